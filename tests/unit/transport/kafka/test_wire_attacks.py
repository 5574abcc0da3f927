"""Clients that hold what others need: memory by promises, responses not taken, handshakes that never end."""

from __future__ import annotations

import asyncio
import ssl
import struct
from pathlib import Path

import pytest

from kipmesh.core.config.node import QUEUED_REQUEST_BYTES_MIN, WireConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.messages.kafka import MalformedError
from kipmesh.messages.table import KAFKA_APIS
from kipmesh.transport.kafka.framing import FIRST_BYTES, STAGING_BYTES
from kipmesh.transport.tls import ServerContext, TlsFiles, TlsPaths, client_context
from kipmesh.transport.tls.making import Authority
from tests.unit.transport.kafka.wire_of_tests import ECHO, LIMITS, STALL_S, WRITE, Client, Wire, frame, listening, until

ENDED = "kipmesh_wire_connections_ended_total"


async def _is_served(wire: Wire) -> None:
    client = await wire.connect()
    client.send(frame(ECHO, 1, "honest"))
    assert await client.text() == (1, "honest/me/KAFKA")


# --- memory of requests


async def test_lengths_alone_hold_little_memory() -> None:
    limits = LIMITS._replace(request_bytes_max=100 << 20, queued_bytes_max=1 << 20, other_request_bytes_max=100 << 20)
    async with listening(limits) as wire:
        for index in range(20):
            client = await wire.connect()
            client.send(struct.pack(">ihhih", 100 << 20, WRITE, 1, index, -1))
        await until(lambda: wire.server.memory.bytes_used == 20 * FIRST_BYTES)
        assert wire.server.memory.waiting == 0
        await _is_served(wire)


async def test_large_requests_that_all_wait_for_each_other_are_carried_out() -> None:
    limits = LIMITS._replace(request_bytes_max=8 << 20, queued_bytes_max=256 << 10)
    async with listening(limits) as wire:
        clients = [await wire.connect() for _ in range(6)]
        whole = [frame(WRITE, index, f"{index}", data=bytes(3 << 20)) for index in range(6)]
        for client, data in zip(clients, whole, strict=True):
            client.send(data[:100_000])
        await until(lambda: wire.server.memory.waiting > 0)
        for client, data in zip(clients, whole, strict=True):
            client.send(data[100_000:])
        for index, client in enumerate(clients):
            assert (await client.text())[0] == index
            assert wire.server.memory.bytes_used <= (256 << 10) + 2 * (3 << 20)


async def test_the_least_memory_is_enough_for_any_request() -> None:
    """With less than what is read at once, the beginning of a request could hold all of it, and wait for itself."""
    assert QUEUED_REQUEST_BYTES_MIN >= 2 * STAGING_BYTES
    limits = LIMITS._replace(request_bytes_max=8 << 20, queued_bytes_max=QUEUED_REQUEST_BYTES_MIN)
    async with listening(limits) as wire:
        clients = [await wire.connect() for _ in range(3)]
        for index, client in enumerate(clients):
            client.send(frame(WRITE, index, f"{index}", data=bytes(3 << 20)))
        for index, client in enumerate(clients):
            async with asyncio.timeout(20):
                assert (await client.text())[0] == index


def test_less_memory_than_one_read_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match=r"queued\.max\.request\.bytes.*greater than or equal to 131072"):
        WireConfig.parse({"queued.max.request.bytes": "131071"})
    assert WireConfig.parse({"queued.max.request.bytes": "131072"}).queued_max_request_bytes == QUEUED_REQUEST_BYTES_MIN


async def test_who_sends_byte_by_byte_goes_when_others_wait_for_the_memory() -> None:
    async with listening(LIMITS._replace(queued_bytes_max=100_000)) as wire:
        slow = await wire.connect()
        slow.send(frame(WRITE, 1, "slow", data=bytes(300_000))[:290_000])
        await until(lambda: wire.server.memory.bytes_used > 290_000)
        (connection,) = wire.connections
        for _ in range(3):  # far longer than the limit, and nobody minds: nobody waits
            wire.look_after(STALL_S * 0.9)
            came_at = connection.active_at
            slow.send(b"\0")

            def was_active(before: float = came_at) -> bool:
                return connection.active_at > before

            await until(was_active)
        assert wire.count(ENDED, reason="stalled") == 0
        other = await wire.connect()
        other.send(frame(ECHO, 1, "other"))
        await until(lambda: wire.server.memory.waiting == 1)
        wire.look_after(0)
        assert wire.count(ENDED, reason="stalled") == 1
        assert await slow.is_closed()
        assert await other.text() == (1, "other/me/KAFKA")


