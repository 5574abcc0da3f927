"""One simulated broker: the parts of `kipmesh.node.broker` put together as `BrokerNode` does, on a disk that may fail.

What is not here: gRPC (`transport`), the driver of the metadata quorum's Raft and its loader (`quorum`), the disk's
thread, HTTP. Everything else that decides about a partition is the production object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry

from kipmesh.core.config import BrokerConfig, Voter
from kipmesh.core.errors import KafkaError
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.messages import Listener, ProduceRequest, ProduceResponse
from kipmesh.node.broker.changes import Changes
from kipmesh.node.broker.controller_channel import ControllerChannel
from kipmesh.node.broker.disk import Disk
from kipmesh.node.broker.fetch import FetchHandler
from kipmesh.node.broker.fetch_sessions import make_session_cache
from kipmesh.node.broker.isolation import Isolation
from kipmesh.node.broker.isr_changes import IsrChanges
from kipmesh.node.broker.lifecycle import BrokerLifecycle
from kipmesh.node.broker.log_dirs import LogDirs
from kipmesh.node.broker.maintenance import Maintenance
from kipmesh.node.broker.metadata import MetadataHandler
from kipmesh.node.broker.metrics import BrokerMetrics
from kipmesh.node.broker.offsets import OffsetsHandler
from kipmesh.node.broker.partitions import Partitions
from kipmesh.node.broker.produce import ProduceHandler
from kipmesh.node.broker.publisher import MetadataPublisher
from kipmesh.node.broker.replica_manager import ReplicaManager
from kipmesh.node.broker.selection import ReplicaSelection
from kipmesh.rpc.server import RequestContext
from kipmesh.storage.errors import StorageError
from kipmesh.storage.log_manager import LogManager
from kipmesh.testing.faulty_fs import FaultyFileSystem
from kipmesh.testing.replica_sim.loop import SimLoop
from kipmesh.testing.replica_sim.quorum import WALL_MS
from kipmesh.testing.replica_sim.transport import Process, address_of
from kipmesh.transport.pipeline import pipeline_of

if TYPE_CHECKING:
    from kipmesh.testing.replica_sim.world import World

DATA = "/data"
LISTENER = "MESH"
_Result = TypeVar("_Result")


class _Metrics(BrokerMetrics):
    """Of all brokers: nobody reads them."""

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """None that could be computed."""


_METRICS = _Metrics(CollectorRegistry())


class SimDisk(Disk):
    """The disk's thread: work is done in order, each after some virtual time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._free_at_ms = 0.0

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """See Disk."""
        now_ms = self._world.scheduler.now_ms
        self._free_at_ms = max(self._free_at_ms, now_ms) + self._world.rng.random() * self._world.flush_max_ms
        await asyncio.sleep((self._free_at_ms - now_ms) / 1000)
        return work()

    def close(self) -> None:
        """There is nothing to close."""


class _Service:
    """The gRPC service Broker; produced batches go by the checker."""

    def __init__(
        self,
        broker: SimBroker,
        produce: ProduceHandler,
        fetch: FetchHandler,
        offsets: OffsetsHandler,
        metadata: MetadataHandler,
    ) -> None:
        self._broker = broker
        self._produce = produce.produce
        self.fetch = fetch.fetch
        self.list_offsets = offsets.list_offsets
        self.offsets_for_leader_epoch = offsets.offsets_for_leader_epoch
        self.delete_records = offsets.delete_records
        self.metadata = metadata.metadata

    async def produce(self, request: ProduceRequest, context: RequestContext) -> ProduceResponse:
        """See ProduceHandler."""
        response = await self._produce(request, context)
        self._broker.world.checker.produced(self._broker, request, response)
        return response


