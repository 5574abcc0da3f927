"""SyncGroup (key 14), versions 0 to 5: the leader brings the assignment, and each member is answered with its own.

From version 5 on members say which protocol they believe the group has (KIP-559); without it, or with another one, it
is INCONSISTENT_GROUP_PROTOCOL.

Not implemented: nothing.
"""

from __future__ import annotations

from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import SyncGroupRequest, SyncGroupRequestAssignment, SyncGroupResponse
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

SAYS_PROTOCOL = 5

REQUEST = Struct(
    SyncGroupRequest,
    field("group_id", "string"),
    field("generation_id", "int32"),
    field("member_id", "string"),
    field("group_instance_id", "string", "3+", nullable="3+"),
    field("protocol_type", "string", "5+", nullable="5+"),
    field("protocol_name", "string", "5+", nullable="5+"),
    field(
        "assignments",
        Array(Struct(SyncGroupRequestAssignment, field("member_id", "string"), field("assignment", "bytes"))),
    ),
)
RESPONSE = Struct(
    SyncGroupResponse,
    field("throttle_time_ms", "int32", "1+"),
    field("error_code", "int16"),
    field("protocol_type", "string", "5+", nullable="5+"),
    field("protocol_name", "string", "5+", nullable="5+"),
    field("assignment", "bytes"),
)


async def _handle(services: Services, request: SyncGroupRequest, call: Call) -> SyncGroupResponse:
    if call.version >= SAYS_PROTOCOL and (request.protocol_type is None or request.protocol_name is None):
        return SyncGroupResponse(error_code=ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
    return await services.groups.sync_group(request, call.context)


API = Api(14, "SyncGroup", versions("0-5"), flexible_since=4, request=REQUEST, response=RESPONSE, handle=_handle)
