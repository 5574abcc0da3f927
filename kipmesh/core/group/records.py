"""Encoding of the records of `__consumer_offsets`, and of subscriptions and assignments that consumers exchange.

A record's key starts with its type: OffsetCommitKey (0 and 1, which are equal) or GroupMetadataKey (2). A record
without a value is a tombstone. `decode_record` skips other types (3 and above: Kafka's newer group protocols).

ConsumerProtocolSubscription and -Assignment are opaque to the coordinator, except for the subscribed topics, which it
needs to expire offsets. Versions 0 to 3 are written; newer versions are read as version 3, because they only append
fields.

Invariants: `decode_record(*encode_record(r)) == r` for each record of the coordinator; `decode(type, encode(value, v))
== value` if version `v` has all fields; malformed bytes raise only CorruptRecordError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias, TypeVar

from kipmesh.core.errors import CorruptRecordError
from kipmesh.messages.kafka import ITEMS_MAX, MalformedError, Out, record_codec
from kipmesh.messages.records.groups import Assignment as Assignment
from kipmesh.messages.records.groups import GroupMetadataKey as GroupMetadataKey
from kipmesh.messages.records.groups import GroupMetadataValue as GroupMetadataValue
from kipmesh.messages.records.groups import MemberMetadata as MemberMetadata
from kipmesh.messages.records.groups import OffsetCommitKey as OffsetCommitKey
from kipmesh.messages.records.groups import OffsetCommitValue as OffsetCommitValue
from kipmesh.messages.records.groups import SubscribedTopics
from kipmesh.messages.records.groups import Subscription as Subscription
from kipmesh.messages.records.groups import TopicPartitionList as TopicPartitionList
from kipmesh.messages.schema import Message

_M = TypeVar("_M", bound=Message)
_VERSION = struct.Struct(">h")

OFFSET_COMMIT_KEY_VERSIONS = (0, 1)
GROUP_METADATA_KEY_VERSION = 2
OFFSET_COMMIT_VALUE_VERSION = 3
OFFSET_COMMIT_EXPIRING_VERSION = 1
"""The only version with an expiry time; written only for offsets that were committed with one."""
GROUP_METADATA_VALUE_VERSION = 3

PROTOCOL_TYPE = "consumer"
HIGHEST_VERSION = 3

Partition = tuple[str, int]
"""(topic, partition)."""


def encode(value: Message, version: int) -> bytes:
    """Return the encoded version and value, without fields that the version lacks.

    Raises ValueError for a value that does not fit its field.
    """
    out = Out()
    out += _VERSION.pack(version)
    try:
        record_codec(type(value), version, strict=False).write(out, value)
    except (struct.error, AttributeError) as error:
        raise ValueError(f"{type(value).__name__}: {error}") from None
    return bytes(out)


def decode(of: type[_M], data: bytes, *, newer_versions_extend: bool = False, is_prefix: bool = False) -> _M:
    """Return the message of type `of` that follows its version (int16). Raises CorruptRecordError for malformed bytes
    and unknown versions.

    `newer_versions_extend`: read a newer version as the last known one and ignore the rest. `is_prefix`: ignore bytes
    after the value.
    """
    key = of.record_key
    if len(data) < _VERSION.size:
        raise CorruptRecordError(f"{of.__name__} has no version: {len(data)} bytes")
    (version,) = _VERSION.unpack_from(data)
    is_newer = version > key.versions.last
    if version < key.versions.first or (is_newer and not newer_versions_extend):
        raise CorruptRecordError(f"unknown version {version} of {of.__name__}")
    try:
        value, end = record_codec(of, min(version, key.versions.last), strict=False).read(
            data, _VERSION.size, max(ITEMS_MAX, len(data))
        )
    except MalformedError as error:
        raise CorruptRecordError(str(error)) from None
    if end != len(data) and not is_newer and not is_prefix:
        raise CorruptRecordError(f"{len(data) - end} bytes are left after {of.__name__}")
    decoded: _M = value
    return decoded


# --- records of __consumer_offsets


class OffsetRecord(NamedTuple):
    """A committed offset or, if the value is None, the tombstone that deletes it."""

    key: OffsetCommitKey
    value: OffsetCommitValue | None


class GroupRecord(NamedTuple):
    """A group's generation or, if the value is None, the tombstone that deletes the group."""

    key: GroupMetadataKey
    value: GroupMetadataValue | None


