"""ElectLeaders (key 43), versions 0 to 2: preferred and (from version 1 on) unclean, by the active controller.

Null partitions are all. Version 0 has no place for an error of the whole request: each partition has it.

Not implemented: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.messages import (
    ElectLeadersRequest,
    ElectLeadersResponse,
    PartitionResult,
    ReplicaElectionResult,
    TopicPartitions,
)
from kipmesh.core.messages.elections import ElectionType
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

HAS_ERROR = 1


class _Request(NamedTuple):
    election_type: int = ElectionType.PREFERRED
    topic_partitions: Sequence[TopicPartitions] | None = None
    timeout_ms: int = 60_000


REQUEST = Struct(
    _Request,
    field("election_type", "int8", "1+"),
    field(
        "topic_partitions",
        Array(Struct(TopicPartitions, field("topic", "string"), field("partitions", Array("int32")))),
        nullable="0+",
    ),
    field("timeout_ms", "int32"),
)
RESPONSE = Struct(
    ElectLeadersResponse,
    field("throttle_time_ms", "int32"),
    field("error_code", "int16", "1+"),
    field(
        "replica_election_results",
        Array(
            Struct(
                ReplicaElectionResult,
                field("topic", "string"),
                field(
                    "partition_result",
                    Array(
                        Struct(
                            PartitionResult,
                            field("partition_id", "int32"),
                            field("error_code", "int16"),
                            field("error_message", "string", nullable="0+"),
                        )
                    ),
                ),
            )
        ),
    ),
)


async def _handle(services: Services, request: _Request, call: Call) -> ElectLeadersResponse:
    partitions = request.topic_partitions
    asked = ElectLeadersRequest(request.election_type, partitions is None, partitions or (), request.timeout_ms)
    response = await services.admin.elect_leaders(asked, call.context)
    if response.error_code and call.version < HAS_ERROR:
        code = response.error_code
        results = [
            ReplicaElectionResult(one.topic, [PartitionResult(number, code) for number in one.partitions])
            for one in partitions or ()
        ]
        return response._replace(replica_election_results=results)
    return response


API = Api(43, "ElectLeaders", versions("0-2"), flexible_since=2, request=REQUEST, response=RESPONSE, handle=_handle)
