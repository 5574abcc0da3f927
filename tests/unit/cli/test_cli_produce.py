"""`kipmesh produce` as a process, with one cluster. Its last line always states the acknowledged records."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kipmesh.client import NewTopic
from kipmesh.client.sync import AdminClient, Consumer
from kipmesh.cluster import LocalCluster
from tests.command import run_command

pytestmark = pytest.mark.xdist_group("cli-produce")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(mode="single", followers=0) as local_cluster:
        yield local_cluster


@pytest.fixture
def topic(cluster: LocalCluster, request: pytest.FixtureRequest) -> str:
    name = re.sub(r"\W", "-", request.node.name)
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topics([NewTopic(name, 1, 1)])
    return name


def start(
    bootstrap: str, *arguments: Any, command: str = "produce", entry: Sequence[str] = ("-m", "kipmesh.cli.main")
) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KIPMESH_")}
    return subprocess.Popen(
        [sys.executable, *entry, command, *arguments, "--bootstrap", bootstrap],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


def wait_until_read(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has read all data in its standard input."""
    assert process.stdin is not None
    while process.poll() is None and any(fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4))):
        time.sleep(0.05)


def produce(bootstrap: str, *arguments: Any, stdin: bytes) -> tuple[int, list[str]]:
    result = run_command("produce", *arguments, "--bootstrap", bootstrap, stdin=stdin)
    return result.returncode, result.stderr.splitlines()


def values(cluster: LocalCluster, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        (end,) = consumer.end_offsets([(topic, 0)]).values()
        consumer.assign([(topic, 0)])
        found: list[tuple[bytes | None, bytes | None]] = []
        while len(found) < end:
            found += [(record.key, record.value) for record in consumer.poll(timeout_ms=5000)]
        return found


def test_produce_sends_one_record_with_key(cluster: LocalCluster, topic: str) -> None:
    code, errors = produce(cluster.bootstrap, topic, "--key-separator", os.fsdecode(b"\xff"), stdin=b"k\xffv\n")
    assert code == 0
    assert [line.partition(",")[0] for line in errors] == ["1 record acknowledged"]
    assert values(cluster, topic) == [(b"k", b"v")]


def test_stats_count_metadata_requests(cluster: LocalCluster, topic: str) -> None:
    code, errors = produce(cluster.bootstrap, topic, "--stats", stdin=b"a\nb")
    assert code == 0
    assert errors[-1].startswith("2 records acknowledged")
    counters = dict(line.split(" ") for line in errors[:-1])
    assert counters["metadata_urgent_requests"] == counters["metadata_urgent_topics"] == "1"
    assert int(counters["metadata_urgent_bytes"]) > 0
    assert float(counters["metadata_blocked_s"]) >= 0


def test_produce_reads_files_of_each_format(cluster: LocalCluster, topic: str, tmp_path: Path) -> None:
    table, other, objects = tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "c.ndjson"
    table.write_text('id,note\n1,"two\nlines"\n')
    other.write_text("id,note\n2,\n")
    objects.write_text('{"id":3}\n\n{"id":null}\n')
    form = ("--format", "csv", "--key-column", "id")
    code, errors = produce(cluster.bootstrap, topic, table, "-", other, *form, stdin=b"id\n9\n")
    assert code == 0, errors
    assert errors[-1].startswith("3 records acknowledged, ")
    assert produce(cluster.bootstrap, topic, objects, "--format", "ndjson", "--key-column", "id", stdin=b"")[0] == 0
    assert values(cluster, topic) == [
        (b"1", b'{"id":"1","note":"two\\nlines"}'),
        (b"9", b'{"id":"9"}'),
        (b"2", b'{"id":"2","note":""}'),
        (b"3", b'{"id":3}'),
        (None, b'{"id":null}'),
    ]


def test_produce_errors_name_file_and_line(cluster: LocalCluster, topic: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("{}\n")
    (tmp_path / "b").write_text("{}\nnope\n{}\n")
    code, errors = produce(cluster.bootstrap, topic, tmp_path / "a", tmp_path / "b", "--format", "ndjson", stdin=b"")
    assert code == 1
    assert errors[0].startswith("kipmesh: b: line 2: invalid JSON: ")
    assert re.fullmatch(r"2 records acknowledged, .* a second; 2 not", errors[1])
    (tmp_path / "long").write_bytes(b"a\n" + b"x" * 2_000_000)
    code, errors = produce(cluster.bootstrap, topic, tmp_path / "a", tmp_path / "long", stdin=b"")
    assert code == 1
    assert errors[0].startswith("kipmesh: MESSAGE_TOO_LARGE: long: line 2 is longer than max.request.size (1048576 ")
    code, errors = produce(cluster.bootstrap, topic, tmp_path / "none", stdin=b"")
    assert (code, errors) == (1, [f"kipmesh: {tmp_path / 'none'}: No such file or directory"])


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--key-column", "id"), "--key-column"),
        (("--format", "csv", "--key-separator", ":"), "--key-separator"),
        (("--format", "csv", "--delimiter", '"'), "--delimiter"),
    ],
)
def test_conflicting_options_are_usage_errors(
    cluster: LocalCluster, topic: str, arguments: tuple[str, ...], option: str
) -> None:
    code, errors = produce(cluster.bootstrap, topic, *arguments, stdin=b"a\n")
    assert code == 2
    assert option in errors[-1]