class Parts:
    """What one process of a broker is made of."""

    def __init__(self, broker: SimBroker, process: Process, manager: LogManager) -> None:
        world, config, loop = broker.world, broker.config, process.loop

        def now_ms() -> int:
            return int(loop.time() * 1000)

        def wall_ms() -> int:
            return WALL_MS + int(world.scheduler.now_ms)

        self.broker = broker
        self.process = process
        self.manager = manager
        self.image = MetadataImage()
        self.applied = 0
        self.available = 0
        self.news = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self.disk = SimDisk(world)
        self.partitions = Partitions(MetadataImage())
        self.changes = Changes()
        pool = process.pool
        self.selection = ReplicaSelection(config, self.partitions, _METRICS, now_ms)
        self.channel = ControllerChannel(config.voters, pool)
        self.isolation = Isolation(self.partitions, config.broker_session_timeout_ms, now_ms)
        self.sessions = make_session_cache(config, self.changes.subscriptions, self.partitions)
        self.replica_manager = ReplicaManager(
            config,
            self.partitions,
            self.changes,
            manager,
            self.disk,
            pool,
            _METRICS,
            wall_ms,
            now_ms,
            lambda: self.lifecycle.broker_epoch,
            self._task_done,
        )
        self.log_dirs = LogDirs(
            config.node_id,
            manager,
            self.disk,
            self.channel,
            lambda: self.lifecycle.broker_epoch,
            self.replica_manager.drop_failed,
            lambda error: broker.failed(process, error),
        )
        self.replica_manager.on_found = self.log_dirs.found
        self.publisher = MetadataPublisher(config.node_id, self.replica_manager, self._published)
        self.isr_changes = IsrChanges(
            config.node_id, self.partitions, self.channel, _METRICS, lambda: self.lifecycle.broker_epoch, now_ms
        )
        self.lifecycle = BrokerLifecycle(
            config,
            self.channel,
            self.isolation,
            incarnation_id=world.rng.randbytes(16),
            is_leader_role=config.node_id == 1,
            previous_broker_epoch=manager.clean_shutdown_epoch,
            metadata_offset=lambda: self.publisher.published_offset,
            log_ends=self.replica_manager.log_ends,
            folders=manager.folders,
        )
        self.log_dirs.on_change = self.lifecycle.folder_failed
        self.maintenance = Maintenance(
            config, self.partitions, self.changes, manager, self.disk, self.isr_changes, wall_ms, now_ms
        )
        process.pipeline = pipeline_of({"Broker": self._service(wall_ms, now_ms)})

    def _service(self, wall_ms: Callable[[], int], now_ms: Callable[[], int]) -> _Service:
        config = self.broker.config
        produce = ProduceHandler(
            self.partitions, _METRICS, self.disk, wall_ms, queued_bytes_max=config.queued_max_request_bytes
        )
        fetch = FetchHandler(
            config.node_id,
            self.partitions,
            self.sessions,
            _METRICS,
            self.isr_changes.propose,
            now_ms,
            cluster_id=config.cluster_id,
            response_bytes_max=config.fetch_max_bytes,
            follower_bytes_max=config.replica_fetch_response_max_bytes,
            selection=self.selection,
            rack=config.broker_rack,
        )
        metadata = MetadataHandler(
            lambda: self.partitions.image if self.publisher.has_published else None,
            cluster_id=config.cluster_id,
            listener=LISTENER,
            controller_id=lambda: -1,
            selection=self.selection,
        )
        return _Service(self.broker, produce, fetch, OffsetsHandler(self.partitions), metadata)

    def start(self) -> None:
        """Begin, on the process's loop."""
        self._spawn(self._live(), "lifecycle")
        self._spawn(self._load(), "loader")
        self._spawn(self.isolation.run(), "isolation")
        self._spawn(self.isr_changes.run(), "isr-changes")
        self._spawn(self.log_dirs.run(), "log-dirs")
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
        await self.lifecycle.beat()

    async def _published(self) -> None:
        self.lifecycle.metadata_advanced()

    async def _load(self) -> None:
        """In the place of `MetadataLoader`: apply what is committed, as far as it was heard."""
        quorum = self.broker.world.quorum
        while True:
            await self.news.wait()
            self.news.clear()
            delta = MetadataDelta()
            for entry in quorum.committed[self.applied : self.available]:
                self.image.replay(entry.batch, delta)
            self.applied = self.available
            if self.applied:
                await self.publisher.publish(self.image, delta)
                await self.publisher.idle()

    @property
    def is_ready(self) -> bool:
        """See BrokerNode.ready."""
        me = self.partitions.image.brokers.get(self.broker.node_id)
        return me is not None and me.broker_epoch == self.lifecycle.broker_epoch and not me.fenced

    def begin_stop(self) -> None:
        """As on SIGTERM."""
        self.process.loop.create_task(self._stop()).add_done_callback(self._task_done)

    async def _stop(self) -> None:
        """See BrokerNode.stop."""
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
    """See the module. It outlives its processes, as a machine does."""

    def __init__(self, world: World, config: BrokerConfig) -> None:
        self.world = world
        self.config = config
        self.node_id = config.node_id
        self.rng = Random(world.rng.getrandbits(64))
        host, _, port = address_of(config.node_id).partition(":")
        self.listener = Listener(LISTENER, host, int(port))
        self.fs = FaultyFileSystem()
        self.parts: Parts | None = None
        self.is_stopping = False
        self.boots = 0
        self._heard: tuple[int, Voter | None, int] = (0, None, 0)

    @property
    def process(self) -> Process | None:
        """The one that runs."""
        return self.parts.process if self.parts is not None else None

    @property
    def is_paused(self) -> bool:
        """Whether its process is stopped, as by SIGSTOP."""
        return self.parts is not None and self.parts.process.loop.is_stopped

    def boot(self) -> None:
        """Start a process on what the disk has; later again when the disk does not let it."""
        if self.parts is not None:
            return
        world = self.world
        self.is_stopping = False
        self.boots += 1
        loop = SimLoop.make(
            world.scheduler, lambda: self.world.checker.stepped(self), 1 + self.rng.uniform(-0.003, 0.003)
        )
        process = Process(world.network, self.node_id, loop, f"broker-{self.node_id}")
        manager = LogManager(
            self.fs,
            [DATA],
            cluster_id=self.config.cluster_id,
            node_id=self.node_id,
            defaults=self.config.topic_defaults(),
            on_folder_failed=lambda path, error: self._folder_failed(process, path, error),
        )
        try:
            manager.load(WALL_MS + int(world.scheduler.now_ms))
        except KafkaError:
            world.counts["starts failed"] += 1
            loop.kill()
            self._boot_later(500)
            return
        world.network.start(process)
        loop.deliver(lambda: self._start(process, manager))

    def _start(self, process: Process, manager: LogManager) -> None:
        self.parts = Parts(self, process, manager)
        self.world.checker.started(self)
        self.parts.start()
        self._take_news()

    def _boot_later(self, delay_ms: float) -> None:
        self.world.scheduler.after(delay_ms, self.boot)

    def _folder_failed(self, process: Process, path: str, error: StorageError) -> None:
        if self.parts is not None and self.process is process and not process.loop.is_dead:
            self.parts.log_dirs.failed(path, error)

    def failed(self, process: Process, error: BaseException) -> None:
        """A task or a log failed: the process ends, and another one begins."""
        if not isinstance(error, KafkaError):
            self.world.fail(f"broker {self.node_id} failed: {error!r}")
        self.world.counts["processes failed"] += 1

        def end() -> None:
            if self.process is process:
                self.stop(restart_ms=self.rng.uniform(50, 500))

        self.world.scheduler.after(0, end)

    def stop(self, *, power: bool = False, restart_ms: float | None = None) -> None:
        """End the process; without power the disk forgets what was not synced."""
        parts = self.parts
        if parts is not None:
            self.world.checker.ending(self, power=power)
            parts.process.end()
            parts.manager.abandon()
            self.parts = None
        if power:
            self.fs.crash(self.rng)
        if restart_ms is not None:
            self._boot_later(restart_ms)

    def shut_down(self) -> None:
        """Stop as on SIGTERM; it comes back."""
        parts = self.parts
        if parts is not None and not self.is_stopping:
            self.is_stopping = True
            parts.process.loop.deliver(parts.begin_stop)

    def stopped(self, process: Process) -> None:
        """The last of a clean stop was done."""

        def end() -> None:
            if self.process is process:
                self.world.counts["clean stops"] += 1
                self.world.checker.ending(self, power=False)
                process.end()
                if self.parts is not None:
                    self.parts.manager.abandon()  # a full disk may have kept it from being closed
                self.parts = None
                self._boot_later(self.rng.uniform(50, 2000))

        self.world.scheduler.after(0, end)

    def wipe(self) -> None:
        """An empty disk in place of this one."""
        self.stop(restart_ms=self.rng.uniform(50, 1500))
        self.fs = FaultyFileSystem()
        self.world.checker.wiped(self)

    def hear(self, available: int, leader: Voter | None, epoch: int) -> None:
        """What the quorum has committed, and who leads it."""
        self._heard = (available, leader, epoch)
        if self.process is not None:
            self.process.loop.deliver(self._take_news)

    def _take_news(self) -> None:
        parts = self.parts
        if parts is None:
            return
        available, leader, epoch = self._heard
        parts.channel.leader_changed(leader)
        parts.isolation.controller_changed(leader.id if leader is not None else -1, epoch)
        if available > parts.available:
            parts.available = available
            parts.news.set()
