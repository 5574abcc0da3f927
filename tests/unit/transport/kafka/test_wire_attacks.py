"""Clients that hold shared resources: announced requests, unread responses, and unfinished handshakes."""

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
    client.send(frame(ECHO, 1, "normal"))
    assert await client.text() == (1, "normal/me/KAFKA")


# -- memory of requests


async def test_frame_length_without_data_reserves_little_memory() -> None:
    limits = LIMITS._replace(request_bytes_max=100 << 20, queued_bytes_max=1 << 20, other_request_bytes_max=100 << 20)
    async with listening(limits) as wire:
        for index in range(20):
            client = await wire.connect()
            client.send(struct.pack(">ihhih", 100 << 20, WRITE, 1, index, -1))
        await until(lambda: wire.server.memory.bytes_used == 20 * FIRST_BYTES)
        assert wire.server.memory.waiting == 0
        await _is_served(wire)


async def test_large_requests_that_wait_for_memory_complete() -> None:
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


async def test_minimum_request_memory_suffices_for_any_request() -> None:
    """With less memory than one read, the start of a request could hold all memory and wait for itself."""
    assert QUEUED_REQUEST_BYTES_MIN >= 2 * STAGING_BYTES
    limits = LIMITS._replace(request_bytes_max=8 << 20, queued_bytes_max=QUEUED_REQUEST_BYTES_MIN)
    async with listening(limits) as wire:
        clients = [await wire.connect() for _ in range(3)]
        for index, client in enumerate(clients):
            client.send(frame(WRITE, index, f"{index}", data=bytes(3 << 20)))
        for index, client in enumerate(clients):
            async with asyncio.timeout(20):
                assert (await client.text())[0] == index


def test_request_memory_below_one_read_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match=r"queued\.max\.request\.bytes must be at least 131072"):
        WireConfig.parse({"queued.max.request.bytes": "131071"})
    assert WireConfig.parse({"queued.max.request.bytes": "131072"}).queued_max_request_bytes == QUEUED_REQUEST_BYTES_MIN


async def test_slow_sender_is_closed_when_others_wait_for_memory() -> None:
    async with listening(LIMITS._replace(queued_bytes_max=100_000)) as wire:
        slow = await wire.connect()
        slow.send(frame(WRITE, 1, "slow", data=bytes(300_000))[:290_000])
        await until(lambda: wire.server.memory.bytes_used > 290_000)
        (connection,) = wire.connections
        for _ in range(3):  # longer than the limit, but no other request waits
            wire.advance_and_check(STALL_S * 0.9)
            active_at = connection.active_at
            slow.send(b"\0")

            def was_active(before: float = active_at) -> bool:
                return connection.active_at > before

            await until(was_active)
        assert wire.count(ENDED, reason="stalled") == 0
        other = await wire.connect()
        other.send(frame(ECHO, 1, "other"))
        await until(lambda: wire.server.memory.waiting == 1)
        wire.advance_and_check(0)
        assert wire.count(ENDED, reason="stalled") == 1
        assert await slow.is_closed()
        assert await other.text() == (1, "other/me/KAFKA")


async def test_connection_with_queued_requests_is_closed_when_others_need_memory() -> None:
    async with listening(LIMITS._replace(queued_bytes_max=100_000)) as wire:
        patient, greedy = await wire.connect(), await wire.connect()
        patient.send(frame(ECHO, 1, "wait a"), frame(ECHO, 2, "small"))
        greedy.send(frame(ECHO, 1, "wait b"))
        greedy.send(*[frame(WRITE, index, f"{index}", data=bytes(30_000)) for index in range(2, 5)])
        await until(lambda: wire.server.memory.bytes_used > 90_000 and len(wire.handler.started) == 2)
        wire.advance_and_check(2 * STALL_S)  # longer than the limit, but no other request waits
        assert wire.count(ENDED, reason="held") == 0
        large = await wire.connect()
        large.send(frame(WRITE, 1, "large", data=bytes(50_000)))
        await until(lambda: wire.server.memory.waiting == 1)
        assert wire.count(ENDED, reason="held") == 0
        wire.advance_and_check(0)
        assert await large.text() == (1, "large/me/KAFKA")
        assert await greedy.is_closed()
        assert wire.count(ENDED, reason="held") == 1
        assert wire.handler.cancelled == ["wait b"]
        assert {"2", "3", "4"} <= set(wire.handler.started)  # complete writes are still handled
        wire.handler.release("wait a")
        assert [await patient.text() for _ in range(2)] == [(1, "wait a/me/KAFKA"), (2, "small/me/KAFKA")]


