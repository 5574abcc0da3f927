"""The metadata quorum of one replica: a state machine that only decides ("The metadata quorum", 630-08, 630-13).

Theory of operation. A step takes one event and returns effects, in the order in which they must be done. The machine
reads the log (`LogView`) but never writes it, knows no clock, no randomness, no network: `now_ms` and `jitter`, a
random number in [0, 1), come with each step. After every event the machine polls its state, as Kafka's client does:
what is due is done, what may be sent is sent. So no event is needed for anything to happen but the passing of time,
and the driver calls `step(TimerFired())` at `next_deadline_ms()`.

The contract with the driver (etcd's Ready, as effects):

1. Effects are done in order, all of them, before the next event. What fails for good (disk) ends the node.
2. `PersistElection` is durable before anything after it is done: no answer and no request tells of an epoch or a vote
   that a crash could forget. The machine puts it before the first effect that could tell.
3. An effect of `CHANGES_LOG` is the last of its kind in a step, and the next event is `LogChanged` when it was done, or
   `AppendRejected` when the log is as it was. Anything else raises `DriverError`.
4. `Flush` may be done on a thread while events go on; `Persisted` reports `Log.recovery_point`. A voter sends no Fetch
   before everything that it has is durable, and a leader counts itself only with what is.
5. `Answer.read` is read from the log when the effect is done, so before any later change of the log.
6. `Send` may get an answer, a failure or nothing; the machine gives up by itself. Late answers are ignored.
7. `QuorumError` and `IllegalTransitionError` mean that safety is gone: the node stops and writes nothing more.

Invariants: epoch, and while it runs the high watermark, never go back; one vote an epoch; the leader appends its
LeaderChange before anything else; nothing below the high watermark is ever cut; a leader never fetches a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator

from kipmesh import messages as m
from kipmesh.core.raft import elections, replication, timing
from kipmesh.core.raft.control import LeaderChange
from kipmesh.core.raft.describe import describe_quorum
from kipmesh.core.raft.leadership import Leadership
from kipmesh.core.raft.peers import Peers
from kipmesh.core.raft.transitions import Cause, State, next_state
from kipmesh.core.raft.types import (
    CHANGES_LOG,
    AppendLeaderChange,
    AppendRejected,
    AppendRequested,
    DriverError,
    Effect,
    ElectionState,
    Event,
    LogChanged,
    LogView,
    Persisted,
    PersistElection,
    RaftConfig,
    Request,
    RequestFailed,
    RequestReceived,
    ResignRequested,
    Response,
    ResponseReceived,
    Send,
    SnapshotChanged,
    SnapshotFetchFailed,
    SnapshotFetchProgress,
    SnapshotServed,
    StateChanged,
    TimerFired,
)
from kipmesh.core.snapshot.ids import latest_end


class Machine:
    """See the module. Attributes are for reading; only this package writes them."""

    def __init__(
        self,
        config: RaftConfig,
        election: ElectionState,
        log: LogView,
        *,
        durable_end: int,
        latest_snapshot: m.SnapshotId | None = None,
        earliest_snapshot: m.SnapshotId | None = None,
    ) -> None:
        self.config = config
        self.log = log
        self.latest_snapshot = latest_snapshot
        self.earliest_snapshot = earliest_snapshot or latest_snapshot
        self.durable_end = min(durable_end, log.log_end_offset)
        self.high_watermark = latest_snapshot.end_offset if latest_snapshot else -1
        self.leader_high_watermark = -1
        self.leader_log_start = -1
        """Where the leader's log starts, as its last Fetch response said; -1 unknown, and for a leader."""
        self.persisted_election = election
        self.election = election
        if election.epoch < self.last_epoch:  # `quorum-state` was lost, the log was not
            self.election = ElectionState(self.last_epoch)
        self.state = self._initial_state()
        self.leadership: Leadership | None = None
        self.granted: set[int] = set()
        self.rejected: set[int] = set()
        self.is_backing_off = False
        self.elections_lost = 0
        self.epochs_failed = 0
        """Epochs in a row that brought no leader though other voters were heard of: slow ones, not absent ones."""
        self.heard_voter = False
        """Whether a vote was asked for or answered since such an epoch was counted last."""
        self.fetching_snapshot: m.SnapshotId | None = None
        self.successors: tuple[int, ...] = tuple(voter for voter in config.voters if voter != config.node_id)
        self.unacknowledged: set[int] = set()
        self.awaits_log = False
        self.deadline_ms: int | None = None
        """When the state ends by itself: election, backoff, fetch timeout; None for a leader.

        Of an observer that looks for a leader: when it asks another voter, should those asked be silent.
        """
        self.silent_leader: tuple[int, int] | None = None
        """Epoch and id of the leader that an observer gave up last: it must say itself that it leads that epoch."""
        self.peers = Peers()
        self.now_ms = 0
        self.jitter = 0.0
        self._effects: list[Effect] = []
        self._next_voter = config.node_id % max(1, len(config.voters))

    def _initial_state(self) -> State:
        leader_id = self.election.leader_id
        if leader_id >= 0 and leader_id not in self.config.voters:
            self.election = ElectionState(self.election.epoch)
            leader_id = -1
        if not self.config.is_voter:
            return State.OBSERVER_FOLLOWER if leader_id >= 0 else State.OBSERVER_UNATTACHED
        if leader_id == self.config.node_id:
            return State.RESIGNED  # it led this epoch once; it may not lead it twice
        if leader_id >= 0:
            return State.FOLLOWER
        return State.VOTED if self.election.voted_id >= 0 else State.UNATTACHED

    # -- what others may ask

    @property
    def epoch(self) -> int:
        """The latest epoch that is known."""
        return self.election.epoch

    @property
    def told_election(self) -> ElectionState:
        """What peers are told: who resigned does not call itself leader."""
        return self.election._replace(leader_id=-1) if self.state is State.RESIGNED else self.election

    @property
    def last_epoch(self) -> int:
        """The epoch of the last record, of the log or of the snapshot in its place (630-13); 0 when there is none."""
        return self.last_offset_and_epoch[0]

    @property
    def last_offset_and_epoch(self) -> tuple[int, int]:
        """(epoch, end offset) for votes: the later of the log's and the snapshot's (630-13)."""
        end, epoch = self.log.log_end_offset, self.log.latest_epoch
        snapshot = self.latest_snapshot
        if snapshot is not None and epoch < 0 and end == snapshot.end_offset:
            epoch = snapshot.epoch
        latest = latest_end(end, max(epoch, 0), snapshot)
        return latest.epoch, latest.end_offset

    @property
    def oldest_snapshot(self) -> m.SnapshotId | None:
        """The oldest at or above the log start; the latest while those below a raised log start are being deleted.

        One below it says nothing of the epoch at the log start.
        """
        earliest = self.earliest_snapshot
        if earliest is not None and earliest.end_offset < self.log.log_start_offset:
            return self.latest_snapshot
        return earliest

    def describe(self, request: m.DescribeQuorumRequest, now_ms: int, wall_ms: int) -> m.DescribeQuorumResponse:
        """Answer DescribeQuorum as of now; only the leader can. `wall_ms` is the wall clock's now."""
        return describe_quorum(self, request, now_ms, wall_ms)

    def next_deadline_ms(self) -> int | None:
        """When `TimerFired` is due at the latest; None for never."""
        return min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[int]:
        if self.deadline_ms is not None:
            yield self.deadline_ms
        yield from self.peers.deadlines(self.now_ms)
        if self.leadership is not None and self.leadership.voters:
            yield self.leadership.check_quorum_deadline_ms
            yield self.leadership.begin_deadline_ms
        if self.leadership is not None:
            for waiting in self.leadership.waiting.values():
                yield waiting.deadline_ms

    # -- steps

    def start(self, now_ms: int, jitter: float) -> list[Effect]:
        """The first step."""
        self.now_ms, self.jitter = now_ms, jitter
        self._enter()
        if self.state is State.RESIGNED:
            self.unacknowledged = set(self.successors)
        replication.flush_if_needed(self)
        self._poll()
        return self._take()

    def step(self, event: Event, now_ms: int, jitter: float) -> list[Effect]:
        """One event; gives what to do, in order."""
        if self.awaits_log != isinstance(event, LogChanged | AppendRejected):
            raise DriverError(f"{type(event).__name__} while {'' if self.awaits_log else 'not '}waiting for the log")
        self.now_ms, self.jitter = max(now_ms, self.now_ms), jitter
        self.awaits_log = False
        self._handle(event)
        self._poll()
        return self._take()

    def _handle(self, event: Event) -> None:
        match event:
            case TimerFired():
                pass
            case RequestReceived(request_id, request):
                self._on_request(request_id, request)
            case ResponseReceived(request_id, response):
                self._on_response(request_id, response)
            case RequestFailed(request_id):
                self.retry_later(self.peers.end(request_id))
            case AppendRequested(token, batch, epoch):
                replication.on_append(self, token, batch, epoch)
            case LogChanged():
                replication.on_log_changed(self)
            case AppendRejected():
                replication.on_append_rejected(self)
            case Persisted(end_offset):
                replication.on_persisted(self, end_offset)
            case SnapshotChanged(latest, earliest):
                replication.on_snapshot(self, latest, earliest or latest)
            case SnapshotFetchProgress() | SnapshotFetchFailed():
                replication.on_snapshot_fetch(self, failed=isinstance(event, SnapshotFetchFailed))
            case SnapshotServed(replica_id):
                if self.leadership is not None:
                    self.leadership.is_alive(replica_id, self.now_ms)
            case ResignRequested():
                self.resign()

    def _on_request(self, request_id: int, request: Request) -> None:
        match request:
            case m.FetchRequest():
                replication.on_fetch(self, request_id, request)
            case m.VoteRequest():
                self.heard_voter = True
                elections.on_vote(self, request_id, request)
            case m.BeginQuorumEpochRequest():
                elections.on_begin(self, request_id, request)
            case m.EndQuorumEpochRequest():
                elections.on_end(self, request_id, request)

    def _on_response(self, request_id: int, response: Response) -> None:
        node_id = self.peers.end(request_id)
        if node_id is None:
            return
        match response:
            case m.FetchResponse():
                replication.on_fetch_response(self, node_id, response)
            case m.VoteResponse():
                self.heard_voter = True
                elections.on_vote_response(self, node_id, response)
            case m.DescribeQuorumResponse():
                raise DriverError("DescribeQuorum is not asked by a replica")
            case _:
                elections.on_epoch_response(self, node_id, response)

    def _poll(self) -> None:
        """Do what is due in this state, and in the one that follows from it."""
        self.peers.expire(self.now_ms, self.config.retry_backoff_ms)
        while not self.awaits_log:
            before = (self.state, self.epoch)
            if self.leadership is not None:
                replication.poll_leader(self, self.leadership)
            elif self.state.follows:
                replication.poll_follower(self)
            elif self.state is State.OBSERVER_UNATTACHED:
                replication.poll_unattached_observer(self)
            else:
                elections.poll_voter(self)
            if before == (self.state, self.epoch):
                break

    # -- for the modules of this package

    def emit(self, effect: Effect) -> None:
        """Add an effect, after the election that it could tell of."""
        self._persist()
        self._effects.append(effect)
        if isinstance(effect, CHANGES_LOG):
            self.awaits_log = True

    def _persist(self) -> None:
        if self.election != self.persisted_election:
            self.persisted_election = self.election
            self._effects.append(PersistElection(self.election))

    def _take(self) -> list[Effect]:
        self._persist()
        effects, self._effects = self._effects, []
        return effects

    def become(self, cause: Cause, epoch: int, *, leader_id: int = -1, voted_id: int = -1) -> None:
        """Change the state as the table says."""
        before = self.state
        self.state = next_state(before, cause, self.epoch, epoch)
        if epoch > self.epoch and self.heard_voter:
            self.epochs_failed, self.heard_voter = self.epochs_failed + 1, False
        self.election = ElectionState(epoch, leader_id, voted_id)
        keeps_ms = self.deadline_ms if before in (State.UNATTACHED, State.VOTED, State.FOLLOWER) else None
        self._enter()
        if cause is Cause.HIGHER_EPOCH and keeps_ms is not None and self.deadline_ms is not None:
            # Whoever stands with a short log, perhaps again and again, must not keep the others from standing.
            self.deadline_ms = min(self.deadline_ms, keeps_ms)
        self.emit(StateChanged(self.state, self.epoch, self.told_election.leader_id))
        if self.state is State.LEADER and self.leadership is not None:
            change = LeaderChange(self.config.node_id, self.config.voters, self.leadership.granting_voters)
            self.emit(AppendLeaderChange(self.epoch, change))

    def _enter(self) -> None:
        """What every state begins with."""
        leadership, self.leadership = self.leadership, None
        self.fetching_snapshot = None
        self.leader_high_watermark = -1
        self.leader_log_start = -1
        self.peers.reset()
        if leadership is not None:
            replication.refuse_waiting(self, leadership)
        only_voter = self.config.voters == (self.config.node_id,)
        match self.state:
            case State.FOLLOWER | State.OBSERVER_FOLLOWER:
                self.elections_lost = self.epochs_failed = 0
                self.deadline_ms = self.now_ms + timing.fetch_timeout_ms(self.config, self.jitter)
            case State.OBSERVER_UNATTACHED:
                self.deadline_ms = None
            case State.LEADER:
                self.elections_lost = self.epochs_failed = 0
                self.deadline_ms = None
                self.leadership = Leadership(self.config, self.log.log_end_offset, self.granted, self.now_ms)
            case _:
                wait_ms = 0 if only_voter else timing.election_timeout_ms(self.config, self.epochs_failed, self.jitter)
                self.deadline_ms = self.now_ms + wait_ms
                self.is_backing_off = False
                self.granted, self.rejected = {self.config.node_id}, set()

    def resign(self) -> None:
        """Stop leading, and say who should follow."""
        if self.leadership is None:
            return
        self.successors = self.leadership.successors()
        self.become(Cause.RESIGNS, self.epoch, leader_id=self.config.node_id)
        self.unacknowledged = set(self.successors)

    def send(self, node_id: int, request: Request) -> None:
        """Send a request to a peer that is free."""
        timeout_ms = self.config.request_timeout_ms
        request_id = self.peers.begin(node_id, self.now_ms + timeout_ms)
        self.emit(Send(request_id, node_id, request, timeout_ms))

    def is_free(self, node_id: int) -> bool:
        """Whether a request may go to a peer now."""
        return self.peers.is_free(node_id, self.now_ms)

    def retry_later(self, node_id: int | None, wait_ms: int | None = None) -> None:
        """Leave a peer alone for a moment."""
        if node_id is not None:
            pause_ms = self.config.retry_backoff_ms if wait_ms is None else wait_ms
            self.peers.back_off(node_id, self.now_ms + pause_ms)

    def any_free_voter(self) -> int | None:
        """Another voter that a request may go to now, each in turn; None when there is none."""
        others = [voter for voter in self.config.voters if voter != self.config.node_id]
        for _ in others:
            self._next_voter += 1
            voter = others[self._next_voter % len(others)]
            if self.is_free(voter):
                return voter
        return None
