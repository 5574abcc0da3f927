"""Both ways of the mechanisms' messages: by SaslAuthenticate, and without headers after SaslHandshake version 0."""

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
GONE = b"nothing, and the connection is closed"


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


async def answer(client: Client) -> bytes:
    """The next frame, or GONE."""
    try:
        (size,) = struct.unpack(">i", await client.reader.readexactly(4))
        return await client.reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return GONE


async def begin(client: Client, version: int, mechanism: str) -> int:
    client.send(handshake(version, mechanism))
    return struct.unpack(">ih", (await answer(client))[:6])[1]  # type: ignore[no-any-return]


async def tell(client: Client, version: int, message: bytes) -> bytes:
    """A message of the mechanism, and what the listener says to it: GONE where that is nothing."""
    if version == 0:
        client.send(bare(message))
        return await answer(client)
    client.send(request(36, 0, bare(message)))
    said = await answer(client)
    (code,) = struct.unpack(">h", said[4:6])
    if code:
        assert code == FAILED
        assert await client.is_closed()
        return GONE
    assert said[6:8] == b"\xff\xff"  # no text
    return said[12:]


async def log_in(client: Client, version: int, mechanism: str, password: str) -> bytes:
    """The last answer."""
    assert await begin(client, version, mechanism) == 0
    if mechanism == "PLAIN":
        return await tell(client, version, f"\0{USER}\0{password}".encode())
    scram = ScramClient([mechanism], USER, password)
    scram.set_server_first((await tell(client, version, scram.get_client_first().encode())).decode())
    last = await tell(client, version, scram.get_client_final().encode())
    if last != GONE:
        scram.set_server_final(last.decode())
    return last


async def is_in(client: Client) -> bool:
    client.send(frame(ECHO, 1, "a"))
    return await client.text() == (1, "a/me/KAFKA")


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_who_knows_the_password_comes_in_once(sasl: Sasl, mechanism: str, version: int) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        said = await log_in(client, version, mechanism, PASSWORD)
        assert said == b"" if mechanism == "PLAIN" else said.startswith(b"v=")
        assert await is_in(client)
        assert await begin(client, version, mechanism) == ILLEGAL_STATE  # not again on this connection
        assert await client.is_closed()


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_who_does_not_is_sent_away(sasl: Sasl, mechanism: str, version: int) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        assert await log_in(client, version, mechanism, "pens") == GONE
        check_failed(wire)


def check_failed(wire: Wire) -> None:
    assert wire.count("kipmesh_wire_connections_ended_total", reason="authentication") == 1
    failed = wire.count(
        "kafka_network_requestmetrics_errors_total", request="SaslAuthenticate", error="SASL_AUTHENTICATION_FAILED"
    )
    assert failed == 1


@pytest.mark.parametrize("version", [0, 1])
async def test_a_mechanism_that_there_is_not(sasl: Sasl, version: int) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        assert await begin(client, version, "GSSAPI") == UNSUPPORTED
        assert await client.is_closed()


BAD: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "one byte": lambda: b"n",
    "too long for a message": lambda: b"\0al\0" + b"x" * MESSAGE_BYTES_MAX,
    "another handshake": lambda: handshake(0, "PLAIN")[4:],
    "a message with a header": lambda: request(36, 0, bare(f"\0{USER}\0{PASSWORD}".encode()))[4:],
    "a request": lambda: frame(ECHO, 1, "a")[4:],
}


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
@pytest.mark.parametrize("name", list(BAD))
async def test_frames_that_are_no_message(sasl: Sasl, name: str, mechanism: str) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        assert await begin(client, 0, mechanism) == 0
        assert await tell(client, 0, BAD[name]()) == GONE
        check_failed(wire)
        assert wire.hand.begun == []


@pytest.mark.parametrize(("size", "reason"), [(LIMITS.sasl_request_bytes_max + 1, "size"), (-1, "length")])
async def test_a_length_that_no_message_has_ends_the_connection_at_once(sasl: Sasl, size: int, reason: str) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        assert await begin(client, 0, "PLAIN") == 0
        client.send(struct.pack(">i", size), bytes(2) if size > 0 else b"")
        assert await client.is_closed()
        assert wire.count("kipmesh_wire_connections_ended_total", reason=reason) == 1


async def test_a_frame_of_nothing_is_no_request(sasl: Sasl) -> None:
    """Before the handshake, where short frames are taken only because a message may follow one."""
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        client.send(bytes(4))
        assert await client.is_closed()
        assert wire.count("kipmesh_wire_connections_ended_total", reason="malformed") == 1


@pytest.mark.parametrize("part", [b"", b"\0\0", bare(b"\0al\0pen")[:-1]])
async def test_who_does_not_go_on_is_sent_away(sasl: Sasl, part: bytes) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        assert await begin(client, 0, "PLAIN") == 0
        client.send(part)
        wire.look_after(AUTHENTICATE_S * 0.5)
        assert wire.server.counts.total == 1
        wire.look_after(AUTHENTICATE_S * 0.6)
        assert await client.is_closed()
        assert wire.count("kipmesh_wire_connections_ended_total", reason="unauthenticated") == 1


async def test_messages_and_requests_may_be_sent_before_the_answers(sasl: Sasl) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        message = bare(b"\0al\0pen")
        assert len(message) < 4 + HEADER_BYTES_MIN
        client.send(handshake(0, "PLAIN"), message, frame(ECHO, 1, "a"))
        assert (await answer(client))[4:6] == bytes(2)
        assert await answer(client) == b""
        assert await client.text() == (1, "a/me/KAFKA")
        assert wire.hand.begun == ["a"]


async def test_what_comes_behind_a_wrong_message_is_not_looked_at(sasl: Sasl) -> None:
    async with listening(sasl=sasl) as wire:
        client = await wire.connect()
        client.send(handshake(0, "PLAIN"), bare(b"\0al\0x"), frame(ECHO, 1, "a"))
        assert (await answer(client))[4:6] == bytes(2)
        assert await answer(client) == GONE
        assert wire.hand.begun == []
