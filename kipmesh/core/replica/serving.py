"""What a replica answers to readers: who may read, the four cases of an offset, and where epochs end.

Rules: 392-01, 392-03 to 392-07, 392-09.

Pure functions over numbers; the driver holds the log. They hold for leaders and followers alike: a leader is a replica
whose leader's high watermark is its own.

Invariants: records at or above a replica's own high watermark are never readable by consumers; what is reported to them
never goes back within one leadership (392-10).
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Final

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages import EpochEndOffset

CONSUMER_ID: Final = -1
"""Replica id of a consumer."""
FOLLOWER_READER_ID: Final = -2
"""Replica id of a consumer that chose the replica itself (392-16); Kafka's debugging consumer."""


class OffsetCase(Enum):
    """Where a fetch offset is in a replica's log; the value is the name in metrics (392-18)."""

    READABLE = "readable"
    """Below the replica's high watermark: there are records."""
    CAUGHT_UP = "caught-up"
    """At the end of everything that is known: nothing to read, and none of the four cases."""
    UNCOMMITTED = "uncommitted"
    """Case 1 (392-03)."""
    UNAVAILABLE = "unavailable"
    """Case 2 (392-04)."""
    TOO_SMALL = "too-small"
    """Case 3 (392-05)."""
    TOO_LARGE = "too-large"
    """Case 4 (392-06)."""

    @property
    def error_code(self) -> ErrorCode:
        """What the partition is answered with."""
        return _ERRORS.get(self, ErrorCode.NONE)

    @property
    def is_counted(self) -> bool:
        """Whether it is one of the four cases."""
        return self not in (OffsetCase.READABLE, OffsetCase.CAUGHT_UP)


_ERRORS = {
    OffsetCase.UNAVAILABLE: ErrorCode.OFFSET_NOT_AVAILABLE,
    OffsetCase.TOO_SMALL: ErrorCode.OFFSET_OUT_OF_RANGE,
    OffsetCase.TOO_LARGE: ErrorCode.OFFSET_OUT_OF_RANGE,
}


def offset_case(
    fetch_offset: int,
    *,
    log_start_offset: int,
    log_end_offset: int,
    high_watermark: int,
    leader_high_watermark: int,
) -> OffsetCase:
    """The decision table of 392-03 to 392-06, for a consumer's fetch.

    `high_watermark` is the replica's own, `leader_high_watermark` the leader's as it was last told (on a leader, both
    are the same). The first row that fits decides.
    """
    if fetch_offset < log_start_offset:
        return OffsetCase.TOO_SMALL
    if fetch_offset < high_watermark:
        return OffsetCase.READABLE
    if fetch_offset == log_end_offset == high_watermark >= leader_high_watermark:
        return OffsetCase.CAUGHT_UP
    if fetch_offset <= log_end_offset:
        return OffsetCase.UNCOMMITTED
    return OffsetCase.UNAVAILABLE if fetch_offset <= leader_high_watermark else OffsetCase.TOO_LARGE


def check_reader(*, is_leader: bool, replica_id: int, names_rack: bool) -> ErrorCode:
    """Whether this replica answers a Fetch of `replica_id` (392-01): NONE, or NOT_LEADER_OR_FOLLOWER.

    `names_rack`: the request's protocol version can name a rack (Kafka's Fetch v11 and above, and all of the mesh's
    own), whether it does or not. Brokers replicate from leaders only.
    """
    if is_leader or (replica_id < 0 and names_rack):
        return ErrorCode.NONE
    return ErrorCode.NOT_LEADER_OR_FOLLOWER


def check_lister(*, is_leader: bool, replica_id: int) -> ErrorCode:
    """Whether this replica answers ListOffsets: leaders all, followers only readers that chose them (392-16)."""
    if is_leader or replica_id == FOLLOWER_READER_ID:
        return ErrorCode.NONE
    return ErrorCode.NOT_LEADER_OR_FOLLOWER


def compares_epochs(
    fetch_offset: int, last_fetched_epoch: int, *, is_leader: bool, log_start_offset: int, log_end_offset: int
) -> bool:
    """Whether a fetch's last fetched epoch is to be compared with this log (`follower.has_diverged`).

    A leader's log is the truth. A follower that lags does not know how an epoch goes on, and one whose log begins at
    the offset not what was before: there the four cases decide. A divergence that it does find is one more reason for
    the reader to ask the leader (392-08).
    """
    return last_fetched_epoch >= 0 and (is_leader or log_start_offset < fetch_offset <= log_end_offset)


def epoch_end_for(
    replica_id: int,
    asked_epoch: int,
    found: EpochEndOffset,
    *,
    leader_epoch: int,
    high_watermark: int,
    high_watermark_is_known: bool,
) -> EpochEndOffset:
    """A leader's answer to OffsetsForLeaderEpoch (392-09); raises KafkaError OFFSET_NOT_AVAILABLE.

    `found` is the largest epoch of the log that is not above `asked_epoch`, and its end. A broker gets that, always. A
    consumer's answer ends at the high watermark. While that is not known (it is below the start of the leader's epoch),
    cutting an end down to it would tell a consumer that records it has read are gone: not only the latest epoch is
    withheld then, but every end that is above the high watermark.
    """
    if replica_id >= 0:
        return found
    if not high_watermark_is_known and (asked_epoch >= leader_epoch or found.end_offset > high_watermark):
        raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE, f"the high watermark of epoch {leader_epoch} is not known yet")
    return EpochEndOffset(found.epoch, min(found.end_offset, high_watermark))


# -- isolated brokers (ADR 7)


def isolated_at_ms(answered_ms: int, controller_changed_ms: int, timeout_ms: int) -> int:
    """When a broker is cut off from the controllers if it hears nothing more; both times are the last of their kind.

    Times count from the sending of the heartbeat that was answered, as leases do: the controller's own time for the
    broker begins later. Another controller, or another epoch of it, that becomes known counts like a heartbeat.
    """
    return max(answered_ms, controller_changed_ms) + timeout_ms


def sends_clients_away(
    *, is_isolated: bool, is_leader: bool, members_heard_ms: Collection[int], now_ms: int, timeout_ms: int
) -> bool:
    """Whether a replica refuses producers and consumers with NOT_LEADER_OR_FOLLOWER.

    | replica of an isolated broker                        | then                                |
    | ---------------------------------------------------- | ----------------------------------- |
    | follows, or has no leader                            | refuses                             |
    | leads, a member of the ISR fetched within the time   | serves: no other replica can lead   |
    | leads, is the only member of the ISR                 | serves: no other replica may lead   |
    | leads, no member of the ISR fetched within the time  | refuses                             |

    So the loss of all controllers stops no partition whose replicas still reach each other. `members_heard_ms`:
    when each other member of a leader's ISR fetched last; empty on followers.
    """
    if not is_isolated or not is_leader:
        return is_isolated
    return bool(members_heard_ms) and now_ms - max(members_heard_ms) >= timeout_ms
