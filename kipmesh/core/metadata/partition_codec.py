"""PartitionRecord, quickly: nearly all of a snapshot is this record, and nearly all of them have the same shape.

The shape is that of version 2 with fewer than 127 replicas, nobody being added or removed and no tagged field. For
anything else each function gives None, and the tables in `records` write or read it.

Invariant: bytes and values are those of the tables, which the tests hold against these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct, error
from typing import Any

_PREFIX = bytes((1, 3, 2))  # versions of the frame, type, version of the record
_EMPTY_ARRAYS = b"\1\1"  # removing and adding replicas
_COUNT_MAX = 126  # a longer array's length takes two bytes
_REPLICAS_AT = 23
_UUID_BYTES = 16


@lru_cache(maxsize=1024)
def _shape(replicas: int, isr: int, directories: int) -> Struct:
    """Prefix, partition, topic id, replicas, isr, empty arrays, leader, epochs, directories, number of tags."""
    return Struct(f">3si16sB{replicas}iB{isr}i2siiiB{directories * _UUID_BYTES}sB")


@lru_cache(maxsize=4096)
def _shared(directories: bytes) -> tuple[bytes, ...]:
    """Ids from their bytes; equal ones are one object, as long as there are not too many."""
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
    """The frame of a partition; `numbers` are leader, leader epoch and partition epoch."""
    count, in_sync, placed = len(replicas), len(isr), len(directories)
    ids = b"".join(directories)
    # Struct would fill up a short id, and cut a long one.
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
    """The fields of the record, if `data` has the usual shape."""
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
    except (IndexError, error):  # cut: the tables say how
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
