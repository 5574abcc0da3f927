"""SaslHandshake (key 17), versions 0 and 1: picks the mechanism by which the client then authenticates.

One that is not enabled is UNSUPPORTED_SASL_MECHANISM, with those that are. Without SASL on the listener, or a second
time, it is ILLEGAL_SASL_STATE. The connection ends after either. After version 1 SaslAuthenticate carries the
mechanism's messages; after version 0 they are frames without headers.

Not implemented: authenticating again (KIP-368).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import VERSION_MAX, Array, Struct, field, versions
from kipmesh.wire.services import Services


class _Request(NamedTuple):
    mechanism: str = ""


class _Response(NamedTuple):
    error_code: int = 0
    mechanisms: Sequence[str] = ()


REQUEST = Struct(_Request, field("mechanism", "string"))
RESPONSE = Struct(_Response, field("error_code", "int16"), field("mechanisms", Array("string")))


async def _handle(services: Services, request: _Request, call: Call) -> _Response:
    state, sasl = call.session.sasl, services.sasl
    if state is None or sasl is None:
        return _Response(ErrorCode.ILLEGAL_SASL_STATE)
    code = await state.handshake(sasl, request.mechanism, is_bare=call.version == 0)
    return _Response(code, sasl.mechanisms)


API = Api(
    17,
    "SaslHandshake",
    versions("0-1"),
    flexible_since=VERSION_MAX,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
)
