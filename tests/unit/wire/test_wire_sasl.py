"""SCRAM beside RFC 7677's own example, and what is refused."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path

import pytest

from kipmesh.core.context import RequestContext
from kipmesh.core.scram import (
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
from kipmesh.node.broker.users import FileUsers, UsersFileError, parse_users
from kipmesh.transport.pipeline import CloseConnection
from kipmesh.wire.handshake import Session, connection_handlers
from kipmesh.wire.sasl import Sasl, SaslFailedError, SaslState, UsersNotKnownError

SALT = b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SERVER_FIRST = "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
FINAL = b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def _exchange(password: str = "pencil") -> ScramExchange:
    salted = salted_password("SCRAM-SHA-256", password, SALT, 4096)
    found = credential("SCRAM-SHA-256", salted, SALT, 4096)
    return ScramExchange("SCRAM-SHA-256", parse_client_first(FIRST), found, NONCE)


def test_the_example_of_rfc_7677() -> None:
    exchange = _exchange()
    assert exchange.server_first == SERVER_FIRST
    assert exchange.finish(FINAL) == SERVER_FINAL


@pytest.mark.parametrize(
    "final",
    [
        b"",
        b"\xff",
        FINAL.replace(b"p=dH", b"p=eH"),
        FINAL.replace(b"c=biws", b"c=eSws"),
        FINAL.replace(b"r=rO", b"r=rP"),
        FINAL[:-4],
        FINAL + b"!",
        FINAL.partition(b",p=")[0],
        FINAL.partition(b",p=")[0] + b",p=",
        b"x" * 5000,
    ],
)
def test_what_does_not_hold(final: bytes) -> None:
    with pytest.raises(ScramError):
        _exchange().finish(final)


def test_another_password() -> None:
    with pytest.raises(ScramError):
        _exchange("pencils").finish(FINAL)


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
def test_first_messages_that_are_none(first: bytes) -> None:
    with pytest.raises(ScramError):
        parse_client_first(first)


def test_names_are_unescaped() -> None:
    assert parse_client_first(b"n,a=a=2Cb=3Dc,n=a=2Cb=3Dc,r=abc").user == "a,b=c"


@pytest.mark.parametrize(
    "message", [b"", b"a", b"\0user", b"\0user\0", b"\0\0pencil", b"other\0user\0pencil", b"\0\xff\0a"]
)
async def test_plain_messages_that_are_none(tmp_path: Path, message: bytes) -> None:
    path = tmp_path / "users"
    path.write_text("user=pencil\n")
    sasl = Sasl(("PLAIN",), FileUsers(str(path)))
    state = SaslState()
    await state.handshake(sasl, "PLAIN")
    with pytest.raises(SaslFailedError):
        await state.authenticate(sasl, message)
    assert state.has_failed
    assert state.user is None
    again = SaslState()
    await again.handshake(sasl, "PLAIN")
    assert await again.authenticate(sasl, b"user\0user\0pencil") == b""
    assert again.user == "user"


async def test_an_unknown_user_has_the_same_salt_each_time(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text("user=pencil\n")
    users = FileUsers(str(path))
    sasl = Sasl(("SCRAM-SHA-256",), users)
    salts = []
    for _ in range(2):
        state = SaslState()
        await state.handshake(sasl, "SCRAM-SHA-256")
        answer = (await state.authenticate(sasl, b"n,,n=nobody,r=abc")).decode()
        assert answer.endswith(f",i={ITERATIONS_MIN}")
        salts.append(answer.partition(",s=")[2])
    assert salts[0] == salts[1]


class NobodyKnows:
    """Users of a broker that has no metadata."""

    async def password(self, user: str) -> str | None:
        raise UsersNotKnownError("no metadata")

    async def credential(self, mechanism: str, user: str) -> ScramCredential | None:
        raise UsersNotKnownError("no metadata")


@pytest.mark.parametrize(
    ("mechanism", "message"), [("PLAIN", b"\0user\0pencil"), ("SCRAM-SHA-512", b"n,,n=user,r=abc")]
)
async def test_while_users_are_not_known_the_connection_ends(mechanism: str, message: bytes) -> None:
    sasl = Sasl((mechanism,), NobodyKnows())
    session = Session(lambda _name, _version: None, sasl=SaslState())
    assert session.sasl is not None
    await session.sasl.handshake(sasl, mechanism)
    authenticate = connection_handlers((), sasl)[SASL_AUTHENTICATE]
    context = RequestContext("p", "", version=2, connection=session)
    with pytest.raises(CloseConnection, match="no metadata") as closed:  # a response would be final for a client
        await authenticate(SaslAuthenticateRequest(message), context)
    assert closed.value.reason == "users not known"


def test_files_of_users(tmp_path: Path) -> None:
    assert parse_users("# a\n\n a = b=c \n") == {"a": "b=c"}
    for bad in ("a", "=b", "a=", "a=b\na=c"):
        with pytest.raises(UsersFileError):
            parse_users(bad)
    with pytest.raises(UsersFileError):
        FileUsers(str(tmp_path / "none"))
