"""A knock at names that stand for several addresses, and at what is no address."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from kipmesh.cluster import ports
from kipmesh.node.knock import refuses


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_name_of_two_addresses_refuses_when_both_do(is_open: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def both(_host: str, port: int, **_hints: Any) -> list[Any]:
        kind = socket.AF_INET, socket.SOCK_STREAM, 0, ""
        return [(*kind, ("127.0.0.1", port)), (*kind, ("127.0.0.2", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
    if is_open:
        with socket.create_server(("127.0.0.2", 0)) as server:
            assert not await refuses(("two.names", server.getsockname()[1]), 30)
    else:
        (port,) = ports.choose(1)
        assert await refuses(("two.names", port), 30)


@pytest.mark.parametrize("host", ["x..y", "x" * 64])
async def test_what_is_no_address_does_not_refuse(host: str) -> None:
    assert not await refuses((host, 9092), 30)


async def test_silence_is_no_refusal() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()):  # and now nobody else finds room
            assert not await refuses(full.getsockname(), 0.05)
