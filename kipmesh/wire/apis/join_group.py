"""JoinGroup (key 11), versions 0 to 9: a member joins, and is answered when all have.

A member without an id gets one with MEMBER_ID_REQUIRED and joins again from version 4 on (KIP-394); older ones are let
in at once. Static members are known from version 5 on. A static leader that came back is told to leave the assignment
alone from version 9 on (KIP-814); older ones are not told that they lead.

Not implemented: the reason of version 8 (it is not logged).
"""

from __future__ import annotations

from kipmesh.core.messages import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
    JoinGroupResponseMember,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

ASKS_FOR_MEMBER_ID = 4
SKIPS_ASSIGNMENT = 9
NULLABLE_PROTOCOL = 7

REQUEST = Struct(
    JoinGroupRequest,
    field("group_id", "string"),
    field("session_timeout_ms", "int32"),
    field("rebalance_timeout_ms", "int32", "1+"),
    field("member_id", "string"),
    field("group_instance_id", "string", "5+", nullable="5+"),
    field("protocol_type", "string"),
    field(
        "protocols",
        Array(Struct(JoinGroupRequestProtocol, field("name", "string"), field("metadata", "bytes"))),
    ),
    field("reason", "string", "8+", nullable="8+"),
)
RESPONSE = Struct(
    JoinGroupResponse,
    field("throttle_time_ms", "int32", "2+"),
    field("error_code", "int16"),
    field("generation_id", "int32"),
    field("protocol_type", "string", "7+", nullable="7+"),
    field("protocol_name", "string", nullable="7+"),
    field("leader", "string"),
    field("skip_assignment", "bool", "9+"),
    field("member_id", "string"),
    field(
        "members",
        Array(
            Struct(
                JoinGroupResponseMember,
                field("member_id", "string"),
                field("group_instance_id", "string", "5+", nullable="5+"),
                field("metadata", "bytes"),
            )
        ),
    ),
)


async def _handle(services: Services, request: JoinGroupRequest, call: Call) -> JoinGroupResponse:
    response = await services.groups.join_group(
        request,
        call.context,
        requires_member_id=call.version >= ASKS_FOR_MEMBER_ID,
        skips_assignment=call.version >= SKIPS_ASSIGNMENT,
    )
    if response.protocol_name is None and call.version < NULLABLE_PROTOCOL:
        response = response._replace(protocol_name="")
    return response


API = Api(
    11,
    "JoinGroup",
    versions("0-9"),
    flexible_since=6,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
    request_bytes_max=1 << 20,
)
