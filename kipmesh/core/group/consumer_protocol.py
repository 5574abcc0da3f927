"""What consumers tell each other through the coordinator: Kafka's ConsumerProtocolSubscription and -Assignment.

To the coordinator both are bytes, but for the topics of a subscription, which it looks at to expire offsets. Versions
0 to 3 are written, newer ones are read as version 3, as Kafka's consumers do: they may only add to the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.group.versioned import VersionedSchema

PROTOCOL_TYPE = "consumer"
HIGHEST_VERSION = 3

Partition = tuple[str, int]
"""(topic, partition)."""


class TopicPartitionList(NamedTuple):
    """Partitions of one topic."""

    topic: str = ""
    partitions: Sequence[int] = ()


class Subscription(NamedTuple):
    """What a member wants, and what it had in `generation_id` (-1: it does not say)."""

    topics: Sequence[str] = ()
    user_data: bytes | None = None
    owned_partitions: Sequence[TopicPartitionList] = ()
    generation_id: int = -1
    rack_id: str | None = None


class Assignment(NamedTuple):
    """What a member gets."""

    assigned_partitions: Sequence[TopicPartitionList] = ()
    user_data: bytes | None = None


class _Topics(NamedTuple):
    topics: Sequence[str] = ()


_PARTITIONS = VersionedSchema(TopicPartitionList, ("topic string", "partitions []int32"))
_STRUCTS = {"partitions": _PARTITIONS}
_SUBSCRIPTION = VersionedSchema(
    Subscription,
    (
        "topics []string",
        "user_data bytes?",
        "owned_partitions []partitions 1+",
        "generation_id int32 2+",
        "rack_id string? 3+",
    ),
    _STRUCTS,
    versions=(0, HIGHEST_VERSION),
    newer_versions_extend=True,
)
_ASSIGNMENT = VersionedSchema(
    Assignment,
    ("assigned_partitions []partitions", "user_data bytes?"),
    _STRUCTS,
    versions=(0, HIGHEST_VERSION),
    newer_versions_extend=True,
)
_JUST_TOPICS = VersionedSchema(_Topics, ("topics []string",), newer_versions_extend=True, is_prefix=True)


def encode_subscription(subscription: Subscription, version: int = HIGHEST_VERSION) -> bytes:
    """The bytes of JoinGroup's metadata."""
    return _SUBSCRIPTION.encode(subscription, version)


def decode_subscription(data: bytes) -> Subscription:
    """What JoinGroup's metadata says; raises CorruptRecordError."""
    found: Subscription = _SUBSCRIPTION.decode(data)
    return found


def encode_assignment(assignment: Assignment, version: int = HIGHEST_VERSION) -> bytes:
    """The bytes of SyncGroup's assignment."""
    return _ASSIGNMENT.encode(assignment, version)


def decode_assignment(data: bytes) -> Assignment:
    """What SyncGroup's assignment says, nothing at all for no bytes; raises CorruptRecordError."""
    if not data:
        return Assignment()
    found: Assignment = _ASSIGNMENT.decode(data)
    return found


def subscribed_topics(data: bytes) -> frozenset[str] | None:
    """The topics of a subscription of whatever version, None where the bytes are not one."""
    try:
        found: _Topics = _JUST_TOPICS.decode(data)
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
    return [(topic, partition) for topic, numbers in lists for partition in numbers]
