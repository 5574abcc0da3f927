"""Encoding of metadata records in the log of `__cluster_metadata-0`. `kipmesh.messages.records.metadata` declares them.

A frame is the frame version 1, record type and version as unsigned varints, then the body, as in Apache Kafka. Records
are written in the highest version that `METADATA_VERSION_LEVEL` allows.

Nearly all records of a snapshot are PartitionRecords of one shape: version 2, fewer than 127 replicas, no reassignment,
no tagged field. `encode_partition` and `decode_partition` are fast paths for that shape and return None for any other.

Invariants: `decode_record(encode_record(r)) == r`; an unknown type or version raises CorruptRecordError; the fast paths
agree with the generic codec.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from kipmesh.core.errors import CorruptRecordError
from kipmesh.messages.kafka import MalformedError, Out, put_varint, read_varint, record_codec
from kipmesh.messages.records import metadata as declarations
from kipmesh.messages.records.metadata import *  # noqa: F403 - the records of this log
from kipmesh.messages.records.metadata import KIPMESH_TAG as KIPMESH_TAG
from kipmesh.messages.records.metadata import ZERO_UUID as ZERO_UUID
from kipmesh.messages.records.metadata import PartitionRecord
from kipmesh.messages.schema import Message, declared_in

METADATA_VERSION = "metadata.version"
METADATA_VERSION_LEVEL = 25
"""Kafka's 4.0-IV3, which Kafka 4.0 and later know. The record versions here belong to it."""

FRAME_VERSION = 1
NO_LEADER = -1
NO_LEADER_CHANGE = -2
"""Value of `PartitionChangeRecord.leader` that keeps the leader."""

Record = Any
"""Any declared metadata record."""

RECORD_TYPES: Sequence[type[Message]] = tuple([one for one in declared_in(declarations) if one.record_key.key >= 0])
_BY_KEY: Mapping[int, type[Message]] = MappingProxyType({one.record_key.key: one for one in RECORD_TYPES})


def encode_record(record: Record, version: int | None = None) -> bytes:
    """Return the encoded record, by default in the highest version of its type.

    Raises ValueError if the version lacks a field that differs from its default, or a value does not fit its field.
    """
    if version is None and type(record) is PartitionRecord:
        frame = _encode_new_partition(record)
        if frame is not None:
            return frame
    key_type: type[Message] = type(record)
    key = key_type.record_key
    if version is None:
        version = key.versions.last
    out = Out()
    out.append(FRAME_VERSION)
    put_varint(out, key.key)
    put_varint(out, version)
    try:
        record_codec(key_type, version).write(out, record)
    except struct.error as error:
        raise ValueError(f"{type(record).__name__}: {error}") from None
    return bytes(out)


def _encode_new_partition(record: PartitionRecord) -> bytes | None:
    """Return the frame of a partition, or None if the generic encoder must write it."""
    if (
        record.removing_replicas
        or record.adding_replicas
        or record.leader_recovery_state
        or record.eligible_leader_replicas is not None
        or record.last_known_elr is not None
        or {len(record.topic_id), *map(len, record.directories)} != {len(ZERO_UUID)}
    ):
        return None
    numbers = (record.leader, record.leader_epoch, record.partition_epoch)
    return encode_partition(
        record.topic_id, record.partition_id, record.replicas, record.isr, numbers, record.directories
    )


def decode_record(data: bytes) -> Record:
    """Return the record in a frame. Raises CorruptRecordError for malformed bytes, and for an unknown type or version,
    which the error message names."""
    partition = decode_partition(data)
    if partition is not None:
        return PartitionRecord(*partition)
    try:
        frame_version, at = read_varint(data, 0)
        if frame_version != FRAME_VERSION:
            raise CorruptRecordError(f"metadata record has frame version {frame_version}, expected {FRAME_VERSION}")
        api_key, at = read_varint(data, at)
        version, at = read_varint(data, at)
    except (MalformedError, IndexError) as error:
        raise CorruptRecordError(f"metadata record has a truncated frame: {error}") from None
    of = _BY_KEY.get(api_key)
    if of is None or version not in of.record_key.versions:
        name = of.__name__ if of else "unknown type"
        raise CorruptRecordError(f"unknown metadata record: type {api_key} ({name}) version {version}")
    try:
        record, end = record_codec(of, version).read(data, at)
    except MalformedError as error:
        raise CorruptRecordError(str(error)) from None
    if end != len(data):
        raise CorruptRecordError(f"{len(data) - end} bytes are left after the metadata record")
    return record


