"""Kafka's control record LeaderChangeMessage, version 0: the first record of every epoch.

It says who leads and who voted for it. Until a record of the leader's own epoch is on a majority nothing is committed,
so a leader that has nothing to append appends this.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError

LEADER_CHANGE_TYPE = 2

_KEY = struct.Struct(">hh")
_HEAD = struct.Struct(">hi")
_VOTER = struct.Struct(">i")
_VOTERS_MAX = 126  # one byte of Kafka's compact length


class LeaderChange(NamedTuple):
    """The content of the record."""

    leader_id: int
    voters: tuple[int, ...]
    granting_voters: tuple[int, ...]


def encode_leader_change(change: LeaderChange) -> tuple[bytes, bytes]:
    """Key and value of the record."""
    value = bytearray(_HEAD.pack(0, change.leader_id))
    for ids in (change.voters, change.granting_voters):
        value += _count(ids)
        for voter in ids:
            value += _VOTER.pack(voter) + b"\0"
    return _KEY.pack(0, LEADER_CHANGE_TYPE), bytes(value + b"\0")


def decode_leader_change(key: bytes | None, value: bytes | None) -> LeaderChange | None:
    """The content; None for a control record of another type. CorruptRecordError."""
    try:
        _, kind = _KEY.unpack(key or b"")
        if kind != LEADER_CHANGE_TYPE:
            return None
        data = value or b""
        _, leader_id = _HEAD.unpack_from(data)
        position, lists = _HEAD.size, []
        for _ in range(2):
            count, position = data[position] - 1, position + 1
            ids = [_VOTER.unpack_from(data, position + 5 * number)[0] for number in range(count)]
            lists.append(tuple(ids))
            position += 5 * count
    except (struct.error, IndexError) as error:
        raise CorruptRecordError(f"a leader change record is cut: {error}") from error
    return LeaderChange(leader_id, *lists)


def leader_change_batch(change: LeaderChange, epoch: int, now_ms: int) -> bytes:
    """A control batch for `Log.append_as_leader`, which gives it its offset."""
    return record_batch.build(
        [encode_leader_change(change)], base_offset=0, leader_epoch=epoch, timestamp_ms=now_ms, is_control=True
    )


def _count(ids: Sequence[int]) -> bytes:
    if len(ids) > _VOTERS_MAX:
        raise ValueError(f"{len(ids)} voters, at most {_VOTERS_MAX}")
    return bytes([len(ids) + 1])
