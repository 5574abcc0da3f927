"""What only Java's client does or tells: fetch sessions by its own log, metadata requests counted, its tools."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients import clusters_of_tests as clusters
from tests.clients import drivers_of_tests as drivers
from tests.clients import scenarios_of_tests as scenarios

pytestmark = pytest.mark.timeout(400)
Open = Callable[..., drivers.Driver]


@pytest.fixture
def java() -> drivers.Client:
    if not drivers.is_wanted("java"):
        pytest.skip("Java's client is of the long form: make clients")
    found = drivers.CLIENTS["java"]
    try:
        found.command()
    except drivers.MissingError as error:
        pytest.skip(str(error))
    return found


def total(cluster: clusters.Cluster, of: Callable[[clusters.Counters], float]) -> float:
    """Over the brokers."""
    return sum(of(cluster.counters(number)) for number in (1, 2, 3))


def test_java_consumer_fetches_incrementally_in_a_session(
    cluster: clusters.Cluster, java: drivers.Client, open_driver: Open, topic: str
) -> None:
    """The consumer's log tells of one full fetch and then incremental ones; the brokers count its session."""
    admin, reader = open_driver(java), open_driver(java)
    scenarios.create(admin, topic, 20)
    before = total(cluster, lambda each: each.sessions)
    wanted = {str(number): 0 for number in range(20)}
    reader.begin("consume", topic=topic, partitions=wanted, count=60, timeout_s=80)
    clusters.wait_for("a session of the reader", lambda: total(cluster, lambda each: each.sessions) > before)
    sent = scenarios.records(60, 20)
    admin("produce", topic=topic, records=sent, pace_ms=20)
    assert len(reader.result()) == 60
    log = reader.log()
    full = re.findall(r"Built full fetch \(sessionId=\w+, epoch=INITIAL\) for node (\d+)", log)
    incremental = re.findall(r"Built incremental fetch \(sessionId=(\d+), epoch=\d+\) for node (\d+)", log)
    answers = re.findall(r"sent an incremental fetch response with .* for session (\d+)", log)
    assert len(full) == len(set(full)), "a full fetch of a node comes once: no session was lost"
    assert len(incremental) > 10
    assert len(answers) > 10
    assert {session for session, _ in incremental} >= set(answers)
    assert not re.findall(r"FETCH_SESSION_ID_NOT_FOUND|INVALID_FETCH_SESSION_EPOCH", log)
    clusters.wait_for("the session is closed", lambda: total(cluster, lambda each: each.sessions) <= before)


def test_broker_counts_the_metadata_requests_of_the_java_producer(
    cluster: clusters.Cluster, java: drivers.Client, open_driver: Open, topic: str
) -> None:
    """The brokers answer as many as the producer's log says that it sent; new topics ride in few of them."""
    admin = open_driver(java)
    scenarios.create(admin, topic, 3)
    admin.close()
    before = total(cluster, lambda each: each.metadata_requests)
    producer = open_driver(java)
    producer("produce", topic=topic, records=scenarios.records(100, 3), pace_ms=5)
    producer.close()
    asked = len(re.findall(r"Sending METADATA request", producer.log()))
    assert 1 <= asked <= 6
    assert total(cluster, lambda each: each.metadata_requests) - before == asked


def tool(name: str, *given: str, typed: str = "") -> str:
    """What one of Apache Kafka's own tools prints."""
    command = [*drivers.JAVA, "-cp", drivers.java_classes(), f"org.apache.kafka.tools.{name}", *given]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return done.stdout


def test_console_tools_write_and_read(cluster: clusters.Cluster, java: drivers.Client, topic: str) -> None:
    there = ("--bootstrap-server", cluster.bootstrap, "--topic", topic)
    tool("TopicCommand", "--create", *there, "--partitions", "2", "--replication-factor", "3")
    assert "PartitionCount: 2" in tool("TopicCommand", "--describe", *there)
    lines = [f"line {number}" for number in range(30)]
    tool("ConsoleProducer", *there, "--compression-codec", "zstd", typed="\n".join(lines) + "\n")
    read = tool("consumer.ConsoleConsumer", *there, "--from-beginning", "--max-messages", "30", "--timeout-ms", "60000")
    assert sorted(read.splitlines()) == sorted(lines)
    assert f"{topic}:" in tool("GetOffsetShell", *there)


