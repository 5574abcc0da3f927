"""OffsetFetch (key 9), versions 1 to 9: what groups have committed; offset -1 where that is nothing.

One group before version 8, several since. Null topics are all that the group has (from version 2 on). Version 1 has
no place for a group's error: each partition has it.

Not implemented: topic ids (version 10), which only KIP-848's members send; their member ids and epochs (version 9) are
ignored. `require_stable` changes nothing, for there are no transactions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.messages import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopics,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

HAS_GROUP_ERROR = 2
SEVERAL_GROUPS = 8


class _Group(NamedTuple):
    group_id: str = ""
    topics: Sequence[OffsetFetchRequestTopics] | None = None
    member_id: str | None = None
    member_epoch: int = -1


class _Request(NamedTuple):
    group_id: str = ""
    topics: Sequence[OffsetFetchRequestTopics] | None = None
    groups: Sequence[_Group] = ()
    require_stable: bool = False


class _Response(NamedTuple):
    throttle_time_ms: int = 0
    topics: Sequence[OffsetFetchResponseTopics] = ()
    error_code: int = 0
    groups: Sequence[OffsetFetchResponseGroup] = ()


_ASKED = Array(Struct(OffsetFetchRequestTopics, field("name", "string"), field("partition_indexes", Array("int32"))))
_ANSWERED = Array(
    Struct(
        OffsetFetchResponseTopics,
        field("name", "string"),
        field(
            "partitions",
            Array(
                Struct(
                    OffsetFetchResponsePartitions,
                    field("partition_index", "int32"),
                    field("committed_offset", "int64"),
                    field("committed_leader_epoch", "int32", "5+"),
                    field("metadata", "string", nullable="0+"),
                    field("error_code", "int16"),
                )
            ),
        ),
    )
)
REQUEST = Struct(
    _Request,
    field("group_id", "string", "1-7"),
    field("topics", _ASKED, "1-7", nullable="2-7"),
    field(
        "groups",
        Array(
            Struct(
                _Group,
                field("group_id", "string"),
                field("member_id", "string", "9+", nullable="9+"),
                field("member_epoch", "int32", "9+"),
                field("topics", _ASKED, nullable="8+"),
            )
        ),
        "8+",
    ),
    field("require_stable", "bool", "7+"),
)
RESPONSE = Struct(
    _Response,
    field("throttle_time_ms", "int32", "3+"),
    field("topics", _ANSWERED, "1-7"),
    field("error_code", "int16", "2-7"),
    field(
        "groups",
        Array(
            Struct(
                OffsetFetchResponseGroup,
                field("group_id", "string"),
                field("topics", _ANSWERED),
                field("error_code", "int16"),
            )
        ),
        "8+",
    ),
)


async def _handle(services: Services, request: _Request, call: Call) -> _Response:
    is_one = call.version < SEVERAL_GROUPS
    asked = [_Group(request.group_id, request.topics)] if is_one else request.groups
    groups = [OffsetFetchRequestGroup(one.group_id, one.topics is None, one.topics or ()) for one in asked]
    response: OffsetFetchResponse = await services.groups.offset_fetch(
        OffsetFetchRequest(groups, request.require_stable), call.context
    )
    if not is_one:
        return _Response(response.throttle_time_ms, groups=response.groups)
    group = response.groups[0]
    topics = group.topics
    if group.error_code and call.version < HAS_GROUP_ERROR:
        topics = [_refused(topic, group.error_code) for topic in request.topics or ()]
    return _Response(response.throttle_time_ms, topics, group.error_code)


def _refused(topic: OffsetFetchRequestTopics, code: int) -> OffsetFetchResponseTopics:
    return OffsetFetchResponseTopics(
        topic.name,
        [OffsetFetchResponsePartitions(index, metadata="", error_code=code) for index in topic.partition_indexes],
    )


API = Api(
    9,
    "OffsetFetch",
    versions("1-9"),
    flexible_since=6,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
    request_bytes_max=4 << 20,
)
