"""Log events for the changes that a decision made: registrations, fencing, elections, topics, configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import structlog

from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.elections import RECOVERING
from kipmesh.core.metadata.image import TOPIC_RESOURCE, MetadataDelta, MetadataImage, PartitionState
from kipmesh.core.metadata.states import LeaderExample
from kipmesh.core.scram import NUMBERS

log = structlog.get_logger(__name__)

EXAMPLES_MAX = 3
"""Partitions that the event "leaders elected" describes."""
_MECHANISMS = {number: name for name, number in NUMBERS.items()}


class Counts(NamedTuple):
    """Number of partitions with a new leader, and how many of those leaders were elected uncleanly."""

    elected: int
    unclean: int


def log_decided(
    image: MetadataImage,
    records: Sequence[r.Record],
    before: Sequence[PartitionState | None],
    delta: MetadataDelta,
) -> Counts:
    """Log the changes of `records`, which were applied to `image`, and return the number of elections.

    Args: before: for each record, the previous state of the partition that it changes, or None; delta: the changes of
    the image, including those that a fencing event implies for partitions (630-16).
    """
    for record in records:
        _log_record(image, record)
    for topic in delta.deleted_topics:
        log.info("topic deleted", topic=topic.name, topic_id=topic.topic_id.hex(), partitions=len(topic.partitions))
    return _log_elections(image, records, before, delta)


def _log_record(image: MetadataImage, record: r.Record) -> None:
    match record:
        case r.RegisterBrokerRecord():
            log.info(
                "broker registered",
                broker_id=record.broker_id,
                broker_epoch=record.broker_epoch,
                rack=record.rack,
                endpoints=[f"{end.name}://{end.host}:{end.port}" for end in record.end_points],
            )
        case r.BrokerRegistrationChangeRecord(proven=True):
            pass  # too frequent, and of no use to an operator
        case r.BrokerRegistrationChangeRecord():
            log.info(
                "broker state changed",
                state=_broker_state(record),
                broker_id=record.broker_id,
                broker_epoch=record.broker_epoch,
                in_controlled_shutdown=bool(record.in_controlled_shutdown),
            )
        case r.TopicRecord():
            topic = image.topics.get(record.topic_id)
            partitions = len(topic.partitions) if topic else 0
            log.info("topic created", topic=record.name, topic_id=record.topic_id.hex(), partitions=partitions)
        case r.ConfigRecord():
            resource = "topic" if record.resource_type == TOPIC_RESOURCE else "broker"
            name = {resource: record.resource_name or "all"}
            log.info("configuration changed", **name, key=record.name, value=record.value)
        case r.UserScramCredentialRecord() | r.RemoveUserScramCredentialRecord():
            mechanism = _MECHANISMS.get(record.mechanism, record.mechanism)
            is_deleted = isinstance(record, r.RemoveUserScramCredentialRecord)
            log.info("credential changed", user=record.name, mechanism=mechanism, is_deleted=is_deleted)
        case r.UnregisterBrokerRecord():
            log.info("broker unregistered", broker_id=record.broker_id, broker_epoch=record.broker_epoch)


def _broker_state(record: r.BrokerRegistrationChangeRecord) -> str:
    if record.fenced:
        return "fenced" if record.fenced > 0 else "unfenced"
    return "shutting down" if record.in_controlled_shutdown else "log directories changed"


def _log_elections(
    image: MetadataImage,
    records: Sequence[r.Record],
    before: Sequence[PartitionState | None],
    delta: MetadataDelta,
) -> Counts:
    elected = sum(effect.elected for effect in delta.fencing_effects)
    offline = sum(effect.without_leader for effect in delta.fencing_effects)
    moved = [example for effect in delta.fencing_effects for example in effect.examples]
    unclean = 0
    for record, state in zip(records, before, strict=True):
        if state is None or record.leader == r.NO_LEADER_CHANGE:
            continue
        if record.leader == r.NO_LEADER:
            offline += 1
        else:
            elected += 1
            unclean += record.leader_recovery_state == RECOVERING
        if len(moved) < EXAMPLES_MAX:
            moved.append(LeaderExample((record.topic_id, record.partition_id), state.leader, record.leader))
    if elected or offline:
        examples = [_example(image, example) for example in moved[:EXAMPLES_MAX]]
        log.info("leaders elected", partitions=elected, unclean=unclean, without_leader=offline, examples=examples)
    return Counts(elected, unclean)


def _example(image: MetadataImage, example: LeaderExample) -> str:
    topic_id, partition = example.key
    topic = image.topics.get(topic_id)
    text = f"{topic.name if topic else topic_id.hex()}-{partition}: {example.before} -> {example.after}"
    waiting = image.required_brokers(topic_id, partition)
    return f"{text}, waits for {list(waiting)}" if waiting else text
