"""A replica's responses to readers: permission, the four offset cases, and epoch end offsets.

Rules: 392-01, 392-03 to 392-07, 392-09. Pure functions over numbers; the driver owns the log. They apply to leaders and
followers alike: for a leader, the leader's high watermark is its own.

Invariants: consumers never read records at or above the replica's own high watermark; the reported high watermark never
decreases within one leadership (392-10).
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
"""Replica id of a consumer that selected the replica itself (392-16); in Kafka, the debugging consumer."""


class OffsetCase(Enum):
    """Position of a fetch offset in a replica's log; the value is its name in metrics (392-18)."""

    READABLE = "readable"
    """Below the replica's high watermark: there are records to read."""
    CAUGHT_UP = "caught-up"
    """At the log end and the high watermark, which the leader has not passed: nothing to read. Not one of the four."""
    UNCOMMITTED = "uncommitted"
    """Case 1: from the high watermark to the log end, so not known as committed yet. No error (392-03)."""
    UNAVAILABLE = "unavailable"
    """Case 2: above the log end, up to the leader's high watermark (392-04)."""
    TOO_SMALL = "too-small"
    """Case 3: below the log start (392-05)."""
    TOO_LARGE = "too-large"
    """Case 4: above the log end and the leader's high watermark (392-06)."""

    @property
    def error_code(self) -> ErrorCode:
        """Error code in the response: OFFSET_NOT_AVAILABLE (case 2), OFFSET_OUT_OF_RANGE (cases 3 and 4), else NONE."""
        return _ERRORS.get(self, ErrorCode.NONE)

    @property
    def is_counted(self) -> bool:
        """Whether the metric of offset cases counts this case: one of the four cases, not READABLE or CAUGHT_UP."""
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
    """Classify a consumer's fetch offset by 392-03 to 392-06.

    `high_watermark` is the replica's own; `leader_high_watermark` is the leader's, as last received. On a leader, both
    are equal.
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


def check_fetch(*, is_leader: bool, replica_id: int, names_rack: bool) -> ErrorCode:
    """Return NONE if this replica serves a Fetch of `replica_id` (392-01), or else NOT_LEADER_OR_FOLLOWER.

    `names_rack` is whether the request's version has a field for the rack (Kafka's Fetch v11 and above, and gRPC), even
    if the field is empty. Brokers are served by leaders only.
    """
    if is_leader or (replica_id < 0 and names_rack):
        return ErrorCode.NONE
    return ErrorCode.NOT_LEADER_OR_FOLLOWER


def check_list_offsets(*, is_leader: bool, replica_id: int) -> ErrorCode:
    """Return NONE if this replica serves ListOffsets of `replica_id`, or else NOT_LEADER_OR_FOLLOWER.

    A follower serves only consumers that selected it themselves (392-16).
    """
    if is_leader or replica_id == FOLLOWER_READER_ID:
        return ErrorCode.NONE
    return ErrorCode.NOT_LEADER_OR_FOLLOWER


def compares_epochs(
    fetch_offset: int, last_fetched_epoch: int, *, is_leader: bool, log_start_offset: int, log_end_offset: int
) -> bool:
    """Whether to compare a fetch's last fetched epoch with this log (`follower.has_diverged`).

    False if that epoch is unknown (-1). A leader always compares. A follower compares only for offsets within its log:
    it does not know how the epoch continues beyond the log's end, or which epoch precedes the log's start. There the
    four cases decide. A consumer that receives a diverging epoch from a follower verifies it with the leader (392-08).
    """
    return last_fetched_epoch >= 0 and (is_leader or log_start_offset < fetch_offset <= log_end_offset)


def epoch_end_for(
    replica_id: int,
    requested_epoch: int,
    log_epoch: EpochEndOffset,
    *,
    leader_epoch: int,
    high_watermark: int,
    high_watermark_is_known: bool,
) -> EpochEndOffset:
    """Return a leader's response to OffsetsForLeaderEpoch for `requested_epoch` (392-09).

    `log_epoch` is the largest epoch in the log that is not above `requested_epoch`, with its end offset. Brokers get it
    unchanged; for consumers the end is limited to the high watermark.

    Raises KafkaError OFFSET_NOT_AVAILABLE for a consumer if the limit would apply while the high watermark is not
    known: records that the consumer may have read would be reported as truncated.
    """
    if replica_id >= 0:
        return log_epoch
    if not high_watermark_is_known and (requested_epoch >= leader_epoch or log_epoch.end_offset > high_watermark):
        raise KafkaError(
            ErrorCode.OFFSET_NOT_AVAILABLE,
            f"high watermark {high_watermark} has not reached the start of leader epoch {leader_epoch}, retry later",
        )
    return EpochEndOffset(log_epoch.epoch, min(log_epoch.end_offset, high_watermark))


# -- isolated brokers (ADR 0007)


def isolated_at_ms(responded_ms: int, controller_changed_ms: int, timeout_ms: int) -> int:
    """Return when (ms) a broker becomes isolated from the controllers unless it gets a heartbeat response before then.

    `responded_ms`: when the last heartbeat that got a response was sent. As with a lease, this is earlier than the time
    from which the controller counts. `controller_changed_ms`: when a new controller or controller epoch last became
    known.
    """
    return max(responded_ms, controller_changed_ms) + timeout_ms


def refuses_clients(
    *, is_isolated: bool, is_leader: bool, members_last_fetch_ms: Collection[int], now_ms: int, timeout_ms: int
) -> bool:
    """Whether a replica refuses producers and consumers with NOT_LEADER_OR_FOLLOWER.

    | replica of an isolated broker                             | result                            |
    | --------------------------------------------------------- | --------------------------------- |
    | follower, or no leader known                              | refuses                           |
    | leader, an ISR member fetched within `timeout_ms`         | serves: no other replica can lead |
    | leader, only member of the ISR                            | serves: no other replica may lead |
    | leader, no ISR member fetched within `timeout_ms`         | refuses                           |

    So the loss of all controllers stops no partition whose replicas can reach each other. `members_last_fetch_ms` has
    the time of the last fetch of each other ISR member, and is empty on followers.
    """
    if not is_isolated or not is_leader:
        return is_isolated
    return bool(members_last_fetch_ms) and now_ms - max(members_last_fetch_ms) >= timeout_ms
