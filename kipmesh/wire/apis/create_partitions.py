"""CreatePartitions (key 37), versions 0 to 3: forwarded to the active controller.

Not implemented: nothing.
"""

from __future__ import annotations

from kipmesh.core.messages import (
    CreatePartitionsAssignment,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

REQUEST = Struct(
    CreatePartitionsRequest,
    field(
        "topics",
        Array(
            Struct(
                CreatePartitionsTopic,
                field("name", "string"),
                field("count", "int32"),
                field(
                    "assignments",
                    Array(Struct(CreatePartitionsAssignment, field("broker_ids", Array("int32")))),
                    nullable="0+",
                    null=(),
                ),
            )
        ),
    ),
    field("timeout_ms", "int32"),
    field("validate_only", "bool"),
)
RESPONSE = Struct(
    CreatePartitionsResponse,
    field("throttle_time_ms", "int32"),
    field(
        "results",
        Array(
            Struct(
                CreatePartitionsTopicResult,
                field("name", "string"),
                field("error_code", "int16"),
                field("error_message", "string", nullable="0+"),
            )
        ),
    ),
)


async def _handle(services: Services, request: CreatePartitionsRequest, call: Call) -> CreatePartitionsResponse:
    return await services.admin.create_partitions(request, call.context)


API = Api(37, "CreatePartitions", versions("0-3"), flexible_since=2, request=REQUEST, response=RESPONSE, handle=_handle)
