"""CreateTopics, DeleteTopics and CreatePartitions: Kafka's checks and errors, one answer a topic.

`__cluster_metadata` is refused everywhere. A request's topics do not see each other but for their names; those that
are refused leave the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, TOPIC_RESOURCE, MetadataImage, TopicState, unified
from kipmesh.core.metadata.placement import PlaceableBroker, Placement
from kipmesh.core.metadata.records import (
    ConfigRecord,
    PartitionRecord,
    Record,
    RemoveTopicRecord,
    TopicRecord,
)
from kipmesh.core.metadata.request_limits import config_value_fault, refusal
from kipmesh.messages.records.metadata import ZERO_UUID

TOPIC_NAME_LENGTH_MAX = 249
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")

Replicas = Sequence[int]


class TopicDefaults(NamedTuple):
    """What a request leaves open, and what it may not exceed."""

    num_partitions: int = 1
    replication_factor: int = 3
    """Lowered to the number of registered brokers."""
    max_partitions_per_request: int = 10_000


def check_topic_name(name: str) -> None:
    """Kafka's rules for names; raises KafkaError(INVALID_TOPIC_EXCEPTION)."""
    if not name or name in (".", ".."):
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"{name!r} is not a topic name")
    if len(name) > TOPIC_NAME_LENGTH_MAX:
        raise KafkaError(
            ErrorCode.INVALID_TOPIC_EXCEPTION, f"a topic name has at most {TOPIC_NAME_LENGTH_MAX} characters"
        )
    if not _NAME_CHARACTERS.issuperset(name):
        raise KafkaError(
            ErrorCode.INVALID_TOPIC_EXCEPTION,
            f"topic name {name!r} has characters other than a-z, A-Z, 0-9, '.', '_', '-'",
        )


class _Plan(NamedTuple):
    """What a topic's creation comes to."""

    topic_id: bytes
    replicas: Sequence[Replicas]
    records: list[Record]


def create_topics(
    image: MetadataImage, request: m.CreateTopicsRequest, defaults: TopicDefaults, new_topic_id: Callable[[], bytes]
) -> Decision[m.CreateTopicsResponse]:
    """Create topics, or only say whether they could be."""
    records: list[Record] = []
    results = []
    counts: dict[str, int] = {}
    for topic in request.topics:
        counts[topic.name] = counts.get(topic.name, 0) + 1
    unified_names: dict[str, str] = {}
    room = defaults.max_partitions_per_request
    for topic in {topic.name: topic for topic in request.topics}.values():
        try:
            if counts[topic.name] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"the request has topic {topic.name!r} more than once")
            _check_new_name(image, topic.name, unified_names)
            plan = _plan_topic(image, topic, defaults, room, new_topic_id)
        except KafkaError as error:
            results.append(m.CreatableTopicResult(topic.name, b"", error.code, refusal(error.message)))
            continue
        unified_names[unified(topic.name)] = topic.name
        room -= len(plan.replicas)
        topic_id = plan.topic_id
        if request.validate_only:
            topic_id = b""
        else:
            records += plan.records
        results.append(
            m.CreatableTopicResult(
                topic.name,
                topic_id,
                num_partitions=len(plan.replicas),
                replication_factor=len(plan.replicas[0]),
            )
        )
    return Decision(records, m.CreateTopicsResponse(topics=tuple(results)))


