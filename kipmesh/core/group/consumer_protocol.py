"""What consumers tell each other through the coordinator: Kafka's ConsumerProtocolSubscription and -Assignment.

To the coordinator both are bytes, but for the topics of a subscription, which it looks at to expire offsets. Versions
0 to 3 are written, newer ones are read as version 3, as Kafka's consumers do: they may only add to the end.
"""

from __future__ import annotations

from collections.abc import Iterable

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.group.versioned import decode, encode
from kipmesh.messages.records.groups import Assignment as Assignment
from kipmesh.messages.records.groups import SubscribedTopics, TopicPartitionList
from kipmesh.messages.records.groups import Subscription as Subscription

PROTOCOL_TYPE = "consumer"
HIGHEST_VERSION = 3

Partition = tuple[str, int]
"""(topic, partition)."""


def encode_subscription(subscription: Subscription, version: int = HIGHEST_VERSION) -> bytes:
    """The bytes of JoinGroup's metadata."""
    return encode(subscription, version)


def decode_subscription(data: bytes) -> Subscription:
    """What JoinGroup's metadata says; raises CorruptRecordError."""
    return decode(Subscription, data, newer_versions_extend=True)


def encode_assignment(assignment: Assignment, version: int = HIGHEST_VERSION) -> bytes:
    """The bytes of SyncGroup's assignment."""
    return encode(assignment, version)


def decode_assignment(data: bytes) -> Assignment:
    """What SyncGroup's assignment says, nothing at all for no bytes; raises CorruptRecordError."""
    if not data:
        return Assignment()
    return decode(Assignment, data, newer_versions_extend=True)


def subscribed_topics(data: bytes) -> frozenset[str] | None:
    """The topics of a subscription of whatever version, None where the bytes are not one."""
    try:
        found = decode(SubscribedTopics, data, newer_versions_extend=True, is_prefix=True)
    except CorruptRecordError:
        return None
    return frozenset(found.topics)


def by_topic(partitions: Iterable[Partition]) -> tuple[TopicPartitionList, ...]:
    """Partitions as the protocol lists them, in order."""
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions):
        topics.setdefault(topic, []).append(partition)
    return tuple([TopicPartitionList(topic, tuple(numbers)) for topic, numbers in topics.items()])


def flat(lists: Iterable[TopicPartitionList]) -> list[Partition]:
    """The same, one by one."""
    return [(one.topic, partition) for one in lists for partition in one.partitions]
