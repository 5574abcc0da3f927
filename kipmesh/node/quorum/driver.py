"""Driver of the metadata quorum: executes the effects of `kipmesh.core.raft.machine` with files, gRPC and threads.

Events are queued. A step, and the step that follows a change of the log, runs without yielding to the event loop, so
`append` is a plain call. The exception is `PersistElection`: it is written on a thread, and the rest of the step and
all later events wait for it. `Flush` runs on another thread in parallel. The durable log end is read when its event is
handled, because the log may be truncated before. A fetched snapshot is installed between two steps.

Invariants: effects are executed in the machine's order. A state, an epoch or a high watermark is visible outside only
after everything it depends on is durable. After the first fatal failure and after `stop`, the driver steps, sends and
writes nothing, and all pending requests have a response.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Protocol, TypeVar

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
_T = TypeVar("_T")

FETCH_BYTES_MAX = 2 << 20
"""Maximum bytes of one Fetch, requested or served. A single batch may be larger."""
FETCH_WAIT_MS_MAX = 500
RESIGN_WAIT_S = 0.3
"""Maximum time for voters to acknowledge EndQuorumEpoch when this node stops."""
STALL_MS = 50
"""Delay of a timer after which the event loop counts as stalled."""
GRACE_S = 0.01
"""Extra time to read pending responses after a stall."""
RETRY_S = 0.1
"""Time between attempts to flush to a full disk."""

DeferredEvent = Callable[[], raft.Event | None]
"""Creates an event at the moment it is handled, or returns None if it is obsolete."""


def raft_config(config: NodeConfig) -> RaftConfig:
    """Return the configuration of a quorum replica. A node that is not in `controller.quorum.voters` is an observer."""
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
    """Receives the driver's notifications within a step: it must return quickly and must not call `append`."""

    def state_changed(self, state: State, epoch: int, leader_id: int) -> None:
        """Called at the start, and when state, epoch or leader (-1: unknown) changes."""
        ...

    def committed(self, high_watermark: int) -> None:
        """Called after the high watermark has advanced."""
        ...

    def truncated(self, offset: int) -> None:
        """Called after the log was truncated to the end offset `offset`."""
        ...

    def snapshot_installed(self, snapshot_id: m.SnapshotId) -> None:
        """Called after a fetched snapshot has replaced the log (630-12)."""
        ...


class Alarm:
    """The driver's only timer: calls `on_due` at the machine's next deadline.

    After a stall of the event loop (a large image, a busy machine) the timer fires before the responses that arrived
    meanwhile are read. The alarm then waits GRACE_S once, so that the node does not abandon a leader that has
    responded.
    """

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._on_due = on_due
        self._handle: asyncio.TimerHandle | None = None
        self._due_ms = 0

    def set(self, due_ms: int | None) -> None:
        """Schedule the alarm for `due_ms` on the monotonic clock. None has no effect.

        An alarm that is already set for an earlier time is kept; its callback sets the next one.
        """
        if due_ms is None or (self._handle is not None and self._due_ms <= due_ms):
            return
        self.cancel()
        self._due_ms = due_ms
        wait_s = max(1, due_ms - monotonic_ms()) / 1000
        self._handle = asyncio.get_running_loop().call_later(wait_s, self._fire, True)

    def cancel(self) -> None:
        """Cancel the alarm if it is set."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self, may_wait: bool) -> None:
        self._handle = None
        if may_wait and monotonic_ms() - self._due_ms > STALL_MS:
            self._handle = asyncio.get_running_loop().call_later(GRACE_S, self._fire, False)
        else:
            self._on_due()


@dataclass(eq=False, repr=False)
class Flusher:
    """Flushes the metadata log on a thread, one flush at a time.

    Requests that arrive during a flush share the next one. A flush that fails because the disk is full is retried; any
    other failure is fatal (`Log.failed`). `on_flushed` is called after each flush has advanced the recovery point.
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
        """Start to make the current content of the log durable. Returns immediately; `on_flushed` is called later."""
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
                    log.error("metadata log flush failed, retrying", error=error.message)
                    self._is_wanted = True
                    await asyncio.sleep(RETRY_S)
                else:
                    self.on_flushed()
        except Exception as error:
            self.on_failure(error)
        finally:
            self._task = None

    def end(self) -> None:
        """Start no more flushes. A running flush continues."""
        self.has_ended = True

    async def ended(self) -> None:
        """Wait for the running flush, if any."""
        if self._task is not None:
            await asyncio.wait([self._task])