def test_verifiable_tools_acknowledge_and_consume_every_record(
    cluster: clusters.Cluster, java: drivers.Client, topic: str
) -> None:
    """Its producer counts acknowledgements, its consumer of a group each record."""
    there = ("--bootstrap-server", cluster.bootstrap, "--topic", topic)
    tool("TopicCommand", "--create", *there, "--partitions", "3", "--replication-factor", "3")
    told = tool("VerifiableProducer", *there, "--max-messages", "500", "--acks", "-1")
    assert '"acked":500' in told
    group = ("--group-id", f"group-{topic}", "--max-messages", "500", "--reset-policy", "earliest")
    read = tool("VerifiableConsumer", *there, *group, "--session-timeout", "10000")
    counts = [int(each) for each in re.findall(r'"name":"records_consumed".*?"count":(\d+)', read)]
    counts = counts or [int(each) for each in re.findall(r'"count":(\d+).*?"name":"records_consumed"', read)]
    assert sum(counts) == 500, read[-2000:]


class Running:
    """A tool that goes on, whose lines are JSON objects."""

    def __init__(self, output: Path, name: str, *given: str) -> None:
        command = [*drivers.JAVA, "-cp", drivers.java_classes(), f"org.apache.kafka.tools.{name}", *given]
        self._output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)

    def told(self, name: str) -> list[dict[str, Any]]:
        """So far, of one kind."""
        lines = self._output.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return [each for each in found if each["name"] == name]

    def ended(self) -> bool:
        """Whether it has."""
        return self._process.poll() is not None

    def close(self) -> None:
        """As its user ends it, or at once when it does not."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def test_verifiable_tools_survive_a_killed_broker(
    breakable: clusters.Cluster, java: drivers.Client, open_driver: Open, topic: str, tmp_path: Path
) -> None:
    """Its producer, idempotent, has an acknowledgement of each number; its consumer finds each in one place."""
    admin, total = open_driver(java), 1500
    scenarios.create(admin, topic, 2)
    leader = scenarios.settled(admin, topic, 2)[0]["leader"]
    config = tmp_path / "producer.properties"  # without it, it tries nothing again
    config.write_text(f"enable.idempotence=true\nretries={2**31 - 1}\ndelivery.timeout.ms=100000\n")
    there = ("--bootstrap-server", breakable.bootstrap, "--topic", topic)
    group = ("--group-id", f"group-{topic}", "--reset-policy", "earliest", "--session-timeout", "10000", "--verbose")
    load = ("--max-messages", str(total), "--throughput", "150", "--producer.config", str(config))
    consumer = Running(tmp_path / "consumer", "VerifiableConsumer", *there, *group)
    producer = Running(tmp_path / "producer", "VerifiableProducer", *there, *load)
    try:
        clusters.wait_for("acknowledgements come", lambda: len(producer.told("producer_send_success")) > 100)
        breakable.kill(leader)
        try:
            clusters.wait_for("all are sent", producer.ended, 120)
        finally:
            breakable.start(leader)
        wanted = {str(number) for number in range(total)}
        assert {each["value"] for each in producer.told("producer_send_success")} == wanted

        def places() -> dict[tuple[int, int], str]:
            told = consumer.told("record_data")
            return {(each["partition"], each["offset"]): each["value"] for each in told}

        clusters.wait_for("all have come", lambda: set(places().values()) == wanted, 90)
        assert len(places()) == total, "no number is there twice"
        scenarios.at_home(admin, topic)
    finally:
        producer.close()
        consumer.close()


def test_performance_tools_send_and_consume_every_record(
    cluster: clusters.Cluster, java: drivers.Client, topic: str
) -> None:
    there = ("--bootstrap-server", cluster.bootstrap, "--topic", topic)
    tool("TopicCommand", "--create", *there, "--partitions", "3", "--replication-factor", "3")
    config = ("--producer-props", f"bootstrap.servers={cluster.bootstrap}", "acks=all", "compression.type=lz4")
    load = ("--topic", topic, "--num-records", "20000", "--record-size", "500", "--throughput", "-1")
    assert "20000 records sent" in tool("ProducerPerformance", *load, *config)
    told = tool("ConsumerPerformance", *there, "--messages", "20000", "--timeout", "60000")
    rows = [line.split(", ") for line in told.splitlines() if line.count(", ") >= 9]
    assert int(dict(zip(rows[0], rows[-1], strict=False))["data.consumed.in.nMsg"]) == 20_000