# --- fast path for partitions without optional fields

_PREFIX = bytes((1, 3, 2))  # versions of the frame, type, version of the record
_EMPTY_ARRAYS = b"\1\1"  # removing and adding replicas
_COUNT_MAX = 126  # a longer array's length takes two bytes
_REPLICAS_AT = 23
_UUID_BYTES = 16


@lru_cache(maxsize=1024)
def _shape(replicas: int, isr: int, directories: int) -> struct.Struct:
    """Return the layout of a frame with these numbers of elements. The fields are prefix, partition, topic id,
    replicas, ISR, empty arrays, leader, epochs, directories, tag count."""
    return struct.Struct(f">3si16sB{replicas}iB{isr}i2siiiB{directories * _UUID_BYTES}sB")


@lru_cache(maxsize=4096)
def _shared(directories: bytes) -> tuple[bytes, ...]:
    """Split concatenated directory ids. While cached, equal ids share one object to save memory."""
    return tuple([_shared_id(directories[at : at + _UUID_BYTES]) for at in range(0, len(directories), _UUID_BYTES)])


@lru_cache(maxsize=4096)
def _shared_id(identity: bytes) -> bytes:
    return identity


def encode_partition(
    topic_id: bytes,
    partition: int,
    replicas: Sequence[int],
    isr: Sequence[int],
    numbers: tuple[int, int, int],
    directories: Sequence[bytes],
) -> bytes | None:
    """Return the frame of a PartitionRecord, or None if the generic encoder must write it.

    `numbers` is (leader, leader epoch, partition epoch).
    """
    count, in_sync, placed = len(replicas), len(isr), len(directories)
    ids = b"".join(directories)
    # struct.pack would pad a short id and truncate a long one.
    if max(count, in_sync, placed) >= _COUNT_MAX or len(topic_id) != _UUID_BYTES or len(ids) != placed * _UUID_BYTES:
        return None
    return _shape(count, in_sync, placed).pack(
        _PREFIX,
        partition,
        topic_id,
        count + 1,
        *replicas,
        in_sync + 1,
        *isr,
        _EMPTY_ARRAYS,
        *numbers,
        placed + 1,
        ids,
        0,
    )


def decode_partition(data: bytes) -> tuple[Any, ...] | None:
    """Return the first eleven fields of the PartitionRecord in the frame `data`, in declaration order.

    Returns None if the generic decoder must read it: for other versions, tagged fields, replicas that are being added
    or removed, lists of more than 126 items, and malformed data.
    """
    if data[:3] != _PREFIX:
        return None
    try:
        count = data[_REPLICAS_AT] - 1
        in_sync_at = _REPLICAS_AT + 1 + 4 * count
        in_sync = data[in_sync_at] - 1
        placed = data[in_sync_at + 15 + 4 * in_sync] - 1
        shape = _shape(count, in_sync, placed)
        if count > _COUNT_MAX or in_sync > _COUNT_MAX or placed > _COUNT_MAX or shape.size != len(data):
            return None
        values = shape.unpack(data)
    except (IndexError, struct.error):  # truncated: the generic codec reports how
        return None
    after_isr = 5 + count + in_sync
    _, leader, leader_epoch, partition_epoch, _, directories, tags = values[after_isr:]
    if tags or values[after_isr] != _EMPTY_ARRAYS:
        return None
    return (
        values[1],
        values[2],
        values[4 : 4 + count],
        values[5 + count : after_isr],
        (),
        (),
        leader,
        0,
        leader_epoch,
        partition_epoch,
        _shared(directories),
    )
