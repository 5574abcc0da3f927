"""What goes into the machine of the metadata quorum and what comes out: values only.

Events and effects are the whole interface of `kipmesh.core.raft.machine`; the contract of who may do what when is in
its header. Times are milliseconds of the caller's monotonic clock; offsets are those of `__cluster_metadata-0`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

from kipmesh import messages as m
from kipmesh.core.control_records import LeaderChange
from kipmesh.core.errors import ErrorCode

Request: TypeAlias = m.VoteRequest | m.BeginQuorumEpochRequest | m.EndQuorumEpochRequest | m.FetchRequest
Response: TypeAlias = (
    m.VoteResponse | m.BeginQuorumEpochResponse | m.EndQuorumEpochResponse | m.FetchResponse | m.DescribeQuorumResponse
)


class State(Enum):
    """What a replica is to its quorum; the value is the name in metrics and documents."""

    UNATTACHED = "unattached"
    VOTED = "voted"
    CANDIDATE = "candidate"
    LEADER = "leader"
    RESIGNED = "resigned"
    FOLLOWER = "follower"
    OBSERVER_UNATTACHED = "observer-unattached"
    OBSERVER_FOLLOWER = "observer-follower"

    @property
    def is_observer(self) -> bool:
        """Whether a replica without a vote is in this state."""
        return self in (State.OBSERVER_UNATTACHED, State.OBSERVER_FOLLOWER)

    @property
    def follows(self) -> bool:
        """Whether it fetches from a leader that it knows."""
        return self in (State.FOLLOWER, State.OBSERVER_FOLLOWER)


@dataclass(frozen=True, slots=True)
class RaftConfig:
    """Who this replica is, who votes, and how long it waits."""

    node_id: int
    voters: tuple[int, ...]
    cluster_id: str
    election_timeout_ms: int = 1000
    """`controller.quorum.election.timeout.ms`; a jittered timeout lies between once and twice this."""
    fetch_timeout_ms: int = 2000
    """`controller.quorum.fetch.timeout.ms`; jitter adds up to a quarter."""
    election_backoff_max_ms: int = 1000
    request_timeout_ms: int = 2000
    retry_backoff_ms: int = 20
    fetch_max_wait_ms: int = 500
    fetch_max_bytes: int = 8 << 20

    @property
    def is_voter(self) -> bool:
        """Whether this replica has a vote; the others are observers."""
        return self.node_id in self.voters

    @property
    def majority(self) -> int:
        """How many voters decide."""
        return len(self.voters) // 2 + 1

    @property
    def check_quorum_timeout_ms(self) -> int:
        """How long a leader goes on without fetches of a majority."""
        return self.fetch_timeout_ms * 3 // 2


class ElectionState(NamedTuple):
    """What `quorum-state` holds: never both a leader and a vote; epoch 0 is before the first election."""

    epoch: int = 0
    leader_id: int = -1
    voted_id: int = -1


class LogView(Protocol):
    """What the machine reads of the log, `kipmesh.storage.log.log.Log` as it is. It never writes."""

    @property
    def log_start_offset(self) -> int:
        """The first offset."""
        ...

    @property
    def log_end_offset(self) -> int:
        """The offset that the next record gets."""
        ...

    @property
    def latest_epoch(self) -> int:
        """The epoch of the last batch, -1 if there is none."""
        ...

    def end_offset_for_epoch(self, epoch: int) -> m.EpochEndOffset:
        """The largest epoch at or below `epoch` and where it ends; (-1, -1) if unknown."""
        ...


# -- events


class RequestReceived(NamedTuple):
    """A peer sent a request; the response is `Respond(request_id)`, at once or later."""

    request_id: int
    request: Request


class ResponseReceived(NamedTuple):
    """A peer responded to `Send(request_id)`."""

    request_id: int
    response: Response


class RequestFailed(NamedTuple):
    """`Send(request_id)` will get no response."""

    request_id: int


class TimerFired(NamedTuple):
    """It is `Machine.next_deadline_ms()`, or somebody thinks so."""


class AppendRequested(NamedTuple):
    """The active controller has a batch; `epoch` is the one that it was decided in."""

    token: int
    batch: bytes
    epoch: int


class LogChanged(NamedTuple):
    """The append or truncation of the step before is done: the log is as it asked for."""


class AppendRejected(NamedTuple):
    """The append of the step before was not done, and left the log as it was: full disk, corrupt batch."""


class Persisted(NamedTuple):
    """Everything below `end_offset` is durable (`Log.recovery_point`, read when this is reported)."""

    end_offset: int


class SnapshotChanged(NamedTuple):
    """Another snapshot became the latest, made here or fetched; for a fetched one the log was replaced before.

    `earliest` is the oldest that is kept, None when that is the same.
    """

    latest: m.SnapshotId
    earliest: m.SnapshotId | None = None


class SnapshotFetchProgress(NamedTuple):
    """A FetchSnapshot response of the leader came: it lives (630-12)."""


class SnapshotFetchFailed(NamedTuple):
    """The snapshot cannot be had; Fetch is asked again (630-11)."""


class SnapshotServed(NamedTuple):
    """A replica asked this leader for a part of a snapshot in its epoch: it counts as alive (630-12)."""

    replica_id: int


class ResignRequested(NamedTuple):
    """Stop leading, for a shutdown or at the operator's wish; nothing happens to those that do not lead."""


