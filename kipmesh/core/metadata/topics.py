"""CreateTopics, DeleteTopics and CreatePartitions: Kafka's checks and errors, one answer a topic.

`__cluster_metadata` is refused everywhere. A request's topics do not see each other but for their names; those that
are refused leave the others alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kipmesh import messages as m
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.configs import checked_value
from kipmesh.core.metadata.decision import ControllerState, Decision, check_replicas, find_topic, refusal
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, TOPIC_RESOURCE, MetadataImage, TopicState, unified
from kipmesh.core.metadata.placement import Placement
from kipmesh.core.metadata.states import new_directory

TOPIC_NAME_LENGTH_MAX = 249
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")

Replicas = Sequence[int]


def check_topic_name(name: str) -> None:
    """Kafka's rules for names; raises KafkaError(INVALID_TOPIC_EXCEPTION)."""
    fault = None
    if not name or name in (".", ".."):
        fault = f"{name!r} is not a topic name"
    elif len(name) > TOPIC_NAME_LENGTH_MAX:
        fault = f"a topic name has at most {TOPIC_NAME_LENGTH_MAX} characters"
    elif not _NAME_CHARACTERS.issuperset(name):
        fault = f"topic name {name!r} has characters other than a-z, A-Z, 0-9, '.', '_', '-'"
    if fault is not None:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, fault)


def create_topics(controller: ControllerState, request: m.CreateTopicsRequest) -> Decision[m.CreateTopicsResponse]:
    """CreateTopics: create topics, or only say whether they could be."""
    image = controller.image
    records: list[r.Record] = []
    results = []
    counts = Counter(topic.name for topic in request.topics)
    unified_names: dict[str, str] = {}
    room = controller.config.max_partitions_per_request
    for topic in {topic.name: topic for topic in request.topics}.values():
        try:
            if counts[topic.name] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"the request has topic {topic.name!r} more than once")
            _check_new_name(image, topic.name, unified_names)
            configs = _checked_configs(topic)
            replicas = _replicas_of_new_topic(controller, topic, room)
        except KafkaError as error:
            results.append(m.CreatableTopicResult(topic.name, b"", error.code, refusal(error.message)))
            continue
        unified_names[unified(topic.name)] = topic.name
        room -= len(replicas)
        topic_id = b""
        if not request.validate_only:
            topic_id = _new_topic_id(controller)
            records.append(r.TopicRecord(topic.name, topic_id))
            records += [r.ConfigRecord(TOPIC_RESOURCE, topic.name, name, value) for name, value in configs.items()]
            records += _partition_records(image, topic_id, 0, replicas)
        results.append(
            m.CreatableTopicResult(
                topic.name, topic_id, num_partitions=len(replicas), replication_factor=len(replicas[0])
            )
        )
    return Decision(records, m.CreateTopicsResponse(topics=tuple(results)))


def _new_topic_id(controller: ControllerState) -> bytes:
    topic_id = controller.new_topic_id()
    while topic_id in controller.image.topics:
        topic_id = controller.new_topic_id()
    return topic_id


def _check_not_internal(name: str) -> None:
    if name == CLUSTER_METADATA_TOPIC:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"topic {name!r} is the cluster's own")


def _check_new_name(image: MetadataImage, name: str, unified_names: dict[str, str]) -> None:
    _check_not_internal(name)
    check_topic_name(name)
    if name in image.topic_names:
        raise KafkaError(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {name!r} exists")
    if "." in name or "_" in name:
        colliding = image.unified_names.get(unified(name)) or unified_names.get(unified(name))
        if colliding is not None:
            text = f"topic {name!r} collides with {colliding!r} in the names of metrics"
            raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, text)


def _replicas_of_new_topic(controller: ControllerState, topic: m.CreatableTopic, room: int) -> Sequence[Replicas]:
    image, config = controller.image, controller.config
    if topic.assignments:
        if topic.num_partitions != -1 or topic.replication_factor != -1:
            text = "with an assignment, number of partitions and replication factor are -1"
            raise KafkaError(ErrorCode.INVALID_REQUEST, text)
        _check_room(len(topic.assignments), room)
        return _assigned(image, topic.assignments)
    count = config.num_partitions if topic.num_partitions == -1 else topic.num_partitions
    if count <= 0:
        raise KafkaError(ErrorCode.INVALID_PARTITIONS, f"{count} is not a number of partitions")
    _check_room(count, room)
    factor = topic.replication_factor
    if factor == -1:
        factor = max(1, min(config.default_replication_factor, len(image.brokers)))
    placement = _placement(image, factor)
    return [placement.place() for _ in range(count)]


def _checked_configs(topic: m.CreatableTopic) -> dict[str, str]:
    configs: dict[str, str] = {}
    for entry in topic.configs:
        if entry.value is None:
            raise InvalidConfigError(f"configuration key {entry.name!r} has no value")
        configs[entry.name] = checked_value(entry.name, entry.value)
    TopicConfig.parse(configs)
    return configs


def _check_room(count: int, room: int) -> None:
    if count > room:
        text = f"{count} partitions are more than max.partitions.per.request leaves ({room})"
        raise KafkaError(ErrorCode.POLICY_VIOLATION, text)


