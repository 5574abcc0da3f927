"""ListPartitionReassignments (key 46), version 0: forwarded to the active controller. Null topics are all.

Not implemented: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.messages import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
    ListPartitionReassignmentsTopics,
    OngoingPartitionReassignment,
    OngoingTopicReassignment,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services


class _Request(NamedTuple):
    timeout_ms: int = 60_000
    topics: Sequence[ListPartitionReassignmentsTopics] | None = None


REQUEST = Struct(
    _Request,
    field("timeout_ms", "int32"),
    field(
        "topics",
        Array(
            Struct(
                ListPartitionReassignmentsTopics,
                field("name", "string"),
                field("partition_indexes", Array("int32")),
            )
        ),
        nullable="0+",
    ),
)
RESPONSE = Struct(
    ListPartitionReassignmentsResponse,
    field("throttle_time_ms", "int32"),
    field("error_code", "int16"),
    field("error_message", "string", nullable="0+"),
    field(
        "topics",
        Array(
            Struct(
                OngoingTopicReassignment,
                field("name", "string"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            OngoingPartitionReassignment,
                            field("partition_index", "int32"),
                            field("replicas", Array("int32")),
                            field("adding_replicas", Array("int32")),
                            field("removing_replicas", Array("int32")),
                        )
                    ),
                ),
            )
        ),
    ),
)


async def _handle(services: Services, request: _Request, call: Call) -> ListPartitionReassignmentsResponse:
    asked = ListPartitionReassignmentsRequest(request.timeout_ms, request.topics or (), request.topics is None)
    return await services.admin.list_partition_reassignments(asked, call.context)


API = Api(
    46,
    "ListPartitionReassignments",
    versions("0"),
    flexible_since=0,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
)
