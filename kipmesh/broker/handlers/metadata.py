"""Metadata, DescribeCluster and DescribeTopicPartitions: the brokers with their addresses on this listener, and topics.

Clients of the Kafka listener see this broker as the controller: it forwards what is for the active controller.

- Metadata (3): null topics are all, and so is an empty list in version 0. Missing topics are created if the request
  allows it and `auto.create.topics.enable` is on. Without metadata the response has no brokers.
- DescribeTopicPartitions (75): a page has at most `PARTITIONS_MAX` partitions, and a cursor to the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

from kipmesh import messages as m
from kipmesh.broker.parts import BrokerParts
from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode

BROKERS = 1
"""The endpoint type of brokers."""
PARTITIONS_MAX = 2000
_NULL_NAME_SINCE = 12


def _controller_id(broker: BrokerParts, brokers: Sequence[m.MetadataResponseBroker]) -> int:
    """This broker; another one while the controller has fenced it, or -1 if there is none."""
    ids = [one.node_id for one in brokers]
    mine = broker.config.node_id
    return mine if mine in ids else min(ids, default=-1)


async def metadata(broker: BrokerParts, request: m.MetadataRequest, context: RequestContext) -> m.MetadataResponse:
    """Describe brokers and topics."""
    if context.version is None:
        return await broker.metadata.metadata(request, context)
    if context.version == 0 and not request.topics:
        request = request._replace(topics=None)
    if context.is_before(4):  # has no field for it
        request = request._replace(allow_auto_topic_creation=True)
    response = await broker.metadata.metadata(request, context)
    if response.error_code:
        code = ErrorCode.LEADER_NOT_AVAILABLE
        missing = [m.MetadataResponseTopic(code, one.name or "", one.topic_id) for one in request.topics or ()]
        return response._replace(cluster_id=broker.config.cluster_id, topics=missing)
    if context.is_before(_NULL_NAME_SINCE) and any(topic.name is None for topic in response.topics):
        response = response._replace(topics=[topic._replace(name=topic.name or "") for topic in response.topics])
    return response._replace(controller_id=_controller_id(broker, response.brokers))


async def describe_cluster(
    broker: BrokerParts, request: m.DescribeClusterRequest, context: RequestContext
) -> m.DescribeClusterResponse:
    """Describe the brokers. Controllers have no endpoints for the Kafka protocol: UNSUPPORTED_ENDPOINT_TYPE."""
    cluster_id = broker.config.cluster_id
    if request.endpoint_type != BROKERS:
        return m.DescribeClusterResponse(
            error_code=ErrorCode.UNSUPPORTED_ENDPOINT_TYPE,
            error_message="only brokers have endpoints for the Kafka protocol",
            endpoint_type=request.endpoint_type,
            cluster_id=cluster_id,
        )
    response = await broker.metadata.metadata(m.MetadataRequest(), context)
    return m.DescribeClusterResponse(
        error_code=response.error_code,
        endpoint_type=BROKERS,
        cluster_id=cluster_id,
        controller_id=_controller_id(broker, response.brokers),
        brokers=[m.DescribeClusterBroker(one.node_id, one.host, one.port, one.rack) for one in response.brokers],
    )


async def describe_topic_partitions(
    broker: BrokerParts, request: m.DescribeTopicPartitionsRequest, context: RequestContext
) -> m.DescribeTopicPartitionsResponse:
    """Describe a page of partitions, in the order of topic names. No topic named means all."""
    names = dict.fromkeys(topic.name for topic in request.topics)
    asked = [m.MetadataRequestTopic(name=name) for name in names]
    response = await broker.metadata.metadata(m.MetadataRequest(asked or None), context)
    if response.error_code:
        code = ErrorCode.LEADER_NOT_AVAILABLE
        return m.DescribeTopicPartitionsResponse(
            topics=[m.DescribeTopicPartitionsResponseTopic(code, name) for name in names]
        )
    room = max(1, min(request.response_partition_limit, PARTITIONS_MAX))
    return page(sorted(response.topics, key=lambda topic: topic.name or ""), request.cursor, room)


def page(
    topics: Sequence[m.MetadataResponseTopic], cursor: m.Cursor | None, room: int
) -> m.DescribeTopicPartitionsResponse:
    """Return `room` partitions of topics in order, from the cursor on."""
    found: list[m.DescribeTopicPartitionsResponseTopic] = []
    next_cursor = None
    for topic in topics:
        name, partitions = topic.name or "", topic.partitions
        if cursor is not None and name < cursor.topic_name:
            continue
        if cursor is not None and name == cursor.topic_name:
            partitions = [one for one in partitions if one.partition_index >= cursor.partition_index]
        if partitions and not room:
            next_cursor = m.Cursor(name, partitions[0].partition_index)
            break
        described = [_partition(one) for one in partitions[:room]]
        found.append(
            m.DescribeTopicPartitionsResponseTopic(
                topic.error_code, topic.name, topic.topic_id, topic.is_internal, described
            )
        )
        if len(partitions) > room:
            next_cursor = m.Cursor(name, partitions[room].partition_index)
            break
        room -= len(partitions)
    return m.DescribeTopicPartitionsResponse(topics=found, next_cursor=next_cursor)


def _partition(one: m.MetadataResponsePartition) -> m.DescribeTopicPartitionsResponsePartition:
    return m.DescribeTopicPartitionsResponsePartition(
        error_code=one.error_code,
        partition_index=one.partition_index,
        leader_id=one.leader_id,
        leader_epoch=one.leader_epoch,
        replica_nodes=one.replica_nodes,
        isr_nodes=one.isr_nodes,
        last_known_elr=one.last_known_elr,
        offline_replicas=one.offline_replicas,
    )
