"""One simulated broker: production parts of `kipmesh.broker`, assembled as in `BrokerNode`, on a disk that may fail.

Replaced are gRPC (`transport`), the Raft driver and loader of the metadata quorum (`quorum`), the disk thread, and
HTTP. All other objects that decide about partitions are production code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from kipmesh.broker.membership.controller_channel import ControllerChannel
from kipmesh.broker.membership.lifecycle import BrokerLifecycle
from kipmesh.broker.membership.publisher import MetadataPublisher
from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.isolation import Isolation
from kipmesh.broker.replication.isr_changes import IsrChanges
from kipmesh.broker.replication.log_dirs import LogDirs
from kipmesh.broker.replication.maintenance import Maintenance
from kipmesh.broker.replication.replica import DirtyReplicas, Disk
from kipmesh.broker.replication.replica_manager import ReplicaManager
from kipmesh.broker.requests.fetch import FetchHandler
from kipmesh.broker.requests.fetch_sessions import make_session_cache
from kipmesh.broker.requests.metadata import MetadataHandler
from kipmesh.broker.requests.offsets import OffsetsHandler
from kipmesh.broker.requests.produce import ProduceHandler
from kipmesh.broker.requests.selection import ReplicaSelection
from kipmesh.core.config import Voter
from kipmesh.core.errors import KafkaError
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.messages import Listener, ProduceRequest, ProduceResponse
from kipmesh.storage.fs import StorageError
from kipmesh.storage.log_manager import LogManager
from kipmesh.transport.grpc.server import RequestContext
from kipmesh.transport.pipeline import pipeline_of
from simulation.engine import WALL_MS, Action, Engine
from simulation.faulty_fs import FaultyFileSystem
from simulation.replicas.checker import Checker, Hosted, ReplicaState
from simulation.replicas.loop import SimLoop
from simulation.replicas.quorum import Quorum
from simulation.replicas.settings import DATA, LISTENER, Settings, address_of
from simulation.replicas.transport import Process

CRASH_POINTS = ("appended", "truncated", "leader", "follower", "high watermark moved")
"""Changes of a replica right after which the process can crash."""
_Result = TypeVar("_Result")


class _Metrics(BrokerMetrics):
    """`BrokerMetrics` shared by all simulated brokers, without computed gauges. Nothing reads them."""

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Register nothing."""


_METRICS = _Metrics(CollectorRegistry())


class SimDisk(Disk):
    """A `Disk` that runs work in order, with random durations in virtual time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._free_at_ms = 0.0

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of `work`, run after all earlier work and a random duration. Raises its exceptions."""
        engine, now_ms = self._engine, self._engine.now_ms
        duration_ms = engine.rng.random() * engine.conditions.disk_work_max_ms
        self._free_at_ms = max(self._free_at_ms, now_ms) + duration_ms
        await asyncio.sleep((self._free_at_ms - now_ms) / 1000)
        return work()

    def close(self) -> None:
        """Do nothing."""


