"""Links between processes that can be cut in either direction."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from kipmesh_chaos.links import Links


@pytest.fixture
async def echo() -> AsyncIterator[tuple[str, asyncio.Queue[bytes]]]:
    """The address of an echo server and the bytes that it received."""
    received: asyncio.Queue[bytes] = asyncio.Queue()
    open_writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.append(writer)
        while data := await reader.read(100):
            received.put_nowait(data)
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", received
    server.close()
    for writer in open_writers:
        writer.close()


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def is_silent(reading: asyncio.Task[bytes]) -> bool:
    """Return True if no bytes arrive within 50 ms."""
    done, _ = await asyncio.wait([reading], timeout=0.05)
    return not done


async def test_cut_link_holds_bytes_in_cut_direction(echo: tuple[str, asyncio.Queue[bytes]]) -> None:
    target, received = echo
    async with Links() as links:
        address = await links.address("a", "b", target)
        assert await links.address("a", "b", target) == address != target
        reader, writer = await connect(address)
        writer.write(b"1")
        assert (await reader.read(10), await received.get()) == (b"1", b"1")

        links.cut([("b", "a")])
        writer.write(b"2")
        assert await received.get() == b"2"  # forwarded to the server
        reading = asyncio.create_task(reader.read(10))
        assert await is_silent(reading)  # the response is held
        links.heal()
        assert await reading == b"2"

        links.cut([("a", "b")])
        writer.write(b"3")
        reading = asyncio.create_task(reader.read(10))
        assert await is_silent(reading)
        assert received.empty()
        links.heal()
        assert (await reading, await received.get()) == (b"3", b"3")
        writer.close()


async def test_link_cut_in_one_direction_delays_new_connections(echo: tuple[str, asyncio.Queue[bytes]]) -> None:
    target, received = echo
    async with Links() as links:
        address = await links.address("a", "b", target)
        links.cut([("b", "a")])
        reader, writer = await connect(address)
        writer.write(b"1")
        reading = asyncio.create_task(reader.read(10))
        assert await is_silent(reading)
        assert received.empty()
        links.heal()
        assert await reading == b"1"
        writer.close()


async def test_link_forwards_eof_and_holds_it_while_cut(echo: tuple[str, asyncio.Queue[bytes]]) -> None:
    target, _ = echo
    async with Links() as links:
        reader, writer = await connect(await links.address("a", "b", target))
        writer.write(b"1")
        assert await reader.read(10) == b"1"
        links.cut([("b", "a"), ("a", "b")])
        writer.write_eof()
        reading = asyncio.create_task(reader.read(10))
        assert await is_silent(reading)
        links.heal()
        assert await reading == b""
        writer.close()


async def test_link_closes_connection_if_server_is_down() -> None:
    async with Links() as links:
        with socket.socket() as not_listening:
            not_listening.bind(("127.0.0.1", 0))
            port = not_listening.getsockname()[1]
            reader, writer = await connect(await links.address("a", "b", f"127.0.0.1:{port}"))
            with suppress(ConnectionResetError):
                assert await reader.read(10) == b""
            writer.close()


async def test_ingress_cuts_links_by_source(echo: tuple[str, asyncio.Queue[bytes]]) -> None:
    target, received = echo
    names: dict[int, str] = {}

    async def source_of(ports: tuple[int, int]) -> str:
        assert address.endswith(f":{ports[1]}")
        return names[ports[0]]

    async with Links() as links:
        address = await links.ingress("b", target, source_of)
        sockets = []
        for name in ("a", "c"):
            client = socket.socket()
            client.bind(("127.0.0.1", 0))
            names[client.getsockname()[1]] = name
            client.setblocking(False)
            host, _, port = address.rpartition(":")
            await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
            sockets.append(client)
        (a_reader, a), (c_reader, c) = [await asyncio.open_connection(sock=client) for client in sockets]
        links.cut([("a", "b"), ("c", "b")])
        links.join([("c", "b")])
        a.write(b"held")
        c.write(b"through")
        assert await c_reader.read(10) == await received.get() == b"through"
        reading = asyncio.create_task(a_reader.read(10))
        assert await is_silent(reading)
        links.join([("a", "b")])
        assert await reading == await received.get() == b"held"
        a.close()
        c.close()


async def test_delay_applies_in_one_direction_until_healed(echo: tuple[str, asyncio.Queue[bytes]]) -> None:
    target, received = echo
    clock = asyncio.get_running_loop().time
    async with Links() as links:
        reader, writer = await connect(await links.address("a", "b", target))
        links.delay([("b", "a")], 0.2)
        begin = clock()
        writer.write(b"1")
        assert await received.get() == b"1"
        assert await reader.read(10) == b"1"
        assert clock() - begin >= 0.2
        links.heal()
        writer.write(b"2")
        assert await reader.read(10) == await received.get() == b"2"
        writer.close()