async def test_who_holds_memory_behind_a_request_that_waits_goes_when_others_need_it() -> None:
    async with listening(LIMITS._replace(queued_bytes_max=100_000)) as wire:
        patient, greedy = await wire.connect(), await wire.connect()
        patient.send(frame(ECHO, 1, "wait a"), frame(ECHO, 2, "small"))
        greedy.send(frame(ECHO, 1, "wait b"))
        greedy.send(*[frame(WRITE, index, f"{index}", data=bytes(30_000)) for index in range(2, 5)])
        await until(lambda: wire.server.memory.bytes_used > 90_000 and len(wire.hand.begun) == 2)
        wire.look_after(2 * STALL_S)  # longer than the limit, and nobody minds
        assert wire.count(ENDED, reason="held") == 0
        large = await wire.connect()
        large.send(frame(WRITE, 1, "large", data=bytes(50_000)))
        await until(lambda: wire.server.memory.waiting == 1)
        assert wire.count(ENDED, reason="held") == 0
        wire.look_after(0)
        assert await large.text() == (1, "large/me/KAFKA")
        assert await greedy.is_closed()
        assert wire.count(ENDED, reason="held") == 1
        assert wire.hand.cancelled == ["wait b"]
        assert {"2", "3", "4"} <= set(wire.hand.begun)  # what was whole and writes is carried out
        wire.hand.release("wait a")
        assert [await patient.text() for _ in range(2)] == [(1, "wait a/me/KAFKA"), (2, "small/me/KAFKA")]


# --- responses that are not taken


def _transport_of(client: Client) -> asyncio.Transport:
    transport = client.writer.transport
    assert isinstance(transport, asyncio.Transport)
    return transport


async def _leaves_unread(wire: Wire, number: int, data: bytes) -> Client:
    client: Client = await wire.connect()
    _transport_of(client).pause_reading()
    for index in range(number):
        client.send(frame(ECHO, index, "a", data=data))
    return client


async def test_unread_responses_are_counted_until_their_clients_are_gone() -> None:
    limits = LIMITS._replace(request_bytes_max=64 << 20, queued_bytes_max=256 << 20, unsent_bytes_max=20 << 20)
    limits = limits._replace(other_request_bytes_max=64 << 20)
    async with listening(limits) as wire:
        assert wire.server.unsent.left == 20 << 20
        data = bytes(24 << 20)
        client = await _leaves_unread(wire, 1, data)
        await until(lambda: wire.server.unsent.is_short)
        assert wire.count("kipmesh_wire_unsent_response_bytes") == wire.server.unsent.bytes_used
        _transport_of(client).resume_reading()
        await client.response()

        def is_nothing_unsent() -> bool:
            wire.look_after(0)  # the last bytes go without anybody being told
            return wire.server.unsent.bytes_used == 0

        await until(is_nothing_unsent)
        gone = await _leaves_unread(wire, 1, data)
        await until(lambda: wire.server.unsent.is_short)
        gone.writer.transport.abort()
        await until(lambda: wire.server.unsent.bytes_used == 0)


async def test_who_reads_byte_by_byte_goes_when_memory_is_short() -> None:
    limits = LIMITS._replace(request_bytes_max=64 << 20, queued_bytes_max=256 << 20, other_request_bytes_max=64 << 20)
    for unsent_bytes_max, is_ended in ((256 << 20, False), (16 << 20, True)):
        async with listening(limits._replace(unsent_bytes_max=unsent_bytes_max)) as wire:
            client = await _leaves_unread(wire, 1, bytes(24 << 20))
            await until(lambda: wire.server.unsent.bytes_used > 8 << 20)
            for _ in range(3):  # some bytes each time, so that it is never quiet for long
                wire.look_after(STALL_S * 0.6)
                if wire.count(ENDED, reason="slow"):
                    break
                await _some_is_taken(wire, client)
            assert wire.count(ENDED, reason="slow") == is_ended
            client.writer.transport.abort()
            await until(lambda: wire.server.unsent.bytes_used == 0)


async def _some_is_taken(wire: Wire, client: Client) -> None:
    """Until the listener could send more."""
    loop = asyncio.get_running_loop()
    (connection,) = wire.connections
    transport = connection._socket
    assert transport is not None
    before = transport.get_write_buffer_size()
    with client.writer.get_extra_info("socket").dup() as reader:
        async with asyncio.timeout(20):
            while transport.get_write_buffer_size() == before:
                assert await loop.sock_recv(reader, 256 << 10)
                await asyncio.sleep(0)


