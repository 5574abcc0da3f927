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
    """The address of a server that sends back what it gets, and what it got."""
    got: asyncio.Queue[bytes] = asyncio.Queue()
    open_writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.append(writer)
        while data := await reader.read(100):
            got.put_nowait(data)
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", got
    server.close()
    for writer in open_writers:
        writer.close()


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def is_silent(reading: asyncio.Task[bytes]) -> bool:
    """Whether nothing has come, after the loop had every chance to bring it."""
    done, _ = await asyncio.wait([reading], timeout=0.05)
    return not done


async def test_bytes_are_held_back_in_the_direction_that_is_cut(echo: tuple[str, asyncio.Queue[bytes]]) -> None:
    target, got = echo
    async with Links() as links:
        address = await links.address("a", "b", target)
        assert await links.address("a", "b", target) == address != target
        reader, writer = await connect(address)
        writer.write(b"1")
        assert (await reader.read(10), await got.get()) == (b"1", b"1")

        links.cut([("b", "a")])
        writer.write(b"2")
        assert await got.get() == b"2"  # there and
        reading = asyncio.create_task(reader.read(10))
        assert await is_silent(reading)  # not back
        links.heal()
        assert await reading == b"2"

        links.cut([("a", "b")])
        writer.write(b"3")
        reading = asyncio.create_task(reader.read(10))
        assert await is_silent(reading)
        assert got.empty()
        links.heal()
        assert (await reading, await got.get()) == (b"3", b"3")
        writer.close()


async def test_a_cut_in_one_direction_lets_no_connection_be_opened(echo: tuple[str, asyncio.Queue[bytes]]) -> None:
    target, got = echo
    async with Links() as links:
        address = await links.address("a", "b", target)
        links.cut([("b", "a")])
        reader, writer = await connect(address)
        writer.write(b"1")
        reading = asyncio.create_task(reader.read(10))
        assert await is_silent(reading)
        assert got.empty()
        links.heal()
        assert await reading == b"1"
        writer.close()


async def test_ends_pass_on_and_are_held_back_too(echo: tuple[str, asyncio.Queue[bytes]]) -> None:
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


async def test_a_server_that_is_not_there_ends_the_connection() -> None:
    async with Links() as links:
        with socket.socket() as not_listening:
            not_listening.bind(("127.0.0.1", 0))
            port = not_listening.getsockname()[1]
            reader, writer = await connect(await links.address("a", "b", f"127.0.0.1:{port}"))
            with suppress(ConnectionResetError):
                assert await reader.read(10) == b""
            writer.close()


async def test_an_ingress_tells_apart_who_connects(echo: tuple[str, asyncio.Queue[bytes]]) -> None:
    target, got = echo
    names: dict[int, str] = {}

    async def source_of(ports: tuple[int, int]) -> str:
        assert address.endswith(f":{ports[1]}")
        return names[ports[0]]

    async with Links() as links:
        address = await links.ingress("b", target, source_of)
        sockets = []
        for name in ("a", "c"):
            one = socket.socket()
            one.bind(("127.0.0.1", 0))
            names[one.getsockname()[1]] = name
            one.setblocking(False)
            host, _, port = address.rpartition(":")
            await asyncio.get_running_loop().sock_connect(one, (host, int(port)))
            sockets.append(one)
        (a_reader, a), (c_reader, c) = [await asyncio.open_connection(sock=one) for one in sockets]
        links.cut([("a", "b"), ("c", "b")])
        links.join([("c", "b")])
        a.write(b"held")
        c.write(b"through")
        assert await c_reader.read(10) == await got.get() == b"through"
        reading = asyncio.create_task(a_reader.read(10))
        assert await is_silent(reading)
        links.join([("a", "b")])
        assert await reading == await got.get() == b"held"
        a.close()
        c.close()


async def test_a_delay_is_in_one_direction_until_it_is_healed(echo: tuple[str, asyncio.Queue[bytes]]) -> None:
    target, got = echo
    clock = asyncio.get_running_loop().time
    async with Links() as links:
        reader, writer = await connect(await links.address("a", "b", target))
        links.delay([("b", "a")], 0.2)
        begin = clock()
        writer.write(b"1")
        assert await got.get() == b"1"
        assert await reader.read(10) == b"1"
        assert clock() - begin >= 0.2
        links.heal()
        writer.write(b"2")
        assert await reader.read(10) == await got.get() == b"2"
        writer.close()
