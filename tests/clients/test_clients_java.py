"""Apache Kafka's Java client and tools: fetch sessions and metadata requests in its log, command-line tools."""

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
        pytest.skip("tests of the Java client run with: make clients")
    found = drivers.CLIENTS["java"]
    try:
        found.command()
    except drivers.MissingError as error:
        pytest.skip(str(error))
    return found


def total(cluster: clusters.Cluster, counter: Callable[[clusters.Counters], float]) -> float:
    """Return the sum of a counter over the brokers."""
    return sum(counter(cluster.counters(number)) for number in (1, 2, 3))


def test_java_consumer_fetches_incrementally_in_a_session(
    cluster: clusters.Cluster, java: drivers.Client, open_driver: Open, topic: str
) -> None:
    """The consumer logs one full fetch per broker and incremental fetches; brokers count its sessions."""
    admin, reader = open_driver(java), open_driver(java)
    scenarios.create(admin, topic, 20)
    before = total(cluster, lambda counters: counters.sessions)
    wanted = {str(number): 0 for number in range(20)}
    reader.begin("consume", topic=topic, partitions=wanted, count=60, timeout_s=80)
    clusters.wait_for("a session of the reader", lambda: total(cluster, lambda counters: counters.sessions) > before)
    sent = scenarios.records(60, 20)
    admin("produce", topic=topic, records=sent, pace_ms=20)
    assert len(reader.result()) == 60
    log = reader.log()
    full = re.findall(r"Built full fetch \(sessionId=\w+, epoch=INITIAL\) for node (\d+)", log)
    incremental = re.findall(r"Built incremental fetch \(sessionId=(\d+), epoch=\d+\) for node (\d+)", log)
    responses = re.findall(r"sent an incremental fetch response with .* for session (\d+)", log)
    assert len(full) == len(set(full)), "a session was recreated"
    assert len(incremental) > 10
    assert len(responses) > 10
    assert {session for session, _ in incremental} >= set(responses)
    assert not re.findall(r"FETCH_SESSION_ID_NOT_FOUND|INVALID_FETCH_SESSION_EPOCH", log)
    clusters.wait_for("the session is closed", lambda: total(cluster, lambda counters: counters.sessions) <= before)


def test_broker_counts_the_metadata_requests_of_the_java_producer(
    cluster: clusters.Cluster, java: drivers.Client, open_driver: Open, topic: str
) -> None:
    """The brokers count as many requests as the producer logs, and few requests cover all topics."""
    admin = open_driver(java)
    scenarios.create(admin, topic, 3)
    admin.close()
    before = total(cluster, lambda counters: counters.metadata_requests)
    producer = open_driver(java)
    producer("produce", topic=topic, records=scenarios.records(100, 3), pace_ms=5)
    producer.close()
    requests = len(re.findall(r"Sending METADATA request", producer.log()))
    assert 1 <= requests <= 6
    assert total(cluster, lambda counters: counters.metadata_requests) - before == requests


def tool(name: str, *given: str, stdin: str = "") -> str:
    """Run a tool of Apache Kafka and return its standard output."""
    command = [*drivers.JAVA, "-cp", drivers.java_classes(), f"org.apache.kafka.tools.{name}", *given]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return done.stdout


def test_console_tools_write_and_read(cluster: clusters.Cluster, java: drivers.Client, topic: str) -> None:
    common = ("--bootstrap-server", cluster.bootstrap, "--topic", topic)
    tool("TopicCommand", "--create", *common, "--partitions", "2", "--replication-factor", "3")
    assert "PartitionCount: 2" in tool("TopicCommand", "--describe", *common)
    lines = [f"line {number}" for number in range(30)]
    tool("ConsoleProducer", *common, "--compression-codec", "zstd", stdin="\n".join(lines) + "\n")
    read = tool(
        "consumer.ConsoleConsumer", *common, "--from-beginning", "--max-messages", "30", "--timeout-ms", "60000"
    )
    assert sorted(read.splitlines()) == sorted(lines)
    assert f"{topic}:" in tool("GetOffsetShell", *common)


