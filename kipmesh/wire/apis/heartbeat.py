"""Heartbeat (key 12), versions 0 to 4: a member lives, and learns of a rebalance. Static members from version 3 on.

Not implemented: nothing.
"""

from __future__ import annotations

from kipmesh.core.messages import HeartbeatRequest, HeartbeatResponse
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Struct, field, versions
from kipmesh.wire.services import Services

REQUEST = Struct(
    HeartbeatRequest,
    field("group_id", "string"),
    field("generation_id", "int32"),
    field("member_id", "string"),
    field("group_instance_id", "string", "3+", nullable="3+"),
)
RESPONSE = Struct(
    HeartbeatResponse,
    field("throttle_time_ms", "int32", "1+"),
    field("error_code", "int16"),
)


async def _handle(services: Services, request: HeartbeatRequest, call: Call) -> HeartbeatResponse:
    return await services.groups.heartbeat(request, call.context)


API = Api(
    12,
    "Heartbeat",
    versions("0-4"),
    flexible_since=4,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
    request_bytes_max=1 << 20,
)
