"""The records of `__consumer_offsets`: Kafka's keys, values and versions, byte for byte.

A record's key starts with its type: OffsetCommitKey (0 and 1, they are the same), GroupMetadataKey (2). A record
without a value is a tombstone. What other types say (3 and above: Kafka's newer group protocols) is not ours, and is
skipped by `decode_record`.

Invariant: `decode_record(*encode_record(r)) == r` for each record that the coordinator makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.group.versioned import VersionedSchema

OFFSET_COMMIT_KEY_VERSIONS = (0, 1)
GROUP_METADATA_KEY_VERSION = 2
OFFSET_COMMIT_VALUE_VERSION = 3
OFFSET_COMMIT_EXPIRING_VERSION = 1
"""The one version that can say when an offset expires; written only for offsets that came with it."""
GROUP_METADATA_VALUE_VERSION = 3


class OffsetCommitKey(NamedTuple):
    """Whose offset, and of which partition."""

    group: str = ""
    topic: str = ""
    partition: int = 0


class OffsetCommitValue(NamedTuple):
    """A committed offset; `expire_timestamp` is -1 unless a commit of an old version named it."""

    offset: int = 0
    leader_epoch: int = -1
    metadata: str = ""
    commit_timestamp: int = 0
    expire_timestamp: int = -1


class GroupMetadataKey(NamedTuple):
    """Which group."""

    group: str = ""


class MemberMetadata(NamedTuple):
    """A member as it was when its generation became stable."""

    member_id: str = ""
    group_instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout: int = -1
    session_timeout: int = 0
    subscription: bytes = b""
    assignment: bytes = b""


class GroupMetadataValue(NamedTuple):
    """A group's generation; without members it is empty since `current_state_timestamp`."""

    protocol_type: str = ""
    generation: int = 0
    protocol: str | None = None
    leader: str | None = None
    current_state_timestamp: int = -1
    members: Sequence[MemberMetadata] = ()


class OffsetRecord(NamedTuple):
    """An offset, or that it is gone (None)."""

    key: OffsetCommitKey
    value: OffsetCommitValue | None


class GroupRecord(NamedTuple):
    """A group's generation, or that the group is gone (None)."""

    key: GroupMetadataKey
    value: GroupMetadataValue | None


Record: TypeAlias = OffsetRecord | GroupRecord

_OFFSET_KEY = VersionedSchema(
    OffsetCommitKey, ("group string", "topic string", "partition int32"), versions=OFFSET_COMMIT_KEY_VERSIONS
)
_GROUP_KEY = VersionedSchema(GroupMetadataKey, ("group string",), versions=(2, 2))
_OFFSET_VALUE = VersionedSchema(
    OffsetCommitValue,
    (
        "offset int64",
        "leader_epoch int32 3+",
        "metadata string",
        "commit_timestamp int64",
        "expire_timestamp int64 1-1",
    ),
    versions=(0, 4),
    flexible_since=4,
)
_MEMBER = VersionedSchema(
    MemberMetadata,
    (
        "member_id string",
        "group_instance_id string? 3+",
        "client_id string",
        "client_host string",
        "rebalance_timeout int32 1+",
        "session_timeout int32",
        "subscription bytes",
        "assignment bytes",
    ),
)
_GROUP_VALUE = VersionedSchema(
    GroupMetadataValue,
    (
        "protocol_type string",
        "generation int32",
        "protocol string?",
        "leader string?",
        "current_state_timestamp int64 2+",
        "members []member",
    ),
    {"member": _MEMBER},
    versions=(0, 4),
    flexible_since=4,
)


def encode_record(record: Record) -> tuple[bytes, bytes | None]:
    """Key and value as they are in the log; raises ValueError for what they cannot say."""
    if isinstance(record, OffsetRecord):
        key = _OFFSET_KEY.encode(record.key, OFFSET_COMMIT_KEY_VERSIONS[1])
        if record.value is None:
            return key, None
        expires = record.value.expire_timestamp != -1
        version = OFFSET_COMMIT_EXPIRING_VERSION if expires else OFFSET_COMMIT_VALUE_VERSION
        return key, _OFFSET_VALUE.encode(record.value, version)
    key = _GROUP_KEY.encode(record.key, GROUP_METADATA_KEY_VERSION)
    return key, None if record.value is None else _GROUP_VALUE.encode(record.value, GROUP_METADATA_VALUE_VERSION)


def decode_record(key: bytes | None, value: bytes | None) -> Record | None:
    """The record, None for one of another kind of group; raises CorruptRecordError."""
    if key is None or len(key) < 2:
        raise CorruptRecordError("a record of __consumer_offsets without a key")
    kind = int.from_bytes(key[:2], "big", signed=True)
    if kind in OFFSET_COMMIT_KEY_VERSIONS:
        return OffsetRecord(_OFFSET_KEY.decode(key), None if value is None else _OFFSET_VALUE.decode(value))
    if kind == GROUP_METADATA_KEY_VERSION:
        return GroupRecord(_GROUP_KEY.decode(key), None if value is None else _GROUP_VALUE.decode(value))
    return None