class Parts:
    """All objects of one broker process, as `BrokerNode` assembles them."""

    def __init__(self, broker: SimBroker, process: Process, manager: LogManager) -> None:
        config, now_ms, wall_ms = broker.config, process.loop.now_ms, broker.wall_ms
        self.broker = broker
        self.process = process
        self.manager = manager
        self.image = MetadataImage()
        self.applied = 0
        self.available = 0
        self.metadata_changed = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self.disk = SimDisk(broker.engine)
        self.hosted_replicas = HostedReplicas(MetadataImage())
        self.dirty_replicas = DirtyReplicas()
        pool = process.pool
        self.selection = ReplicaSelection(config, self.hosted_replicas, _METRICS, now_ms)
        self.channel = ControllerChannel(config.voters, pool)
        self.isolation = Isolation(self.hosted_replicas, config.broker_session_timeout_ms, now_ms)
        self.sessions = make_session_cache(config, self.dirty_replicas.subscriptions, self.hosted_replicas)
        self.log_dirs = LogDirs(
            broker_id=config.node_id,
            log_manager=manager,
            disk=self.disk,
            channel=self.channel,
            broker_epoch=lambda: self.lifecycle.broker_epoch,
            on_failure=lambda error: broker.failed(process, error),
            on_change=lambda: self.lifecycle.heartbeat_due.set(),
        )
        self.replica_manager = ReplicaManager(
            config=config,
            hosted_replicas=self.hosted_replicas,
            dirty_replicas=self.dirty_replicas,
            log_manager=manager,
            disk=self.disk,
            pool=pool,
            metrics=_METRICS,
            now_ms=wall_ms,
            monotonic_ms=now_ms,
            broker_epoch=lambda: self.lifecycle.broker_epoch,
            on_task_done=self._task_done,
            log_dirs=self.log_dirs,
        )
        self.publisher = MetadataPublisher(config.node_id, self.replica_manager, self._on_published)
        self.isr_changes = IsrChanges(
            config.node_id, self.hosted_replicas, self.channel, _METRICS, lambda: self.lifecycle.broker_epoch, now_ms
        )
        self.lifecycle = BrokerLifecycle(
            config,
            self.channel,
            self.isolation,
            incarnation_id=broker.engine.rng.randbytes(16),
            is_leader_role=config.node_id == 1,
            previous_broker_epoch=manager.clean_shutdown_epoch,
            metadata_offset=lambda: self.publisher.published_offset,
            log_ends=self.replica_manager.log_ends,
            directories=manager.directories,
        )
        self.maintenance = Maintenance(
            config, self.hosted_replicas, self.dirty_replicas, manager, self.disk, self.isr_changes, wall_ms, now_ms
        )
        self.hosted = Hosted(config.node_id, manager, self.hosted_replicas, self.lifecycle)
        process.pipeline = pipeline_of({"Broker": self._service()})

    def _service(self) -> SimpleNamespace:
        """Return the gRPC service Broker. The checker sees produced batches."""
        config, now_ms = self.broker.config, self.process.loop.now_ms
        hosted, disk = self.hosted_replicas, self.disk
        self._produce_handler = ProduceHandler(config, hosted, _METRICS, disk, self.broker.wall_ms)
        fetch = FetchHandler(
            config, hosted, self.sessions, _METRICS, self.isr_changes.propose, now_ms, selection=self.selection
        )
        metadata = MetadataHandler(
            config,
            lambda: hosted.image if self.publisher.has_published else None,
            controller_id=lambda: -1,
            selection=self.selection,
        )
        offsets = OffsetsHandler(self.hosted_replicas)
        return SimpleNamespace(
            produce=self._produce,
            fetch=fetch.fetch,
            list_offsets=offsets.list_offsets,
            offsets_for_leader_epoch=offsets.offsets_for_leader_epoch,
            delete_records=offsets.delete_records,
            metadata=metadata.metadata,
        )

    async def _produce(self, request: ProduceRequest, context: RequestContext) -> ProduceResponse:
        response = await self._produce_handler.produce(request, context)
        if request.acks == -1:
            self.broker.check_replicas()
            self.broker.checker.check_produced(self.broker.node_id, request, response)
        return response

    def start(self) -> None:
        """Start all tasks on the loop of the process."""
        self._spawn(self._live(), "lifecycle")
        self._spawn(self._load(), "loader")
        self._spawn(self.isolation.run(), "isolation")
        self._spawn(self.isr_changes.run(), "isr-changes")
        self._spawn(self.log_dirs.run(self.replica_manager.drop_failed), "log-dirs")
        self._spawn(self.maintenance.run(), "maintenance")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self.process.loop.create_task(work, name=name)
        task.add_done_callback(self._task_done)
        self.tasks.append(task)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.broker.failed(self.process, error)

    async def _live(self) -> None:
        await self.lifecycle.register([self.broker.listener])
        self.publisher.registered(self.lifecycle.broker_epoch)
        await self.lifecycle.send_heartbeats()

    async def _on_published(self) -> None:
        self.lifecycle.metadata_advanced()

    async def _load(self) -> None:
        """Apply the committed metadata that the broker was notified of, in place of `MetadataLoader`."""
        quorum = self.broker.quorum
        while True:
            await self.metadata_changed.wait()
            self.metadata_changed.clear()
            delta = MetadataDelta()
            for entry in quorum.committed[self.applied : self.available]:
                self.image.replay(entry.batch, delta)
            self.applied = self.available
            if self.applied:
                await self.publisher.publish(self.image, delta)
                await self.publisher.idle()

    @property
    def is_ready(self) -> bool:
        """Whether the broker is registered and unfenced, in its own metadata image."""
        me = self.hosted_replicas.image.brokers.get(self.broker.node_id)
        return me is not None and me.broker_epoch == self.lifecycle.broker_epoch and not me.fenced

    def begin_stop(self) -> None:
        """Begin a clean stop, as on SIGTERM. It ends with `SimBroker.stopped`."""
        self.process.loop.create_task(self._stop()).add_done_callback(self._task_done)

    async def _stop(self) -> None:
        """Stop as `BrokerNode.stop` does: controlled shutdown if ready, then close the logs."""
        config = self.broker.config
        if self.is_ready:
            await self.lifecycle.shut_down(config.shutdown_grace_ms / 1000)
        broker_epoch = self.lifecycle.broker_epoch
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        high_watermarks = self.replica_manager.high_watermarks()
        await self.replica_manager.stop(is_clean=True)
        self.process.pipeline = None
        try:
            await self.disk.run(lambda: self.manager.checkpoint_high_watermarks(high_watermarks))
            await self.disk.run(lambda: self.manager.close(broker_epoch))
        finally:
            self.broker.stopped(self.process)


