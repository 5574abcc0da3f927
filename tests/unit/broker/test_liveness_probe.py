"""Liveness probes of names with several addresses, and of invalid addresses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kipmesh.cluster import ports
from kipmesh.node.liveness_probe import LivenessProber


@pytest.fixture
def prober() -> Iterator[LivenessProber]:
    with contextlib.closing(LivenessProber()) as prober:
        yield prober


@pytest.mark.parametrize("is_open", [False, True])
async def test_host_refuses_only_if_all_its_addresses_refuse(
    is_open: bool, prober: LivenessProber, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve_to_both(_host: str, port: int, **_hints: Any) -> list[Any]:
        kind = socket.AF_INET, socket.SOCK_STREAM, 0, ""
        return [(*kind, ("127.0.0.1", port)), (*kind, ("127.0.0.2", port))]

    if is_open:
        with socket.create_server(("127.0.0.2", 0)) as server:
            monkeypatch.setattr(socket, "getaddrinfo", resolve_to_both)
            assert not await prober.refuses(("two.names", server.getsockname()[1]), 30)
    else:
        (port,) = ports.choose(1)
        monkeypatch.setattr(socket, "getaddrinfo", resolve_to_both)
        assert await prober.refuses(("two.names", port), 30)


@pytest.mark.parametrize("host", ["x..y", "x" * 64])
async def test_invalid_host_does_not_count_as_refusal(host: str, prober: LivenessProber) -> None:
    assert not await prober.refuses((host, 9092), 30)


async def test_connection_timeout_does_not_count_as_refusal(prober: LivenessProber) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()):  # fills the backlog
            assert not await prober.refuses(full.getsockname(), 0.05)


async def test_slow_name_lookups_do_not_block_default_executor(
    prober: LivenessProber, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = threading.Event()

    def resolve_slowly(*_address: Any, flags: int = 0, **_hints: Any) -> list[Any]:
        if flags != socket.AI_NUMERICHOST:
            resolved.wait(60)
        raise socket.gaierror("unknown name")

    monkeypatch.setattr(socket, "getaddrinfo", resolve_slowly)
    try:
        assert not any(
            await asyncio.gather(*[prober.refuses((f"broker-{number}", 9092), 0.05) for number in range(100)])
        )
        assert await asyncio.wait_for(asyncio.to_thread(str, "read"), 30) == "read"
    finally:
        resolved.set()