# --- many small things in one request


@pytest.mark.parametrize(
    ("key", "version", "body"),
    [
        (3, 4, struct.pack(">i", 100_001) + bytes(2 * 100_001)),
        (15, 0, struct.pack(">i", 100_001) + bytes(2 * 100_001)),
        (3, 9, bytes([0x01, 0, 0, 0, 0xC1, 0x8D, 0x06]) + bytes(300_000)),
    ],
    ids=["topics", "groups", "tags"],
)
def test_lists_have_a_limit_over_all_of_a_request(key: int, version: int, body: bytes) -> None:
    with pytest.raises(MalformedError, match="items"):
        KAFKA_APIS[key].decode(memoryview(body), 0, version)


def test_the_limit_of_items_counts_lists_within_lists() -> None:
    one = struct.pack(">h1si", 1, b"t", 3) + struct.pack(">3i", 0, 1, 2)
    body = struct.pack(">h1si", 1, b"g", 10) + 10 * one
    request = KAFKA_APIS[9].decode(memoryview(body), 0, 1, 40)
    assert [len(topic.partition_indexes) for topic in request.topics] == 10 * [3]
    with pytest.raises(MalformedError, match="items"):
        KAFKA_APIS[9].decode(memoryview(body), 0, 1, 39)


# --- TLS


@pytest.fixture
def contexts(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    made = Authority.make("kipmesh")
    made.issue("server", ["localhost", "127.0.0.1"]).write(tmp_path)
    files = TlsFiles(TlsPaths(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt"))
    return ServerContext(files, client_auth="none").reloading(), client_context(files)


async def test_connections_within_their_handshake_count(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    server, client = contexts
    limits = LIMITS._replace(connections_per_ip_max=3)
    async with listening(limits, server_ssl=server, client_ssl=client) as wire:
        silent = [await wire.connect_plain() for _ in range(3)]
        await until(lambda: wire.server.counts.total == 3)
        assert await (await wire.connect_plain()).is_closed()
        assert wire.count("kipmesh_wire_connections_refused_total", limit="max.connections.per.ip") == 1
        for each in silent:
            each.writer.transport.abort()
        await until(lambda: wire.server.counts.total == 0)
        await _is_served(wire)


async def test_handshakes_that_take_too_long_end(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    server, _ = contexts
    async with listening(LIMITS._replace(handshake_ms_max=200), server_ssl=server) as wire:
        for each in [await wire.connect_plain() for _ in range(3)]:
            assert await each.is_closed()
        assert wire.count(ENDED, reason="handshake") == 3
        await until(lambda: wire.server.counts.total == 0)


async def test_what_is_no_handshake_ends_its_connection(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    server, client = contexts
    async with listening(LIMITS, server_ssl=server, client_ssl=client) as wire:
        plain = await wire.connect_plain()
        plain.send(frame(ECHO, 1, "a"))
        async with asyncio.timeout(20):
            while await plain.reader.read(100):
                pass
        assert wire.count(ENDED, reason="handshake") == 1
        gone = await wire.connect_plain()
        gone.writer.transport.abort()
        await until(lambda: wire.server.counts.total == 0)
        await _is_served(wire)


async def test_requests_and_large_responses_by_tls(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    server, client = contexts
    limits = LIMITS._replace(request_bytes_max=8 << 20, queued_bytes_max=64 << 20)
    async with listening(limits, server_ssl=server, client_ssl=client) as wire:
        one = await wire.connect()
        data = bytes(range(256)) * (3 << 12)
        for index in range(5):
            one.send(frame(ECHO, index, "a", data=data))
        for index in range(5):
            correlation_id, answer = await one.response()
            assert (correlation_id, answer.endswith(data)) == (index, True)
        slow = await _leaves_unread(wire, 6, data)
        await until(lambda: wire.server.unsent.bytes_used > 0)
        await wire.goes_for_being("slow")
        assert len(wire.hand.begun) < 11
        slow.writer.transport.abort()
        await until(lambda: wire.server.unsent.bytes_used == 0)


# --- names


@pytest.mark.parametrize("name", ["FindCoordinator", "DescribeGroups", "DeleteGroups", "JoinGroup", "OffsetFetch"])
def test_requests_with_names_of_groups_are_small(name: str) -> None:
    """Each name is hashed character by character."""
    (api,) = [api for api in KAFKA_APIS.values() if api.name == name]
    assert api.request_bytes_max is not None
    assert api.request_bytes_max <= 4 << 20
