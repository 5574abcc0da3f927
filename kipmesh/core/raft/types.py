"""Events and effects of the metadata quorum's state machine. Values only.

They are the whole interface of `kipmesh.core.raft.machine`, whose module docstring states the contract with the driver.
Times are milliseconds of the caller's monotonic clock. Offsets are those of `__cluster_metadata-0`.
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
    """Role of a replica in the metadata quorum; the value is its name in metrics and documentation."""

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
        """Whether the replica has no vote."""
        return self in (State.OBSERVER_UNATTACHED, State.OBSERVER_FOLLOWER)

    @property
    def follows(self) -> bool:
        """Whether the replica fetches from a known leader."""
        return self in (State.FOLLOWER, State.OBSERVER_FOLLOWER)


@dataclass(frozen=True, slots=True)
class RaftConfig:
    """Node id, voter set and timeouts of one replica."""

    node_id: int
    voters: tuple[int, ...]
    cluster_id: str
    election_timeout_ms: int = 1000
    """`controller.quorum.election.timeout.ms`; jitter extends it to at most twice this time."""
    fetch_timeout_ms: int = 2000
    """`controller.quorum.fetch.timeout.ms`; jitter extends it by at most a quarter."""
    election_backoff_max_ms: int = 1000
    request_timeout_ms: int = 2000
    retry_backoff_ms: int = 20
    fetch_max_wait_ms: int = 500
    fetch_max_bytes: int = 8 << 20

    @property
    def is_voter(self) -> bool:
        """Whether this replica is in the voter set. Other replicas are observers."""
        return self.node_id in self.voters

    @property
    def majority(self) -> int:
        """Number of voters that form a majority."""
        return len(self.voters) // 2 + 1

    @property
    def check_quorum_timeout_ms(self) -> int:
        """Time without fetches from a majority of voters after which a leader resigns: 1.5 times the fetch timeout."""
        return self.fetch_timeout_ms * 3 // 2


class ElectionState(NamedTuple):
    """Content of the `quorum-state` file: epoch, leader id and voted id (-1: none).

    Never has both a leader and a vote. Epoch 0 precedes the first election.
    """

    epoch: int = 0
    leader_id: int = -1
    voted_id: int = -1


class LogView(Protocol):
    """Read-only view of the metadata log. `kipmesh.storage.log.log.Log` implements it."""

    @property
    def log_start_offset(self) -> int:
        """Offset of the first record, or the log end offset if the log is empty."""
        ...

    @property
    def log_end_offset(self) -> int:
        """Offset of the next record to be appended."""
        ...

    @property
    def latest_epoch(self) -> int:
        """Leader epoch of the last batch, or -1 if the log is empty."""
        ...

    def end_offset_for_epoch(self, epoch: int) -> m.EpochEndOffset:
        """Return the largest epoch at or below `epoch`, and its end offset.

        Returns (-1, -1) if `epoch` is negative or above the latest epoch, or if the log is empty. If `epoch` is below
        all epochs in the log, returns it with the start offset of the first one.
        """
        ...


# -- events


class RequestReceived(NamedTuple):
    """A peer sent a request. The machine emits `Respond(request_id)` in this step or later."""

    request_id: int
    request: Request


class ResponseReceived(NamedTuple):
    """A peer responded to `Send(request_id)`."""

    request_id: int
    response: Response


class RequestFailed(NamedTuple):
    """`Send(request_id)` will not get a response."""

    request_id: int


class TimerFired(NamedTuple):
    """`Machine.next_deadline_ms()` may have passed. Early or repeated timers are harmless."""


class AppendRequested(NamedTuple):
    """The active controller wants to append a batch that it created in `epoch`; `token` identifies the append."""

    token: int
    batch: bytes
    epoch: int


class LogChanged(NamedTuple):
    """The append or truncation of the previous step succeeded."""


class AppendRejected(NamedTuple):
    """The append of the previous step failed (full disk, corrupt batch) and left the log unchanged."""


class Persisted(NamedTuple):
    """All records below `end_offset` (`Log.recovery_point`) are durable."""

    end_offset: int


class SnapshotChanged(NamedTuple):
    """A generated or fetched snapshot became the latest one; a fetched one has already replaced the log.

    `earliest` is the oldest snapshot that is kept; None if `latest` is the only one.
    """

    latest: m.SnapshotId
    earliest: m.SnapshotId | None = None


class SnapshotFetchProgress(NamedTuple):
    """The leader responded to a FetchSnapshot request, so it is alive (630-12)."""


class SnapshotFetchFailed(NamedTuple):
    """Fetching the snapshot failed. The machine sends Fetch again (630-11)."""


class SnapshotServed(NamedTuple):
    """A replica sent FetchSnapshot in this leader's epoch; it counts for check-quorum (630-12)."""

    replica_id: int


class ResignRequested(NamedTuple):
    """Resign leadership, for a shutdown or at the operator's request. Ignored unless this replica is the leader."""


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
    """Write `quorum-state` durably before performing any later effect."""

    election: ElectionState


class TruncateLog(NamedTuple):
    """Truncate the log to `offset`, then report `LogChanged`."""

    offset: int


class AppendLeaderChange(NamedTuple):
    """Append the LeaderChange control record in `epoch`, then report `LogChanged`."""

    epoch: int
    change: LeaderChange


class AppendAsLeader(NamedTuple):
    """Append the batch with leader epoch `epoch`, then report `LogChanged`."""

    token: int
    batch: bytes
    epoch: int


class AppendAsFollower(NamedTuple):
    """Append the leader's batches unchanged, then report `LogChanged`."""

    records: bytes


class RefuseAppend(NamedTuple):
    """Fail the `AppendRequested` with this token and error; `leader_id` is the current leader or -1."""

    token: int
    error: ErrorCode
    leader_id: int


class Flush(NamedTuple):
    """Make the log durable up to its current end, on any thread, then report `Persisted`.

    May be merged with a flush that is already running.
    """


class Send(NamedTuple):
    """Send a request to a peer, then report `ResponseReceived` or `RequestFailed`, or nothing after `timeout_ms`."""

    request_id: int
    node_id: int
    request: Request
    timeout_ms: int


class Read(NamedTuple):
    """Log range to read into a Fetch response: whole batches from `offset` that end at or below `max_offset`."""

    offset: int
    max_bytes: int
    max_offset: int


class Respond(NamedTuple):
    """Respond to a `RequestReceived`. If `read` is given, add its records to the response with `wire.with_records`."""

    request_id: int
    response: Response
    read: Read | None = None


class Committed(NamedTuple):
    """The high watermark advanced: the state machine may apply all records below it."""

    high_watermark: int


class StateChanged(NamedTuple):
    """State, epoch or leader (-1: unknown) changed. The driver drops a snapshot transfer from the old leader."""

    state: State
    epoch: int
    leader_id: int


class FetchSnapshot(NamedTuple):
    """Fetch the snapshot from the leader. Fetch pauses until `SnapshotChanged` or `SnapshotFetchFailed` (630-08)."""

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
    """The driver broke the contract, for example by sending another event where `LogChanged` was due."""


class QuorumError(Exception):
    """Consensus is broken: an epoch has two leaders, or committed records would be truncated. The node must stop."""
