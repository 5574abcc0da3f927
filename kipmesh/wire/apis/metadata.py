"""Metadata (key 3), versions 0 to 13: the brokers with their addresses on this listener, and topics.

No topics are asked for by an empty list, all by null (and by an empty list in version 0). Topics are named by id too
from version 10 on (those with an id and no name from version 12). With `allow_auto_topic_creation` topics that there
are not are made, if `auto.create.topics.enable` says so; before version 4 always.

The controller that is told is this broker itself: clients send there what is for the controller, and every broker
forwards it. Without metadata the answer has no brokers, and from version 13 on an error.

Not implemented: authorized operations (always unknown).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

UNKNOWN_OPERATIONS = -(2**31)


class _Request(NamedTuple):
    topics: Sequence[MetadataRequestTopic] | None
    allow_auto_topic_creation: bool = True


REQUEST = Struct(
    _Request,
    field(
        "topics",
        Array(
            Struct(
                MetadataRequestTopic,
                field("topic_id", "uuid", "10+"),
                field("name", "string", nullable="10+"),
            )
        ),
        nullable="1+",
    ),
    field("allow_auto_topic_creation", "bool", "4+"),
    field("include_cluster_authorized_operations", "bool", "8-10", default=False),
    field("include_topic_authorized_operations", "bool", "8+", default=False),
)
RESPONSE = Struct(
    MetadataResponse,
    field("throttle_time_ms", "int32", "3+"),
    field(
        "brokers",
        Array(
            Struct(
                MetadataResponseBroker,
                field("node_id", "int32"),
                field("host", "string"),
                field("port", "int32"),
                field("rack", "string", "1+", nullable="1+"),
            )
        ),
    ),
    field("cluster_id", "string", "2+", nullable="2+"),
    field("controller_id", "int32", "1+"),
    field(
        "topics",
        Array(
            Struct(
                MetadataResponseTopic,
                field("error_code", "int16"),
                field("name", "string", nullable="12+"),
                field("topic_id", "uuid", "10+"),
                field("is_internal", "bool", "1+"),
                field(
                    "partitions",
                    Array(
                        Struct(
                            MetadataResponsePartition,
                            field("error_code", "int16"),
                            field("partition_index", "int32"),
                            field("leader_id", "int32"),
                            field("leader_epoch", "int32", "7+"),
                            field("replica_nodes", Array("int32")),
                            field("isr_nodes", Array("int32")),
                            field("offline_replicas", Array("int32"), "5+"),
                        )
                    ),
                ),
                field("topic_authorized_operations", "int32", "8+", default=UNKNOWN_OPERATIONS),
            )
        ),
    ),
    field("cluster_authorized_operations", "int32", "8-10", default=UNKNOWN_OPERATIONS),
    field("error_code", "int16", "13+"),
)


async def _handle(services: Services, request: _Request, call: Call) -> MetadataResponse:
    all_topics = request.topics is None or (call.version == 0 and not request.topics)
    asked = MetadataRequest(request.topics or (), all_topics, request.allow_auto_topic_creation)
    response = await services.broker.metadata(asked, call.context)
    if response.error_code:
        code = ErrorCode.LEADER_NOT_AVAILABLE
        topics = [MetadataResponseTopic(code, one.name or "", one.topic_id) for one in asked.topics]
        return response._replace(cluster_id=services.cluster_id, topics=topics)
    if call.version < 12 and any(topic.name is None for topic in response.topics):
        response = response._replace(topics=[topic._replace(name=topic.name or "") for topic in response.topics])
    return response._replace(controller_id=controller_id(services, response.brokers))


def controller_id(services: Services, brokers: Sequence[MetadataResponseBroker]) -> int:
    """This broker; another one while the controllers have this one fenced, or -1 if there is none."""
    ids = [broker.node_id for broker in brokers]
    return services.node_id if services.node_id in ids else min(ids, default=-1)


API = Api(
    3,
    "Metadata",
    versions("0-13"),
    flexible_since=9,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
)
