"""OffsetDelete (key 47), version 0: removes what a group committed for topics that no member of it subscribes to.

Not implemented: nothing.
"""

from __future__ import annotations

from kipmesh.core.messages import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import VERSION_MAX, Array, Struct, field, versions
from kipmesh.wire.services import Services

REQUEST = Struct(
    OffsetDeleteRequest,
    field("group_id", "string"),
    field(
        "topics",
        Array(
            Struct(
                OffsetDeleteRequestTopic,
                field("name", "string"),
                field("partitions", Array(Struct(OffsetDeleteRequestPartition, field("partition_index", "int32")))),
            )
        ),
    ),
)
RESPONSE = Struct(
    OffsetDeleteResponse,
    field("error_code", "int16"),
    field("throttle_time_ms", "int32"),
    field(
        "topics",
        Array(
            Struct(
                OffsetDeleteResponseTopic,
                field("name", "string"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            OffsetDeleteResponsePartition,
                            field("partition_index", "int32"),
                            field("error_code", "int16"),
                        )
                    ),
                ),
            )
        ),
    ),
)


async def _handle(services: Services, request: OffsetDeleteRequest, call: Call) -> OffsetDeleteResponse:
    return await services.groups.offset_delete(request, call.context)


API = Api(
    47,
    "OffsetDelete",
    versions("0"),
    flexible_since=VERSION_MAX,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
)
