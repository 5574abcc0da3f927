"""State of one replica of the metadata quorum, and the effects of the current step.

Elections, replication and snapshots are functions that read and change a `RaftContext` and emit effects. The context
itself implements no protocol rule, except one: an election is persisted before the first effect that could disclose it.

At most one request is in flight to each peer, so a slow peer costs one request. Request ids are never reused. Responses
with an id that is not in flight are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kipmesh.core.raft import types
from kipmesh.core.raft.leadership import Leadership
from kipmesh.core.raft.types import ElectionState, LogView, RaftConfig, Request, State
from kipmesh.core.snapshot.ids import latest_end
from kipmesh.messages import SnapshotId


@dataclass(slots=True)
class Peer:
    """The request in flight to one node, if any, and the backoff before the next one."""

    request_id: int = 0
    """0 if no request is in flight."""
    deadline_ms: int = 0
    not_before_ms: int = 0


class RaftContext:
    """State of one replica. Only `kipmesh.core.raft` writes its attributes.

    Args: durable_end: end offset of the durable part of the log; latest_snapshot, earliest_snapshot: newest and oldest
    snapshot on disk (`earliest_snapshot` defaults to `latest_snapshot`).
    """

    def __init__(
        self,
        config: RaftConfig,
        election: ElectionState,
        log: LogView,
        *,
        durable_end: int,
        latest_snapshot: SnapshotId | None = None,
        earliest_snapshot: SnapshotId | None = None,
    ) -> None:
        self.config = config
        self.log = log
        self.latest_snapshot = latest_snapshot
        self.earliest_snapshot = earliest_snapshot or latest_snapshot
        self.durable_end = min(durable_end, log.log_end_offset)
        self.high_watermark = latest_snapshot.end_offset if latest_snapshot else -1
        self.leader_high_watermark = -1
        self.leader_log_start = -1
        """Log start offset in the leader's last Fetch response; -1 if unknown or if this node is the leader."""
        self.persisted_election = election
        self.election = election
        if election.epoch < self.last_epoch:  # `quorum-state` was lost but the log was kept
            self.election = ElectionState(self.last_epoch)
        self.state = self._initial_state()
        self.leadership: Leadership | None = None
        self.granted: set[int] = set()
        self.rejected: set[int] = set()
        self.is_backing_off = False
        self.elections_lost = 0
        self.epochs_failed = 0
        """Consecutive epochs that ended without a leader although other voters took part."""
        self.has_voter_activity = False
        """Whether a Vote request or response arrived since an epoch was last counted in `epochs_failed`."""
        self.fetching_snapshot: SnapshotId | None = None
        self.other_voters = tuple([voter for voter in config.voters if voter != config.node_id])
        self.successors = self.other_voters
        self.unacknowledged: set[int] = set()
        self.awaits_log = False
        self.deadline_ms: int | None = None
        """Deadline of the current state (election, backoff or fetch timeout); None for a leader.

        For an observer without a leader: time to send Fetch to another voter if no voter has responded.
        """
        self.abandoned_leader: tuple[int, int] | None = None
        """(epoch, leader id) that an observer last gave up; only a response from that leader restores it."""
        self.now_ms = 0
        self.jitter = 0.0
        self.peers: dict[int, Peer] = {}
        self._last_request_id = 0
        self._effects: list[types.Effect] = []
        self._next_voter = config.node_id % max(1, len(config.voters))

    def _initial_state(self) -> State:
        leader_id = self.election.leader_id
        if leader_id >= 0 and leader_id not in self.config.voters:
            self.election = ElectionState(self.election.epoch)
            leader_id = -1
        if not self.config.is_voter:
            return State.OBSERVER_FOLLOWER if leader_id >= 0 else State.OBSERVER_UNATTACHED
        if leader_id == self.config.node_id:
            return State.RESIGNED  # a restarted leader must not lead the same epoch again
        if leader_id >= 0:
            return State.FOLLOWER
        return State.VOTED if self.election.voted_id >= 0 else State.UNATTACHED

    # -- derived values

    @property
    def epoch(self) -> int:
        """Latest known epoch."""
        return self.election.epoch

    @property
    def advertised_election(self) -> ElectionState:
        """Election state for responses to peers. A resigned leader does not name itself."""
        return self.election._replace(leader_id=-1) if self.state is State.RESIGNED else self.election

    @property
    def last_epoch(self) -> int:
        """Epoch of the last record of the log or, if later, of the latest snapshot (630-13); 0 if there is neither."""
        return self.last_offset_and_epoch[0]

    @property
    def last_offset_and_epoch(self) -> tuple[int, int]:
        """(epoch, end offset) for votes: the later of the log's and the latest snapshot's (630-13)."""
        end, epoch = self.log.log_end_offset, self.log.latest_epoch
        snapshot = self.latest_snapshot
        if snapshot is not None and epoch < 0 and end == snapshot.end_offset:
            epoch = snapshot.epoch
        latest = latest_end(end, max(epoch, 0), snapshot)
        return latest.epoch, latest.end_offset

    def deadlines(self) -> Iterator[int]:
        """Yield all times (monotonic ms) at which a step is due without another event."""
        if self.deadline_ms is not None:
            yield self.deadline_ms
        for peer in self.peers.values():
            if peer.request_id:
                yield peer.deadline_ms
            elif peer.not_before_ms > self.now_ms:
                yield peer.not_before_ms
        if self.leadership is not None:
            if self.leadership.voters:
                yield self.leadership.check_quorum_deadline_ms
                yield self.leadership.begin_deadline_ms
            for waiting in self.leadership.waiting.values():
                yield waiting.deadline_ms

    # -- effects

    def emit(self, effect: types.Effect) -> None:
        """Add an effect to the current step, preceded by `PersistElection` if the election changed.

        An effect in `CHANGES_LOG` makes the machine wait for `LogChanged` or `AppendRejected`.
        """
        self._persist()
        self._effects.append(effect)
        if isinstance(effect, types.CHANGES_LOG):
            self.awaits_log = True

    def _persist(self) -> None:
        if self.election != self.persisted_election:
            self.persisted_election = self.election
            self._effects.append(types.PersistElection(self.election))

    def take_effects(self) -> list[types.Effect]:
        """Return the effects of this step and start a new list."""
        self._persist()
        effects, self._effects = self._effects, []
        return effects

    def commit(self, offset: int) -> bool:
        """Advance the high watermark to `offset` and emit `Committed`. Returns False if it has already reached
        `offset`."""
        if offset <= self.high_watermark:
            return False
        self.high_watermark = offset
        self.emit(types.Committed(offset))
        return True

    def restart_fetch_timeout(self) -> None:
        """Set the deadline to now plus the fetch timeout, extended by jitter of up to a quarter of that timeout."""
        timeout_ms = self.config.fetch_timeout_ms
        self.deadline_ms = self.now_ms + timeout_ms + int(self.jitter * timeout_ms / 4)

    # -- requests to peers

    def is_free(self, node_id: int) -> bool:
        """Whether no request to the node is in flight and its backoff has passed."""
        peer = self.peers.get(node_id)
        return peer is None or (not peer.request_id and self.now_ms >= peer.not_before_ms)

    def next_free_voter(self) -> int | None:
        """Return the next other voter for which `is_free` is true, in round-robin order, or None if there is none."""
        for _ in self.other_voters:
            self._next_voter += 1
            voter = self.other_voters[self._next_voter % len(self.other_voters)]
            if self.is_free(voter):
                return voter
        return None

    def send(self, node_id: int, request: Request) -> None:
        """Emit `Send` with a new request id and the request timeout. The peer must be free (`is_free`)."""
        timeout_ms = self.config.request_timeout_ms
        self._last_request_id += 1
        peer = self.peers.setdefault(node_id, Peer())
        peer.request_id, peer.deadline_ms = self._last_request_id, self.now_ms + timeout_ms
        self.emit(types.Send(self._last_request_id, node_id, request, timeout_ms))

    def end_request(self, request_id: int) -> int | None:
        """Mark a request as completed; return the id of its peer, or None if the request is not in flight."""
        for node_id, peer in self.peers.items():
            if peer.request_id == request_id:
                peer.request_id = 0
                return node_id
        return None

    def expire_requests(self) -> None:
        """Give up on requests whose timeout has passed, and back off from their peers."""
        for node_id, peer in self.peers.items():
            if peer.request_id and self.now_ms >= peer.deadline_ms:
                peer.request_id = 0
                self.retry_later(node_id)

    def retry_later(self, node_id: int, wait_ms: int | None = None) -> None:
        """Send nothing to a peer for `wait_ms`, by default the retry backoff."""
        pause_ms = self.config.retry_backoff_ms if wait_ms is None else wait_ms
        self.peers.setdefault(node_id, Peer()).not_before_ms = self.now_ms + pause_ms
