"""OffsetCommit (key 8), versions 2 to 9: answered when the offsets are durable.

Leader epochs are known from version 6 on, static members from 7 on. A generation of a group that there is not is
ILLEGAL_GENERATION before version 9, which clients older than that know, and GROUP_ID_NOT_FOUND since.

Not implemented: a retention of its own (versions 2 to 4; offsets are kept for `offsets.retention.minutes`), topic ids
(version 10), which only KIP-848's members send.
"""

from __future__ import annotations

from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

KNOWS_GROUP_ID_NOT_FOUND = 9

REQUEST = Struct(
    OffsetCommitRequest,
    field("group_id", "string"),
    field("generation_id_or_member_epoch", "int32"),
    field("member_id", "string"),
    field("group_instance_id", "string", "7+", nullable="7+"),
    field("retention_time_ms", "int64", "2-4", default=-1),
    field(
        "topics",
        Array(
            Struct(
                OffsetCommitRequestTopic,
                field("name", "string"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            OffsetCommitRequestPartition,
                            field("partition_index", "int32"),
                            field("committed_offset", "int64"),
                            field("committed_leader_epoch", "int32", "6+"),
                            field("committed_metadata", "string", nullable="0+"),
                        )
                    ),
                ),
            )
        ),
    ),
)
RESPONSE = Struct(
    OffsetCommitResponse,
    field("throttle_time_ms", "int32", "3+"),
    field(
        "topics",
        Array(
            Struct(
                OffsetCommitResponseTopic,
                field("name", "string"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            OffsetCommitResponsePartition,
                            field("partition_index", "int32"),
                            field("error_code", "int16"),
                        )
                    ),
                ),
            )
        ),
    ),
)


async def _handle(services: Services, request: OffsetCommitRequest, call: Call) -> OffsetCommitResponse:
    response = await services.groups.offset_commit(request, call.context)
    return response if call.version >= KNOWS_GROUP_ID_NOT_FOUND else _without_group_id_not_found(response)


def _without_group_id_not_found(response: OffsetCommitResponse) -> OffsetCommitResponse:
    def known(one: OffsetCommitResponsePartition) -> OffsetCommitResponsePartition:
        is_new = one.error_code == ErrorCode.GROUP_ID_NOT_FOUND
        return one._replace(error_code=ErrorCode.ILLEGAL_GENERATION) if is_new else one

    topics = [topic._replace(partitions=[known(one) for one in topic.partitions]) for topic in response.topics]
    return response._replace(topics=topics)


API = Api(8, "OffsetCommit", versions("2-9"), flexible_since=8, request=REQUEST, response=RESPONSE, handle=_handle)
