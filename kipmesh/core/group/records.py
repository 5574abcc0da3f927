"""The bytes of consumer groups: the records of `__consumer_offsets`, and what consumers exchange in a group.

A record's key starts with its type: OffsetCommitKey (0 and 1, they are the same), GroupMetadataKey (2). A record
without a value is a tombstone. What other types say (3 and above: Kafka's newer group protocols) is not ours, and is
skipped by `decode_record`.

Consumers exchange Kafka's ConsumerProtocolSubscription and -Assignment through the coordinator. To the coordinator both
are bytes, but for the topics of a subscription, which it needs to expire offsets. Versions 0 to 3 are written, newer
ones are read as version 3, as Kafka's consumers do: they may only add to the end.

Invariants: `decode_record(*encode_record(r)) == r` for each record that the coordinator makes;
`decode(of, encode(value, v)) == value` for each value whose fields `v` has; bytes that are not a whole message raise
CorruptRecordError only.
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
"""The one version that can say when an offset expires; written only for offsets that came with it."""
GROUP_METADATA_VALUE_VERSION = 3

PROTOCOL_TYPE = "consumer"
HIGHEST_VERSION = 3

Partition = tuple[str, int]
"""(topic, partition)."""


def encode(value: Message, version: int) -> bytes:
    """Return the version and the value, without fields that the version lacks.

    Raises ValueError for a value that a field cannot state.
    """
    out = Out()
    out += _VERSION.pack(version)
    try:
        record_codec(type(value), version, strict=False).write(out, value)
    except (struct.error, AttributeError) as error:
        raise ValueError(f"{type(value).__name__}: {error}") from None
    return bytes(out)


def decode(of: type[_M], data: bytes, *, newer_versions_extend: bool = False, is_prefix: bool = False) -> _M:
    """Return the value of a whole message. Raises CorruptRecordError, also for an unknown version.

    With `newer_versions_extend` a newer version is read as the last known one, and what follows is ignored. With
    `is_prefix` whatever follows the value is ignored.
    """
    key = of.record_key
    if len(data) < _VERSION.size:
        raise CorruptRecordError(f"{of.__name__}: {len(data)} bytes")
    (version,) = _VERSION.unpack_from(data)
    is_newer = version > key.versions.last
    if version < key.versions.first or (is_newer and not newer_versions_extend):
        raise CorruptRecordError(f"version {version} of {of.__name__}")
    try:
        value, end = record_codec(of, min(version, key.versions.last), strict=False).read(
            data, _VERSION.size, max(ITEMS_MAX, len(data))
        )
    except MalformedError as error:
        raise CorruptRecordError(str(error)) from None
    if end != len(data) and not is_newer and not is_prefix:
        raise CorruptRecordError(f"{len(data) - end} bytes are left after {of.__name__}")
    found: _M = value
    return found


# --- records of __consumer_offsets


class OffsetRecord(NamedTuple):
    """An offset, or that it is gone (None)."""

    key: OffsetCommitKey
    value: OffsetCommitValue | None


class GroupRecord(NamedTuple):
    """A group's generation, or that the group is gone (None)."""

    key: GroupMetadataKey
    value: GroupMetadataValue | None


Record: TypeAlias = OffsetRecord | GroupRecord


def encode_record(record: Record) -> tuple[bytes, bytes | None]:
    """Key and value as they are in the log; raises ValueError for what they cannot say."""
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
    """The record, None for one of another kind of group; raises CorruptRecordError."""
    if key is None or len(key) < 2:
        raise CorruptRecordError("a record of __consumer_offsets without a key")
    kind = int.from_bytes(key[:2], "big", signed=True)
    if kind in OFFSET_COMMIT_KEY_VERSIONS:
        return OffsetRecord(decode(OffsetCommitKey, key), None if value is None else decode(OffsetCommitValue, value))
    if kind == GROUP_METADATA_KEY_VERSION:
        return GroupRecord(decode(GroupMetadataKey, key), None if value is None else decode(GroupMetadataValue, value))
    return None


# --- what consumers exchange


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
