"""The health check of containers: exit codes for responses of a process."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Callable

import pytest
from prometheus_client import CollectorRegistry

from kipmesh.node import health
from kipmesh.node.http import Conditions, ProbeServer

pytestmark = pytest.mark.usefixtures("long_timeouts")


@pytest.fixture
async def probes() -> AsyncIterator[Callable[[bool], str]]:
    """A function that starts a probe server with the given readiness and returns its address."""
    import asyncio

    started: list[ProbeServer] = []

    def start(is_ready: bool) -> str:
        conditions = Conditions(lambda: True, lambda: is_ready, lambda: is_ready)
        server = ProbeServer(CollectorRegistry(), conditions, asyncio.get_running_loop())
        started.append(server)
        return f"0.0.0.0:{server.start('127.0.0.1', 0)}"

    yield start
    for server in started:
        server.stop()


async def _check(arguments: list[str], environment: dict[str, str]) -> int:
    import asyncio

    return await asyncio.to_thread(health.main, arguments, environment)


async def test_health_check_passes_for_ready_process(
    probes: Callable[[bool], str], capsys: pytest.CaptureFixture[str]
) -> None:
    address = probes(True)
    assert await _check([], {health.VARIABLE: address}) == 0
    assert capsys.readouterr().out == "ready\n"
    assert await _check([address.rpartition(":")[2]], {}) == 0


async def test_health_check_fails_for_process_that_is_alive_but_not_ready(
    probes: Callable[[bool], str], capsys: pytest.CaptureFixture[str]
) -> None:
    address = probes(False)
    assert await _check([], {health.VARIABLE: address}) == 1
    assert capsys.readouterr().out == "not ready\n"
    assert await _check(["--path", "/healthz"], {health.VARIABLE: address}) == 0
    assert await _check(["--path", "/nowhere"], {health.VARIABLE: address}) == 1


def test_health_check_fails_without_listening_process(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        port = taken.getsockname()[1]
        assert health.main([str(port)], {}) == 1
    assert f"no response from 127.0.0.1:{port}/readyz" in capsys.readouterr().out


def test_health_check_fails_for_response_that_is_not_http(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def respond() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"hello\r\n\r\n")

        thread = threading.Thread(target=respond)
        thread.start()
        assert health.main([str(server.getsockname()[1])], {}) == 1
        thread.join()
    assert "not HTTP" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["x"], ["0"], ["99999"], ["1", "2"], ["9404", "--path"], ["9404", "--path", "x"]]
)
def test_health_check_exits_with_2_for_wrong_arguments(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert health.main(arguments, {}) == 2
    assert "usage:" in capsys.readouterr().err
