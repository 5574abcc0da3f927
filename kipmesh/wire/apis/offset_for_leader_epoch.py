"""OffsetForLeaderEpoch (key 23), versions 2 to 4: where a leader epoch ended, for consumers.

Not implemented: followers' questions (CLUSTER_AUTHORIZATION_FAILED).
"""

from __future__ import annotations

from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import (
    OffsetForLeaderPartition,
    OffsetForLeaderPartitionResult,
    OffsetForLeaderTopic,
    OffsetForLeaderTopicResult,
    OffsetsForLeaderEpochRequest,
    OffsetsForLeaderEpochResponse,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

REQUEST = Struct(
    OffsetsForLeaderEpochRequest,
    field("replica_id", "int32", "3+"),
    field(
        "topics",
        Array(
            Struct(
                OffsetForLeaderTopic,
                field("topic", "string"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            OffsetForLeaderPartition,
                            field("partition", "int32"),
                            field("current_leader_epoch", "int32", "2+"),
                            field("leader_epoch", "int32"),
                        )
                    ),
                ),
            )
        ),
    ),
)
RESPONSE = Struct(
    OffsetsForLeaderEpochResponse,
    field("throttle_time_ms", "int32", "2+"),
    field(
        "topics",
        Array(
            Struct(
                OffsetForLeaderTopicResult,
                field("topic", "string"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            OffsetForLeaderPartitionResult,
                            field("error_code", "int16"),
                            field("partition", "int32"),
                            field("leader_epoch", "int32", "1+"),
                            field("end_offset", "int64"),
                        )
                    ),
                ),
            )
        ),
    ),
)


async def _handle(
    services: Services, request: OffsetsForLeaderEpochRequest, call: Call
) -> OffsetsForLeaderEpochResponse:
    if request.replica_id < 0:
        return await services.broker.offsets_for_leader_epoch(request, call.context)
    code = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    return OffsetsForLeaderEpochResponse(
        topics=[
            OffsetForLeaderTopicResult(
                topic.topic,
                partitions=[OffsetForLeaderPartitionResult(one.partition, code) for one in topic.partitions],
            )
            for topic in request.topics
        ]
    )


API = Api(
    23,
    "OffsetForLeaderEpoch",
    versions("2-4"),
    flexible_since=4,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
)
