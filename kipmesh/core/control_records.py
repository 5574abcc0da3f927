"""Control records of the metadata log and its snapshots, in Kafka's schemas (630-02).

The key of a control record is its version (0) and type. Readers skip unknown types and fields added by newer versions.

The first record of each epoch is LeaderChangeMessage version 0, with the leader and the voters that elected it. It also
lets a leader commit records of older epochs: nothing is committed before a record of the leader's own epoch is on a
majority.
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
    """Types of control records in the metadata log and its snapshots."""

    LEADER_CHANGE = 2
    SNAPSHOT_HEADER = 3
    SNAPSHOT_FOOTER = 4
    KRAFT_VERSION = 5
    KRAFT_VOTERS = 6


def encode_control(value: Message) -> tuple[bytes, bytes]:
    """Return (key, value) of a control record in version 0."""
    out = Out()
    record_codec(type(value), 0).write(out, value)
    return _KEY.pack(0, type(value).record_key.key), bytes(out)


def control_type(key: bytes | None) -> int:
    """Return the type in a control record's key. Raises CorruptRecordError if the key is too short."""
    try:
        return int(_KEY.unpack_from(key or b"")[1])
    except error:
        size = len(key or b"")
        raise CorruptRecordError(f"control record key must have at least {_KEY.size} bytes, got {size}") from None


@cache
def _prefix_codec(of: type[Message]) -> Codec:
    """Return a codec for the fields of version 0. Newer versions with a fixed layout only append fields."""
    is_fixed = all(each.type in FIXED for each in of.message_fields)
    return Codec(of, 0, flexible=False) if is_fixed else record_codec(of, 0)


def decode_control(of: type[_M], value: bytes | None) -> _M:
    """Decode the value of a control record of type `of`. Raises CorruptRecordError if it is incomplete."""
    try:
        message: _M = _prefix_codec(of).read(value or b"")[0]
    except MalformedError as malformed:
        raise CorruptRecordError(f"invalid control record: {malformed}") from None
    return message


class LeaderChange(NamedTuple):
    """Content of a LeaderChangeMessage: leader, voters, and the voters that elected the leader."""

    leader_id: int
    voters: tuple[int, ...]
    granting_voters: tuple[int, ...]


def encode_leader_change(change: LeaderChange) -> tuple[bytes, bytes]:
    """Return (key, value) of a LeaderChangeMessage record."""
    voters, granting = ([Voter(voter) for voter in ids] for ids in (change.voters, change.granting_voters))
    return encode_control(LeaderChangeMessage(0, change.leader_id, voters, granting))


def decode_leader_change(key: bytes | None, value: bytes | None) -> LeaderChange | None:
    """Decode a LeaderChangeMessage record; None for another type. Raises CorruptRecordError for an invalid record."""
    if control_type(key) != ControlType.LEADER_CHANGE:
        return None
    message = decode_control(LeaderChangeMessage, value)
    voters, granting = (tuple([each.voter_id for each in ids]) for ids in (message.voters, message.granting_voters))
    return LeaderChange(message.leader_id, voters, granting)


def leader_change_batch(change: LeaderChange, epoch: int, now_ms: int) -> bytes:
    """Return a control batch with one LeaderChangeMessage. `Log.append_as_leader` assigns its offset."""
    return record_batch.build(
        [encode_leader_change(change)], base_offset=0, leader_epoch=epoch, timestamp_ms=now_ms, is_control=True
    )
