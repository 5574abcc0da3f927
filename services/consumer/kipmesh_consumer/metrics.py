"""Metrics of the consumer service that Kafka does not define."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kipmesh.client import FetchStats


class FetchCollector(Collector):
    """Exports fetch counters of all streams to Prometheus. `read` returns the current counters (227-19)."""

    def __init__(self, read: Callable[[], FetchStats]) -> None:
        self._read = read

    def describe(self) -> Iterator[Metric]:
        """Yield the metric families, which the registry reads at registration."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families with the current values."""
        stats = self._read()
        yield GaugeMetricFamily(
            "kipmesh_consumer_fetch_sessions_open", "Open fetch sessions of streams", value=stats.sessions
        )
        fetches = CounterMetricFamily("kipmesh_consumer_fetches", "Fetch requests of streams by kind", labels=["kind"])
        fetches.add_metric(["full"], stats.full_fetches)
        fetches.add_metric(["incremental"], stats.incremental_fetches)
        fetches.add_metric(["aside"], stats.fetches_aside)
        yield fetches
        resets = CounterMetricFamily(
            "kipmesh_consumer_fetch_session_resets", "Fetch sessions reset by the client, by cause", labels=["cause"]
        )
        for cause, count in sorted(stats.resets.items()):
            resets.add_metric([cause], count)
        yield resets


class ServiceMetrics:
    """Prometheus metrics of streams and delivered records, registered in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.streams_open = Gauge("kipmesh_consumer_streams_open", "Open streams", registry=registry)
        self.partitions_assigned = Gauge(
            "kipmesh_consumer_partitions_assigned", "Partitions assigned to streams by the group", registry=registry
        )
        self.streams_refused = Counter(
            "kipmesh_consumer_streams_refused_total", "Streams refused because of streams.max", registry=registry
        )
        self.streams_ended = Counter(
            "kipmesh_consumer_streams_ended_total", "Ended streams by reason", ["reason"], registry=registry
        )
        self.records_delivered = Counter(
            "kipmesh_consumer_records_delivered_total", "Records sent to HTTP clients", registry=registry
        )
        self.bytes_delivered = Counter(
            "kipmesh_consumer_delivered_bytes_total", "Body bytes sent to HTTP clients", registry=registry
        )
