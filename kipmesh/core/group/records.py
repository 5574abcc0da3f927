"""The records of `__consumer_offsets`: Kafka's keys, values and versions, byte for byte.

A record's key starts with its type: OffsetCommitKey (0 and 1, they are the same), GroupMetadataKey (2). A record
without a value is a tombstone. What other types say (3 and above: Kafka's newer group protocols) is not ours, and is
skipped by `decode_record`.

Invariant: `decode_record(*encode_record(r)) == r` for each record that the coordinator makes.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.group.versioned import decode, encode
from kipmesh.messages.records.groups import GroupMetadataKey as GroupMetadataKey
from kipmesh.messages.records.groups import GroupMetadataValue as GroupMetadataValue
from kipmesh.messages.records.groups import MemberMetadata as MemberMetadata
from kipmesh.messages.records.groups import OffsetCommitKey as OffsetCommitKey
from kipmesh.messages.records.groups import OffsetCommitValue as OffsetCommitValue

OFFSET_COMMIT_KEY_VERSIONS = (0, 1)
GROUP_METADATA_KEY_VERSION = 2
OFFSET_COMMIT_VALUE_VERSION = 3
OFFSET_COMMIT_EXPIRING_VERSION = 1
"""The one version that can say when an offset expires; written only for offsets that came with it."""
GROUP_METADATA_VALUE_VERSION = 3


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
