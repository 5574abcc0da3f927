"""`kipmesh produce`: its last line says what was acknowledged, whatever happens. One mesh, commands as processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kipmesh.client import NewTopic
from kipmesh.client.sync import AdminClient, Consumer
from kipmesh.cluster import LocalCluster

pytestmark = pytest.mark.xdist_group("cli-produce")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(mode="single", followers=0) as it:
        yield it


@pytest.fixture
def topic(cluster: LocalCluster, request: pytest.FixtureRequest) -> str:
    name = re.sub(r"\W", "-", request.node.name)
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topics([NewTopic(name, 1, 1)])
    return name


def start(bootstrap: str, *arguments: Any, command: str = "produce") -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KIPMESH_")}
    return subprocess.Popen(
        [sys.executable, "-m", "kipmesh.cli.main", command, *arguments, "--bootstrap", bootstrap],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


def produce(bootstrap: str, *arguments: Any, stdin: bytes) -> tuple[int, list[str]]:
    process = start(bootstrap, *arguments)
    _, errors = process.communicate(stdin, timeout=60)
    return process.returncode, errors.decode().splitlines()


def values(cluster: LocalCluster, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        (end,) = consumer.end_offsets([(topic, 0)]).values()
        consumer.assign([(topic, 0)])
        found: list[tuple[bytes | None, bytes | None]] = []
        while len(found) < end:
            found += [(record.key, record.value) for record in consumer.poll(timeout_ms=5000)]
        return found


def test_one_record(cluster: LocalCluster, topic: str) -> None:
    code, errors = produce(cluster.bootstrap, topic, "--key-separator", os.fsdecode(b"\xff"), stdin=b"k\xffv\n")
    assert code == 0
    assert [line.partition(",")[0] for line in errors] == ["1 record acknowledged"]
    assert values(cluster, topic) == [(b"k", b"v")]


def test_stats_say_what_was_asked_for(cluster: LocalCluster, topic: str) -> None:
    code, errors = produce(cluster.bootstrap, topic, "--stats", stdin=b"a\nb")
    assert code == 0
    assert errors[-1].startswith("2 records acknowledged")
    counters = dict(line.split(" ") for line in errors[:-1])
    assert counters["metadata_urgent_requests"] == counters["metadata_urgent_topics"] == "1"
    assert int(counters["metadata_urgent_bytes"]) > 0
    assert float(counters["metadata_blocked_s"]) >= 0


def test_nobody_acknowledges_with_acks_0(cluster: LocalCluster, topic: str) -> None:
    code, errors = produce(cluster.bootstrap, topic, "--config", "acks=0", stdin=b"a\nb")
    assert code == 0
    assert errors[-1].startswith("2 records sent (acks=0: not acknowledged), ")


def test_a_bad_line_in_the_middle(cluster: LocalCluster, topic: str) -> None:
    code, errors = produce(cluster.bootstrap, topic, "--key-separator", ":", stdin=b"a:1\nbad\nc:3\n")
    assert code == 1
    assert errors[0] == "kipmesh: line 2: no key separator ':' in 'bad'"
    assert re.fullmatch(r"1 record acknowledged, .* a second; 2 not", errors[1])
    assert values(cluster, topic) == [(b"a", b"1")]


def test_a_record_that_is_too_large(cluster: LocalCluster, topic: str) -> None:
    """Also one without an end is refused at once: nobody waits for its newline, or holds it."""
    config = ("--config", "max.request.size=20000")
    code, errors = produce(cluster.bootstrap, topic, *config, stdin=b"a\n" + b"x" * 19_999 + b"\nb\n")
    assert code == 1
    assert errors[0].startswith("kipmesh: MESSAGE_TOO_LARGE: line 2: a record of ")
    assert errors[1].startswith("1 record acknowledged, ")
    assert errors[1].endswith("; 2 not")
    process = start(cluster.bootstrap, topic, *config)
    assert process.stdin is not None
    process.stdin.write(b"a\n" + b"x" * 20_100)
    process.stdin.flush()
    assert process.wait(30) == 1
    _, output = process.communicate()
    lines = output.decode().splitlines()
    assert lines[0] == "kipmesh: MESSAGE_TOO_LARGE: line 2 is longer than max.request.size (20000 bytes)"
    assert lines[1].endswith("; 1 not")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_delivers_what_was_read(cluster: LocalCluster, topic: str, number: signal.Signals) -> None:
    # The linger would keep the records for long: the stop flushes them.
    process = start(cluster.bootstrap, topic, "--config", "linger.ms=100000", "--config", "delivery.timeout.ms=200000")
    assert process.stdin is not None
    process.stdin.write(b"a\nb\nunfinished")
    process.stdin.flush()
    time.sleep(2.0)
    process.send_signal(number)
    process.wait(30)  # its input is still open
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    (line,) = errors.decode().splitlines()
    assert line.startswith("2 records acknowledged, ")
    assert line.endswith(f"; 1 not (stopped by {number.name})")
    assert values(cluster, topic) == [(None, b"a"), (None, b"b")]


def test_a_signal_while_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = start(f"127.0.0.1:{silent.getsockname()[1]}", "t", "--config", "request.timeout.ms=60000")
        assert process.stdin is not None
        process.stdin.write(b"a\n")
        process.stdin.flush()
        time.sleep(2.0)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - began < 3
    assert process.returncode == 143
    assert errors.decode().startswith("0 records acknowledged, 0 a second (stopped by SIGTERM)")


def test_it_gives_up_soon_where_nobody_is() -> None:
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        consuming = start(address, "t", "--timeout-ms", "1000", command="consume")
        code, errors = produce(address, "t", stdin=b"a\n")
        assert time.monotonic() - began < 12
        assert (code, errors[0]) == (1, f"kipmesh: NETWORK_EXCEPTION: no broker answers at {address} within 5 s")
        assert errors[1].startswith("0 records acknowledged, ")
        _, output = consuming.communicate(timeout=10)
    assert consuming.returncode == 1
    assert output.decode() == f"kipmesh: NETWORK_EXCEPTION: no broker answers at {address} within 1 s\n"