# -- unread responses


def _transport_of(client: Client) -> asyncio.Transport:
    transport = client.writer.transport
    assert isinstance(transport, asyncio.Transport)
    return transport


async def _client_that_does_not_read(wire: Wire, number: int, data: bytes) -> Client:
    client: Client = await wire.connect()
    _transport_of(client).pause_reading()
    for index in range(number):
        client.send(frame(ECHO, index, "a", data=data))
    return client


async def test_unsent_response_bytes_are_counted_until_sent_or_aborted() -> None:
    limits = LIMITS._replace(request_bytes_max=64 << 20, queued_bytes_max=256 << 20, unsent_bytes_max=20 << 20)
    limits = limits._replace(other_request_bytes_max=64 << 20)
    async with listening(limits) as wire:
        assert wire.server.unsent.left == 20 << 20
        data = bytes(24 << 20)
        client = await _client_that_does_not_read(wire, 1, data)
        await until(lambda: wire.server.unsent.is_short)
        assert wire.count("kipmesh_wire_unsent_response_bytes") == wire.server.unsent.bytes_used
        _transport_of(client).resume_reading()
        await client.response()

        def is_nothing_unsent() -> bool:
            wire.advance_and_check(0)  # the transport does not report the last bytes
            return wire.server.unsent.bytes_used == 0

        await until(is_nothing_unsent)
        aborted = await _client_that_does_not_read(wire, 1, data)
        await until(lambda: wire.server.unsent.is_short)
        aborted.writer.transport.abort()
        await until(lambda: wire.server.unsent.bytes_used == 0)


async def test_slow_reader_is_closed_when_response_memory_is_short() -> None:
    limits = LIMITS._replace(request_bytes_max=64 << 20, queued_bytes_max=256 << 20, other_request_bytes_max=64 << 20)
    for unsent_bytes_max, is_ended in ((256 << 20, False), (16 << 20, True)):
        async with listening(limits._replace(unsent_bytes_max=unsent_bytes_max)) as wire:
            client = await _client_that_does_not_read(wire, 1, bytes(24 << 20))
            await until(lambda: wire.server.unsent.bytes_used > 8 << 20)
            for _ in range(3):  # the client reads some bytes before each limit
                wire.advance_and_check(STALL_S * 0.6)
                if wire.count(ENDED, reason="slow"):
                    break
                await _read_some(wire, client)
            assert wire.count(ENDED, reason="slow") == is_ended
            client.writer.transport.abort()
            await until(lambda: wire.server.unsent.bytes_used == 0)


async def _read_some(wire: Wire, client: Client) -> None:
    """Read until the listener can send more."""
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


# -- many items in one request


@pytest.mark.parametrize(
    ("key", "version", "body"),
    [
        (3, 4, struct.pack(">i", 100_001) + bytes(2 * 100_001)),
        (15, 0, struct.pack(">i", 100_001) + bytes(2 * 100_001)),
        (3, 9, bytes([0x01, 0, 0, 0, 0xC1, 0x8D, 0x06]) + bytes(300_000)),
    ],
    ids=["topics", "groups", "tags"],
)
def test_request_with_too_many_items_is_malformed(key: int, version: int, body: bytes) -> None:
    with pytest.raises(MalformedError, match="items"):
        KAFKA_APIS[key].decode(memoryview(body), 0, version)


