"""Prometheus metrics of producer metadata (526-10)."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kipmesh.client import NewTopic, sync
from kipmesh.client.producer.exporter import PRODUCERS_MAX, ProducerCollector
from kipmesh.cluster import LocalCluster

NAME = "kipmesh_producer_metadata_"


class FakeMetrics:
    def metrics(self) -> dict[str, int | float]:
        kinds = ("requests", "topics", "bytes")
        numbers = {f"metadata_{urgency}_{kind}": 1 for urgency in ("urgent", "non_urgent") for kind in kinds}
        others = ("failed_requests", "evictions", "blocked_s", "cached_topics")
        return numbers | {f"metadata_{other}": 2.5 for other in others}


def test_metric_names_are_registered_without_producers() -> None:
    registry = CollectorRegistry()
    registry.register(ProducerCollector())
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(ProducerCollector())


def test_client_ids_of_exported_producers_are_unique() -> None:
    collector = ProducerCollector()
    collector.add("first", FakeMetrics())
    with pytest.raises(ValueError, match="'first' is already exported"):
        collector.add("first", FakeMetrics())
    registry = CollectorRegistry()
    registry.register(collector)
    assert registry.get_sample_value(f"{NAME}blocked_seconds_total", {"client_id": "first"}) == 2.5
    collector.remove("first")
    assert registry.get_sample_value(f"{NAME}blocked_seconds_total", {"client_id": "first"}) is None
    for number in range(PRODUCERS_MAX):
        collector.add(str(number), FakeMetrics())
    with pytest.raises(ValueError, match=f"{PRODUCERS_MAX} producers"):
        collector.add("one more", FakeMetrics())


def test_blocking_producer_metrics_are_exported() -> None:
    collector, registry = ProducerCollector(), CollectorRegistry()
    registry.register(collector)
    with LocalCluster(mode="single") as cluster:
        with sync.AdminClient(cluster.bootstrap) as admin:
            admin.create_topics([NewTopic("a", 1), NewTopic("b", 1)])
        with sync.Producer(cluster.bootstrap) as producer:
            collector.add("writer", producer)
            producer.send("a", b"1").result()
            producer.send("b", b"1").result()
            counted = producer.metrics()
            for urgency in ("urgent", "non_urgent"):
                for kind in ("requests", "topics", "bytes"):
                    labels = {"client_id": "writer", "urgency": urgency}
                    value = registry.get_sample_value(f"{NAME}{kind}_total", labels)
                    assert value == counted[f"metadata_{urgency}_{kind}"]
            assert counted["metadata_urgent_topics"] >= 2  # more if a broker does not have the topics yet
            assert registry.get_sample_value(f"{NAME}cached_topics", {"client_id": "writer"}) == 2
            assert b'client_id="writer"' in generate_latest(registry)
