"""The driver of the metadata quorum: does what `kipmesh.core.raft.machine` says, with files, gRPC and threads.

Theory of operation. Events wait in a queue. A step, and the step that follows a change of the log, runs to its end in
the event loop without giving way, so `append` is a plain call. Only `PersistElection` takes the loop's way out: it is
written on a thread, and the rest of its step and every later event wait for it. `Flush` runs on another thread beside
the steps; those asked for while one runs are one. The durable end of the log is read when the machine is told, never
before, for the log may have been cut in between. A fetched snapshot takes the log's place between two steps.

Invariants: effects are done in the machine's order; nobody outside learns of a state, an epoch or a high watermark
before what it rests on is durable; after the first failure that is for good (`on_failure`, called once), and after
`stop`, nothing is stepped, sent or written any more, and whoever waits is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Protocol

import structlog

from kipmesh import messages as m
from kipmesh.core.config import NodeConfig, Voter
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.raft import ElectionState, RaftConfig, State
from kipmesh.core.raft import types as raft
from kipmesh.core.raft.wire import error_response, with_records
from kipmesh.node import monotonic_ms, wall_ms
from kipmesh.node.quorum.snapshot_fetcher import SnapshotFetcher
from kipmesh.node.quorum.transport import Transport
from kipmesh.storage.fs import StorageError
from kipmesh.storage.quorum.quorum_replica import QuorumReplica
from kipmesh.transport.grpc.client import ConnectionPool

log = structlog.get_logger(__name__)

FETCH_BYTES_MAX = 2 << 20
"""Of one Fetch, asked for or answered: what a step reads or appends at most, but for a greater batch."""
FETCH_WAIT_MS_MAX = 500
RESIGN_WAIT_S = 0.3
STALL_MS = 50
GRACE_S = 0.01
RETRY_S = 0.1

Waiting = Callable[[], raft.Event | None]
"""An event that is made when its turn comes; None when there is nothing to say any more."""


def raft_config(config: NodeConfig) -> RaftConfig:
    """The quorum's configuration as a node has it; a node that is not among the voters observes."""
    fetch_timeout_ms = config.controller_quorum_fetch_timeout_ms
    return RaftConfig(
        node_id=config.node_id,
        voters=tuple(sorted(voter.id for voter in config.voters)),
        cluster_id=config.cluster_id,
        election_timeout_ms=config.controller_quorum_election_timeout_ms,
        fetch_timeout_ms=fetch_timeout_ms,
        election_backoff_max_ms=config.controller_quorum_election_backoff_max_ms,
        request_timeout_ms=config.controller_quorum_request_timeout_ms,
        retry_backoff_ms=config.controller_quorum_retry_backoff_ms,
        fetch_max_wait_ms=min(FETCH_WAIT_MS_MAX, fetch_timeout_ms // 2),
        fetch_max_bytes=FETCH_BYTES_MAX,
    )


class QuorumListener(Protocol):
    """Told of what happens, in the event loop, within a step: it must be quick, and must not call `append`."""

    def state_changed(self, state: State, epoch: int, leader_id: int) -> None:
        """Another state, epoch or leader (-1 unknown); also once at the start."""
        ...

    def committed(self, high_watermark: int) -> None:
        """The high watermark rose."""
        ...

    def truncated(self, offset: int) -> None:
        """The log was cut, it ends at `offset`."""
        ...

    def snapshot_installed(self, snapshot_id: m.SnapshotId) -> None:
        """A fetched snapshot took the log's place (630-12)."""
        ...


class Alarm:
    """The driver's one timer: it wakes the machine when the machine wants to be woken.

    A loop that stood still (a large image, a busy machine) finds its timer overdue and the responses of meanwhile
    unread. The alarm then waits a moment more, once, so that a leader is not given up whose response is in the
    socket already.
    """

    def __init__(self, on_due: Callable[[], None]) -> None:
        """`on_due` is called at the time that was set, or a little later, and may set another."""
        self._on_due = on_due
        self._handle: asyncio.TimerHandle | None = None
        self._due_ms = 0

    def set(self, due_ms: int | None) -> None:
        """Be there at `due_ms` of the monotonic clock; one that is set for earlier stays, and is set again then."""
        if due_ms is None or (self._handle is not None and self._due_ms <= due_ms):
            return
        self.cancel()
        self._due_ms = due_ms
        wait_s = max(1, due_ms - monotonic_ms()) / 1000
        self._handle = asyncio.get_running_loop().call_later(wait_s, self._fire, True)

    def cancel(self) -> None:
        """Do not call."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self, gives_way: bool) -> None:
        self._handle = None
        if gives_way and monotonic_ms() - self._due_ms > STALL_MS:
            self._handle = asyncio.get_running_loop().call_later(GRACE_S, self._fire, False)
        else:
            self._on_due()


@dataclass(eq=False, repr=False)
class Flusher:
    """Flushes of the metadata log on a thread, one at a time: requests while one runs are served by one more.

    A flush that finds no room is tried again; any other failure is final (`Log.failed`).

    `on_flushed`: the recovery point moved as far as it could, read it now.
    """

    replica: QuorumReplica
    executor: Executor
    on_flushed: Callable[[], None]
    on_failure: Callable[[BaseException], None]

    def __post_init__(self) -> None:
        self._is_wanted = False
        self.has_ended = False
        self._task: asyncio.Task[None] | None = None

    def flush(self) -> None:
        """Everything that is in the log now is to be durable."""
        self._is_wanted = True
        if self._task is None and not self.has_ended:
            self._task = asyncio.create_task(self._flush_all())

    async def _flush_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._is_wanted and not self.has_ended:
                self._is_wanted = False
                try:
                    await loop.run_in_executor(self.executor, self.replica.flush)
                except StorageError as error:
                    if self.replica.log.failed is not None:
                        raise
                    log.error("the metadata log is not flushed, trying again", error=error.message)
                    self._is_wanted = True
                    await asyncio.sleep(RETRY_S)
                else:
                    self.on_flushed()
        except Exception as error:
            self.on_failure(error)
        finally:
            self._task = None

    def end(self) -> None:
        """Begin no other flush."""
        self.has_ended = True

    async def ended(self) -> None:
        """Wait for the flush that runs."""
        if self._task is not None:
            await asyncio.wait([self._task])


@dataclass(eq=False, repr=False)
class QuorumDriver:
    """See the module. Made, used and stopped in one event loop."""

    config: RaftConfig
    voters: tuple[Voter, ...]
    replica: QuorumReplica
    pool: ConnectionPool
    listener: QuorumListener
    on_failure: Callable[[BaseException], None]
    _: KW_ONLY
    jitter: InitVar[Callable[[], float] | None] = None

    def __post_init__(self, jitter: Callable[[], float] | None) -> None:
        self.machine = self.replica.machine(self.config)
        self.corrupt_snapshots = 0
        """Snapshots that came from a leader and were none (630-12)."""
        self.state = self.machine.state
        self.election = self.machine.advertised_election
        """As far as listeners and peers know; epoch and leader of the latest `state_changed`."""
        self.high_watermark = max(0, self.machine.high_watermark)
        """Everything below is committed, as far as this node knows."""
        self._jitter = jitter or random.SystemRandom().random  # the shared state is for programs to seed
        self._transport = Transport(self.voters, self.pool, self.post, self._fail)
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="quorum")  # an election does not wait for a flush
        self._queue: deque[raft.Event | Waiting] = deque()
        self._effects: deque[raft.Effect] = deque()
        self._following: raft.Event | None = None
        self._is_stepping = False
        self._persisting: asyncio.Task[None] | None = None
        self._flusher = Flusher(self.replica, self._executor, self._flushed, self._fail)
        self._alarm = Alarm(self._wake)
        self._open: dict[int, tuple[raft.Request, asyncio.Future[raft.Response]]] = {}
        self._request_ids = 0
        self._appended: int | KafkaError | None = None
        self.fetcher: SnapshotFetcher | None = None
        self._installing: asyncio.Future[bool] | None = None
        self._successors_told: asyncio.Future[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._is_started = self.has_ended = False

    # -- what is so

    @property
    def is_leader(self) -> bool:
        """Whether this node leads `epoch`."""
        return self.state is State.LEADER and not self.has_ended

    @property
    def epoch(self) -> int:
        """The latest epoch."""
        return self.election.epoch

    @property
    def leader(self) -> Voter | None:
        """Who leads the epoch, None unknown."""
        return next((voter for voter in self.voters if voter.id == self.election.leader_id), None)

    # -- for the node

    def start(self) -> None:
        """The first step."""
        self._is_started = True
        self.listener.state_changed(self.state, self.epoch, self.election.leader_id)
        try:
            self._effects.extend(self.machine.start(monotonic_ms(), self._jitter()))
        except Exception as error:
            self._fail(error)
            return
        self._run()

    def append(self, batch: bytes, epoch: int) -> int:
        """Append as the leader of `epoch`, as one batch; gives the log end after it. It counts once that is committed.

        NOT_CONTROLLER when this node does not lead that epoch or cannot say now; KAFKA_STORAGE_ERROR (full disk) and
        CORRUPT_MESSAGE when the log refused, and is as it was.
        """
        if self._is_stepping or self._persisting or not self.is_leader or epoch != self.epoch:
            raise self._not_controller(epoch)
        self._appended = None
        self.post(raft.AppendRequested(0, batch, epoch))
        if self.has_ended:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, "the metadata log of this controller failed")
        if self._appended is None:
            raise self._not_controller(epoch)
        if isinstance(self._appended, KafkaError):
            raise self._appended
        return self._appended

    def _not_controller(self, epoch: int) -> KafkaError:
        leader = self.leader
        if leader is None:
            return KafkaError(ErrorCode.NOT_CONTROLLER, "no controller is active")
        if leader.id == self.config.node_id:
            return KafkaError(ErrorCode.NOT_CONTROLLER, f"this controller is not active in epoch {epoch} any more")
        return KafkaError(ErrorCode.NOT_CONTROLLER, f"controller {leader.id} ({leader.address}) is active")

    def resign(self) -> None:
        """Stop leading, if this node leads."""
        self.post(raft.ResignRequested())

    async def stop(self) -> None:
        """Resign, give the successors a moment to hear of it, answer who waits, make the log durable. Idempotent."""
        self._stopping = self._stopping or asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def abort(self) -> None:
        """End as a crash would: nobody is told, nothing is made durable. Idempotent."""
        self._end()
        await self.stop()

    # -- for peers and clients

    async def request(self, request: raft.Request) -> raft.Response:
        """Respond to a peer's Vote, BeginQuorumEpoch, EndQuorumEpoch or Fetch; a Fetch may wait for its time."""
        if self.has_ended or not self._is_started:
            return _refusal(request)
        request_id = self._request_ids = self._request_ids + 1
        response: asyncio.Future[raft.Response] = asyncio.get_running_loop().create_future()
        self._open[request_id] = (request, response)
        try:
            self.post(raft.RequestReceived(request_id, request))
            return await response
        finally:
            self._open.pop(request_id, None)

    def describe(self, request: m.DescribeQuorumRequest) -> m.DescribeQuorumResponse:
        """Respond to DescribeQuorum: everything at the leader, at others NOT_LEADER_OR_FOLLOWER and who leads."""
        response = self.machine.describe(request, monotonic_ms(), wall_ms())
        return response._replace(
            endpoints=tuple([m.NodeEndpoint(voter.id, voter.host, voter.port) for voter in self.voters])
        )

    # -- steps

    def post(self, event: raft.Event | Waiting) -> None:
        """Step on an event when its turn comes; ignored after the end."""
        if not self.has_ended:
            self._queue.append(event)
            self._run()

    def _run(self) -> None:
        """Step until nothing is left, or until an election has to be written first."""
        if not self._is_started or self._is_stepping or self._persisting or self.has_ended:
            return
        self._is_stepping = True
        try:
            while not self.has_ended:
                while self._effects and not self.has_ended:
                    effect = self._effects.popleft()
                    if isinstance(effect, raft.PersistElection):
                        self._persisting = asyncio.create_task(self._persist(effect.election))
                        return
                    self._do(effect)
                event = self._next_event()
                if event is None:
                    break
                self._effects.extend(self.machine.step(event, monotonic_ms(), self._jitter()))
        except Exception as error:
            self._fail(error)
        finally:
            self._is_stepping = False
        self._alarm.set(None if self.has_ended else self.machine.next_deadline_ms())
        if self._successors_told is not None and not self._is_telling and not self._successors_told.done():
            self._successors_told.set_result(None)

    def _next_event(self) -> raft.Event | None:
        event, self._following = self._following, None
        while event is None and self._queue and not self.has_ended:
            waiting = self._queue.popleft()
            event = waiting() if callable(waiting) else waiting
        return event

    async def _persist(self, election: ElectionState) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._executor, self.replica.persist, election)
        except Exception as error:
            self._persisting = None
            self._fail(error)
            return
        self._persisting = None
        self._run()

    def _do(self, effect: raft.Effect) -> None:
        match effect:
            case raft.Send():
                self._transport.send(effect)
            case raft.Respond():
                self._respond(effect)
            case raft.Flush():
                self._flusher.flush()
            case raft.Committed(high_watermark):
                self.high_watermark = high_watermark
                self.listener.committed(high_watermark)
            case raft.StateChanged():
                self._change_state(effect)
            case raft.RefuseAppend():
                pass  # `append` has seen to it
            case raft.FetchSnapshot():
                self._fetch_snapshot(effect)
            case raft.TruncateLog() | raft.AppendLeaderChange() | raft.AppendAsLeader() | raft.AppendAsFollower():
                self._change_log(effect)

    def _change_log(
        self, effect: raft.TruncateLog | raft.AppendLeaderChange | raft.AppendAsLeader | raft.AppendAsFollower
    ) -> None:
        before = self.replica.log.log_end_offset
        self._following = self.replica.change_log(effect, wall_ms())
        end = self.replica.log.log_end_offset
        if isinstance(self._following, raft.AppendRejected):
            error = self.replica.last_rejection
            log.error("the metadata log refused an append", error=str(error))
            if isinstance(effect, raft.AppendAsLeader):
                self._appended = error
        elif isinstance(effect, raft.AppendAsLeader):
            self._appended = end
        elif isinstance(effect, raft.TruncateLog) and end < before:
            log.warning("metadata log truncated", before=before, log_end_offset=end)
            self.listener.truncated(end)

    def _change_state(self, effect: raft.StateChanged) -> None:
        if self.fetcher is not None:
            self.fetcher.cancel()
        self.state = effect.state
        self.election = ElectionState(effect.epoch, effect.leader_id)
        log.info("metadata quorum", state=effect.state.value, epoch=effect.epoch, leader_id=effect.leader_id)
        self.listener.state_changed(effect.state, effect.epoch, effect.leader_id)

    def _respond(self, effect: raft.Respond) -> None:
        _, pending = self._open.pop(effect.request_id, (None, None))
        if pending is None or pending.done():
            return  # the client is gone
        response, read = effect.response, effect.read
        if read is not None:
            limited = read._replace(max_bytes=min(read.max_bytes, FETCH_BYTES_MAX))
            response = with_records(response, self.replica.read(limited))
        pending.set_result(response)

    def _flushed(self) -> None:
        self.post(lambda: raft.Persisted(self.replica.log.recovery_point))

    def _wake(self) -> None:
        due_ms = self.machine.next_deadline_ms()
        if self._persisting or due_ms is None:
            return
        if due_ms <= monotonic_ms():
            self.post(raft.TimerFired())
        else:
            self._alarm.set(due_ms)

    # -- snapshots

    def _fetch_snapshot(self, effect: raft.FetchSnapshot) -> None:
        leader = next(voter for voter in self.voters if voter.id == effect.leader_id)
        log.info("fetching a metadata snapshot", snapshot_id=effect.snapshot_id, leader_id=leader.id)
        before = self.fetcher
        self.fetcher = SnapshotFetcher(self.config, self.replica, self.pool.get(leader.address), effect, self)
        self.fetcher.start(before, self._fail)

    def snapshot_progressed(self) -> None:
        """For the fetcher: the leader lives (630-12)."""
        self.post(raft.SnapshotFetchProgress())

    def snapshot_failed(self, *, corrupt: bool) -> None:
        """For the fetcher: Fetch is asked again."""
        self.corrupt_snapshots += corrupt
        self.post(raft.SnapshotFetchFailed())

    def snapshot_received(self, snapshot_id: m.SnapshotId) -> Awaitable[bool]:
        """For the fetcher: put the snapshot in the log's place between two steps, if it is still wanted then."""
        wanted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self.has_ended:
            wanted.set_result(True)  # the next start finds it
            return wanted
        self._installing = wanted
        self.post(lambda: self._install(snapshot_id, wanted))
        return wanted

    def _install(self, snapshot_id: m.SnapshotId, wanted: asyncio.Future[bool]) -> raft.Event | None:
        self._installing = None
        is_wanted = self.machine.fetching_snapshot == snapshot_id
        if not wanted.done():
            wanted.set_result(is_wanted or snapshot_id == self.replica.latest_snapshot)
        if not is_wanted:
            return None
        event = self.replica.install(snapshot_id)
        log.info("metadata snapshot installed", snapshot_id=snapshot_id)
        self.listener.snapshot_installed(snapshot_id)
        return event

    # -- the end

    @property
    def _is_telling(self) -> bool:
        """Whether there is still a voter that was not told that this node leads no more."""
        return self.machine.state is State.RESIGNED and bool(self.machine.unacknowledged)

    async def _stop(self) -> None:
        if self.is_leader and len(self.config.voters) > 1:
            self._successors_told = asyncio.get_running_loop().create_future()
            self.resign()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._successors_told, RESIGN_WAIT_S)
        may_write = not self.has_ended
        self._end()
        if self._persisting is not None:
            await asyncio.wait([self._persisting])
        await self._flusher.ended()
        await self._transport.close()
        if self.fetcher is not None:
            await self.fetcher.ended()
        await asyncio.to_thread(self._last_flush if may_write else self._executor.shutdown)

    def _last_flush(self) -> None:
        try:
            if self.replica.log.failed is None:
                self.replica.flush()
        except KafkaError as error:
            log.error("the metadata log is not flushed at the end", error=error.message)
        finally:
            self._executor.shutdown()

    def _fail(self, error: BaseException) -> None:
        """What is for good: the node must stop. Told once; after `stop` not at all."""
        if self.has_ended:
            return
        log.error("the metadata quorum of this node failed", error=f"{type(error).__name__}: {error}")
        self._end()
        self.on_failure(error)

    def _end(self) -> None:
        """Do nothing more, and answer who waits."""
        self.has_ended = True
        self._queue.clear()
        self._effects.clear()
        self._alarm.cancel()
        self._flusher.end()
        if self.fetcher is not None:
            self.fetcher.cancel()
        if self._installing is not None and not self._installing.done():
            self._installing.set_result(True)
        if self._successors_told is not None and not self._successors_told.done():
            self._successors_told.set_result(None)
        waiting, self._open = self._open, {}
        for request, pending in waiting.values():
            if not pending.done():
                pending.set_result(_refusal(request))


def _refusal(request: raft.Request) -> raft.Response:
    """Return the response of a node that takes no part in the quorum any more, or not yet."""
    is_fetch = isinstance(request, m.FetchRequest)
    return error_response(request, ErrorCode.NOT_LEADER_OR_FOLLOWER if is_fetch else ErrorCode.BROKER_NOT_AVAILABLE)