def test_terminal_shows_progress_bar(cluster: LocalCluster, topic: str, tmp_path: Path) -> None:
    """The size of the file is known, so the bar shows a percentage."""
    lines = tmp_path / "lines"
    lines.write_text("x\n" * 100_000)
    leader, follower = pty.openpty()
    with os.fdopen(leader, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [sys.executable, "-m", "kipmesh.cli.main", "produce", topic, lines, "--bootstrap", cluster.bootstrap],
            stderr=follower,
        )
        os.close(follower)
        output_of_terminal = b""
        try:
            while chunk := screen.read(4096):
                output_of_terminal += chunk
        except OSError:  # the process has closed the terminal
            pass
        assert process.wait(60) == 0
    *bars, last = [part.strip() for part in re.split(r"\r|\x1b\[K", output_of_terminal.decode()) if part.strip()]
    assert re.fullmatch(r"100,000 records acknowledged, .* a second", last)
    assert all(re.fullmatch(r"\[#* *\] +\d+%  [\d,]+ records? acknowledged, [\d,]+ a second", bar) for bar in bars), (
        bars
    )
    assert bars


def test_acks_0_reports_records_as_sent(cluster: LocalCluster, topic: str) -> None:
    code, errors = produce(cluster.bootstrap, topic, "--config", "acks=0", stdin=b"a\nb")
    assert code == 0
    assert errors[-1].startswith("2 records sent (acks=0: not acknowledged), ")


def test_invalid_line_ends_produce_after_records_before_it(cluster: LocalCluster, topic: str) -> None:
    code, errors = produce(cluster.bootstrap, topic, "--key-separator", ":", stdin=b"a:1\nbad\nc:3\n")
    assert code == 1
    assert errors[0] == "kipmesh: line 2: no key separator ':' in 'bad'"
    assert re.fullmatch(r"1 record acknowledged, .* a second; 2 not", errors[1])
    assert values(cluster, topic) == [(b"a", b"1")]


