"""Values that a partition's reader and its driver exchange (392-08, 392-10, 392-13 to 392-17).

Times are milliseconds of the driver's monotonic clock. A node id of -1 is nobody, an epoch of -1 is not known.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from kipmesh.core.errors import ErrorCode

TIMESTAMP_LATEST: Final = -1
TIMESTAMP_EARLIEST: Final = -2


class SelectionMode(Enum):
    """`replica.selection.mode`: who chooses the replica."""

    FETCH = "fetch"
    """The leader, in answers to Fetch (392-13)."""
    METADATA = "metadata"
    """Whoever answers Metadata (392-15)."""
    CONSUMER = "consumer"
    """The consumer itself, at each update of its metadata (392-16)."""


class ReaderConfig(NamedTuple):
    """What all partitions of a consumer share."""

    reset_to: int | None
    """`auto.offset.reset` as a timestamp; None for `none` and `error`."""
    has_rack: bool = False
    """Whether `client.rack` is set (392-17)."""
    mode: SelectionMode = SelectionMode.FETCH
    prefers_replicas: bool = False
    """`replica.selection.policy=preferred`; for the modes of the draft only (392-17)."""
    metadata_max_age_ms: int = 300_000
    """`metadata.max.age.ms`: how long a preferred replica is kept (392-14)."""
    retry_backoff_max_ms: int = 1000
    """`retry.backoff.max.ms`; also how long a replica is left alone after its first failure."""
    fetch_max_wait_ms: int = 500
    """`fetch.max.wait.ms`"""
    follower_silence_ms: int = 1000
    """How long beyond `fetch.max.wait.ms` a follower may leave a fetch unanswered before the leader is asked."""


class PartitionNews(NamedTuple):
    """What metadata says about a partition."""

    leader_id: int = -1
    leader_epoch: int = -1
    replicas: tuple[int, ...] = ()
    isr: tuple[int, ...] = ()
    offline_replicas: tuple[int, ...] = ()
    preferred_read_replica: int = -1
    """From the response (392-15), or what the consumer's own selector chose (392-16)."""


class EpochSpan(NamedTuple):
    """Consecutive records of one leader epoch in an answer; `next_offset` is after the last."""

    first_offset: int
    next_offset: int
    epoch: int


# --- actions: what a partition wants next -----------------------------------------------------------------------------


class FetchFrom(NamedTuple):
    """Fetch records."""

    node_id: int
    is_leader: bool
    replica_id: int
    """-1, or -2 where the consumer chose the follower (392-16)."""
    offers_rack: bool
    """Whether the request may carry `client.rack`; one for several partitions only if all of them say so."""
    fetch_offset: int
    last_fetched_epoch: int
    current_leader_epoch: int


class ListOffsetsAtLeader(NamedTuple):
    """Ask the leader for an offset: for a reset, or because a follower did not have ours (392-08)."""

    node_id: int
    current_leader_epoch: int
    timestamp: int


class EndOfEpochAtLeader(NamedTuple):
    """Ask the leader where an epoch ended (OffsetsForLeaderEpoch, 392-08)."""

    node_id: int
    current_leader_epoch: int
    epoch: int


class BackOff(NamedTuple):
    """Nothing before then."""

    until_ms: int


class AwaitMetadata(NamedTuple):
    """The leader is not known: metadata is to be refreshed until it is."""


class AwaitAnswer(NamedTuple):
    """A request of this partition is under way."""


class AwaitReader(NamedTuple):
    """The reader is to take what is buffered, or to decide: seek, reset or retry."""


Request = FetchFrom | ListOffsetsAtLeader | EndOfEpochAtLeader
Action = Request | BackOff | AwaitMetadata | AwaitAnswer | AwaitReader

AWAIT_METADATA: Final = AwaitMetadata()
AWAIT_ANSWER: Final = AwaitAnswer()
AWAIT_READER: Final = AwaitReader()


# --- effects: what an event leads to, in this order -------------------------------------------------------------------


class TakeRecords(NamedTuple):
    """Buffer the answer's records. Without this, they are to be thrown away."""


class RefreshMetadata(NamedTuple):
    """The topic's metadata may be old."""


class MoveTo(NamedTuple):
    """Throw away what is buffered and go on at `offset` (None: to be found)."""

    offset: int | None


class Abandon(NamedTuple):
    """The request of that number is waited for no more; its answer will be ignored."""

    request_id: int


class OffsetReset(NamedTuple):
    """The leader does not have the offset: it is reset to the timestamp, by `auto.offset.reset` (392-08)."""

    offset: int
    timestamp: int
    log_start_offset: int
    high_watermark: int


class TruncationFound(NamedTuple):
    """Records that the reader was given are not in the log any more (392-08): to be reported to the user.

    Those from `end_offset` up to `position` are gone. None: it is not known where the log parted. The partition goes on
    at `end_offset` or, `is_fatal`, waits for the user's decision.
    """

    position: int
    end_offset: int | None
    epoch: int
    is_fatal: bool


class RaiseError(NamedTuple):
    """To be raised at the reader, after what is buffered. Offsets are those of OFFSET_OUT_OF_RANGE, else -1."""

    code: ErrorCode
    offset: int = -1
    log_start_offset: int = -1
    high_watermark: int = -1


class Redirected(NamedTuple):
    """The leader sent the partition to another replica (392-13)."""

    node_id: int


class LeaveCause(Enum):
    """Why a partition went back to the leader; the value is the label in metrics."""

    FAILED = "failed"
    FENCED = "fenced"
    OUT_OF_RANGE = "out-of-range"
    DIVERGED = "diverged"
    SILENT = "silent"
    STUCK = "stuck"


class Left(NamedTuple):
    """The partition went back to the leader (392-14)."""

    node_id: int
    cause: LeaveCause


Effect = (
    TakeRecords | RefreshMetadata | MoveTo | Abandon | OffsetReset | TruncationFound | RaiseError | Redirected | Left
)
Effects = tuple[Effect, ...]

TAKE: Final[Effects] = (TakeRecords(),)
REFRESH: Final[Effects] = (RefreshMetadata(),)
NOTHING: Final[Effects] = ()
