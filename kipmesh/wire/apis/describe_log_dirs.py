"""DescribeLogDirs (key 35), versions 1 to 4: this broker's data folders, and the logs in them.

Null topics are all; from version 4 on the folders' disks have their sizes.

Not implemented: version 5 (no folder is ever cordoned); logs that are on the way to another folder (there are none).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.messages import (
    DescribableLogDirTopic,
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services


class _Request(NamedTuple):
    topics: Sequence[DescribableLogDirTopic] | None = None


REQUEST = Struct(
    _Request,
    field(
        "topics",
        Array(Struct(DescribableLogDirTopic, field("topic", "string"), field("partitions", Array("int32")))),
        nullable="0+",
    ),
)
RESPONSE = Struct(
    DescribeLogDirsResponse,
    field("throttle_time_ms", "int32"),
    field("error_code", "int16", "3+"),
    field(
        "results",
        Array(
            Struct(
                DescribeLogDirsResult,
                field("error_code", "int16"),
                field("log_dir", "string"),
                field(
                    "topics",
                    Array(
                        Struct(
                            DescribeLogDirsTopic,
                            field("name", "string"),
                            field(
                                "partitions",
                                Array(
                                    Struct(
                                        DescribeLogDirsPartition,
                                        field("partition_index", "int32"),
                                        field("partition_size", "int64"),
                                        field("offset_lag", "int64"),
                                        field("is_future_key", "bool"),
                                    )
                                ),
                            ),
                        )
                    ),
                ),
                field("total_bytes", "int64", "4+"),
                field("usable_bytes", "int64", "4+"),
            )
        ),
    ),
)


async def _handle(services: Services, request: _Request, call: Call) -> DescribeLogDirsResponse:
    response = await services.broker.describe_log_dirs(DescribeLogDirsRequest(request.topics or ()), call.context)
    if request.topics is not None and not request.topics:  # nothing is asked for; to the broker that is everything
        return response._replace(results=[one._replace(topics=()) for one in response.results])
    return response


API = Api(35, "DescribeLogDirs", versions("1-4"), flexible_since=2, request=REQUEST, response=RESPONSE, handle=_handle)
