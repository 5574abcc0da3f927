"""SASL of one connection: PLAIN (RFC 4616) and SCRAM, and what a connection may do before it is authenticated.

On a listener with SASL a client first may send ApiVersions, SaslHandshake and SaslAuthenticate, and nothing else: any
other request ends the connection. SaslHandshake picks a mechanism, SaslAuthenticate carries its messages; after version
0 of SaslHandshake they are frames without headers, and so are the answers. Whoever fails is told so without the reason,
`FAILED_DELAY_S` later, or not told where there are no headers, and the connection ends: a connection has one attempt.
All of it has `AUTHENTICATE_S`.

A user that there is not is treated as one of the file of users with another password, in messages and in time. Users of
the metadata log have iterations and salts of their own, whose number and length may say that there is such a user.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from typing import NamedTuple, Protocol

import structlog

from kipmesh.core.errors import ErrorCode
from kipmesh.core.scram import (
    HASHES,
    ITERATIONS_MIN,
    MESSAGE_BYTES_MAX,
    ScramCredential,
    ScramError,
    ScramExchange,
    parse_client_first,
)

log = structlog.get_logger(__name__)

PLAIN = "PLAIN"
MECHANISMS = (PLAIN, *HASHES)
FAILED_DELAY_S = 0.1
AUTHENTICATE_S = 30.0
ALLOWED_KEYS = frozenset({17, 18, 36})
_SECRET = secrets.token_bytes(32)
FAILED = "authentication failed: the user, its password or the mechanism is not right"


class UsersNotKnownError(Exception):
    """Nobody can say now who may come in; the text is for the log."""


class Users(Protocol):
    """Who may come in. Both may raise UsersNotKnownError."""

    async def password(self, user: str) -> str | None:
        """The user's password for PLAIN; None for a user that there is not."""

    async def credential(self, mechanism: str, user: str) -> ScramCredential | None:
        """The user's credential for a SCRAM mechanism."""


class Sasl(NamedTuple):
    """A broker's: the mechanisms that are enabled, and the users."""

    mechanisms: tuple[str, ...]
    users: Users


class SaslFailedError(Exception):
    """The attempt failed; the text is for the log."""


class SaslState:
    """What one connection has shown so far."""

    def __init__(self) -> None:
        self.mechanism = ""
        self.user: str | None = None
        """Who it is; None as long as that is not shown."""
        self.has_failed = False
        self._is_bare = False
        self._exchange: ScramExchange | None = None
        self._name = ""

    @property
    def takes_tokens(self) -> bool:
        """Whether the next frame is a message of the mechanism, without a header."""
        return self._is_bare and self.user is None and not self.has_failed

    async def handshake(self, sasl: Sasl, mechanism: str, *, is_bare: bool = False) -> ErrorCode:
        """SaslHandshake: pick a mechanism, once; with `is_bare` its messages have no headers."""
        if self.user is not None or self.mechanism:
            self.has_failed = True
            return ErrorCode.ILLEGAL_SASL_STATE
        if mechanism not in sasl.mechanisms:
            self.has_failed = True
            return ErrorCode.UNSUPPORTED_SASL_MECHANISM
        self.mechanism = mechanism
        self._is_bare = is_bare
        return ErrorCode.NONE

    async def authenticate(self, sasl: Sasl, message: bytes) -> bytes:
        """SaslAuthenticate: the answer to a client's message; SaslFailedError, late."""
        try:
            if len(message) > MESSAGE_BYTES_MAX:
                raise SaslFailedError(f"a message of {len(message)} bytes")
            if self.mechanism == PLAIN:
                return await self._plain(sasl.users, message)
            return await self._scram(sasl.users, message)
        except (SaslFailedError, ScramError) as error:
            self.has_failed = True
            await asyncio.sleep(FAILED_DELAY_S)
            raise SaslFailedError(str(error)) from None

    async def _plain(self, users: Users, message: bytes) -> bytes:
        parts = message.split(b"\0")
        if len(parts) != 3 or not parts[1] or not parts[2]:
            raise SaslFailedError("a message that is not PLAIN's")
        try:
            authzid, user = parts[0].decode(), parts[1].decode()
        except UnicodeDecodeError:
            raise SaslFailedError("a name that is no text") from None
        if authzid not in ("", user):
            raise SaslFailedError("the user wants to act for another one")
        known = await users.password(user)
        # Digests, so that the time says nothing of the length either.
        right = hmac.digest(_SECRET, (known or "").encode(), "sha256")
        is_right = hmac.compare_digest(hmac.digest(_SECRET, parts[2], "sha256"), right)
        if known is None or not is_right:
            raise SaslFailedError("unknown user or wrong password")
        self.user = user
        return b""

    async def _scram(self, users: Users, message: bytes) -> bytes:
        if self._exchange is None:
            first = parse_client_first(message)
            found = await users.credential(self.mechanism, first.user)
            nonce = secrets.token_urlsafe(24)
            self._name = first.user if found is not None else ""
            self._exchange = ScramExchange(self.mechanism, first, found or _nobody(self.mechanism, first.user), nonce)
            return self._exchange.server_first.encode()
        last = self._exchange.finish(message)
        if not self._name:
            raise SaslFailedError("unknown user")
        self.user = self._name
        return last


def _nobody(mechanism: str, user: str) -> ScramCredential:
    """For a user that there is not: the same salt each time, and keys that nobody has."""
    size = hashlib.new(HASHES[mechanism]).digest_size
    salt = hmac.digest(_SECRET, user.encode(), "sha256")[:16]
    return ScramCredential(salt, secrets.token_bytes(size), secrets.token_bytes(size), ITERATIONS_MIN)
