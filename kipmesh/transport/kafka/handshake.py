"""ApiVersions (18), SaslHandshake (17) and SaslAuthenticate (36) of one Kafka connection.

ApiVersions in an unsupported version gets UNSUPPORTED_VERSION in version 0 with the supported versions (KIP-511). A
client of a SASL listener must authenticate with PLAIN (RFC 4616) or SCRAM before it sends other requests. It has one
attempt and `AUTHENTICATE_S`. A failed attempt gets an error without a reason after `FAILED_DELAY_S` and is closed.
While the user list is unknown, the connection is closed without a response, so that clients retry.

Messages and timing do not distinguish an unknown user from a wrong password of a user in the users file. Users in the
metadata log have their own salt length and iteration count, which may reveal their existence.
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
FAILED = "authentication failed: check user name, password and mechanism"


class UsersNotKnownError(Exception):
    """Raised while the broker cannot look up users. The message is for the log."""


class Users(Protocol):
    """The credentials of users. Both methods may raise UsersNotKnownError."""

    async def password(self, user: str) -> str | None:
        """Return the user's plaintext password for PLAIN, or None for an unknown user."""

    async def credential(self, mechanism: str, user: str) -> ScramCredential | None:
        """Return the user's credential for a SCRAM mechanism, or None for an unknown user."""


class Sasl(NamedTuple):
    """A broker's enabled SASL mechanisms and its users."""

    mechanisms: tuple[str, ...]
    users: Users


class SaslFailedError(Exception):
    """Raised for a failed authentication. The message is for the log, not for the client."""


class SaslState:
    """Progress of the authentication of one connection."""

    def __init__(self) -> None:
        self.mechanism = ""
        self.user: str | None = None
        """The authenticated user, or None before authentication."""
        self.has_failed = False
        self._is_bare = False
        self._exchange: ScramExchange | None = None
        self._name = ""

    @property
    def takes_tokens(self) -> bool:
        """Whether the next frame is a SASL message without a header (SaslHandshake v0)."""
        return self._is_bare and self.user is None and not self.has_failed

    async def handshake(self, sasl: Sasl, mechanism: str, *, is_bare: bool = False) -> ErrorCode:
        """Select a mechanism. With `is_bare`, its messages are frames without headers.

        Returns NONE, ILLEGAL_SASL_STATE for a second handshake, or UNSUPPORTED_SASL_MECHANISM for a disabled mechanism.
        After an error the authentication has failed.
        """
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
        """Return the response to a SASL message of the client, and set `user` after the last message.

        Raises SaslFailedError after FAILED_DELAY_S if authentication has failed, and UsersNotKnownError without delay
        while the broker cannot look up users.
        """
        try:
            if len(message) > MESSAGE_BYTES_MAX:
                raise SaslFailedError(f"message must have at most {MESSAGE_BYTES_MAX} bytes, got {len(message)}")
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
            raise SaslFailedError("message is not in the format of PLAIN")
        try:
            authzid, user = parts[0].decode(), parts[1].decode()
        except UnicodeDecodeError:
            raise SaslFailedError("user name is not UTF-8") from None
        if authzid not in ("", user):
            raise SaslFailedError("authorization id differs from the user name")
        password = await users.password(user)
        # Digests, so that timing does not reveal the password's length.
        expected = hmac.digest(_SECRET, (password or "").encode(), "sha256")
        is_correct = hmac.compare_digest(hmac.digest(_SECRET, parts[2], "sha256"), expected)
        if password is None or not is_correct:
            raise SaslFailedError("unknown user or wrong password")
        self.user = user
        return b""

    async def _scram(self, users: Users, message: bytes) -> bytes:
        if self._exchange is None:
            first = parse_client_first(message)
            credential = await users.credential(self.mechanism, first.user)
            self._name = first.user if credential is not None else ""
            credential = credential or _unusable_credential(self.mechanism, first.user)
            self._exchange = ScramExchange(self.mechanism, first, credential, secrets.token_urlsafe(24))
            return self._exchange.server_first.encode()
        last = self._exchange.finish(message)
        if not self._name:
            raise SaslFailedError("unknown user")
        self.user = self._name
        return last


def _unusable_credential(mechanism: str, user: str) -> ScramCredential:
    """Return a credential for an unknown user: a stable salt and random keys that no password matches."""
    size = hashlib.new(HASHES[mechanism]).digest_size
    salt = hmac.digest(_SECRET, user.encode(), "sha256")[:16]
    return ScramCredential(salt, secrets.token_bytes(size), secrets.token_bytes(size), ITERATIONS_MIN)


@dataclass(slots=True)
class Session:
    """State of one connection for the handlers: its authentication, and a callback for the client software."""

    on_software: Callable[[str, str], None]
    """Called with the name and the version of the client's software."""
    sasl: SaslState | None = None
    """The progress of authentication, on a listener with SASL."""


def connection_handlers(apis: Iterable[Api], sasl: Sasl | None) -> dict[Api, Handler]:
    """Return the handlers of the three connection APIs, for a listener that serves `apis`, which include them.

    `sasl` is None for a listener without SASL, where SASL requests get ILLEGAL_SASL_STATE.
    """
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
            return m.SaslAuthenticateResponse(ErrorCode.ILLEGAL_SASL_STATE, "this listener does not use SASL")
        if state.user is not None or not state.mechanism:
            state.has_failed = True
            return m.SaslAuthenticateResponse(ErrorCode.ILLEGAL_SASL_STATE, "send SaslHandshake first, and only once")
        try:
            message = await state.authenticate(sasl, request.auth_bytes)
        except SaslFailedError as error:
            log.info("authentication failed", reason=str(error), mechanism=state.mechanism, peer=context.peer)
            return m.SaslAuthenticateResponse(ErrorCode.SASL_AUTHENTICATION_FAILED, FAILED)
        except UsersNotKnownError as error:
            raise CloseConnection("users not known", str(error)) from None
        return m.SaslAuthenticateResponse(auth_bytes=message)

    return {API_VERSIONS: api_versions, SASL_HANDSHAKE: handshake, SASL_AUTHENTICATE: authenticate}
