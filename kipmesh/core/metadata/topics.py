"""CreateTopics, DeleteTopics and CreatePartitions, with Kafka's checks, errors and one result per topic.

`__cluster_metadata` is always refused. The topics of a request are independent except for their names; an error of one
does not affect the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kipmesh import messages as m
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.configs import checked_value
from kipmesh.core.metadata.decision import ControllerState, Decision, check_replicas, error_text, find_topic
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, TOPIC_RESOURCE, MetadataImage, TopicState
from kipmesh.core.metadata.placement import Placement
from kipmesh.core.metadata.states import metric_name, new_directory

TOPIC_NAME_LENGTH_MAX = 249
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")

Replicas = Sequence[int]


def check_topic_name(name: str) -> None:
    """Raise KafkaError(INVALID_TOPIC_EXCEPTION) unless the name is valid in Kafka: 1 to 249 characters from a-z, A-Z,
    0-9, `.`, `_` and `-`, but neither `.` nor `..` as the whole name."""
    fault = None
    if not name or name in (".", ".."):
        fault = f"topic name {name!r} is empty, '.' or '..'"
    elif len(name) > TOPIC_NAME_LENGTH_MAX:
        fault = f"a topic name must have at most {TOPIC_NAME_LENGTH_MAX} characters, got {len(name)}"
    elif not _NAME_CHARACTERS.issuperset(name):
        fault = f"topic name {name!r} has characters other than a-z, A-Z, 0-9, '.', '_', '-'"
    if fault is not None:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, fault)


def create_topics(controller: ControllerState, request: m.CreateTopicsRequest) -> Decision[m.CreateTopicsResponse]:
    """Decide CreateTopics: create topics, or only validate them (`validate_only`), which writes no records.

    Error codes per topic: INVALID_REQUEST, INVALID_TOPIC_EXCEPTION (also for names that differ only in `.` and `_`),
    TOPIC_ALREADY_EXISTS, INVALID_CONFIG, INVALID_PARTITIONS, INVALID_REPLICATION_FACTOR, INVALID_REPLICA_ASSIGNMENT,
    POLICY_VIOLATION (too many partitions in the request).
    """
    image = controller.image
    records: list[r.Record] = []
    results = []
    counts = Counter(topic.name for topic in request.topics)
    metric_names: dict[str, str] = {}
    room = controller.config.max_partitions_per_request
    for topic in {topic.name: topic for topic in request.topics}.values():
        try:
            if counts[topic.name] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"the request has topic {topic.name!r} more than once")
            _check_new_name(image, topic.name, metric_names)
            configs = _checked_configs(topic)
            replicas = _replicas_of_new_topic(controller, topic, room)
        except KafkaError as error:
            results.append(m.CreatableTopicResult(topic.name, b"", error.code, error_text(error.message)))
            continue
        metric_names[metric_name(topic.name)] = topic.name
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
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"topic {name!r} is internal and cannot be changed")


def _check_new_name(image: MetadataImage, name: str, metric_names: dict[str, str]) -> None:
    _check_not_internal(name)
    check_topic_name(name)
    if name in image.topic_names:
        raise KafkaError(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {name!r} already exists")
    if "." in name or "_" in name:
        colliding = image.metric_names.get(metric_name(name)) or metric_names.get(metric_name(name))
        if colliding is not None:
            text = f"topic {name!r} collides with {colliding!r} in metric names, where '.' and '_' are the same"
            raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, text)


def _replicas_of_new_topic(controller: ControllerState, topic: m.CreatableTopic, room: int) -> Sequence[Replicas]:
    image, config = controller.image, controller.config
    if topic.assignments:
        if topic.num_partitions != -1 or topic.replication_factor != -1:
            text = "num_partitions and replication_factor must be -1 if replicas are assigned"
            raise KafkaError(ErrorCode.INVALID_REQUEST, text)
        _check_room(len(topic.assignments), room)
        return _assigned_replicas(image, topic.assignments)
    count = config.num_partitions if topic.num_partitions == -1 else topic.num_partitions
    if count <= 0:
        raise KafkaError(ErrorCode.INVALID_PARTITIONS, f"the number of partitions must be at least 1, got {count}")
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
        text = f"{count} partitions exceed what max.partitions.per.request leaves for this request ({room})"
        raise KafkaError(ErrorCode.POLICY_VIOLATION, text)


def _placement(image: MetadataImage, replication_factor: int) -> Placement:
    replica_counts = {broker_id: len(image.partitions_of_broker(broker_id)) for broker_id in image.brokers}
    try:
        return Placement(image.brokers.values(), replica_counts, replication_factor)
    except ValueError as error:
        raise KafkaError(ErrorCode.INVALID_REPLICATION_FACTOR, f"cannot place {error}") from None


def _assigned_replicas(image: MetadataImage, assignments: Sequence[m.CreatableReplicaAssignment]) -> list[Replicas]:
    by_index = {assignment.partition_index: tuple(assignment.broker_ids) for assignment in assignments}
    if sorted(by_index) != list(range(len(assignments))):
        text = f"assigned partitions must be 0 to {len(assignments) - 1}, each once"
        raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)
    replicas: list[Replicas] = [by_index[index] for index in range(len(assignments))]
    _check_assignment(image, replicas, len(replicas[0]))
    return replicas


def _check_assignment(image: MetadataImage, replicas: Sequence[Replicas], factor: int) -> None:
    for partition in replicas:
        if not partition or len(partition) != factor:
            text = f"each partition must have {factor} replicas, got {list(partition)}"
            raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)
        check_replicas(image, partition)
        if not any(map(image.can_lead, partition)):
            raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"none of the replicas {list(partition)} can lead")


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
    """Decide DeleteTopics: delete topics by name or id.

    Error codes per topic: INVALID_REQUEST (a topic that is named twice or by both name and id, or
    `__cluster_metadata`), UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID.
    """
    records: list[r.Record] = []
    results = []
    seen: set[bytes] = set()
    for requested in request.topics:
        try:
            topic = _to_delete(controller.image, requested)
            if topic.topic_id in seen:
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"the request has topic {topic.name!r} more than once")
        except KafkaError as error:
            text = error_text(error.message)
            results.append(m.DeletableTopicResult(requested.name, requested.topic_id, error.code, text))
            continue
        seen.add(topic.topic_id)
        records.append(r.RemoveTopicRecord(topic.topic_id))
        results.append(m.DeletableTopicResult(topic.name, topic.topic_id))
    return Decision(records, m.DeleteTopicsResponse(responses=tuple(results)))


def _to_delete(image: MetadataImage, requested: m.DeleteTopicState) -> TopicState:
    name = requested.name or ""
    _check_not_internal(name)
    if not requested.topic_id:
        return find_topic(image, name)
    if requested.name is not None:
        text = f"topic {name!r} is named by its name and its id; use one of them"
        raise KafkaError(ErrorCode.INVALID_REQUEST, text)
    topic = image.topics.get(requested.topic_id)
    if topic is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_ID, f"no topic has id {requested.topic_id.hex()}")
    return topic


def create_partitions(
    controller: ControllerState, request: m.CreatePartitionsRequest
) -> Decision[m.CreatePartitionsResponse]:
    """Decide CreatePartitions: add partitions to topics, or only validate the request (`validate_only`), which writes
    no records.

    Error codes per topic: INVALID_REQUEST, UNKNOWN_TOPIC_OR_PARTITION, INVALID_PARTITIONS (not above the current
    number), INVALID_REPLICATION_FACTOR, INVALID_REPLICA_ASSIGNMENT, POLICY_VIOLATION (too many partitions in the
    request).
    """
    records: list[r.Record] = []
    results = []
    seen: set[str] = set()
    room = controller.config.max_partitions_per_request
    for requested in request.topics:
        try:
            if requested.name in seen:
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"the request has topic {requested.name!r} more than once")
            seen.add(requested.name)
            added = _more_partitions(controller.image, requested, room)
        except KafkaError as error:
            results.append(m.CreatePartitionsTopicResult(requested.name, error.code, error_text(error.message)))
            continue
        room -= len(added)
        if not request.validate_only:
            records += added
        results.append(m.CreatePartitionsTopicResult(requested.name))
    return Decision(records, m.CreatePartitionsResponse(results=tuple(results)))


def _more_partitions(image: MetadataImage, requested: m.CreatePartitionsTopic, room: int) -> list[r.PartitionRecord]:
    _check_not_internal(requested.name)
    topic = find_topic(image, requested.name)
    before = len(topic.partitions)
    if requested.count <= before:
        text = f"topic {requested.name!r} already has {before} partitions; request more, not {requested.count}"
        raise KafkaError(ErrorCode.INVALID_PARTITIONS, text)
    more = requested.count - before
    _check_room(more, room)
    factor = len(topic.partitions[0].replicas)
    if requested.assignments:
        replicas: list[Replicas] = [tuple(assignment.broker_ids) for assignment in requested.assignments]
        if len(replicas) != more:
            text = f"{more} new partitions need {more} assignments, got {len(replicas)}"
            raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)
        _check_assignment(image, replicas, factor)
    else:
        placement = _placement(image, factor)
        for state in topic.partitions.values():
            placement.add_existing(state.replicas)
        replicas = [placement.place() for _ in range(more)]
    return _partition_records(image, topic.topic_id, before, replicas)