Event: TypeAlias = (
    RequestReceived
    | ResponseReceived
    | RequestFailed
    | TimerFired
    | AppendRequested
    | LogChanged
    | AppendRejected
    | Persisted
    | SnapshotChanged
    | SnapshotFetchProgress
    | SnapshotFetchFailed
    | SnapshotServed
    | ResignRequested
)


# -- effects


class PersistElection(NamedTuple):
    """Write `quorum-state` durably, before anything that follows."""

    election: ElectionState


class TruncateLog(NamedTuple):
    """Cut the log, then `LogChanged`."""

    offset: int


class AppendLeaderChange(NamedTuple):
    """Append the control record as leader, then `LogChanged`."""

    epoch: int
    change: LeaderChange


class AppendAsLeader(NamedTuple):
    """Append the batch with that epoch, then `LogChanged`."""

    token: int
    batch: bytes
    epoch: int


class AppendAsFollower(NamedTuple):
    """Append the leader's batches as they are, then `LogChanged`."""

    records: bytes


class RefuseAppend(NamedTuple):
    """An `AppendRequested` that will not be done: respond to its client."""

    token: int
    error: ErrorCode
    leader_id: int


class Flush(NamedTuple):
    """Make the log durable up to its end of now, on any thread, then `Persisted`. May be joined with a running one."""


class Send(NamedTuple):
    """Send a request to a peer; then `ResponseReceived`, `RequestFailed` or nothing."""

    request_id: int
    node_id: int
    request: Request
    timeout_ms: int


class Read(NamedTuple):
    """What of the log belongs into a Fetch response: whole batches from `offset`, none that reaches `max_offset`."""

    offset: int
    max_bytes: int
    max_offset: int


class Respond(NamedTuple):
    """Respond to a `RequestReceived`; with `read`, records of the log go into it (`wire.with_records`)."""

    request_id: int
    response: Response
    read: Read | None = None


class Committed(NamedTuple):
    """The high watermark rose: the state machine may apply what is below."""

    high_watermark: int


class StateChanged(NamedTuple):
    """Another state, epoch or leader (-1 unknown). A snapshot that is being fetched from the old leader is dropped."""

    state: State
    epoch: int
    leader_id: int


class FetchSnapshot(NamedTuple):
    """Fetch that snapshot from the leader; Fetch pauses until `SnapshotChanged` or `SnapshotFetchFailed` (630-08)."""

    snapshot_id: m.SnapshotId
    leader_id: int
    epoch: int


Effect: TypeAlias = (
    PersistElection
    | TruncateLog
    | AppendLeaderChange
    | AppendAsLeader
    | AppendAsFollower
    | RefuseAppend
    | Flush
    | Send
    | Respond
    | Committed
    | StateChanged
    | FetchSnapshot
)

CHANGES_LOG = (TruncateLog, AppendLeaderChange, AppendAsLeader, AppendAsFollower)


class DriverError(Exception):
    """Our own driver broke the contract, for instance another event where `LogChanged` was due."""


class QuorumError(Exception):
    """The quorum is not one: two leaders in an epoch, committed records to be cut. The node must stop."""