class SimBroker:
    """One simulated broker: a disk and at most one process. It outlives its processes."""

    def __init__(self, quorum: Quorum, settings: Settings, checker: Checker, node_id: int) -> None:
        self.quorum = quorum
        self.network = quorum.network
        self.engine = quorum.engine
        self.counts = quorum.counts
        self.checker = checker
        self.config = config = settings.broker_config(node_id)
        self.node_id = node_id
        self.rng = Random(self.engine.rng.getrandbits(64))
        host, _, port = address_of(config.node_id).partition(":")
        self.listener = Listener(LISTENER, host, int(port))
        self.fs = FaultyFileSystem()
        self.parts: Parts | None = None
        self.is_stopping = False
        self.crash_point = ""
        """The process crashes after a change in `CRASH_POINTS`."""
        self._metadata_state: tuple[int, Voter | None, int] = (0, None, 0)
        quorum.listeners[node_id] = self._on_notification

    def wall_ms(self) -> int:
        """Return the wall clock (ms)."""
        return WALL_MS + int(self.engine.now_ms)

    @property
    def process(self) -> Process | None:
        """The running process, or None."""
        return self.parts.process if self.parts is not None else None

    @property
    def is_up(self) -> bool:
        """Whether a process runs, paused or not."""
        return self.parts is not None

    @property
    def is_paused(self) -> bool:
        """Whether the process is stopped by SIGSTOP."""
        return self.parts is not None and self.parts.process.loop.is_paused

    def boot(self) -> None:
        """Start a process on the current disk. Does nothing if one runs. Retries after 500 ms if the disk fails."""
        if self.parts is not None:
            return
        self.is_stopping = False
        loop = SimLoop(self.engine, self._stepped, 1 + self.rng.uniform(-0.003, 0.003))  # type: ignore[abstract]
        process = Process(self.network, self.node_id, loop, f"broker-{self.node_id}")
        manager = LogManager(
            self.fs,
            [DATA],
            cluster_id=self.config.cluster_id,
            node_id=self.node_id,
            defaults=self.config.topic_defaults(),
            on_directory_failed=lambda path, error: self._on_directory_failed(process, path, error),
        )
        try:
            manager.load(self.wall_ms())
        except KafkaError:
            self.counts["starts failed"] += 1
            loop.kill()
            self._boot_later(500)
            return
        self.network.processes[self.node_id] = process
        loop.deliver(lambda: self._start(process, manager))

    def _start(self, process: Process, manager: LogManager) -> None:
        self.parts = Parts(self, process, manager)
        self.checker.check_start(self.parts.hosted)
        self.parts.start()
        self._apply_notification()

    def _stepped(self) -> None:
        """Check the broker after each step of the process. Raises InvariantError."""
        self.check_replicas()
        self.engine.check_problems()

    def check_replicas(self) -> None:
        """Check the replicas, and crash if one passed the crash point. Raises InvariantError."""
        if self.parts is None:
            return
        for before, now in self.checker.check_replicas(self.parts.hosted):
            if self.crash_point and _has_passed(self.crash_point, before, now):
                self.counts[f"crash at {self.crash_point}"] += 1
                self.crash_point = ""
                self.engine.after(0, partial(self.crash, power=self.engine.rng.random() < 0.5))

    def crash(self, *, power: bool) -> None:
        """Kill the process, if one runs. It restarts later. With `power`, the disk also loses unsynced data."""
        if self.parts is not None:
            self.counts["crashes"] += 1
            self.counts["power cuts"] += power
            rng = self.engine.rng
            self.stop(power=power, restart_ms=rng.choice((30, 300, 2500)) * rng.uniform(0.5, 1.5))

    def pause(self) -> Action:
        """Pause the process as SIGSTOP does, if one runs. Return the action that resumes it."""
        if self.process is None:
            return lambda: None
        loop = self.process.loop
        loop.is_paused = True
        return loop.resume

    def _boot_later(self, delay_ms: float) -> None:
        self.engine.after(delay_ms, self.boot)

    def _on_directory_failed(self, process: Process, path: str, error: StorageError) -> None:
        if self.parts is not None and self.process is process and not process.loop.is_dead:
            self.parts.log_dirs.directory_failed(path, error)

    def failed(self, process: Process, error: BaseException) -> None:
        """Kill and restart the process after a task or log has failed.

        Reports any error other than KafkaError as a defect.
        """
        if not isinstance(error, KafkaError):
            self.engine.report(f"broker {self.node_id} failed: {error!r}")
        self.counts["processes failed"] += 1

        def end() -> None:
            if self.process is process:
                self.stop(restart_ms=self.rng.uniform(50, 500))

        self.engine.after(0, end)

    def stop(self, *, power: bool = False, restart_ms: float | None = None) -> None:
        """End the process as kill does: without writing, but keeping written data. `stopped` ends a clean stop instead.

        With `power`, also loses a random part of unsynced data. `restart_ms` is the delay of the restart, or None for
        no restart.
        """
        parts = self.parts
        self.checker.process_ended(self.node_id, power=power)
        if parts is not None:
            parts.process.end()
            parts.manager.abandon()
            self.parts = None
        if power:
            self.fs.crash(self.rng)
        if restart_ms is not None:
            self._boot_later(restart_ms)

    def shut_down(self) -> None:
        """Begin a clean stop as on SIGTERM, and restart later. Does nothing if no process runs or it is stopping."""
        parts = self.parts
        if parts is not None and not self.is_stopping:
            self.is_stopping = True
            parts.process.loop.deliver(parts.begin_stop)

    def stopped(self, process: Process) -> None:
        """End a process that has stopped cleanly, and restart later."""

        def end() -> None:
            if self.process is process:
                self.counts["clean stops"] += 1
                self.checker.process_ended(self.node_id, power=False)
                process.end()
                if self.parts is not None:
                    self.parts.manager.abandon()  # a full disk may have prevented the close
                self.parts = None
                self._boot_later(self.rng.uniform(50, 2000))

        self.engine.after(0, end)

    def wipe(self) -> None:
        """Kill the process, replace the disk with an empty one and restart."""
        self.stop(restart_ms=self.rng.uniform(50, 1500))
        self.fs = FaultyFileSystem()
        self.checker.disk_lost(self.node_id)

    def _on_notification(self, available: int, leader: Voter | None, epoch: int) -> None:
        self._metadata_state = (available, leader, epoch)
        if self.process is not None:
            self.process.loop.deliver(self._apply_notification)

    def _apply_notification(self) -> None:
        parts = self.parts
        if parts is None:
            return
        available, leader, epoch = self._metadata_state
        parts.channel.leader_changed(leader)
        parts.isolation.controller_changed(leader.id if leader is not None else -1, epoch)
        if available > parts.available:
            parts.available = available
            parts.metadata_changed.set()


def _has_passed(point: str, before: ReplicaState, now: ReplicaState) -> bool:
    has_passed = {
        "appended": now.log_end > before.log_end,
        "truncated": now.log_end < before.log_end,
        "leader": now.is_leader and now.leader_epoch > before.leader_epoch,
        "follower": not now.is_leader and now.leader_epoch > before.leader_epoch,
        "high watermark moved": now.high_watermark > before.high_watermark,
    }
    return has_passed[point]