def _check_new_name(image: MetadataImage, name: str, unified_names: dict[str, str]) -> None:
    if name == CLUSTER_METADATA_TOPIC:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"topic {name!r} is the cluster's own")
    check_topic_name(name)
    if name in image.topic_names:
        raise KafkaError(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {name!r} exists")
    if "." in name or "_" in name:
        colliding = image.colliding_topic(name) or unified_names.get(unified(name))
        if colliding is not None:
            raise KafkaError(
                ErrorCode.INVALID_TOPIC_EXCEPTION, f"topic {name!r} collides with {colliding!r} in the names of metrics"
            )


def _plan_topic(
    image: MetadataImage, topic: m.CreatableTopic, defaults: TopicDefaults, room: int, new_topic_id: Callable[[], bytes]
) -> _Plan:
    configs = _checked_configs(topic)
    if topic.assignments:
        if topic.num_partitions != -1 or topic.replication_factor != -1:
            raise KafkaError(
                ErrorCode.INVALID_REQUEST, "with an assignment, number of partitions and replication factor are -1"
            )
        _check_room(len(topic.assignments), room)
        replicas = _assigned(image, topic.assignments)
    else:
        count = defaults.num_partitions if topic.num_partitions == -1 else topic.num_partitions
        if count <= 0:
            raise KafkaError(ErrorCode.INVALID_PARTITIONS, f"{count} is not a number of partitions")
        _check_room(count, room)
        factor = topic.replication_factor
        if factor == -1:
            factor = max(1, min(defaults.replication_factor, len(image.brokers)))
        placement = _placement(image, factor)
        replicas = [placement.place() for _ in range(count)]
    topic_id = new_topic_id()
    while topic_id in image.topics:
        topic_id = new_topic_id()
    records: list[Record] = [TopicRecord(topic.name, topic_id)]
    records += [ConfigRecord(TOPIC_RESOURCE, topic.name, name, value) for name, value in configs.items()]
    records += _partition_records(image, topic_id, 0, replicas)
    return _Plan(topic_id, replicas, records)


def _checked_configs(topic: m.CreatableTopic) -> dict[str, str]:
    configs: dict[str, str] = {}
    for entry in topic.configs:
        if entry.value is None:
            raise KafkaError(ErrorCode.INVALID_CONFIG, f"configuration key {entry.name!r} has no value")
        fault = config_value_fault(entry.value)
        if fault is not None:
            raise KafkaError(ErrorCode.INVALID_CONFIG, f"configuration key {entry.name!r}: {fault}")
        configs[entry.name] = entry.value
    TopicConfig.parse(configs)
    return configs


def _check_room(count: int, room: int) -> None:
    if count > room:
        raise KafkaError(
            ErrorCode.POLICY_VIOLATION, f"{count} partitions are more than max.partitions.per.request leaves ({room})"
        )


def _placement(image: MetadataImage, replication_factor: int) -> Placement:
    brokers = [
        PlaceableBroker(
            broker.broker_id,
            broker.rack,
            broker.is_leader_role,
            not broker.can_lead,
            len(image.partitions_of_broker(broker.broker_id)),
        )
        for broker in image.brokers.values()
    ]
    try:
        return Placement(brokers, replication_factor)
    except ValueError as error:
        raise KafkaError(ErrorCode.INVALID_REPLICATION_FACTOR, f"cannot place {error}") from None


def _assigned(image: MetadataImage, assignments: Iterable[m.CreatableReplicaAssignment]) -> list[Replicas]:
    by_index = {assignment.partition_index: tuple(assignment.broker_ids) for assignment in assignments}
    count = sum(1 for _ in assignments)
    if sorted(by_index) != list(range(count)):
        raise KafkaError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, "the partitions of an assignment are 0, 1, 2 ..., each once"
        )
    replicas: list[Replicas] = [by_index[index] for index in range(count)]
    _check_assignment(image, replicas, len(replicas[0]))
    return replicas


def _check_assignment(image: MetadataImage, replicas: Sequence[Replicas], factor: int) -> None:
    for partition in replicas:
        if not partition or len(partition) != factor:
            raise KafkaError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"partitions have {len(partition)} and {factor} replicas"
            )
        if len(set(partition)) != len(partition):
            raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"{list(partition)} has a broker twice")
        unknown = [broker for broker in partition if broker not in image.brokers]
        if unknown:
            raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"broker {unknown[0]} is not registered")
        if not any(image.brokers[broker].can_lead for broker in partition):
            raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"all brokers of {list(partition)} are fenced")


