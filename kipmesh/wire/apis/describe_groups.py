"""DescribeGroups (key 15), versions 0 to 6: groups and their members, with what was assigned while they are stable.

A group that there is not is `Dead`; from version 6 on that is GROUP_ID_NOT_FOUND, too (KIP-1043).

Not implemented: authorized operations (always unknown).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.classic import GroupState
from kipmesh.core.messages import DescribedGroup, DescribedGroupMember, DescribeGroupsRequest
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

UNKNOWN_OPERATIONS = -(2**31)
SAYS_NOT_FOUND = 6


class _Group(NamedTuple):
    error_code: int = 0
    group_id: str = ""
    group_state: str = ""
    protocol_type: str = ""
    protocol_data: str = ""
    members: Sequence[DescribedGroupMember] = ()
    error_message: str | None = None


class _Response(NamedTuple):
    throttle_time_ms: int = 0
    groups: Sequence[_Group] = ()


REQUEST = Struct(
    DescribeGroupsRequest,
    field("groups", Array("string")),
    field("include_authorized_operations", "bool", "3+", default=False),
)
RESPONSE = Struct(
    _Response,
    field("throttle_time_ms", "int32", "1+"),
    field(
        "groups",
        Array(
            Struct(
                _Group,
                field("error_code", "int16"),
                field("error_message", "string", "6+", nullable="6+"),
                field("group_id", "string"),
                field("group_state", "string"),
                field("protocol_type", "string"),
                field("protocol_data", "string"),
                field(
                    "members",
                    Array(
                        Struct(
                            DescribedGroupMember,
                            field("member_id", "string"),
                            field("group_instance_id", "string", "4+", nullable="4+"),
                            field("client_id", "string"),
                            field("client_host", "string"),
                            field("member_metadata", "bytes"),
                            field("member_assignment", "bytes"),
                        )
                    ),
                ),
                field("authorized_operations", "int32", "3+", default=UNKNOWN_OPERATIONS),
            )
        ),
    ),
)


async def _handle(services: Services, request: DescribeGroupsRequest, call: Call) -> _Response:
    response = await services.groups.describe_groups(request, call.context)
    return _Response(response.throttle_time_ms, [_group(one, call.version) for one in response.groups])


def _group(one: DescribedGroup, version: int) -> _Group:
    group = _Group(*one)
    if version >= SAYS_NOT_FOUND and not one.error_code and one.group_state == GroupState.DEAD.value:
        message = f"there is no group {one.group_id!r}"
        group = group._replace(error_code=ErrorCode.GROUP_ID_NOT_FOUND, error_message=message)
    return group


API = Api(
    15,
    "DescribeGroups",
    versions("0-6"),
    flexible_since=5,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
    request_bytes_max=1 << 20,
)