Record: TypeAlias = OffsetRecord | GroupRecord


def encode_record(record: Record) -> tuple[bytes, bytes | None]:
    """Return the encoded key and value; a tombstone's value is None. Raises ValueError for a value that does not fit
    its field."""
    if isinstance(record, OffsetRecord):
        key = encode(record.key, OFFSET_COMMIT_KEY_VERSIONS[1])
        if record.value is None:
            return key, None
        expires = record.value.expire_timestamp != -1
        version = OFFSET_COMMIT_EXPIRING_VERSION if expires else OFFSET_COMMIT_VALUE_VERSION
        return key, encode(record.value, version)
    key = encode(record.key, GROUP_METADATA_KEY_VERSION)
    return key, None if record.value is None else encode(record.value, GROUP_METADATA_VALUE_VERSION)


def decode_record(key: bytes | None, value: bytes | None) -> Record | None:
    """Return the record, or None for a key type of another group protocol. Raises CorruptRecordError for malformed
    bytes or a missing key."""
    if key is None or len(key) < 2:
        raise CorruptRecordError("record of __consumer_offsets has no key")
    kind = int.from_bytes(key[:2], "big", signed=True)
    if kind in OFFSET_COMMIT_KEY_VERSIONS:
        return OffsetRecord(decode(OffsetCommitKey, key), None if value is None else decode(OffsetCommitValue, value))
    if kind == GROUP_METADATA_KEY_VERSION:
        return GroupRecord(decode(GroupMetadataKey, key), None if value is None else decode(GroupMetadataValue, value))
    return None


# --- consumer protocol


def encode_subscription(subscription: Subscription, version: int = HIGHEST_VERSION) -> bytes:
    """Return the metadata of a JoinGroup request, encoded in this version. Raises ValueError for a value that does not
    fit its field."""
    return encode(subscription, version)


def decode_subscription(data: bytes) -> Subscription:
    """Return the subscription in a JoinGroup request's metadata. Raises CorruptRecordError for malformed bytes."""
    return decode(Subscription, data, newer_versions_extend=True)


def encode_assignment(assignment: Assignment, version: int = HIGHEST_VERSION) -> bytes:
    """Return the assignment for a SyncGroup request, encoded in this version. Raises ValueError for a value that does
    not fit its field."""
    return encode(assignment, version)


def decode_assignment(data: bytes) -> Assignment:
    """Return the assignment of a SyncGroup response; empty bytes mean an empty assignment. Raises CorruptRecordError
    for malformed bytes."""
    if not data:
        return Assignment()
    return decode(Assignment, data, newer_versions_extend=True)


def subscribed_topics(data: bytes) -> frozenset[str] | None:
    """Return the topics of a subscription of any version, or None if the bytes are not a subscription."""
    try:
        found = decode(SubscribedTopics, data, newer_versions_extend=True, is_prefix=True)
    except CorruptRecordError:
        return None
    return frozenset(found.topics)


def by_topic(partitions: Iterable[Partition]) -> tuple[TopicPartitionList, ...]:
    """Return the partitions grouped by topic, with topics and partition numbers sorted."""
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions):
        topics.setdefault(topic, []).append(partition)
    return tuple([TopicPartitionList(topic, tuple(numbers)) for topic, numbers in topics.items()])


def flat(lists: Iterable[TopicPartitionList]) -> list[Partition]:
    """Return the (topic, partition) pairs of lists that are grouped by topic."""
    return [(one.topic, partition) for one in lists for partition in one.partitions]
