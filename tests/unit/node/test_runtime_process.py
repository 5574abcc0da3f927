"""A node process: signals, probes, metrics, exit codes and error messages."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("node_of_tests.py")

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[subprocess.Popen[str]] = []

    def start_process(behaviour: str, *arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, str(SCRIPT), behaviour, *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start_process
    for child in children:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()


def wait_for_event(child: subprocess.Popen[str], event: str) -> dict[str, object]:
    assert child.stderr is not None
    for line in child.stderr:
        values: dict[str, object] = json.loads(line)
        if values["event"] == event:
            return values
    raise AssertionError(f"no {event!r}")


def get(port: object, path: str, method: str = "GET") -> tuple[int, str]:
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_process_cleanly(start: Start, number: signal.Signals) -> None:
    child = start("ok")
    wait_for_event(child, "started")
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0
    assert out == "stopped cleanly\n"
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["stopping", "stopped"]


def test_signal_during_start_stops_process(start: Start) -> None:
    child = start("slow-start")
    wait_for_event(child, "probe server started")
    time.sleep(0.1)
    child.terminate()
    assert child.wait(60) == 0


def test_process_serves_probes_and_metrics(start: Start) -> None:
    child = start("ok")
    port = wait_for_event(child, "probe server started")["port"]
    wait_for_event(child, "started")
    assert get(port, "/healthz") == (200, "alive\n")
    assert get(port, "/readyz?verbose") == (200, "ready\n")
    assert get(port, "/readyz", "HEAD") == (200, "")
    status, text = get(port, "/metrics")
    assert status == 200
    for name in ("tests_started_total 1.0", "process_resident_memory_bytes", "kipmesh_runtime_event_loop_lag_seconds"):
        assert name in text
    assert get(port, "/other")[0] == 404
    assert get(port, "/healthz", "POST")[0] == 501


def test_starting_process_is_alive_but_not_ready(start: Start) -> None:
    child = start("slow-start")
    port = wait_for_event(child, "probe server started")["port"]
    assert get(port, "/readyz") == (503, "not ready\n")
    assert get(port, "/healthz")[0] == 200


def test_liveness_probe_fails_if_event_loop_is_blocked(start: Start) -> None:
    child = start("blocks")
    port = wait_for_event(child, "probe server started")["port"]
    wait_for_event(child, "started")
    deadline = time.monotonic() + 60
    while (response := get(port, "/healthz")) == (200, "alive\n") and time.monotonic() < deadline:
        time.sleep(0.05)  # until the loop is blocked
    assert response == (503, "the event loop did not respond within 2 s\n")
    assert get(port, "/metrics")[0] == 200


def test_probe_server_refuses_connections_above_limit(start: Start) -> None:
    child = start("ok")
    port = wait_for_event(child, "probe server started")["port"]
    idle = [socket.create_connection(("127.0.0.1", int(str(port)))) for _ in range(16)]
    try:
        deadline = time.monotonic() + 60
        while (response := get(port, "/healthz")[0]) != 503 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert response == 503
    finally:
        for connection in idle:
            connection.close()
    deadline = time.monotonic() + 60
    while (response := get(port, "/healthz")[0]) != 200 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert response == 200


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--config", "some.numbr=1"], "unknown configuration key 'some.numbr' (did you mean 'some.number'?)"),
        (["--config", "some.number=-1"], "some.number must be at least 0, got -1"),
        (["--config-file", "/does/not/exist"], "configuration file /does/not/exist: No such file or directory"),
    ],
)
def test_invalid_configuration_prints_one_line_and_exits_with_2(start: Start, arguments: list[str], line: str) -> None:
    child = start("ok", *arguments)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 2
    assert out == ""
    assert err.startswith(f"node_of_tests: {line}")
    assert err.count("\n") == 1


def test_failed_start_prints_error_in_one_line(start: Start) -> None:
    child = start("foreign")
    _out, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert err.splitlines()[-1] == "node_of_tests: cannot start: the directory belongs to another cluster"


def test_unexpected_error_at_start_logs_traceback(start: Start) -> None:
    child = start("bug")
    _out, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert err.splitlines()[-1] == "node_of_tests: cannot start: a bug"
    assert "ZeroDivisionError" in json.loads(err.splitlines()[-2])["trace"]


def test_failed_node_ends_process(start: Start) -> None:
    child = start("fails")
    out, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert out == ""  # not a clean stop
    assert err.splitlines()[-1].startswith("node_of_tests: cannot continue: [Errno 28] No space left")


def test_used_probe_port_prints_error_in_one_line(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        child = start("ok", "--config", f"http.listener=127.0.0.1:{port}")
        _out, err = child.communicate(timeout=60)
    assert child.returncode == 1
    line = f"node_of_tests: cannot start: cannot listen on 127.0.0.1:{port} (http.listener): Address already in use"
    assert err.splitlines() == [line]


def test_closed_parent_pipe_stops_process(start: Start) -> None:
    child = start("ok", "--parent-pipe", stdin=subprocess.PIPE)
    wait_for_event(child, "started")
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(60) == 0


def test_help_shows_examples_and_configuration_keys(start: Start) -> None:
    child = start("ok", "--help")
    assert "examples:\n  node_of_tests ok" in child.communicate(timeout=60)[0]
    child = start("ok", "--help-config")
    assert "some.number\n" in child.communicate(timeout=60)[0]


def test_second_interrupt_ends_slow_stop(start: Start) -> None:
    child = start("slow-stop")
    wait_for_event(child, "started")
    child.send_signal(signal.SIGINT)
    wait_for_event(child, "stopping")
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 1
