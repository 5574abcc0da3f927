"""ListOffsets (key 2), versions 1 to 10: the offset of a time, or of an end of the log.

The times -1 (latest), -2 (earliest), -3 (largest timestamp) and, for there is no remote storage, -4 (earliest local)
and -5 (latest in remote storage: none).

A question with a broker's id is a consumer's too: followers of ours do not come to this listener.

Not implemented: the isolation level (nothing is transactional), version 10's time limit.
"""

from __future__ import annotations

from kipmesh.core.messages import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
    ListOffsetsTopicResponse,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

REQUEST = Struct(
    ListOffsetsRequest,
    field("replica_id", "int32"),
    field("isolation_level", "int8", "2+"),
    field(
        "topics",
        Array(
            Struct(
                ListOffsetsTopic,
                field("name", "string"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            ListOffsetsPartition,
                            field("partition_index", "int32"),
                            field("current_leader_epoch", "int32", "4+"),
                            field("timestamp", "int64"),
                        )
                    ),
                ),
            )
        ),
    ),
    field("timeout_ms", "int32", "10+"),
)
RESPONSE = Struct(
    ListOffsetsResponse,
    field("throttle_time_ms", "int32", "2+"),
    field(
        "topics",
        Array(
            Struct(
                ListOffsetsTopicResponse,
                field("name", "string"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            ListOffsetsPartitionResponse,
                            field("partition_index", "int32"),
                            field("error_code", "int16"),
                            field("timestamp", "int64", "1+"),
                            field("offset", "int64", "1+"),
                            field("leader_epoch", "int32", "4+"),
                        )
                    ),
                ),
            )
        ),
    ),
)


async def _handle(services: Services, request: ListOffsetsRequest, call: Call) -> ListOffsetsResponse:
    # Apache Kafka answers whatever a client says of itself here, and kafka-python 3.1 says that it is broker 0.
    return await services.broker.list_offsets(request._replace(replica_id=min(request.replica_id, -1)), call.context)


API = Api(
    2,
    "ListOffsets",
    versions("1-10"),
    flexible_since=6,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
)
