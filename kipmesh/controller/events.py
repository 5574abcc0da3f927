"""One line in the log for what a decision changed: registrations, fencing, elections, topics."""

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
_MECHANISMS = {number: name for name, number in NUMBERS.items()}


class Counts(NamedTuple):
    """Partitions that got a leader, and those of them whose leader is not from the last ISR."""

    elected: int
    unclean: int


def log_decided(
    image: MetadataImage,
    records: Sequence[r.Record],
    before: Sequence[PartitionState | None],
    delta: MetadataDelta,
) -> Counts:
    """Tell of records that were applied to the image; `before` has, for each change of a partition, what it was.

    What they imply for the partitions of a broker (630-16) is in the delta.
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
            pass  # many, and nothing that anybody would act on
        case r.BrokerRegistrationChangeRecord():
            what = {1: "broker fenced", -1: "broker unfenced", 0: "broker shutting down"}[record.fenced]
            log.info(
                what,
                broker_id=record.broker_id,
                broker_epoch=record.broker_epoch,
                in_controlled_shutdown=bool(record.in_controlled_shutdown),
            )
        case r.TopicRecord():
            topic = image.topics.get(record.topic_id)
            partitions = len(topic.partitions) if topic else 0
            log.info("topic created", topic=record.name, topic_id=record.topic_id.hex(), partitions=partitions)
        case r.ConfigRecord():
            whose = "topic" if record.resource_type == TOPIC_RESOURCE else "broker"
            name = {whose: record.resource_name or "all"}
            log.info("configuration changed", **name, key=record.name, value=record.value)
        case r.UserScramCredentialRecord() | r.RemoveUserScramCredentialRecord():
            what = "credential set" if isinstance(record, r.UserScramCredentialRecord) else "credential deleted"
            log.info(what, user=record.name, mechanism=_MECHANISMS.get(record.mechanism, record.mechanism))
        case r.UnregisterBrokerRecord():
            log.info("broker unregistered", broker_id=record.broker_id, broker_epoch=record.broker_epoch)


def _log_elections(
    image: MetadataImage,
    records: Sequence[r.Record],
    before: Sequence[PartitionState | None],
    delta: MetadataDelta,
) -> Counts:
    elected = sum(departure.elected for departure in delta.departures)
    offline = sum(departure.without_leader for departure in delta.departures)
    moved = [example for departure in delta.departures for example in departure.examples]
    unclean = 0
    for record, was in zip(records, before, strict=True):
        if was is None or record.leader == r.NO_LEADER_CHANGE:
            continue
        if record.leader == r.NO_LEADER:
            offline += 1
        else:
            elected += 1
            unclean += record.leader_recovery_state == RECOVERING
        if len(moved) < EXAMPLES_MAX:
            moved.append(LeaderExample((record.topic_id, record.partition_id), was.leader, record.leader))
    if elected or offline:
        examples = [_example(image, example) for example in moved[:EXAMPLES_MAX]]
        log.info("leaders elected", partitions=elected, unclean=unclean, without_leader=offline, examples=examples)
    return Counts(elected, unclean)


def _example(image: MetadataImage, example: LeaderExample) -> str:
    topic_id, partition = example.key
    topic = image.topics.get(topic_id)
    text = f"{topic.name if topic else topic_id.hex()}-{partition}: {example.before} -> {example.after}"
    waiting = image.waiting_for(topic_id, partition)
    return f"{text}, waits for {list(waiting)}" if waiting else text
