"""Connections of the Kafka protocol: order and overlap of requests, limits, and closed connections."""

from __future__ import annotations

import asyncio
import gc
import random
import struct
from typing import Any

import pytest

from kipmesh.messages.table import KAFKA_APIS, Api
from tests.unit.transport.kafka.kio_of_tests import random_value
from tests.unit.transport.kafka.wire_of_tests import ECHO, IDLE_S, LIMITS, STALL_S, WRITE, frame, listening, until


async def test_requests_of_connection_are_handled_in_order() -> None:
    async with listening() as wire:
        client = await wire.connect()
        client.send(frame(ECHO, 1, "wait"), frame(ECHO, 2, "b"), frame(ECHO, 3, "c"))
        await until(lambda: wire.handler.started == ["wait"])
        other = await wire.connect()
        other.send(frame(ECHO, 9, "x"))
        assert await other.text() == (9, "x/me/KAFKA")
        assert wire.handler.started == ["wait", "x"]
        wire.handler.release("wait")
        assert [await client.text() for _ in range(3)] == [(1, "wait/me/KAFKA"), (2, "b/me/KAFKA"), (3, "c/me/KAFKA")]


async def test_writes_overlap_and_responses_keep_order() -> None:
    async with listening() as wire:
        client = await wire.connect()
        client.send(frame(WRITE, 1, "wait 1"), frame(WRITE, 2, "wait 2"), frame(WRITE, 3, "none"), frame(ECHO, 4, "d"))
        await until(lambda: wire.handler.started == ["wait 1", "wait 2", "none"])
        wire.handler.release("wait 2")
        await asyncio.sleep(0.02)
        assert wire.handler.started == ["wait 1", "wait 2", "none"]  # other requests wait for all writes
        wire.handler.release("wait 1")
        texts = [await client.text() for _ in range(3)]
        assert texts == [(1, "wait 1/me/KAFKA"), (2, "wait 2/me/KAFKA"), (4, "d/me/KAFKA")]
        assert wire.count("kafka_network_requestmetrics_requests_total", request="Write", version="1") == 3


async def test_connection_accepts_single_bytes_and_large_requests() -> None:
    async with listening() as wire:
        client = await wire.connect()
        data = random.Random(1).randbytes(300_000)
        whole = frame(ECHO, 1, "a") + frame(WRITE, 2, "b", data=data)
        for byte in whole[:40]:
            client.send(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)
        client.send(whole[40:])
        assert await client.text() == (1, "a/me/KAFKA")
        assert (await client.response())[1].endswith(data)
        assert wire.count("kafka_network_requestmetrics_responsebytes_total", request="Write") > len(data)


BAD = {
    "negative length": (struct.pack(">i", -5) + bytes(20), "length"),
    "short length": (struct.pack(">i", 4) + bytes(20), "length"),
    "above size limit": (struct.pack(">ih", (1 << 20) + 1, ECHO) + bytes(20), "size"),
    "unknown API": (frame(77, 1, "a"), "api"),
    "unknown version": (frame(ECHO, 1, "a", version=3), "version"),
    "client id beyond end": (struct.pack(">ihhih", 12, ECHO, 1, 1, 500) + b"ab", "malformed"),
    "no body": (struct.pack(">ihhih", 10, ECHO, 1, 1, 0), "malformed"),
    "no text": (struct.pack(">ihhihh", 14, ECHO, 1, 1, 0, -1) + bytes(2), "malformed"),
    "not UTF-8": (struct.pack(">ihhihh", 18, ECHO, 1, 1, 0, 2) + b"\xff\xfe" + bytes(4), "malformed"),
    "failing handler": (frame(ECHO, 1, "fail"), "failed"),
    "handler that closes connection": (frame(WRITE, 1, "hang up"), "acks-0"),
}


@pytest.mark.parametrize("name", list(BAD))
async def test_invalid_request_closes_only_its_connection(name: str) -> None:
    data, reason = BAD[name]
    async with listening() as wire:
        other, client = await wire.connect(), await wire.connect()
        other.send(frame(ECHO, 1, "wait"))
        await until(lambda: wire.handler.started == ["wait"])
        client.send(data, frame(ECHO, 2, "never"))
        assert await client.is_closed()
        wire.handler.release("wait")
        assert await other.text() == (1, "wait/me/KAFKA")
        assert "never" not in wire.handler.started
        assert wire.count("kipmesh_wire_connections_ended_total", reason=reason) == 1
        is_malformed = reason not in ("failed", "acks-0")
        assert wire.count("kipmesh_wire_malformed_frames_total") == is_malformed


@pytest.mark.parametrize("size", [-1, 0])
async def test_invalid_frame_length_closes_connection(size: int) -> None:
    async with listening() as wire:
        client = await wire.connect()
        client.send(struct.pack(">i", size))
        async with asyncio.timeout(60):
            assert await client.is_closed()
        assert wire.count("kipmesh_wire_connections_ended_total", reason="length") == 1


