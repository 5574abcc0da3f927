"""DescribeProducers (61): of each partition that this broker hosts, as leader or follower, as in Apache Kafka."""

from __future__ import annotations

from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.request_limits import refusal
from kipmesh.core.metadata.topics import check_topic_name
from kipmesh.messages.apis import describe_producers as m
from kipmesh.node.broker.parts import BrokerParts
from kipmesh.storage.producer_snapshots import PartitionProducers


async def describe_producers(
    broker: BrokerParts, request: m.DescribeProducersRequest, context: RequestContext
) -> m.DescribeProducersResponse:
    """Describe the producers of partitions."""
    wanted: dict[str, dict[int, None]] = {}  # a repeated partition is described once
    for one in request.topics:
        wanted.setdefault(one.name, {}).update(dict.fromkeys(one.partition_indexes))
    found = [(name, [_found(broker, name, index) for index in indexes]) for name, indexes in wanted.items()]
    return m.DescribeProducersResponse(topics=[m.DescribeProducersTopicResponse(*topic) for topic in found])


def _found(broker: BrokerParts, name: str, index: int) -> m.DescribeProducersPartitionResponse:
    try:
        check_topic_name(name)
        replica = broker.partitions.require(b"", name, index)
        if not replica.has_role:  # it is starting or stopping
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"partition {index} of topic {name!r} is not served")
    except KafkaError as error:
        return m.DescribeProducersPartitionResponse(index, error.code, refusal(error.message))
    producers = replica.log.producers
    entries = producers.states.entries() if isinstance(producers, PartitionProducers) else ()
    active = [
        m.ActiveProducer(producer_id, epoch, sequence, timestamp, coordinator_epoch, txn_offset)
        for producer_id, epoch, sequence, _, _, timestamp, coordinator_epoch, txn_offset in entries
    ]
    return m.DescribeProducersPartitionResponse(index, active_producers=active)
