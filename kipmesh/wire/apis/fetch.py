"""Fetch (key 1), versions 4 to 17, of consumers: sessions (from 7 on), racks and preferred replicas (11), divergence
and leaders (12), topics by id (13), where leaders are (16).

The records of a response are what the log read, not copied once more unless they are few. A client that cannot name a
rack (before version 11) is served by leaders alone. In versions before 10 a batch with zstd is
UNSUPPORTED_COMPRESSION_TYPE.

Not implemented: followers. Replicas are copied by gRPC alone, so a replica id of a broker is
CLUSTER_AUTHORIZATION_FAILED. No transaction is ever aborted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import (
    AbortedTransaction,
    EpochEndOffset,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
    PartitionData,
    SnapshotId,
)
from kipmesh.core.messages.limits import MAX_INT32
from kipmesh.wire.api import Api, Call
from kipmesh.wire.apis.produce import LEADER, NODE
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

RACK_SINCE = 11
_ZSTD = 4
_ZSTD_SINCE = 10
_ATTRIBUTES_AT = 22


class _ReplicaState(NamedTuple):
    replica_id: int = -1
    replica_epoch: int = -1


class _Request(NamedTuple):
    """FetchRequest's fields in its order, and one more."""

    cluster_id: str | None = None
    replica_id: int = -1
    replica_epoch: int = -1
    max_wait_ms: int = 0
    min_bytes: int = 0
    max_bytes: int = MAX_INT32
    isolation_level: int = 0
    session_id: int = 0
    session_epoch: int = -1
    topics: Sequence[FetchTopic] = ()
    forgotten_topics_data: Sequence[ForgottenTopic] = ()
    rack_id: str = ""
    replica_state: _ReplicaState = _ReplicaState()


REQUEST = Struct(
    _Request,
    field("cluster_id", "string", "12+", nullable="12+", tag=0),
    field("replica_id", "int32", "0-14"),
    field(
        "replica_state",
        Struct(_ReplicaState, field("replica_id", "int32"), field("replica_epoch", "int64")),
        "15+",
        tag=1,
    ),
    field("max_wait_ms", "int32"),
    field("min_bytes", "int32"),
    field("max_bytes", "int32", "3+"),
    field("isolation_level", "int8", "4+"),
    field("session_id", "int32", "7+"),
    field("session_epoch", "int32", "7+"),
    field(
        "topics",
        Array(
            Struct(
                FetchTopic,
                field("topic", "string", "0-12"),
                field("topic_id", "uuid", "13+"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            FetchPartition,
                            field("partition", "int32"),
                            field("current_leader_epoch", "int32", "9+"),
                            field("fetch_offset", "int64"),
                            field("last_fetched_epoch", "int32", "12+"),
                            field("log_start_offset", "int64", "5+"),
                            field("partition_max_bytes", "int32"),
                            field("replica_directory_id", "uuid", "17+", tag=0, default=b""),
                        )
                    ),
                ),
            )
        ),
    ),
    field(
        "forgotten_topics_data",
        Array(
            Struct(
                ForgottenTopic,
                field("topic", "string", "7-12"),
                field("topic_id", "uuid", "13+"),
                field("partitions", Array("int32")),
            )
        ),
        "7+",
    ),
    field("rack_id", "string", "11+"),
)
RESPONSE = Struct(
    FetchResponse,
    field("throttle_time_ms", "int32", "1+"),
    field("error_code", "int16", "7+"),
    field("session_id", "int32", "7+"),
    field(
        "responses",
        Array(
            Struct(
                FetchableTopicResponse,
                field("topic", "string", "0-12"),
                field("topic_id", "uuid", "13+"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            PartitionData,
                            field("partition_index", "int32"),
                            field("error_code", "int16"),
                            field("high_watermark", "int64"),
                            field("last_stable_offset", "int64", "4+"),
                            field("log_start_offset", "int64", "5+"),
                            field(
                                "diverging_epoch",
                                Struct(EpochEndOffset, field("epoch", "int32"), field("end_offset", "int64")),
                                "12+",
                                tag=0,
                            ),
                            field("current_leader", LEADER, "12+", tag=1),
                            field(
                                "snapshot_id",
                                Struct(SnapshotId, field("end_offset", "int64"), field("epoch", "int32")),
                                "12+",
                                tag=2,
                            ),
                            field(
                                "aborted_transactions",
                                Array(
                                    Struct(
                                        AbortedTransaction,
                                        field("producer_id", "int64"),
                                        field("first_offset", "int64"),
                                    )
                                ),
                                "4+",
                                nullable="4+",
                            ),
                            field("preferred_read_replica", "int32", "11+"),
                            field("records", "records", nullable="0+"),
                        )
                    ),
                ),
            )
        ),
    ),
    field("node_endpoints", Array(NODE), "16+", tag=0),
)


async def _handle(services: Services, request: _Request, call: Call) -> FetchResponse:
    if request.replica_id >= 0 or request.replica_state.replica_id >= 0:
        return FetchResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    asked = FetchRequest._make(request[:-1])
    # Not 0 where nothing is left: a fetch that wants no byte is done at once, and its consumer asks without a pause.
    asked = asked._replace(max_bytes=min(asked.max_bytes, max(1, call.unsent.left)))
    if call.version >= 15:
        asked = asked._replace(replica_id=request.replica_state.replica_id)
    response = await services.broker.fetch(asked, call.context, names_rack=call.version >= RACK_SINCE)
    return response if call.version >= _ZSTD_SINCE else _without_zstd(response)


def _without_zstd(response: FetchResponse) -> FetchResponse:
    """Refuse the partitions whose records begin with such a batch: their topic is written with it."""
    topics = []
    for topic in response.responses:
        partitions = [
            data._replace(error_code=ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, records=b"")
            if len(data.records) > _ATTRIBUTES_AT and data.records[_ATTRIBUTES_AT] & 7 == _ZSTD
            else data
            for data in topic.partitions
        ]
        topics.append(topic._replace(partitions=partitions))
    return response._replace(responses=topics)


API = Api(
    1,
    "Fetch",
    versions("4-17"),
    flexible_since=12,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
)
