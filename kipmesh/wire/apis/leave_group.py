"""LeaveGroup (key 13), versions 0 to 5: members go, or are removed by an administrator.

Several members at once, static ones by their instance id, from version 3 on; before, one member, whose error is the
answer's.

Not implemented: the reason of version 5 (it is not logged).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.messages import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity, MemberResponse
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

SEVERAL_MEMBERS = 3


class _Request(NamedTuple):
    group_id: str = ""
    member_id: str = ""
    members: Sequence[MemberIdentity] = ()


REQUEST = Struct(
    _Request,
    field("group_id", "string"),
    field("member_id", "string", "0-2"),
    field(
        "members",
        Array(
            Struct(
                MemberIdentity,
                field("member_id", "string"),
                field("group_instance_id", "string", nullable="3+"),
                field("reason", "string", "5+", nullable="5+"),
            )
        ),
        "3+",
    ),
)
RESPONSE = Struct(
    LeaveGroupResponse,
    field("throttle_time_ms", "int32", "1+"),
    field("error_code", "int16"),
    field(
        "members",
        Array(
            Struct(
                MemberResponse,
                field("member_id", "string"),
                field("group_instance_id", "string", nullable="3+"),
                field("error_code", "int16"),
            )
        ),
        "3+",
    ),
)


async def _handle(services: Services, request: _Request, call: Call) -> LeaveGroupResponse:
    if call.version >= SEVERAL_MEMBERS:
        return await services.groups.leave_group(LeaveGroupRequest(request.group_id, request.members), call.context)
    one = LeaveGroupRequest(request.group_id, [MemberIdentity(request.member_id)])
    response = await services.groups.leave_group(one, call.context)
    code = response.error_code or next((member.error_code for member in response.members), 0)
    return response._replace(error_code=code, members=())


API = Api(
    13,
    "LeaveGroup",
    versions("0-5"),
    flexible_since=4,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
    request_bytes_max=1 << 20,
)
