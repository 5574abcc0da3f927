"""The first record of every epoch: Kafka's control record LeaderChangeMessage, version 0.

It names the leader and the voters that elected it. A leader without anything else to append appends it, because
nothing is committed before a record of the leader's own epoch is on a majority.
"""

from __future__ import annotations

from typing import NamedTuple

from kipmesh.core import record_batch
from kipmesh.core.snapshot.control import ControlType, control_type, decode_control, encode_control
from kipmesh.messages.records.control import LeaderChangeMessage, Voter


class LeaderChange(NamedTuple):
    """The content of the record."""

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
