"""Produce (key 0), versions 3 to 13: batches go to the broker's log as they came, slices of the request's frame.

acks=0 gets no response; an error among its partitions ends the connection, which is how the client learns of it. The
next Produce of a connection begins while this one waits for its replicas. Topics go by id from version 13 on. Who leads
instead, and where, is told from version 10 on. Batches with zstd need version 7.

Not implemented: transactions (INVALID_REQUEST), message formats before 2 (refused by the log).
"""

from __future__ import annotations

from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import (
    BatchIndexAndErrorMessage,
    LeaderIdAndEpoch,
    NodeEndpoint,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from kipmesh.wire.api import NO_ANSWER, Api, Call, HangUp
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

_ZSTD = 4
_ZSTD_SINCE = 7
_ATTRIBUTES_AT = 22

LEADER = Struct(LeaderIdAndEpoch, field("leader_id", "int32"), field("leader_epoch", "int32"))
NODE = Struct(
    NodeEndpoint,
    field("node_id", "int32"),
    field("host", "string"),
    field("port", "int32"),
    field("rack", "string", nullable="0+"),
)
REQUEST = Struct(
    ProduceRequest,
    field("transactional_id", "string", nullable="3+"),
    field("acks", "int16"),
    field("timeout_ms", "int32"),
    field(
        "topic_data",
        Array(
            Struct(
                TopicProduceData,
                field("name", "string", "0-12"),
                field("topic_id", "uuid", "13+"),
                field(
                    "partition_data",
                    Array(
                        Struct(
                            PartitionProduceData,
                            field("index", "int32"),
                            field("records", "records", nullable="0+", null=b""),
                        )
                    ),
                ),
            )
        ),
    ),
)
RESPONSE = Struct(
    ProduceResponse,
    field(
        "responses",
        Array(
            Struct(
                TopicProduceResponse,
                field("name", "string", "0-12"),
                field("topic_id", "uuid", "13+"),
                field(
                    "partition_responses",
                    Array(
                        Struct(
                            PartitionProduceResponse,
                            field("index", "int32"),
                            field("error_code", "int16"),
                            field("base_offset", "int64"),
                            field("log_append_time_ms", "int64", "2+"),
                            field("log_start_offset", "int64", "5+"),
                            field(
                                "record_errors",
                                Array(
                                    Struct(
                                        BatchIndexAndErrorMessage,
                                        field("batch_index", "int32"),
                                        field("batch_index_error_message", "string", nullable="8+"),
                                    )
                                ),
                                "8+",
                            ),
                            field("error_message", "string", "8+", nullable="8+"),
                            field("current_leader", LEADER, "10+", tag=0),
                        )
                    ),
                ),
            )
        ),
    ),
    field("throttle_time_ms", "int32", "1+"),
    field("node_endpoints", Array(NODE), "10+", tag=0),
)


async def _handle(services: Services, request: ProduceRequest, call: Call) -> ProduceResponse | None:
    if call.version < _ZSTD_SINCE and _has_zstd(request):
        response = _refused(request, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE)
    else:
        response = await services.broker.produce(request, call.context)
    if request.acks:
        return response
    for topic in response.responses:
        for partition in topic.partition_responses:
            if partition.error_code:
                where = f"{topic.name or topic.topic_id.hex()}-{partition.index}"
                raise HangUp("acks-0", f"{where}: {ErrorCode.of(partition.error_code).name}")
    return NO_ANSWER


def _has_zstd(request: ProduceRequest) -> bool:
    return any(
        len(data.records) > _ATTRIBUTES_AT and data.records[_ATTRIBUTES_AT] & 7 == _ZSTD
        for topic in request.topic_data
        for data in topic.partition_data
    )


def _refused(request: ProduceRequest, code: ErrorCode) -> ProduceResponse:
    return ProduceResponse(
        [
            TopicProduceResponse(
                topic.name,
                topic.topic_id,
                [PartitionProduceResponse(data.index, code) for data in topic.partition_data],
            )
            for topic in request.topic_data
        ]
    )


API = Api(
    0,
    "Produce",
    versions("3-13"),
    flexible_since=9,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
    is_pipelined=True,
)