async def test_requests_before_invalid_frame_are_handled() -> None:
    async with listening() as wire:
        client = await wire.connect()
        client.send(frame(WRITE, 1, "none"), frame(WRITE, 2, "none"), struct.pack(">i", -1) + bytes(10))
        assert await client.is_closed()
        await until(lambda: wire.handler.started == ["none", "none"])


async def test_disconnect_cancels_pending_requests_except_writes() -> None:
    async with listening() as wire:
        client = await wire.connect()
        client.send(frame(ECHO, 1, "wait"), frame(WRITE, 2, "none"), frame(ECHO, 3, "c"), frame(WRITE, 4, "wait w"))
        await until(lambda: wire.handler.started == ["wait"])
        await client.close()
        await until(lambda: wire.handler.started == ["wait", "none", "wait w"])
        assert wire.handler.cancelled == ["wait"]
        await until(lambda: wire.server.counts.total == 0)
        assert wire.server.memory.bytes_used > 0
        wire.handler.release("wait w")
        await until(lambda: wire.server.memory.bytes_used == 0)


async def test_pending_requests_per_connection_are_limited() -> None:
    async with listening() as wire:
        client = await wire.connect()
        number = 3 * LIMITS.pending_max
        client.send(*(frame(WRITE, index, f"wait {index}") for index in range(number)))
        await until(lambda: len(wire.handler.started) == LIMITS.pending_max)
        await asyncio.sleep(0.02)
        assert len(wire.handler.started) == LIMITS.pending_max
        for index in range(number):
            wire.handler.release(f"wait {index}")
        assert [(await client.text())[0] for _ in range(number)] == list(range(number))


async def test_requests_above_memory_limit_wait_for_released_memory() -> None:
    async with listening(LIMITS._replace(queued_bytes_max=1000)) as wire:
        first, second, third = [await wire.connect() for _ in range(3)]
        first.send(frame(WRITE, 1, "wait 1", data=bytes(600)))
        await until(lambda: wire.handler.started == ["wait 1"])
        second.send(frame(WRITE, 2, "wait 2", data=bytes(600)))
        await until(lambda: wire.server.memory.waiting == 1)
        third.send(frame(ECHO, 3, "small"))
        await until(lambda: wire.server.memory.waiting == 2)
        assert wire.handler.started == ["wait 1"]
        assert wire.count("kipmesh_wire_queued_request_bytes") > 600
        wire.handler.release("wait 1")
        assert await first.text() == (1, "wait 1/me/KAFKA")
        assert await third.text() == (3, "small/me/KAFKA")
        wire.handler.release("wait 2")
        assert await second.text() == (2, "wait 2/me/KAFKA")


async def test_disconnected_request_that_waits_for_memory_is_skipped() -> None:
    async with listening(LIMITS._replace(queued_bytes_max=1000)) as wire:
        first, second, third = [await wire.connect() for _ in range(3)]
        first.send(frame(WRITE, 1, "wait 1", data=bytes(600)))
        await until(lambda: wire.handler.started == ["wait 1"])
        second.send(frame(WRITE, 2, "second", data=bytes(900))[:500])
        await until(lambda: wire.server.memory.waiting == 1)
        third.send(frame(ECHO, 3, "small"))
        await until(lambda: wire.server.memory.waiting == 2)
        second.writer.transport.abort()
        wire.handler.release("wait 1")
        await first.text()
        assert await third.text() == (3, "small/me/KAFKA")
        assert "second" not in wire.handler.started


async def test_connections_above_limit_are_closed() -> None:
    async with listening(LIMITS._replace(connections_per_ip_max=2)) as wire:
        clients = [await wire.connect() for _ in range(3)]
        assert await clients[2].is_closed()
        clients[0].send(frame(ECHO, 1, "a"))
        assert await clients[0].text() == (1, "a/me/KAFKA")
        assert wire.count("kipmesh_wire_connections_refused_total", limit="max.connections.per.ip") == 1
        await clients[1].close()
        await until(lambda: wire.server.counts.total == 1)
        reconnected = await wire.connect()
        reconnected.send(frame(ECHO, 1, "a"))
        assert await reconnected.text() == (1, "a/me/KAFKA")


async def test_idle_connections_are_closed_unless_request_is_pending() -> None:
    async with listening() as wire:
        idle, busy = await wire.connect(), await wire.connect()
        busy.send(frame(ECHO, 1, "wait"))
        await until(lambda: wire.handler.started == ["wait"])
        wire.advance_and_check(IDLE_S * 0.9)
        assert wire.count("kipmesh_wire_connections_ended_total", reason="idle") == 0
        wire.advance_and_check(IDLE_S * 0.2)
        assert wire.count("kipmesh_wire_connections_ended_total", reason="idle") == 1
        assert await idle.is_closed()
        wire.handler.release("wait")
        assert await busy.text() == (1, "wait/me/KAFKA")


async def test_listener_checks_connections_periodically() -> None:
    async with listening(LIMITS._replace(idle_ms_max=200), checks_periodically=True) as wire:
        assert await (await wire.connect()).is_closed()
        assert wire.count("kipmesh_wire_connections_ended_total", reason="idle") == 1


