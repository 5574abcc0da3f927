"""Counters of the metadata benchmark with Apache Kafka's producer and broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import kafka
from bench.metadata import JAVA, Row, as_markdown

pytestmark = [pytest.mark.slow, pytest.mark.kafka_tools, pytest.mark.timeout(600)]

TOPICS = 5


def test_producer_and_broker_count_the_same_metadata_requests(tmp_path: Path) -> None:
    with kafka.KafkaBroker() as broker:
        kafka.compile_program("ProducerStart", tmp_path)
        address = (broker.bootstrap, str(broker.jmx_port))
        kafka.run_program("ProducerStart", tmp_path, *address, "create", str(TOPICS), "1")
        for shape in ("awaited", "burst"):
            figures = kafka.run_program("ProducerStart", tmp_path, *address, shape, str(TOPICS))
            row = Row(shape, JAVA, **figures, client_cpu_s=0.0, cluster_cpu_s=0.0, load=0.0)
            # One topic per request; repeated while the broker did not have the topic.
            assert row.topics >= TOPICS
            assert row.broker_requests is not None
            assert row.broker_received_bytes is not None
            assert abs(row.requests - row.broker_requests) <= 1, "only the first request may precede the counter"
            assert 0 < row.broker_received_bytes < row.bytes
            assert row.total_s > 0
            assert row.peak_mib > 10
    assert as_markdown([row, row._replace(producer="`paced`"), row._replace(producer="`all`")], TOPICS)


def test_failing_java_program_raises_its_error(tmp_path: Path) -> None:
    kafka.prepare()
    kafka.compile_program("ProducerStart", tmp_path)
    with pytest.raises(kafka.KafkaMissingError, match="ProducerStart failed: "):
        kafka.run_program("ProducerStart", tmp_path, "127.0.0.1:1", "1", "awaited", "none")
    with pytest.raises(kafka.KafkaMissingError, match=r"None\.java failed"):
        kafka.compile_program("None", tmp_path)
