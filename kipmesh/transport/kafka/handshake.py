"""Requests about the connection itself: ApiVersions (18), SaslHandshake (17), SaslAuthenticate (36).

ApiVersions in an unsupported version gets UNSUPPORTED_VERSION in version 0, with the supported versions of ApiVersions,
so that the client can repeat it (KIP-511). From version 3 on clients state their software; an invalid name is
INVALID_REQUEST.

SaslHandshake selects the mechanism. One that is not enabled is UNSUPPORTED_SASL_MECHANISM. Without SASL on the
listener, or a second time, it is ILLEGAL_SASL_STATE. The connection ends after either. SaslAuthenticate carries the
messages of the mechanism. After version 0 of SaslHandshake they are frames without headers. A failed authentication
ends the connection. While the broker does not know its users, it ends without a response, so that clients retry.

On a listener with SASL a client first may send ApiVersions, SaslHandshake and SaslAuthenticate, and nothing else: any
other request ends the connection. The mechanisms are PLAIN (RFC 4616) and SCRAM. A failed attempt gets a response
without the reason after `FAILED_DELAY_S`, or none where there are no headers: a connection has one attempt. All of it
has `AUTHENTICATE_S`.

An unknown user is treated as one of the file of users with another password, in messages and in time. Users of the
metadata log have iterations and salts of their own, whose number and length may state that there is such a user.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import structlog

from kipmesh import messages as m
from kipmesh.core.context import RequestContext
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
from kipmesh.messages.table import API_VERSIONS, SASL_AUTHENTICATE, SASL_HANDSHAKE, Api
from kipmesh.transport.pipeline import CloseConnection, Handler

log = structlog.get_logger(__name__)

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_SOFTWARE_MAX = 100
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


@dataclass(slots=True)
class Session:
    """The state of one connection: its authentication and its software."""

    on_software: Callable[[str, str], None]
    """Called with the name and the version of the client's software."""
    sasl: SaslState | None = None
    """The progress of authentication, on a listener with SASL."""


def connection_handlers(apis: Iterable[Api], sasl: Sasl | None) -> dict[Api, Handler]:
    """Return the handlers of a listener that supports `apis`, these included."""
    mine = m.ApiVersion(API_VERSIONS.key or 0, *API_VERSIONS.versions)
    supported = sorted([m.ApiVersion(api.key or 0, *api.versions) for api in apis])

    async def api_versions(request: m.ApiVersionsRequest | None, context: RequestContext) -> m.ApiVersionsResponse:
        if request is None:
            return m.ApiVersionsResponse(ErrorCode.UNSUPPORTED_VERSION, [mine])
        if not context.is_before(3):
            software = request.client_software_name, request.client_software_version
            if any(len(text) > _SOFTWARE_MAX or not _SOFTWARE.fullmatch(text) for text in software):
                return m.ApiVersionsResponse(ErrorCode.INVALID_REQUEST)
            context.connection.on_software(*software)
        return m.ApiVersionsResponse(ErrorCode.NONE, supported)

    async def handshake(request: m.SaslHandshakeRequest, context: RequestContext) -> m.SaslHandshakeResponse:
        state = context.connection.sasl
        if state is None or sasl is None:
            return m.SaslHandshakeResponse(ErrorCode.ILLEGAL_SASL_STATE)
        code = await state.handshake(sasl, request.mechanism, is_bare=context.version == 0)
        return m.SaslHandshakeResponse(code, sasl.mechanisms)

    async def authenticate(request: m.SaslAuthenticateRequest, context: RequestContext) -> m.SaslAuthenticateResponse:
        state = context.connection.sasl
        if state is None or sasl is None:
            return m.SaslAuthenticateResponse(ErrorCode.ILLEGAL_SASL_STATE, "the listener has no SASL")
        if state.user is not None or not state.mechanism:
            state.has_failed = True
            return m.SaslAuthenticateResponse(ErrorCode.ILLEGAL_SASL_STATE, "SaslHandshake comes first, and once")
        try:
            message = await state.authenticate(sasl, request.auth_bytes)
        except SaslFailedError as error:
            log.info("authentication failed", reason=str(error), mechanism=state.mechanism, peer=context.peer)
            return m.SaslAuthenticateResponse(ErrorCode.SASL_AUTHENTICATION_FAILED, FAILED)
        except UsersNotKnownError as error:
            raise CloseConnection("users not known", str(error)) from None
        return m.SaslAuthenticateResponse(auth_bytes=message)

    return {API_VERSIONS: api_versions, SASL_HANDSHAKE: handshake, SASL_AUTHENTICATE: authenticate}
