"""Control records of metadata logs and snapshots, in Kafka's schemas (630-02).

A control record's key is its version (0) and type. Readers skip types that are not listed, and what newer versions add.

The first record of every epoch is LeaderChangeMessage, version 0: it names the leader and the voters that elected it.
A leader without anything else to append appends it, because nothing is committed before a record of the leader's own
epoch is on a majority.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from struct import Struct, error
from typing import NamedTuple, TypeVar

from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError
from kipmesh.messages.kafka import FIXED, Codec, MalformedError, Out, record_codec
from kipmesh.messages.records.control import LeaderChangeMessage, Voter
from kipmesh.messages.records.control import SnapshotFooter as SnapshotFooter
from kipmesh.messages.records.control import SnapshotHeader as SnapshotHeader
from kipmesh.messages.schema import Message

_KEY = Struct(">hh")
_M = TypeVar("_M", bound=Message)


class ControlType(IntEnum):
    """Kafka's control records that a log or a snapshot of metadata can have."""

    LEADER_CHANGE = 2
    SNAPSHOT_HEADER = 3
    SNAPSHOT_FOOTER = 4
    KRAFT_VERSION = 5
    KRAFT_VOTERS = 6


def encode_control(value: Message) -> tuple[bytes, bytes]:
    """Return the key and the value of a control record, in version 0."""
    out = Out()
    record_codec(type(value), 0).write(out, value)
    return _KEY.pack(0, type(value).record_key.key), bytes(out)


def control_type(key: bytes | None) -> int:
    """Return the type that a control record's key states. Raises CorruptRecordError."""
    try:
        return int(_KEY.unpack_from(key or b"")[1])
    except error:
        raise CorruptRecordError("a control record's key is shorter than its version and type") from None


@cache
def _prefix_codec(of: type[Message]) -> Codec:
    """Return the codec of the fields of version 0: newer versions of a fixed layout only add to its end."""
    is_fixed = all(each.type in FIXED for each in of.message_fields)
    return Codec(of, 0, flexible=False) if is_fixed else record_codec(of, 0)


def decode_control(of: type[_M], value: bytes | None) -> _M:
    """Return the value of a control record of type `of`. Raises CorruptRecordError."""
    try:
        found: _M = _prefix_codec(of).read(value or b"")[0]
    except MalformedError as malformed:
        raise CorruptRecordError(f"a control record is cut: {malformed}") from None
    return found


class LeaderChange(NamedTuple):
    """The content of the first record of an epoch."""

    leader_id: int
    voters: tuple[int, ...]
    granting_voters: tuple[int, ...]


def encode_leader_change(change: LeaderChange) -> tuple[bytes, bytes]:
    """Return the key and the value of the record."""
    voters, granting = ([Voter(voter) for voter in ids] for ids in (change.voters, change.granting_voters))
    return encode_control(LeaderChangeMessage(0, change.leader_id, voters, granting))


def decode_leader_change(key: bytes | None, value: bytes | None) -> LeaderChange | None:
    """Return the content, or None for a control record of another type. Raises CorruptRecordError."""
    if control_type(key) != ControlType.LEADER_CHANGE:
        return None
    found = decode_control(LeaderChangeMessage, value)
    voters, granting = (tuple([one.voter_id for one in ids]) for ids in (found.voters, found.granting_voters))
    return LeaderChange(found.leader_id, voters, granting)


def leader_change_batch(change: LeaderChange, epoch: int, now_ms: int) -> bytes:
    """Return a control batch for `Log.append_as_leader`, which assigns its offset."""
    return record_batch.build(
        [encode_leader_change(change)], base_offset=0, leader_epoch=epoch, timestamp_ms=now_ms, is_control=True
    )
