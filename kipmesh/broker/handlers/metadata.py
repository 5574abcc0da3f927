"""Metadata, DescribeCluster and DescribeTopicPartitions: topics, and the brokers with their addresses on a listener.

Clients of the Kafka listener receive this broker as the controller: it forwards requests for the active controller.

- Metadata (3): null topics mean all, as does an empty list in version 0. Missing topics are created if the request
  allows it and `auto.create.topics.enable` is on. Without metadata the response has no brokers.
- DescribeTopicPartitions (75): a page has at most `PARTITIONS_MAX` partitions and a cursor to the next page.
"""

from __future__ import annotations

from collections.abc import Sequence

from kipmesh import messages as m
from kipmesh.broker.parts import BrokerParts
from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode

BROKERS = 1
"""Endpoint type of brokers."""
PARTITIONS_MAX = 2000
_NULL_NAME_SINCE = 12


def _controller_id(broker: BrokerParts, brokers: Sequence[m.MetadataResponseBroker]) -> int:
    """Return this broker's id if it is in `brokers`, else the lowest id, or -1 if there are no brokers."""
    ids = [one.node_id for one in brokers]
    mine = broker.config.node_id
    return mine if mine in ids else min(ids, default=-1)


async def metadata(broker: BrokerParts, request: m.MetadataRequest, context: RequestContext) -> m.MetadataResponse:
    """Describe the brokers and the requested topics.

    Without metadata, the topics have LEADER_NOT_AVAILABLE on Kafka listeners; the gRPC response has the top-level error
    BROKER_NOT_AVAILABLE.
    """
    if context.version is None:
        return await broker.metadata.metadata(request, context)
    if context.version == 0 and not request.topics:
        request = request._replace(topics=None)
    if context.is_before(4):  # before that, creation is always allowed
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
    """Describe the brokers.

    Top-level errors: BROKER_NOT_AVAILABLE without metadata, and UNSUPPORTED_ENDPOINT_TYPE if the request is for
    controllers, which have no Kafka endpoints.
    """
    cluster_id = broker.config.cluster_id
    if request.endpoint_type != BROKERS:
        return m.DescribeClusterResponse(
            error_code=ErrorCode.UNSUPPORTED_ENDPOINT_TYPE,
            error_message=f"endpoint type must be {BROKERS} (brokers), got {request.endpoint_type}",
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
    """Describe a page of partitions of the requested topics, or of all topics if none is requested, by topic name.

    Without metadata, each requested topic has LEADER_NOT_AVAILABLE.
    """
    names = dict.fromkeys(topic.name for topic in request.topics)
    requested = [m.MetadataRequestTopic(name=name) for name in names]
    response = await broker.metadata.metadata(m.MetadataRequest(requested or None), context)
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
    """Return a response with up to `room` partitions of the sorted topics, from the cursor on.

    Its next cursor is None if no partition is left.
    """
    described: list[m.DescribeTopicPartitionsResponseTopic] = []
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
        in_page = [_partition(one) for one in partitions[:room]]
        described.append(
            m.DescribeTopicPartitionsResponseTopic(
                topic.error_code, topic.name, topic.topic_id, topic.is_internal, in_page
            )
        )
        if len(partitions) > room:
            next_cursor = m.Cursor(name, partitions[room].partition_index)
            break
        room -= len(partitions)
    return m.DescribeTopicPartitionsResponse(topics=described, next_cursor=next_cursor)


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