def test_record_above_max_request_size_is_rejected(cluster: LocalCluster, topic: str) -> None:
    """A record without line ending is rejected immediately, without waiting for its newline or buffering it."""
    config = ("--config", "max.request.size=20000")
    code, errors = produce(cluster.bootstrap, topic, *config, stdin=b"a\n" + b"x" * 19_999 + b"\nb\n")
    assert code == 1
    assert errors[0].startswith("kipmesh: MESSAGE_TOO_LARGE: line 2: record of ")
    assert errors[1].startswith("1 record acknowledged, ")
    assert errors[1].endswith("; 2 not")
    process = start(cluster.bootstrap, topic, *config)
    assert process.stdin is not None
    process.stdin.write(b"a\n" + b"x" * 20_100)
    process.stdin.flush()
    assert process.wait(60) == 1
    _, output = process.communicate()
    lines = output.decode().splitlines()
    assert lines[0] == "kipmesh: MESSAGE_TOO_LARGE: line 2 is longer than max.request.size (20000 bytes)"
    assert lines[1].endswith("; 1 not")


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_signal_flushes_complete_lines(cluster: LocalCluster, topic: str, signal_number: signal.Signals) -> None:
    # The linger delays the records. The signal flushes them.
    process = start(cluster.bootstrap, topic, "--config", "linger.ms=100000", "--config", "delivery.timeout.ms=200000")
    assert process.stdin is not None
    process.stdin.write(b"a\nb\nunfinished")
    process.stdin.flush()
    wait_until_read(process)
    process.send_signal(signal_number)
    process.wait(60)  # standard input is still open
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal_number
    (line,) = errors.decode().splitlines()
    assert line.startswith("2 records acknowledged, ")
    assert line.endswith(f"; 1 not (stopped by {signal_number.name})")
    assert values(cluster, topic) == [(None, b"a"), (None, b"b")]


def test_signal_ends_produce_while_broker_does_not_respond() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = start(f"127.0.0.1:{silent.getsockname()[1]}", "t", "--config", "request.timeout.ms=600000")
        assert process.stdin is not None
        process.stdin.write(b"a\n")
        process.stdin.flush()
        silent.settimeout(60)
        silent.accept()[0].close()  # the command has connected
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)  # not after the 600 s of a request
    assert process.returncode == 143
    assert errors.decode().startswith("0 records acknowledged, 0 a second (stopped by SIGTERM)")


def test_produce_and_consume_time_out_without_broker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        consuming = start(address, "t", "--timeout-ms", "1000", command="consume")
        code, errors = produce(address, "t", stdin=b"a\n")
        assert (code, errors[0]) == (1, f"kipmesh: NETWORK_EXCEPTION: no broker responded at {address} within 5 s")
        assert errors[1].startswith("0 records acknowledged, ")
        _, output = consuming.communicate(timeout=60)
    assert consuming.returncode == 1
    assert output.decode() == f"kipmesh: NETWORK_EXCEPTION: no broker responded at {address} within 1 s\n"


def test_consume_states_the_range_of_offsets(cluster: LocalCluster, topic: str) -> None:
    assert produce(cluster.bootstrap, topic, stdin=b"a\nb\n")[0] == 0
    place = ("consume", topic, "--partition", "0", "--bootstrap", cluster.bootstrap)
    result = run_command(*place, "--offset", "9999")
    assert (result.returncode, result.stderr) == (
        1,
        f"kipmesh: OFFSET_OUT_OF_RANGE: partition 0 of topic {topic!r} has no offset 9999; give --offset 0 to 2\n",
    )
    assert run_command(*place, "--offset", "1", "--max-messages", "1").stdout == "b\n"


def test_address_of_kafka_listener_gets_a_hint() -> None:
    with LocalCluster(mode="single", followers=0, config={"log.level": "error"}) as cluster:
        assert cluster.kafka_bootstrap is not None
        result = run_command("topic", "list", "--bootstrap", cluster.kafka_bootstrap)
    assert result.returncode == 1
    assert result.stderr.endswith("; give the gRPC address that `kipmesh local up` prints after bootstrap:\n")


def test_produce_warns_while_topic_is_missing(cluster: LocalCluster) -> None:
    patched_command = (
        "from kipmesh.cli import main, produce_command; produce_command.METADATA_WARNING_S = 0; main.main()"
    )
    process = start(cluster.bootstrap, "none", "--config", "max.block.ms=600000", entry=("-c", patched_command))
    try:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"x\n")
        process.stdin.flush()
        assert process.stderr.readline() == (
            b"kipmesh: no metadata for topic 'none' yet; waiting. If it does not exist, create it with: "
            b"kipmesh topic create none --partitions 6\n"
        )
    finally:
        process.kill()
        process.communicate()
