"""AlterPartitionReassignments (key 45), version 0: forwarded to the active controller. Null replicas cancel.

Not implemented: version 1, with which a client can forbid that the replication factor changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.messages import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ReassignablePartition,
    ReassignablePartitionResponse,
    ReassignableTopic,
    ReassignableTopicResponse,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services


class _Partition(NamedTuple):
    partition_index: int = 0
    replicas: Sequence[int] | None = None


class _Topic(NamedTuple):
    name: str = ""
    partitions: Sequence[_Partition] = ()


class _Request(NamedTuple):
    timeout_ms: int = 60_000
    topics: Sequence[_Topic] = ()


REQUEST = Struct(
    _Request,
    field("timeout_ms", "int32"),
    field(
        "topics",
        Array(
            Struct(
                _Topic,
                field("name", "string"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            _Partition,
                            field("partition_index", "int32"),
                            field("replicas", Array("int32"), nullable="0+"),
                        )
                    ),
                ),
            )
        ),
    ),
)
RESPONSE = Struct(
    AlterPartitionReassignmentsResponse,
    field("throttle_time_ms", "int32"),
    field("error_code", "int16"),
    field("error_message", "string", nullable="0+"),
    field(
        "responses",
        Array(
            Struct(
                ReassignableTopicResponse,
                field("name", "string"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            ReassignablePartitionResponse,
                            field("partition_index", "int32"),
                            field("error_code", "int16"),
                            field("error_message", "string", nullable="0+"),
                        )
                    ),
                ),
            )
        ),
    ),
)


async def _handle(services: Services, request: _Request, call: Call) -> AlterPartitionReassignmentsResponse:
    topics = [ReassignableTopic(topic.name, [_partition(one) for one in topic.partitions]) for topic in request.topics]
    asked = AlterPartitionReassignmentsRequest(request.timeout_ms, topics)
    return await services.admin.alter_partition_reassignments(asked, call.context)


def _partition(one: _Partition) -> ReassignablePartition:
    return ReassignablePartition(one.partition_index, one.replicas or (), is_cancelled=one.replicas is None)


API = Api(
    45,
    "AlterPartitionReassignments",
    versions("0"),
    flexible_since=0,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
)
