"""SCRAM, compared with the library scramp, PLAIN, and invalid messages."""

from __future__ import annotations

from base64 import b64decode, b64encode
from pathlib import Path

import pytest
from scramp import ScramClient, ScramMechanism

from kipmesh.broker.membership.users import FileUsers, UsersFileError, parse_users
from kipmesh.core.context import RequestContext
from kipmesh.core.scram import (
    HASHES,
    ITERATIONS_MAX,
    ITERATIONS_MIN,
    ScramCredential,
    ScramError,
    ScramExchange,
    credential,
    parse_client_first,
    salted_password,
)
from kipmesh.messages import SaslAuthenticateRequest
from kipmesh.messages.table import SASL_AUTHENTICATE
from kipmesh.transport.kafka.handshake import (
    Sasl,
    SaslFailedError,
    SaslState,
    Session,
    UsersNotKnownError,
    connection_handlers,
)
from kipmesh.transport.pipeline import CloseConnection

SALT = bytes(range(16))
SHA_256 = "SCRAM-SHA-256"


def _server(first: bytes, mechanism: str = SHA_256, password: str = "pencil", nonce: str = "server") -> ScramExchange:
    salted = salted_password(mechanism, password, SALT, ITERATIONS_MIN)
    return ScramExchange(
        mechanism, parse_client_first(first), credential(mechanism, salted, SALT, ITERATIONS_MIN), nonce
    )


def _client() -> tuple[bytes, bytes]:
    """Return both messages of a client with the correct password for the fixed server nonce."""
    client = ScramClient([SHA_256], "user", "pencil", c_nonce="client")
    first = client.get_client_first().encode()
    client.set_server_first(_server(first).server_first)
    return first, client.get_client_final().encode()


FIRST, FINAL = _client()
WITHOUT_PROOF, _, PROOF = FINAL.partition(b",p=")
OTHER_PROOF = b",p=" + b64encode(bytes([b64decode(PROOF)[0] ^ 1]) + b64decode(PROOF)[1:])


@pytest.mark.parametrize("mechanism", HASHES)
@pytest.mark.parametrize(("user", "password"), [("user", "pencil"), ("a,b=c", "one, two"), ("Jörg", "ü=three")])
def test_scram_server_and_scramp_client_authenticate(mechanism: str, user: str, password: str) -> None:
    client = ScramClient([mechanism], user, password)
    server = _server(client.get_client_first().encode(), mechanism, password, "nonce")
    client.set_server_first(server.server_first)
    client.set_server_final(server.finish(client.get_client_final().encode()).decode())  # raises for a wrong signature


@pytest.mark.parametrize("mechanism", HASHES)
@pytest.mark.parametrize("iterations", [ITERATIONS_MIN, ITERATIONS_MAX])
def test_scram_credentials_equal_those_of_scramp(mechanism: str, iterations: int) -> None:
    created = credential(mechanism, salted_password(mechanism, "ü=three", SALT, iterations), SALT, iterations)
    assert tuple(created) == ScramMechanism(mechanism).make_auth_info("ü=three", iterations, SALT)


@pytest.mark.parametrize(
    "final",
    [
        b"",
        b"\xff",
        WITHOUT_PROOF + OTHER_PROOF,
        FINAL.replace(b"c=biws", b"c=eSws"),
        FINAL.replace(b"r=client", b"r=cliemt"),
        FINAL[:-4],
        FINAL + b"!",
        WITHOUT_PROOF,
        WITHOUT_PROOF + b",p=",
        b"x" * 5000,
    ],
)
def test_invalid_scram_client_final_message_is_refused(final: bytes) -> None:
    with pytest.raises(ScramError):
        _server(FIRST).finish(final)


def test_scram_proof_of_wrong_password_is_refused() -> None:
    assert _server(FIRST).finish(FINAL).startswith(b"v=")
    with pytest.raises(ScramError):
        _server(FIRST, password="pencils").finish(FINAL)


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"n,,",
        b"p=tls-unique,,n=user,r=abc",
        b"n,,n=,r=abc",
        b"n,,n=user,r=",
        b"n,,r=abc,n=user",
        b"n,a=other,n=user,r=abc",
        b"n,,n=us=er,r=abc",
        b"n,,n=user,r=abc,tokenauth=true",
        b"n,,n=\xff,r=abc",
    ],
)
def test_malformed_scram_client_first_message_is_refused(first: bytes) -> None:
    with pytest.raises(ScramError):
        parse_client_first(first)


def test_scram_user_name_is_unescaped() -> None:
    assert parse_client_first(b"n,a=a=2Cb=3Dc,n=a=2Cb=3Dc,r=abc").user == "a,b=c"


@pytest.mark.parametrize(
    "message", [b"", b"a", b"\0user", b"\0user\0", b"\0\0pencil", b"other\0user\0pencil", b"\0\xff\0a"]
)
async def test_malformed_plain_message_is_refused(tmp_path: Path, message: bytes) -> None:
    path = tmp_path / "users"
    path.write_text("user=pencil\n")
    sasl = Sasl(("PLAIN",), FileUsers(str(path)))
    state = SaslState()
    await state.handshake(sasl, "PLAIN")
    with pytest.raises(SaslFailedError):
        await state.authenticate(sasl, message)
    assert state.has_failed
    assert state.user is None
    second = SaslState()
    await second.handshake(sasl, "PLAIN")
    assert await second.authenticate(sasl, b"user\0user\0pencil") == b""
    assert second.user == "user"


async def test_unknown_user_gets_same_salt_each_time(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text("user=pencil\n")
    users = FileUsers(str(path))
    sasl = Sasl(("SCRAM-SHA-256",), users)
    salts = []
    for _ in range(2):
        state = SaslState()
        await state.handshake(sasl, "SCRAM-SHA-256")
        response = (await state.authenticate(sasl, b"n,,n=unknown,r=abc")).decode()
        assert response.endswith(f",i={ITERATIONS_MIN}")
        salts.append(response.partition(",s=")[2])
    assert salts[0] == salts[1]


class UsersWithoutMetadata:
    """Users of a broker without metadata."""

    async def password(self, user: str) -> str | None:
        raise UsersNotKnownError("no metadata")

    async def credential(self, mechanism: str, user: str) -> ScramCredential | None:
        raise UsersNotKnownError("no metadata")


@pytest.mark.parametrize(
    ("mechanism", "message"), [("PLAIN", b"\0user\0pencil"), ("SCRAM-SHA-512", b"n,,n=user,r=abc")]
)
async def test_connection_closes_if_users_are_not_known(mechanism: str, message: bytes) -> None:
    sasl = Sasl((mechanism,), UsersWithoutMetadata())
    session = Session(lambda _name, _version: None, sasl=SaslState())
    assert session.sasl is not None
    await session.sasl.handshake(sasl, mechanism)
    authenticate = connection_handlers((), sasl)[SASL_AUTHENTICATE]
    context = RequestContext("p", "", version=2, connection=session)
    with pytest.raises(
        CloseConnection, match="no metadata"
    ) as closed:  # a client would not retry after an error response
        await authenticate(SaslAuthenticateRequest(message), context)
    assert closed.value.reason == "users not known"


def test_users_file_is_parsed_and_invalid_lines_are_refused(tmp_path: Path) -> None:
    assert parse_users("# a\n\n a = b=c \n") == {"a": "b=c"}
    for bad in ("a", "=b", "a=", "a=b\na=c"):
        with pytest.raises(UsersFileError):
            parse_users(bad)
    with pytest.raises(UsersFileError):
        FileUsers(str(tmp_path / "none"))
