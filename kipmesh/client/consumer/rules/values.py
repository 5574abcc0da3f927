"""Values that the partition reader and its driver exchange (392-08, 392-10, 392-13 to 392-17).

Times are milliseconds of the driver's monotonic clock. Node id -1 means none, epoch -1 means unknown.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from kipmesh.core.errors import ErrorCode

TIMESTAMP_LATEST: Final = -1
TIMESTAMP_EARLIEST: Final = -2


class SelectionMode(Enum):
    """The component that selects the replica (`replica.selection.mode`)."""

    FETCH = "fetch"
    """The leader, in Fetch responses (392-13)."""
    METADATA = "metadata"
    """Any broker, in Metadata responses (392-15)."""
    CONSUMER = "consumer"
    """The consumer, at each metadata update (392-16)."""


class ReaderConfig(NamedTuple):
    """Configuration shared by all partition readers of a consumer."""

    reset_to: int | None
    """`auto.offset.reset` as a timestamp; None for `none` and `error`."""
    has_rack: bool = False
    """Whether `client.rack` is set (392-17)."""
    mode: SelectionMode = SelectionMode.FETCH
    prefers_replicas: bool = False
    """Whether `replica.selection.policy=preferred`. Applies to the modes METADATA and CONSUMER only (392-17)."""
    metadata_max_age_ms: int = 300_000
    """`metadata.max.age.ms`: lease of a preferred replica (392-14)."""
    retry_backoff_max_ms: int = 1000
    """`retry.backoff.max.ms`: also the exclusion time of a replica after its first failure."""
    fetch_max_wait_ms: int = 500
    """`fetch.max.wait.ms`"""
    follower_timeout_ms: int = 1000
    """Time beyond `fetch.max.wait.ms` after which a follower that does not respond counts as failed."""


class PartitionView(NamedTuple):
    """Metadata of a partition as its reader sees it. Replicas are broker ids."""

    leader_id: int = -1
    leader_epoch: int = -1
    replicas: tuple[int, ...] = ()
    isr: tuple[int, ...] = ()
    offline_replicas: tuple[int, ...] = ()
    preferred_read_replica: int = -1
    """Selected by the broker (392-15) or by the consumer's own selector (392-16)."""


class EpochSpan(NamedTuple):
    """Consecutive records of one leader epoch in a fetch response. `next_offset` is exclusive."""

    first_offset: int
    next_offset: int
    epoch: int


# --- actions that the reader requests ---------------------------------------------------------------------------------


class FetchFrom(NamedTuple):
    """Fetch records from a node, starting at `fetch_offset`."""

    node_id: int
    is_leader: bool
    replica_id: int
    """-1, or -2 for a follower that was not selected by the leader (392-16)."""
    offers_rack: bool
    """Whether the request may carry `client.rack`. A request for several partitions may if all of them allow it."""
    fetch_offset: int
    last_fetched_epoch: int
    current_leader_epoch: int


class ListOffsetsAtLeader(NamedTuple):
    """Request the offset of a timestamp (ms or TIMESTAMP_...) from the leader with ListOffsets.

    Used for a reset, and to confirm an OFFSET_OUT_OF_RANGE error from a follower (392-08).
    """

    node_id: int
    current_leader_epoch: int
    timestamp: int


class EndOfEpochAtLeader(NamedTuple):
    """Request the end offset of an epoch from the leader (OffsetsForLeaderEpoch, 392-08)."""

    node_id: int
    current_leader_epoch: int
    epoch: int


class BackOff(NamedTuple):
    """Do nothing until `until_ms`."""

    until_ms: int


class AwaitMetadata(NamedTuple):
    """Refresh metadata until the leader is known."""


class AwaitResponse(NamedTuple):
    """Wait for the response to the pending request."""


class AwaitApplication(NamedTuple):
    """Wait until the application consumes the buffered records, or calls seek or reset."""


Request = FetchFrom | ListOffsetsAtLeader | EndOfEpochAtLeader
Action = Request | BackOff | AwaitMetadata | AwaitResponse | AwaitApplication

AWAIT_METADATA: Final = AwaitMetadata()
AWAIT_RESPONSE: Final = AwaitResponse()
AWAIT_APPLICATION: Final = AwaitApplication()


# --- effects of an event, to be applied in order ----------------------------------------------------------------------


class TakeRecords(NamedTuple):
    """Buffer the records of the response. Without this effect they must be discarded."""


class RefreshMetadata(NamedTuple):
    """Refresh the topic's metadata, which may be stale."""


class MoveTo(NamedTuple):
    """Discard the buffered records and continue at `offset` (None: the reader will request it from the leader)."""

    offset: int | None


class Abandon(NamedTuple):
    """Stop waiting for a request. Its response will be ignored."""

    request_id: int


class OffsetReset(NamedTuple):
    """Report that the leader does not have the offset, and that `auto.offset.reset` applies (392-08)."""

    offset: int
    timestamp: int
    log_start_offset: int
    high_watermark: int


class TruncationFound(NamedTuple):
    """Report that records already returned to the application were truncated from the log (392-08).

    The records from `end_offset` (None: unknown) up to `position` were lost. The partition continues at `end_offset`
    or, if `is_fatal`, waits for a seek by the application.
    """

    position: int
    end_offset: int | None
    epoch: int
    is_fatal: bool


class RaiseError(NamedTuple):
    """Raise an error in the application, after the buffered records. Offsets are set for OFFSET_OUT_OF_RANGE only."""

    code: ErrorCode
    offset: int = -1
    log_start_offset: int = -1
    high_watermark: int = -1


class Redirected(NamedTuple):
    """Report that the leader redirected the partition to another replica (392-13)."""

    node_id: int


class LeaveCause(Enum):
    """Cause of a return from a follower to the leader. The value is the label in metrics."""

    FAILED = "failed"
    FENCED = "fenced"
    OUT_OF_RANGE = "out-of-range"
    DIVERGED = "diverged"
    SILENT = "silent"
    STUCK = "stuck"


class LeftFollower(NamedTuple):
    """Report that the partition returned from a follower to the leader (392-14)."""

    node_id: int
    cause: LeaveCause


Effect = (
    TakeRecords
    | RefreshMetadata
    | MoveTo
    | Abandon
    | OffsetReset
    | TruncationFound
    | RaiseError
    | Redirected
    | LeftFollower
)
Effects = tuple[Effect, ...]

TAKE: Final[Effects] = (TakeRecords(),)
REFRESH: Final[Effects] = (RefreshMetadata(),)
NOTHING: Final[Effects] = ()
