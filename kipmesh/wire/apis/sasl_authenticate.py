"""SaslAuthenticate (key 36), versions 0 to 2: carries the messages of the mechanism that SaslHandshake picked.

Whoever fails is told SASL_AUTHENTICATION_FAILED, and the connection ends. Before a handshake, or after the end of
another attempt, it is ILLEGAL_SASL_STATE. While the broker does not know its users yet the connection ends without an
answer: for clients that is a reason to try again, which a failed authentication is not.

`TOKEN` is the same for messages without headers, which follow version 0 of SaslHandshake: a frame is a message of the
mechanism and nothing else, and so is the answer. Whoever fails gets none.

Not implemented: sessions that end (their lifetime is told as 0) and authenticating again (KIP-368).
"""

from __future__ import annotations

from typing import NamedTuple

import structlog

from kipmesh.core.errors import ErrorCode
from kipmesh.wire.api import Api, Call, HangUp
from kipmesh.wire.codec import Out
from kipmesh.wire.sasl import FAILED, SaslFailedError, UsersNotKnownError
from kipmesh.wire.schema import VERSION_MAX, Struct, field, versions
from kipmesh.wire.services import Services

log = structlog.get_logger(__name__)


class _Request(NamedTuple):
    auth_bytes: bytes = b""


class _Response(NamedTuple):
    error_code: int = 0
    error_message: str | None = None
    auth_bytes: bytes = b""
    session_lifetime_ms: int = 0


REQUEST = Struct(_Request, field("auth_bytes", "bytes"))
RESPONSE = Struct(
    _Response,
    field("error_code", "int16"),
    field("error_message", "string", nullable="0+"),
    field("auth_bytes", "bytes"),
    field("session_lifetime_ms", "int64", "1+"),
)


async def _handle(services: Services, request: _Request, call: Call) -> _Response:
    state, sasl = call.session.sasl, services.sasl
    if state is None or sasl is None:
        return _Response(ErrorCode.ILLEGAL_SASL_STATE, "the listener has no SASL")
    if state.user is not None or not state.mechanism:
        state.has_failed = True
        return _Response(ErrorCode.ILLEGAL_SASL_STATE, "SaslHandshake comes first, and once")
    try:
        answer = await state.authenticate(sasl, request.auth_bytes)
    except SaslFailedError as error:
        log.info("authentication failed", reason=str(error), mechanism=state.mechanism, peer=call.context.peer)
        return _Response(ErrorCode.SASL_AUTHENTICATION_FAILED, FAILED)
    except UsersNotKnownError as error:
        raise HangUp("users not known", str(error)) from None
    return _Response(auth_bytes=answer)


API = Api(36, "SaslAuthenticate", versions("0-2"), flexible_since=2, request=REQUEST, response=RESPONSE, handle=_handle)


class _TokenApi(Api):
    """Whose frames have no headers."""

    __slots__ = ()

    def encode(self, correlation_id: int, version: int, response: _Response) -> Out:
        """The message; nothing for an error."""
        out = Out()
        if not response.error_code:
            out += len(response.auth_bytes).to_bytes(4, "big")
            out += response.auth_bytes
        return out


TOKEN = _TokenApi(API.key, API.name, versions("0"), VERSION_MAX, REQUEST, RESPONSE, _handle)