def _placement(image: MetadataImage, replication_factor: int) -> Placement:
    replica_counts = {broker_id: len(image.partitions_of_broker(broker_id)) for broker_id in image.brokers}
    try:
        return Placement(image.brokers.values(), replica_counts, replication_factor)
    except ValueError as error:
        raise KafkaError(ErrorCode.INVALID_REPLICATION_FACTOR, f"cannot place {error}") from None


def _assigned(image: MetadataImage, assignments: Sequence[m.CreatableReplicaAssignment]) -> list[Replicas]:
    by_index = {assignment.partition_index: tuple(assignment.broker_ids) for assignment in assignments}
    if sorted(by_index) != list(range(len(assignments))):
        text = "the partitions of an assignment are 0, 1, 2 ..., each once"
        raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)
    replicas: list[Replicas] = [by_index[index] for index in range(len(assignments))]
    _check_assignment(image, replicas, len(replicas[0]))
    return replicas


def _check_assignment(image: MetadataImage, replicas: Sequence[Replicas], factor: int) -> None:
    for partition in replicas:
        if not partition or len(partition) != factor:
            text = f"partitions have {len(partition)} and {factor} replicas"
            raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)
        check_replicas(image, partition)
        if not any(map(image.can_lead, partition)):
            raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"all brokers of {list(partition)} are fenced")


def _partition_records(
    image: MetadataImage, topic_id: bytes, first: int, replicas: Sequence[Replicas]
) -> list[r.PartitionRecord]:
    can_lead = {broker_id for broker_id, broker in image.brokers.items() if broker.can_lead}
    directory = {broker_id: new_directory(broker) for broker_id, broker in image.brokers.items()}
    records = []
    for index, brokers in enumerate(replicas, first):
        isr = tuple([broker for broker in brokers if broker in can_lead])
        records.append(
            r.PartitionRecord(
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


def delete_topics(controller: ControllerState, request: m.DeleteTopicsRequest) -> Decision[m.DeleteTopicsResponse]:
    """DeleteTopics: by name or by id."""
    records: list[r.Record] = []
    results = []
    seen: set[bytes] = set()
    for asked in request.topics:
        try:
            topic = _to_delete(controller.image, asked)
            if topic.topic_id in seen:
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"the request has topic {topic.name!r} more than once")
        except KafkaError as error:
            results.append(m.DeletableTopicResult(asked.name, asked.topic_id, error.code, refusal(error.message)))
            continue
        seen.add(topic.topic_id)
        records.append(r.RemoveTopicRecord(topic.topic_id))
        results.append(m.DeletableTopicResult(topic.name, topic.topic_id))
    return Decision(records, m.DeleteTopicsResponse(responses=tuple(results)))


def _to_delete(image: MetadataImage, asked: m.DeleteTopicState) -> TopicState:
    name = asked.name or ""
    _check_not_internal(name)
    if not asked.topic_id:
        return find_topic(image, name)
    if asked.name is not None:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "a topic is named by its name or by its id, not by both")
    topic = image.topics.get(asked.topic_id)
    if topic is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_ID, f"no topic of id {asked.topic_id.hex()}")
    return topic


def create_partitions(
    controller: ControllerState, request: m.CreatePartitionsRequest
) -> Decision[m.CreatePartitionsResponse]:
    """CreatePartitions: give topics more partitions."""
    records: list[r.Record] = []
    results = []
    seen: set[str] = set()
    room = controller.config.max_partitions_per_request
    for asked in request.topics:
        try:
            if asked.name in seen:
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"the request has topic {asked.name!r} more than once")
            seen.add(asked.name)
            added = _more_partitions(controller.image, asked, room)
        except KafkaError as error:
            results.append(m.CreatePartitionsTopicResult(asked.name, error.code, refusal(error.message)))
            continue
        room -= len(added)
        if not request.validate_only:
            records += added
        results.append(m.CreatePartitionsTopicResult(asked.name))
    return Decision(records, m.CreatePartitionsResponse(results=tuple(results)))


def _more_partitions(image: MetadataImage, asked: m.CreatePartitionsTopic, room: int) -> list[r.PartitionRecord]:
    _check_not_internal(asked.name)
    topic = find_topic(image, asked.name)
    before = len(topic.partitions)
    if asked.count <= before:
        text = f"topic {asked.name!r} has {before} partitions, which cannot become {asked.count}"
        raise KafkaError(ErrorCode.INVALID_PARTITIONS, text)
    more = asked.count - before
    _check_room(more, room)
    factor = len(topic.partitions[0].replicas)
    if asked.assignments:
        replicas: list[Replicas] = [tuple(assignment.broker_ids) for assignment in asked.assignments]
        if len(replicas) != more:
            text = f"{more} partitions are new, {len(replicas)} are assigned"
            raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)
        _check_assignment(image, replicas, factor)
    else:
        placement = _placement(image, factor)
        for state in topic.partitions.values():
            placement.add_existing(state.replicas)
        replicas = [placement.place() for _ in range(more)]
    return _partition_records(image, topic.topic_id, before, replicas)
