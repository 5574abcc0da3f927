"""Apache Kafka's own producer on a real broker, as the benchmark of metadata counts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import kafka, kafka_broker
from bench.metadata_start import JAVA, Row, as_markdown

pytestmark = [pytest.mark.slow, pytest.mark.kafka_tools, pytest.mark.timeout(600)]

TOPICS = 5


def test_the_producer_and_the_broker_count_the_same(tmp_path: Path) -> None:
    with kafka_broker.KafkaBroker() as broker:
        kafka_broker.compile_program("ProducerStart", tmp_path)
        given = (broker.bootstrap, str(broker.jmx_port))
        kafka_broker.run_program("ProducerStart", tmp_path, *given, "create", str(TOPICS), "1")
        for shape in ("awaited", "burst"):
            figures = kafka_broker.run_program("ProducerStart", tmp_path, *given, shape, str(TOPICS))
            row = Row(shape, JAVA, **figures, client_cpu_s=0.0, cluster_cpu_s=0.0, load=0.0)
            # A topic each; more where the broker had not heard of one yet.
            assert row.topics >= TOPICS
            assert row.broker_requests is not None
            assert row.broker_received_bytes is not None
            assert abs(row.requests - row.broker_requests) <= 1, "the first may go before the counter is there"
            assert 0 < row.broker_received_bytes < row.bytes
            assert row.total_s > 0
            assert row.peak_mib > 10
    assert as_markdown([row, row._replace(who="`paced`"), row._replace(who="`all`")], TOPICS)


def test_failing_java_program_raises_its_error(tmp_path: Path) -> None:
    kafka.prepare()
    kafka_broker.compile_program("ProducerStart", tmp_path)
    with pytest.raises(kafka.KafkaMissingError, match="ProducerStart failed: "):
        kafka_broker.run_program("ProducerStart", tmp_path, "127.0.0.1:1", "1", "awaited", "none")
    with pytest.raises(kafka.KafkaMissingError, match="cannot be compiled"):
        kafka_broker.compile_program("None", tmp_path)