async def test_stalled_request_closes_connection_and_releases_memory() -> None:
    async with listening() as wire:
        client = await wire.connect()
        client.send(frame(WRITE, 1, "a", data=bytes(200_000))[:100_000])
        await until(lambda: wire.server.memory.bytes_used > 200_000)
        wire.advance_and_check(STALL_S * 0.9)
        assert wire.count("kipmesh_wire_connections_ended_total", reason="stalled") == 0
        wire.advance_and_check(STALL_S * 0.2)
        assert wire.count("kipmesh_wire_connections_ended_total", reason="stalled") == 1
        assert await client.is_closed()
        await until(lambda: wire.server.memory.bytes_used == 0)


async def test_connection_with_unread_responses_is_paused_and_closed() -> None:
    limits = LIMITS._replace(request_bytes_max=8 << 20, queued_bytes_max=64 << 20)
    async with listening(limits) as wire:
        client = await wire.connect()
        client.writer.transport.pause_reading()
        data = bytes(4 << 20)
        for index in range(6):
            client.send(frame(ECHO, index, f"{index}", data=data))
        await until(lambda: wire.server.unsent.bytes_used > 0)
        await wire.wait_until_ended_as("slow")
        assert len(wire.handler.started) < 6
        client.writer.transport.resume_reading()


async def test_api_versions_of_unknown_version_returns_supported_versions() -> None:
    async with listening() as wire:
        client = await wire.connect()
        client.send(struct.pack(">ihhih", 10, 18, 77, 5, 0))
        correlation_id, data = await client.response()
        assert (correlation_id, data) == (5, struct.pack(">hihhh", 35, 1, 18, 0, 4))
        client.send(struct.pack(">ihhih", 10, 18, 0, 6, 0))
        correlation_id, data = await client.response()
        assert correlation_id == 6
        assert struct.unpack(">hi9h", data) == (0, 3, 18, 0, 4, ECHO, 1, 2, WRITE, 1, 2)


@pytest.mark.parametrize(("name", "code"), [("librdkafka", 0), ("a" * 200, 42), ("-x", 42), ("", 42)])
async def test_api_versions_counts_valid_client_software(name: str, code: int) -> None:
    async with listening() as wire:
        client = await wire.connect()
        size = len(name) + 1
        body = (bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])) + name.encode() + b"\x042.0\0"
        client.send(struct.pack(">ihhih", 11 + len(body), 18, 3, 5, 0) + b"\0" + body)
        _, data = await client.response()
        assert struct.unpack(">h", data[:2])[0] == code
        counted = wire.count("kipmesh_wire_client_software_total", name=name, version="2.0")
        assert counted == (1 if code == 0 else 0)


async def test_requests_create_no_reference_cycles() -> None:
    async with listening() as wire:
        client = await wire.connect()
        client.send(frame(ECHO, 1, "a", data=bytes(100_000)))
        await client.response()
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            for index in range(50):
                client.send(frame(ECHO, index, "a", data=bytes(100_000)), frame(WRITE, index, "b"))
                await client.response()
                await client.response()
            assert gc.collect() < 50
            assert len(gc.get_objects()) < before + 50
        finally:
            gc.enable()


def _all_errors(value: Any) -> list[int]:
    """Collect error codes by a full traversal; the oracle for `Api.errors`."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [code for item in value for code in _all_errors(item)]
    if not hasattr(value, "_fields"):
        return []
    own = [value.error_code] if getattr(value, "error_code", 0) else []
    return own + [code for name in value._fields for code in _all_errors(getattr(value, name))]


@pytest.mark.parametrize("api", KAFKA_APIS.values(), ids=lambda api: api.name)
def test_api_errors_finds_errors_at_every_depth(api: Api) -> None:
    source, found = random.Random(api.name), 0
    for _ in range(20):
        value = random_value(source, api.response, api.versions.last)
        assert sorted(api.errors(value)) == sorted(_all_errors(value))
        found += len(api.errors(value))
    assert found or not [name for name in api.response._fields if "error" in name]


async def test_response_errors_are_counted_by_api_and_name() -> None:
    async with listening() as wire:
        client = await wire.connect()
        client.send(struct.pack(">ihhih", 10, 18, 77, 5, 0))
        await client.response()
        name = "kafka_network_requestmetrics_errors_total"
        assert wire.count(name, request="ApiVersions", error="UNSUPPORTED_VERSION") == 1
        assert wire.count(name, request="Echo") == 0


async def test_connection_end_reasons_are_exported_before_first_end() -> None:
    async with listening() as wire:
        name = "kipmesh_wire_connections_ended_total"
        reasons = {sample.labels["reason"] for sample in wire.samples if sample.name == name}
        assert {"slow", "stalled", "idle", "malformed", "authentication", "handshake"} <= reasons


async def test_listener_metrics_are_exported_before_first_connection() -> None:
    async with listening() as wire:
        samples = {sample.name: sample for sample in wire.samples}
        for suffix in ("count", "creation_total", "close_total"):
            sample = samples[f"kafka_server_socket_server_metrics_connection_{suffix}"]
            assert (sample.labels, sample.value) == ({"listener": "KAFKA"}, 0)
