"""DescribeQuorum (key 55), versions 0 to 2: the metadata quorum, forwarded to its leader.

Observers and voters have the time of their last fetch from version 1 on; version 2 names the nodes' addresses.

Not implemented: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.messages import (
    DescribeQuorumPartition,
    DescribeQuorumRequest,
    DescribeQuorumTopic,
    DescribeQuorumTopicResponse,
    ReplicaState,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

CONTROLLER_LISTENER = "MESH"


class _Partition(NamedTuple):
    partition_index: int = 0


class _Topic(NamedTuple):
    topic_name: str = ""
    partitions: Sequence[_Partition] = ()


class _Request(NamedTuple):
    topics: Sequence[_Topic] = ()


class _Listener(NamedTuple):
    name: str = ""
    host: str = ""
    port: int = 0


class _Node(NamedTuple):
    node_id: int = -1
    listeners: Sequence[_Listener] = ()


class _Response(NamedTuple):
    error_code: int = 0
    error_message: str | None = None
    topics: Sequence[DescribeQuorumTopicResponse] = ()
    nodes: Sequence[_Node] = ()


_REPLICAS = Array(
    Struct(
        ReplicaState,
        field("replica_id", "int32"),
        field("replica_directory_id", "uuid", "2+"),
        field("log_end_offset", "int64"),
        field("last_fetch_timestamp", "int64", "1+"),
        field("last_caught_up_timestamp", "int64", "1+"),
    )
)
REQUEST = Struct(
    _Request,
    field(
        "topics",
        Array(
            Struct(
                _Topic,
                field("topic_name", "string"),
                field("partitions", Array(Struct(_Partition, field("partition_index", "int32")))),
            )
        ),
    ),
)
RESPONSE = Struct(
    _Response,
    field("error_code", "int16"),
    field("error_message", "string", "2+", nullable="2+"),
    field(
        "topics",
        Array(
            Struct(
                DescribeQuorumTopicResponse,
                field("topic_name", "string"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            DescribeQuorumPartition,
                            field("partition_index", "int32"),
                            field("error_code", "int16"),
                            field("error_message", "string", "2+", nullable="2+"),
                            field("leader_id", "int32"),
                            field("leader_epoch", "int32"),
                            field("high_watermark", "int64"),
                            field("current_voters", _REPLICAS),
                            field("observers", _REPLICAS),
                        )
                    ),
                ),
            )
        ),
    ),
    field(
        "nodes",
        Array(
            Struct(
                _Node,
                field("node_id", "int32"),
                field(
                    "listeners",
                    Array(Struct(_Listener, field("name", "string"), field("host", "string"), field("port", "uint16"))),
                ),
            )
        ),
        "2+",
    ),
)


async def _handle(services: Services, request: _Request, call: Call) -> _Response:
    topics = [
        DescribeQuorumTopic(topic.topic_name, [one.partition_index for one in topic.partitions])
        for topic in request.topics
    ]
    response = await services.quorum.describe_quorum(DescribeQuorumRequest(topics), call.context)
    nodes = [_Node(one.node_id, [_Listener(CONTROLLER_LISTENER, one.host, one.port)]) for one in response.nodes]
    return _Response(response.error_code, response.error_message, response.topics, nodes)


API = Api(55, "DescribeQuorum", versions("0-2"), flexible_since=0, request=REQUEST, response=RESPONSE, handle=_handle)
