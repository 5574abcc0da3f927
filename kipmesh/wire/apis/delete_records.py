"""DeleteRecords (key 21), versions 0 to 2: raises the log starts of partitions that this broker leads.

Offset -1 is the high watermark. Answered when the live replicas have done the same.

Not implemented: nothing.
"""

from __future__ import annotations

from kipmesh.core.messages import (
    DeleteRecordsPartition,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
    DeleteRecordsTopicResult,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

REQUEST = Struct(
    DeleteRecordsRequest,
    field(
        "topics",
        Array(
            Struct(
                DeleteRecordsTopic,
                field("name", "string"),
                field(
                    "partitions",
                    Array(Struct(DeleteRecordsPartition, field("partition_index", "int32"), field("offset", "int64"))),
                ),
            )
        ),
    ),
    field("timeout_ms", "int32"),
)
RESPONSE = Struct(
    DeleteRecordsResponse,
    field("throttle_time_ms", "int32"),
    field(
        "topics",
        Array(
            Struct(
                DeleteRecordsTopicResult,
                field("name", "string"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            DeleteRecordsPartitionResult,
                            field("partition_index", "int32"),
                            field("low_watermark", "int64"),
                            field("error_code", "int16"),
                        )
                    ),
                ),
            )
        ),
    ),
)


async def _handle(services: Services, request: DeleteRecordsRequest, call: Call) -> DeleteRecordsResponse:
    return await services.broker.delete_records(request, call.context)


API = Api(21, "DeleteRecords", versions("0-2"), flexible_since=2, request=REQUEST, response=RESPONSE, handle=_handle)
