"""DescribeTopicPartitions (key 75), version 0: topics by name, a page of their partitions at a time.

Topics come in the order of their names; none named means all. A page has `response_partition_limit` partitions, at most
`PARTITIONS_MAX`, and says where the next begins.

Not implemented: eligible leader replicas (none are told, and no null, which Java clients do not expect), authorized
operations (always unknown).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.apis.metadata import UNKNOWN_OPERATIONS
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

PARTITIONS_MAX = 2000


class _Topic(NamedTuple):
    name: str


class _Cursor(NamedTuple):
    topic_name: str
    partition_index: int


class _Request(NamedTuple):
    topics: Sequence[_Topic]
    response_partition_limit: int = PARTITIONS_MAX
    cursor: _Cursor | None = None


class _Response(NamedTuple):
    topics: Sequence[MetadataResponseTopic]
    next_cursor: _Cursor | None


CURSOR = Struct(_Cursor, field("topic_name", "string"), field("partition_index", "int32"))
REQUEST = Struct(
    _Request,
    field("topics", Array(Struct(_Topic, field("name", "string")))),
    field("response_partition_limit", "int32"),
    field("cursor", CURSOR, nullable="0+"),
)
RESPONSE = Struct(
    _Response,
    field("throttle_time_ms", "int32", default=0),
    field(
        "topics",
        Array(
            Struct(
                MetadataResponseTopic,
                field("error_code", "int16"),
                field("name", "string", nullable="0+"),
                field("topic_id", "uuid"),
                field("is_internal", "bool"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            MetadataResponsePartition,
                            field("error_code", "int16"),
                            field("partition_index", "int32"),
                            field("leader_id", "int32"),
                            field("leader_epoch", "int32"),
                            field("replica_nodes", Array("int32")),
                            field("isr_nodes", Array("int32")),
                            field("eligible_leader_replicas", Array("int32"), nullable="0+", default=()),
                            field("last_known_elr", Array("int32"), nullable="0+"),
                            field("offline_replicas", Array("int32")),
                        )
                    ),
                ),
                field("topic_authorized_operations", "int32", default=UNKNOWN_OPERATIONS),
            )
        ),
    ),
    field("next_cursor", CURSOR, nullable="0+"),
)


async def _handle(services: Services, request: _Request, call: Call) -> _Response:
    asked = [MetadataRequestTopic(name=name) for name in dict.fromkeys(topic.name for topic in request.topics)]
    metadata = MetadataRequest(asked, all_topics=not asked)
    response = await services.broker.metadata(metadata, call.context)
    if response.error_code:
        code = ErrorCode.LEADER_NOT_AVAILABLE
        return _Response([MetadataResponseTopic(code, topic.name) for topic in asked], None)
    room = max(1, min(request.response_partition_limit, PARTITIONS_MAX))
    return page(sorted(response.topics, key=lambda topic: topic.name or ""), request.cursor, room)


def page(topics: Sequence[MetadataResponseTopic], cursor: _Cursor | None, room: int) -> _Response:
    """`room` partitions of topics in order, from the cursor on."""
    found: list[MetadataResponseTopic] = []
    for topic in topics:
        name, partitions = topic.name or "", topic.partitions
        if cursor is not None and name < cursor.topic_name:
            continue
        if cursor is not None and name == cursor.topic_name:
            partitions = [one for one in partitions if one.partition_index >= cursor.partition_index]
        if partitions and not room:
            return _Response(found, _Cursor(name, partitions[0].partition_index))
        found.append(topic._replace(partitions=partitions[:room]))
        if len(partitions) > room:
            return _Response(found, _Cursor(name, partitions[room].partition_index))
        room -= len(partitions)
    return _Response(found, None)


API = Api(
    75,
    "DescribeTopicPartitions",
    versions("0"),
    flexible_since=0,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
)