def _partition_records(
    image: MetadataImage, topic_id: bytes, first: int, replicas: Sequence[Replicas]
) -> list[PartitionRecord]:
    can_lead = {broker_id for broker_id, broker in image.brokers.items() if broker.can_lead}
    directory = {
        broker_id: broker.log_dirs[0] if len(broker.log_dirs) == 1 else ZERO_UUID
        for broker_id, broker in image.brokers.items()
    }
    records = []
    for index, brokers in enumerate(replicas, first):
        isr = tuple([broker for broker in brokers if broker in can_lead])
        records.append(
            PartitionRecord(
                partition_id=index,
                topic_id=topic_id,
                replicas=brokers,
                isr=isr,
                leader=isr[0],
                leader_epoch=0,
                partition_epoch=0,
                directories=tuple([directory[broker] for broker in brokers]),
            )
        )
    return records


def delete_topics(image: MetadataImage, request: m.DeleteTopicsRequest) -> Decision[m.DeleteTopicsResponse]:
    """Delete topics by name or by id."""
    records: list[Record] = []
    results = []
    seen: set[bytes] = set()
    for asked in request.topics:
        try:
            topic = _to_delete(image, asked)
            if topic.topic_id in seen:
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"the request has topic {topic.name!r} more than once")
        except KafkaError as error:
            results.append(m.DeletableTopicResult(asked.name, asked.topic_id, error.code, refusal(error.message)))
            continue
        seen.add(topic.topic_id)
        records.append(RemoveTopicRecord(topic.topic_id))
        results.append(m.DeletableTopicResult(topic.name, topic.topic_id))
    return Decision(records, m.DeleteTopicsResponse(responses=tuple(results)))


def _to_delete(image: MetadataImage, asked: m.DeleteTopicState) -> TopicState:
    if asked.name == CLUSTER_METADATA_TOPIC:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"topic {asked.name!r} is the cluster's own")
    if asked.topic_id:
        if asked.name is not None:
            raise KafkaError(ErrorCode.INVALID_REQUEST, "a topic is named by its name or by its id, not by both")
        topic = image.topics.get(asked.topic_id)
        if topic is None:
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_ID, f"no topic of id {asked.topic_id.hex()}")
        return topic
    topic = image.topic_by_name(asked.name or "")
    if topic is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"no topic {asked.name!r}")
    return topic


def create_partitions(
    image: MetadataImage, request: m.CreatePartitionsRequest, defaults: TopicDefaults
) -> Decision[m.CreatePartitionsResponse]:
    """Give topics more partitions."""
    records: list[Record] = []
    results = []
    seen: set[str] = set()
    room = defaults.max_partitions_per_request
    for asked in request.topics:
        try:
            if asked.name in seen:
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"the request has topic {asked.name!r} more than once")
            seen.add(asked.name)
            added = _more_partitions(image, asked, room)
        except KafkaError as error:
            results.append(m.CreatePartitionsTopicResult(asked.name, error.code, refusal(error.message)))
            continue
        room -= len(added)
        if not request.validate_only:
            records += added
        results.append(m.CreatePartitionsTopicResult(asked.name))
    return Decision(records, m.CreatePartitionsResponse(results=tuple(results)))


def _more_partitions(image: MetadataImage, asked: m.CreatePartitionsTopic, room: int) -> list[PartitionRecord]:
    if asked.name == CLUSTER_METADATA_TOPIC:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"topic {asked.name!r} is the cluster's own")
    topic = image.topic_by_name(asked.name)
    if topic is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"no topic {asked.name!r}")
    before = len(topic.partitions)
    if asked.count <= before:
        raise KafkaError(
            ErrorCode.INVALID_PARTITIONS,
            f"topic {asked.name!r} has {before} partitions, which cannot become {asked.count}",
        )
    more = asked.count - before
    _check_room(more, room)
    factor = len(topic.partitions[0].replicas)
    if asked.assignments:
        replicas: list[Replicas] = [tuple(assignment.broker_ids) for assignment in asked.assignments]
        if len(replicas) != more:
            raise KafkaError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"{more} partitions are new, {len(replicas)} are assigned"
            )
        _check_assignment(image, replicas, factor)
    else:
        placement = _placement(image, factor)
        for state in topic.partitions.values():
            placement.add_existing(state.replicas)
        replicas = [placement.place() for _ in range(more)]
    return _partition_records(image, topic.topic_id, before, replicas)
