"""Requests about the connection itself: ApiVersions (18), SaslHandshake (17), SaslAuthenticate (36).

ApiVersions in an unsupported version gets UNSUPPORTED_VERSION in version 0, with the supported versions of ApiVersions,
so that the client can repeat it (KIP-511). From version 3 on clients state their software; an invalid name is
INVALID_REQUEST.

SaslHandshake selects the mechanism. One that is not enabled is UNSUPPORTED_SASL_MECHANISM. Without SASL on the
listener, or a second time, it is ILLEGAL_SASL_STATE. The connection ends after either. SaslAuthenticate carries the
messages of the mechanism. After version 0 of SaslHandshake they are frames without headers. A failed authentication
ends the connection. While the broker does not know its users, it ends without a response, so that clients retry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from kipmesh import messages as m
from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode
from kipmesh.messages.table import API_VERSIONS, SASL_AUTHENTICATE, SASL_HANDSHAKE, Api
from kipmesh.transport.pipeline import CloseConnection, Handler
from kipmesh.wire.sasl import FAILED, Sasl, SaslFailedError, SaslState, UsersNotKnownError

log = structlog.get_logger(__name__)

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_SOFTWARE_MAX = 100


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
