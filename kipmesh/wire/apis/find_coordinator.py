"""FindCoordinator (key 10), versions 0 to 6: the brokers that coordinate groups; several groups at once from 4 on.

Not implemented: coordinators of transactions (key type 1) and of share groups (2): INVALID_REQUEST.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.messages import Coordinator, FindCoordinatorRequest
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

MANY_SINCE = 4


class _Request(NamedTuple):
    key: str = ""
    key_type: int = 0
    coordinator_keys: Sequence[str] = ()


class _Response(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    error_message: str | None = None
    node_id: int = -1
    host: str = ""
    port: int = -1
    coordinators: Sequence[Coordinator] = ()


REQUEST = Struct(
    _Request,
    field("key", "string", "0-3"),
    field("key_type", "int8", "1+"),
    field("coordinator_keys", Array("string"), "4+"),
)
RESPONSE = Struct(
    _Response,
    field("throttle_time_ms", "int32", "1+"),
    field("error_code", "int16", "0-3"),
    field("error_message", "string", "1-3", nullable="1-3"),
    field("node_id", "int32", "0-3"),
    field("host", "string", "0-3"),
    field("port", "int32", "0-3"),
    field(
        "coordinators",
        Array(
            Struct(
                Coordinator,
                field("key", "string"),
                field("node_id", "int32"),
                field("host", "string"),
                field("port", "int32"),
                field("error_code", "int16"),
                field("error_message", "string", nullable="4+"),
            )
        ),
        "4+",
    ),
)


async def _handle(services: Services, request: _Request, call: Call) -> _Response:
    keys = request.coordinator_keys if call.version >= MANY_SINCE else (request.key,)
    found = await services.groups.find_coordinator(FindCoordinatorRequest(request.key_type, keys), call.context)
    if call.version >= MANY_SINCE:
        return _Response(coordinators=found.coordinators)
    one = found.coordinators[0]
    return _Response(0, one.error_code, one.error_message, one.node_id, one.host, one.port)


API = Api(
    10,
    "FindCoordinator",
    versions("0-6"),
    flexible_since=3,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
    request_bytes_max=1 << 20,
)