@dataclass(eq=False, repr=False)
class QuorumDriver:
    """Runs one replica of the metadata quorum (state machine, files and connections) in one event loop.

    `listener` receives state, commits and log changes. `on_failure` is called once, with the first fatal error.
    `jitter` returns a random number in [0, 1) for election timeouts.
    """

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
        """Number of fetched snapshots that failed validation (630-12)."""
        self.state = self.machine.state
        self.election = self.machine.advertised_election
        """Epoch and leader of the latest `state_changed`, which listeners and peers may know."""
        self.high_watermark = max(0, self.machine.high_watermark)
        """End offset of the records that this node knows to be committed."""
        self._jitter = jitter or random.SystemRandom().random  # programs may seed the shared generator
        self._transport = Transport(self.voters, self.pool, self.post, self._fail)
        # Two threads, because an election must not wait for a flush.
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="quorum")
        self._queue: deque[raft.Event | DeferredEvent] = deque()
        self._effects: deque[raft.Effect] = deque()
        self._next: raft.Event | None = None
        """Result of the last change of the log; handled before the queue."""
        self._is_stepping = False
        self._persisting: asyncio.Task[None] | None = None
        self._flusher = Flusher(self.replica, self._executor, self._flushed, self._fail)
        self._alarm = Alarm(self._wake)
        self._pending: dict[int, tuple[raft.Request, asyncio.Future[raft.Response]]] = {}
        self._request_ids = 0
        self._appended: int | KafkaError | None = None
        self.fetcher: SnapshotFetcher | None = None
        self._installing: asyncio.Future[bool] | None = None
        self._resigned: asyncio.Future[None] | None = None
        """Completes when all voters have acknowledged the resignation."""
        self._stopping: asyncio.Task[None] | None = None
        self._is_started = self.has_ended = False

    # -- state

    @property
    def is_leader(self) -> bool:
        """Whether this node leads `epoch`. False after the end."""
        return self.state is State.LEADER and not self.has_ended

    @property
    def epoch(self) -> int:
        """The epoch of `election`."""
        return self.election.epoch

    @property
    def leader(self) -> Voter | None:
        """The leader of `epoch`, or None if unknown."""
        return next((voter for voter in self.voters if voter.id == self.election.leader_id), None)

    # -- for the node

    def start(self) -> None:
        """Notify the listener of the initial state and run the first step."""
        self._is_started = True
        self.listener.state_changed(self.state, self.epoch, self.election.leader_id)
        try:
            self._effects.extend(self.machine.start(monotonic_ms(), self._jitter()))
        except Exception as error:
            self._fail(error)
            return
        self._run()

    def append(self, batch: bytes, epoch: int) -> int:
        """Append one batch as the leader of `epoch` and return the new log end offset. The batch is not yet committed.

        Raises KafkaError: NOT_CONTROLLER if this node does not lead `epoch` or is still persisting an election;
        KAFKA_STORAGE_ERROR (full disk) or CORRUPT_MESSAGE if the log refused the batch and is unchanged;
        also KAFKA_STORAGE_ERROR if the driver failed during the append.
        """
        if self._is_stepping or self._persisting or not self.is_leader or epoch != self.epoch:
            raise self._not_controller(epoch)
        self._appended = None
        self.post(raft.AppendRequested(0, batch, epoch))
        if self.has_ended:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, "the metadata log of this controller has failed")
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
            return KafkaError(ErrorCode.NOT_CONTROLLER, f"this controller is no longer active in epoch {epoch}")
        return KafkaError(ErrorCode.NOT_CONTROLLER, f"controller {leader.id} ({leader.address}) is active")

    def resign(self) -> None:
        """Give up leadership of the quorum. No effect if this node does not lead."""
        self.post(raft.ResignRequested())

    async def stop(self) -> None:
        """Resign, notify the successors, complete pending requests and make the log durable. Idempotent.

        Only logs if the log cannot be made durable. After a fatal error, nothing is sent or written.
        """
        self._stopping = self._stopping or asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def abort(self) -> None:
        """Stop as in a crash: no peer is notified and nothing is made durable. Idempotent."""
        self._end()
        await self.stop()

    # -- for peers and clients

    async def request(self, request: raft.Request) -> raft.Response:
        """Return the response to Vote, BeginQuorumEpoch, EndQuorumEpoch or Fetch; a Fetch may wait `max_wait_ms`.

        Before `start` and after the end the response has NOT_LEADER_OR_FOLLOWER (Fetch) or BROKER_NOT_AVAILABLE.
        """
        if self.has_ended or not self._is_started:
            return _refusal(request)
        request_id = self._request_ids = self._request_ids + 1
        response: asyncio.Future[raft.Response] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = (request, response)
        try:
            self.post(raft.RequestReceived(request_id, request))
            return await response
        finally:
            self._pending.pop(request_id, None)

    def describe(self, request: m.DescribeQuorumRequest) -> m.DescribeQuorumResponse:
        """Return the response to DescribeQuorum; if this node does not lead, NOT_LEADER_OR_FOLLOWER and the leader."""
        response = self.machine.describe(request, monotonic_ms(), wall_ms())
        return response._replace(
            endpoints=tuple([m.NodeEndpoint(voter.id, voter.host, voter.port) for voter in self.voters])
        )

    # -- steps

    def post(self, event: raft.Event | DeferredEvent) -> None:
        """Handle an event after those already queued. Ignored after the end."""
        if not self.has_ended:
            self._queue.append(event)
            self._run()

    def _run(self) -> None:
        """Execute effects and handle events until none are left or an election must be persisted first."""
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
                    self._execute(effect)
                event = self._next_event()
                if event is None:
                    break
                self._effects.extend(self.machine.step(event, monotonic_ms(), self._jitter()))
        except Exception as error:
            self._fail(error)
        finally:
            self._is_stepping = False
        self._alarm.set(None if self.has_ended else self.machine.next_deadline_ms())
        resigned, machine = self._resigned, self.machine
        if resigned is not None and not (machine.state is State.RESIGNED and machine.unacknowledged):
            _complete(resigned, None)

    def _next_event(self) -> raft.Event | None:
        event, self._next = self._next, None
        while event is None and self._queue and not self.has_ended:
            queued = self._queue.popleft()
            event = queued() if callable(queued) else queued
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

    def _execute(self, effect: raft.Effect) -> None:
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
                pass  # `append` raises because `_appended` is unset
            case raft.FetchSnapshot():
                self._fetch_snapshot(effect)
            case raft.TruncateLog() | raft.AppendLeaderChange() | raft.AppendAsLeader() | raft.AppendAsFollower():
                self._change_log(effect)

    def _change_log(
        self, effect: raft.TruncateLog | raft.AppendLeaderChange | raft.AppendAsLeader | raft.AppendAsFollower
    ) -> None:
        before = self.replica.log.log_end_offset
        self._next = self.replica.change_log(effect, wall_ms())
        end = self.replica.log.log_end_offset
        if isinstance(self._next, raft.AppendRejected):
            error = self.replica.last_rejection
            log.error("append to the metadata log refused", error=str(error))
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
        log.info("quorum state changed", state=effect.state.value, epoch=effect.epoch, leader_id=effect.leader_id)
        self.listener.state_changed(effect.state, effect.epoch, effect.leader_id)

    def _respond(self, effect: raft.Respond) -> None:
        _, pending = self._pending.pop(effect.request_id, (None, None))
        if pending is None or pending.done():
            return  # the client disconnected
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
        previous = self.fetcher
        self.fetcher = SnapshotFetcher(self.config, self.replica, self.pool.get(leader.address), effect, self)
        self.fetcher.start(previous, self._fail)

    def snapshot_progressed(self) -> None:
        """Reset the fetch timeout: the leader sent part of the snapshot (630-12)."""
        self.post(raft.SnapshotFetchProgress())

    def snapshot_failed(self, *, corrupt: bool) -> None:
        """End a failed snapshot transfer, so that the replica sends Fetch again. Counts `corrupt` snapshots."""
        self.corrupt_snapshots += corrupt
        self.post(raft.SnapshotFetchFailed())

    def snapshot_received(self, snapshot_id: m.SnapshotId) -> Awaitable[bool]:
        """Replace the log with the snapshot between two steps. The result is False if the snapshot is obsolete."""
        wanted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self.has_ended:
            wanted.set_result(True)  # kept: the next start loads it
            return wanted
        self._installing = wanted
        self.post(lambda: self._install(snapshot_id, wanted))
        return wanted

    def _install(self, snapshot_id: m.SnapshotId, wanted: asyncio.Future[bool]) -> raft.Event | None:
        self._installing = None
        is_wanted = self.machine.fetching_snapshot == snapshot_id
        _complete(wanted, is_wanted or snapshot_id == self.replica.latest_snapshot)
        if not is_wanted:
            return None
        event = self.replica.install(snapshot_id)
        log.info("metadata snapshot installed", snapshot_id=snapshot_id)
        self.listener.snapshot_installed(snapshot_id)
        return event

    # -- end

    async def _stop(self) -> None:
        if self.is_leader and len(self.config.voters) > 1:
            self._resigned = asyncio.get_running_loop().create_future()
            self.resign()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._resigned, RESIGN_WAIT_S)
        may_write = not self.has_ended
        self._end()
        if self._persisting is not None:
            await asyncio.wait([self._persisting])
        await self._flusher.ended()
        await self._transport.close()
        if self.fetcher is not None:
            await self.fetcher.ended()
        await asyncio.to_thread(self._final_flush if may_write else self._executor.shutdown)

    def _final_flush(self) -> None:
        try:
            if self.replica.log.failed is None:
                self.replica.flush()
        except KafkaError as error:
            log.error("final flush of the metadata log failed", error=error.message)
        finally:
            self._executor.shutdown()

    def _fail(self, error: BaseException) -> None:
        """Stop the driver after a fatal error. Reports only the first error, and none after `stop`."""
        if self.has_ended:
            return
        log.error("quorum driver failed", error=f"{type(error).__name__}: {error}")
        self._end()
        self.on_failure(error)

    def _end(self) -> None:
        """Drop queued events and effects, and complete all pending requests."""
        self.has_ended = True
        self._queue.clear()
        self._effects.clear()
        self._alarm.cancel()
        self._flusher.end()
        if self.fetcher is not None:
            self.fetcher.cancel()
        if self._installing is not None:
            _complete(self._installing, True)
        if self._resigned is not None:
            _complete(self._resigned, None)
        pending, self._pending = self._pending, {}
        for request, response in pending.values():
            _complete(response, _refusal(request))


def _complete(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)


def _refusal(request: raft.Request) -> raft.Response:
    """Return the response of a replica that has not started or has stopped."""
    is_fetch = isinstance(request, m.FetchRequest)
    return error_response(request, ErrorCode.NOT_LEADER_OR_FOLLOWER if is_fetch else ErrorCode.BROKER_NOT_AVAILABLE)