def test_item_limit_counts_nested_lists() -> None:
    topic = struct.pack(">h1si", 1, b"t", 3) + struct.pack(">3i", 0, 1, 2)
    body = struct.pack(">h1si", 1, b"g", 10) + 10 * topic
    request = KAFKA_APIS[9].decode(memoryview(body), 0, 1, 40)
    assert [len(topic.partition_indexes) for topic in request.topics] == 10 * [3]
    with pytest.raises(MalformedError, match="items"):
        KAFKA_APIS[9].decode(memoryview(body), 0, 1, 39)


# -- TLS


@pytest.fixture
def contexts(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    authority = Authority.make("kipmesh")
    authority.issue("server", ["localhost", "127.0.0.1"]).write(tmp_path)
    files = TlsFiles(TlsPaths(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt"))
    return ServerContext(files, client_auth="none").reloading(), client_context(files)


async def test_connections_in_tls_handshake_count_against_limit(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    server, client = contexts
    limits = LIMITS._replace(connections_per_ip_max=3)
    async with listening(limits, server_ssl=server, client_ssl=client) as wire:
        silent = [await wire.connect_plain() for _ in range(3)]
        await until(lambda: wire.server.counts.total == 3)
        assert await (await wire.connect_plain()).is_closed()
        assert wire.count("kipmesh_wire_connections_refused_total", limit="max.connections.per.ip") == 1
        for connection in silent:
            connection.writer.transport.abort()
        await until(lambda: wire.server.counts.total == 0)
        await _is_served(wire)


async def test_slow_tls_handshakes_are_closed(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    server, _ = contexts
    async with listening(LIMITS._replace(handshake_ms_max=200), server_ssl=server) as wire:
        for client in [await wire.connect_plain() for _ in range(3)]:
            assert await client.is_closed()
        assert wire.count(ENDED, reason="handshake") == 3
        await until(lambda: wire.server.counts.total == 0)


async def test_plaintext_to_tls_listener_closes_connection(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    server, client = contexts
    async with listening(LIMITS, server_ssl=server, client_ssl=client) as wire:
        plain = await wire.connect_plain()
        plain.send(frame(ECHO, 1, "a"))
        async with asyncio.timeout(20):
            while await plain.reader.read(100):
                pass
        assert wire.count(ENDED, reason="handshake") == 1
        aborted = await wire.connect_plain()
        aborted.writer.transport.abort()
        await until(lambda: wire.server.counts.total == 0)
        await _is_served(wire)


async def test_tls_listener_serves_large_responses_and_closes_slow_reader(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    server, client = contexts
    limits = LIMITS._replace(request_bytes_max=8 << 20, queued_bytes_max=64 << 20)
    async with listening(limits, server_ssl=server, client_ssl=client) as wire:
        reading = await wire.connect()
        data = bytes(range(256)) * (3 << 12)
        for index in range(5):
            reading.send(frame(ECHO, index, "a", data=data))
        for index in range(5):
            correlation_id, response = await reading.response()
            assert (correlation_id, response.endswith(data)) == (index, True)
        slow = await _client_that_does_not_read(wire, 6, data)
        await until(lambda: wire.server.unsent.bytes_used > 0)
        await wire.wait_until_ended_as("slow")
        assert len(wire.handler.started) < 11
        slow.writer.transport.abort()
        await until(lambda: wire.server.unsent.bytes_used == 0)


# -- names


@pytest.mark.parametrize("name", ["FindCoordinator", "DescribeGroups", "DeleteGroups", "JoinGroup", "OffsetFetch"])
def test_group_requests_have_small_size_limit(name: str) -> None:
    """The limit bounds the time to hash group names, which takes time per character."""
    (api,) = [api for api in KAFKA_APIS.values() if api.name == name]
    assert api.request_bytes_max is not None
    assert api.request_bytes_max <= 4 << 20