def test_verifiable_tools_acknowledge_and_consume_every_record(
    cluster: clusters.Cluster, java: drivers.Client, topic: str
) -> None:
    common = ("--bootstrap-server", cluster.bootstrap, "--topic", topic)
    tool("TopicCommand", "--create", *common, "--partitions", "3", "--replication-factor", "3")
    output = tool("VerifiableProducer", *common, "--max-messages", "500", "--acks", "-1")
    assert '"acked":500' in output
    group = ("--group-id", f"group-{topic}", "--max-messages", "500", "--reset-policy", "earliest")
    read = tool("VerifiableConsumer", *common, *group, "--session-timeout", "10000")
    counts = [int(count) for count in re.findall(r'"name":"records_consumed".*?"count":(\d+)', read)]
    counts = counts or [int(count) for count in re.findall(r'"count":(\d+).*?"name":"records_consumed"', read)]
    assert sum(counts) == 500, read[-2000:]


class BackgroundTool:
    """A tool that runs in the background and prints JSON objects, one per line."""

    def __init__(self, output: Path, name: str, *given: str) -> None:
        command = [*drivers.JAVA, "-cp", drivers.java_classes(), f"org.apache.kafka.tools.{name}", *given]
        self._output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the printed objects with this name."""
        lines = self._output.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return [event for event in found if event["name"] == name]

    def has_exited(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """Send SIGTERM, and SIGKILL if the tool does not exit."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def test_verifiable_tools_survive_a_killed_broker(
    breakable: clusters.Cluster, java: drivers.Client, open_driver: Open, topic: str, tmp_path: Path
) -> None:
    """The idempotent producer has each number acknowledged, and the consumer reads each number once."""
    admin, total = open_driver(java), 1500
    scenarios.create(admin, topic, 2)
    leader = scenarios.wait_in_sync(admin, topic, 2)[0]["leader"]
    config = tmp_path / "producer.properties"  # by default the tool does not retry
    config.write_text(f"enable.idempotence=true\nretries={2**31 - 1}\ndelivery.timeout.ms=100000\n")
    common = ("--bootstrap-server", breakable.bootstrap, "--topic", topic)
    group = ("--group-id", f"group-{topic}", "--reset-policy", "earliest", "--session-timeout", "10000", "--verbose")
    load = ("--max-messages", str(total), "--throughput", "150", "--producer.config", str(config))
    consumer = BackgroundTool(tmp_path / "consumer", "VerifiableConsumer", *common, *group)
    producer = BackgroundTool(tmp_path / "producer", "VerifiableProducer", *common, *load)
    try:
        clusters.wait_for("acknowledgements", lambda: len(producer.events("producer_send_success")) > 100)
        breakable.kill(leader)
        try:
            clusters.wait_for("end of the producer", producer.has_exited, 120)
        finally:
            breakable.start(leader)
        wanted = {str(number) for number in range(total)}
        assert {event["value"] for event in producer.events("producer_send_success")} == wanted

        def consumed() -> dict[tuple[int, int], str]:
            events = consumer.events("record_data")
            return {(event["partition"], event["offset"]): event["value"] for event in events}

        clusters.wait_for("all records consumed", lambda: set(consumed().values()) == wanted, 90)
        assert len(consumed()) == total, "a number was written twice"
        scenarios.wait_leaders_restored(admin, topic)
    finally:
        producer.close()
        consumer.close()


def test_performance_tools_send_and_consume_every_record(
    cluster: clusters.Cluster, java: drivers.Client, topic: str
) -> None:
    common = ("--bootstrap-server", cluster.bootstrap, "--topic", topic)
    tool("TopicCommand", "--create", *common, "--partitions", "3", "--replication-factor", "3")
    config = ("--producer-props", f"bootstrap.servers={cluster.bootstrap}", "acks=all", "compression.type=lz4")
    load = ("--topic", topic, "--num-records", "20000", "--record-size", "500", "--throughput", "-1")
    assert "20000 records sent" in tool("ProducerPerformance", *load, *config)
    output = tool("ConsumerPerformance", *common, "--messages", "20000", "--timeout", "60000")
    rows = [line.split(", ") for line in output.splitlines() if line.count(", ") >= 9]
    assert int(dict(zip(rows[0], rows[-1], strict=False))["data.consumed.in.nMsg"]) == 20_000
