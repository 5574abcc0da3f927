"""SASL messages in SaslAuthenticate requests, and without headers after SaslHandshake version 0."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from scramp import ScramClient

from kipmesh.broker.membership.users import FileUsers
from kipmesh.core.scram import MESSAGE_BYTES_MAX
from kipmesh.transport.kafka.framing import HEADER_BYTES_MIN
from kipmesh.transport.kafka.handshake import AUTHENTICATE_S, MECHANISMS, Sasl
from tests.unit.transport.kafka.wire_of_tests import ECHO, LIMITS, Client, Wire, frame, listening

pytestmark = pytest.mark.timeout(120)
USER, PASSWORD = "al", "pen"
FAILED, ILLEGAL_STATE, UNSUPPORTED = 58, 34, 33
CLOSED = b"no response, and the connection is closed"


@pytest.fixture
def sasl(tmp_path: Path) -> Sasl:
    path = tmp_path / "users"
    path.touch(0o600)
    path.write_text(f"{USER}={PASSWORD}\n")
    return Sasl(MECHANISMS, FileUsers(str(path)))


def request(key: int, version: int, body: bytes) -> bytes:
    return bare(struct.pack(">hhih", key, version, 7, -1) + body)


def bare(message: bytes) -> bytes:
    return struct.pack(">i", len(message)) + message


def handshake(version: int, mechanism: str) -> bytes:
    return request(17, version, struct.pack(">h", len(mechanism)) + mechanism.encode())


async def next_frame(client: Client) -> bytes:
    """Return the next frame, or CLOSED."""
    try:
        (size,) = struct.unpack(">i", await client.reader.readexactly(4))
        return await client.reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return CLOSED


async def start_handshake(client: Client, version: int, mechanism: str) -> int:
    client.send(handshake(version, mechanism))
    return struct.unpack(">ih", (await next_frame(client))[:6])[1]  # type: ignore[no-any-return]


async def send_message(client: Client, version: int, message: bytes) -> bytes:
    """Send a message of the mechanism and return the response, or CLOSED."""
    if version == 0:
        client.send(bare(message))
        return await next_frame(client)
    client.send(request(36, 0, bare(message)))
    response = await next_frame(client)
    (code,) = struct.unpack(">h", response[4:6])
    if code:
        assert code == FAILED
        assert await client.is_closed()
        return CLOSED
    assert response[6:8] == b"\xff\xff"  # null error message
    return response[12:]


async def log_in(client: Client, version: int, mechanism: str, password: str) -> bytes:
    """Authenticate and return the last response."""
    assert await start_handshake(client, version, mechanism) == 0
    if mechanism == "PLAIN":
        return await send_message(client, version, f"\0{USER}\0{password}".encode())
    scram = ScramClient([mechanism], USER, password)
    scram.set_server_first((await send_message(client, version, scram.get_client_first().encode())).decode())
    last = await send_message(client, version, scram.get_client_final().encode())
    if last != CLOSED:
        scram.set_server_final(last.decode())
    return last


async def is_authenticated(client: Client) -> bool:
    client.send(frame(ECHO, 1, "a"))
    return await client.text() == (1, "a/me/KAFKA")


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_correct_password_authenticates_once_per_connection(sasl: Sasl, mechanism: str, version: int) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        response = await log_in(client, version, mechanism, PASSWORD)
        assert response == b"" if mechanism == "PLAIN" else response.startswith(b"v=")
        assert await is_authenticated(client)
        assert await start_handshake(client, version, mechanism) == ILLEGAL_STATE  # a second handshake is refused
        assert await client.is_closed()


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_wrong_password_closes_connection(sasl: Sasl, mechanism: str, version: int) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        assert await log_in(client, version, mechanism, "pens") == CLOSED
        check_failed(wire)


def check_failed(wire: Wire) -> None:
    assert wire.count("kipmesh_wire_connections_ended_total", reason="authentication") == 1
    failed = wire.count(
        "kafka_network_requestmetrics_errors_total", request="SaslAuthenticate", error="SASL_AUTHENTICATION_FAILED"
    )
    assert failed == 1


@pytest.mark.parametrize("version", [0, 1])
async def test_unsupported_mechanism_closes_connection(sasl: Sasl, version: int) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        assert await start_handshake(client, version, "GSSAPI") == UNSUPPORTED
        assert await client.is_closed()


BAD: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "one byte": lambda: b"n",
    "above size limit": lambda: b"\0al\0" + b"x" * MESSAGE_BYTES_MAX,
    "second handshake": lambda: handshake(0, "PLAIN")[4:],
    "message with header": lambda: request(36, 0, bare(f"\0{USER}\0{PASSWORD}".encode()))[4:],
    "request": lambda: frame(ECHO, 1, "a")[4:],
}


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
@pytest.mark.parametrize("name", list(BAD))
async def test_invalid_sasl_frames_fail_authentication(sasl: Sasl, name: str, mechanism: str) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        assert await start_handshake(client, 0, mechanism) == 0
        assert await send_message(client, 0, BAD[name]()) == CLOSED
        check_failed(wire)
        assert wire.handler.started == []


@pytest.mark.parametrize(("size", "reason"), [(LIMITS.sasl_request_bytes_max + 1, "size"), (-1, "length")])
async def test_invalid_sasl_frame_length_closes_connection(sasl: Sasl, size: int, reason: str) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        assert await start_handshake(client, 0, "PLAIN") == 0
        client.send(struct.pack(">i", size), bytes(2) if size > 0 else b"")
        assert await client.is_closed()
        assert wire.count("kipmesh_wire_connections_ended_total", reason=reason) == 1


async def test_empty_frame_before_handshake_is_malformed(sasl: Sasl) -> None:
    """The framer accepts short frames before the handshake, as SASL messages may follow it."""
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        client.send(bytes(4))
        assert await client.is_closed()
        assert wire.count("kipmesh_wire_connections_ended_total", reason="malformed") == 1


@pytest.mark.parametrize("part", [b"", b"\0\0", bare(b"\0al\0pen")[:-1]])
async def test_unfinished_authentication_times_out(sasl: Sasl, part: bytes) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        assert await start_handshake(client, 0, "PLAIN") == 0
        client.send(part)
        wire.advance_and_check(AUTHENTICATE_S * 0.5)
        assert wire.server.counts.total == 1
        wire.advance_and_check(AUTHENTICATE_S * 0.6)
        assert await client.is_closed()
        assert wire.count("kipmesh_wire_connections_ended_total", reason="unauthenticated") == 1


async def test_pipelined_authentication_and_requests_succeed(sasl: Sasl) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        message = bare(b"\0al\0pen")
        assert len(message) < 4 + HEADER_BYTES_MIN
        client.send(handshake(0, "PLAIN"), message, frame(ECHO, 1, "a"))
        assert (await next_frame(client))[4:6] == bytes(2)
        assert await next_frame(client) == b""
        assert await client.text() == (1, "a/me/KAFKA")
        assert wire.handler.started == ["a"]


async def test_requests_after_failed_authentication_are_ignored(sasl: Sasl) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        client.send(handshake(0, "PLAIN"), bare(b"\0al\0x"), frame(ECHO, 1, "a"))
        assert (await next_frame(client))[4:6] == bytes(2)
        assert await next_frame(client) == CLOSED
        assert wire.handler.started == []
