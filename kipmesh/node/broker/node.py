"""The broker process: what it is made of, in which order it starts and stops.

Leader and follower services run the same object; only the role that it registers with differs. Tasks: the metadata
quorum's driver and loader (which alone changes what is hosted), the lifecycle (registration, heartbeats), one fetcher a
leader, the ISR changes, the housekeeping. A task that fails ends the node through `failed`.

A broker listens before it has loaded the metadata, which may take long: until then, and until it is registered and
unfenced, it is alive but not ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, cast

import structlog
from prometheus_client import CollectorRegistry

from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.messages import Listener
from kipmesh.messages.table import KAFKA_APIS
from kipmesh.node.broker.auto_topics import AutoTopics
from kipmesh.node.broker.changes import Changes
from kipmesh.node.broker.cleaner import Cleaner
from kipmesh.node.broker.controller_channel import ControllerChannel
from kipmesh.node.broker.departures import Departures, FreshlyFenced, Knocks, LostLeaders
from kipmesh.node.broker.disk import Disk
from kipmesh.node.broker.fetch import FetchHandler
from kipmesh.node.broker.fetch_sessions import FetchSessionCollector, log_session, make_session_cache
from kipmesh.node.broker.forwarder import Forwarder
from kipmesh.node.broker.group_lag import GroupLagCollector
from kipmesh.node.broker.groups import GroupsHandler
from kipmesh.node.broker.handlers import make_handlers
from kipmesh.node.broker.isolation import Isolation
from kipmesh.node.broker.isr_changes import IsrChanges
from kipmesh.node.broker.joining import Joining
from kipmesh.node.broker.lifecycle import BrokerLifecycle
from kipmesh.node.broker.log_dirs import LogDirCollector, LogDirs, LogDirsHandler
from kipmesh.node.broker.maintenance import Maintenance
from kipmesh.node.broker.metadata import MetadataHandler
from kipmesh.node.broker.metrics import BrokerMetrics, PartitionCollector
from kipmesh.node.broker.offsets import OffsetsHandler
from kipmesh.node.broker.partitions import Partitions
from kipmesh.node.broker.parts import BrokerParts
from kipmesh.node.broker.produce import ProduceHandler
from kipmesh.node.broker.producer_ids import ProducerIdsHandler
from kipmesh.node.broker.publisher import MetadataPublisher
from kipmesh.node.broker.quorum import BrokerQuorum, open_replica
from kipmesh.node.broker.replica_manager import ReplicaManager
from kipmesh.node.broker.selection import ReplicaSelection
from kipmesh.node.clock import monotonic_ms, wall_ms
from kipmesh.node.tls import ProcessTls
from kipmesh.rpc.client import ConnectionPool
from kipmesh.rpc.server import Server
from kipmesh.storage.fs import FileSystem, RealFileSystem
from kipmesh.storage.log_manager import LogManager
from kipmesh.transport.metrics import RequestMetrics
from kipmesh.transport.pipeline import Pipeline

if TYPE_CHECKING:
    from kipmesh.node.broker.kafka_listeners import KafkaListeners
    from kipmesh.node.broker.trace import MeshTrace

log = structlog.get_logger(__name__)

STOP_GRACE_S = 0.2


class BrokerNode:
    """One broker; make it and use it inside one event loop."""

    def __init__(self, config: BrokerConfig, *, is_leader_role: bool, fs: FileSystem | None = None) -> None:
        self.config = config
        self.registry = CollectorRegistry()
        self.tls = ProcessTls(config, self.registry)
        self._metrics = BrokerMetrics(self.registry)
        self.partitions = Partitions(MetadataImage())
        # First: a plugin that cannot be had stops the node before it touches anything.
        self._selection = ReplicaSelection(config, self.partitions, self._metrics, monotonic_ms)
        self._joining = Joining(config.node_id, lambda: self.partitions.image)
        self.grpc_port = 0
        """Of `inter.broker.listener.name`."""
        self._ports: dict[str, int] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_leader_role = is_leader_role
        self._fs = fs or RealFileSystem()
        self._log_manager = LogManager(
            self._fs,
            config.log_dirs,
            cluster_id=config.cluster_id,
            node_id=config.node_id,
            defaults=config.topic_defaults(),
            open_files_max=config.log_open_files_max,
            on_folder_failed=lambda path, error: self._log_dirs.failed(path, error),
            metadata_dir=config.metadata_log_dir,
        )
        self._disk = Disk(f"broker-{config.node_id}")
        self._cleaner = Cleaner(config, self.partitions, self._log_manager, self._disk, self._metrics, wall_ms)
        self._pool = ConnectionPool(f"broker-{config.node_id}", self.tls.mesh_client())
        self._channel = ControllerChannel(config.voters, self._pool)
        self._changes = Changes()
        self._isolation = Isolation(self.partitions, config.broker_session_timeout_ms, monotonic_ms)
        self.fetch_sessions = make_session_cache(config, self._changes.subscriptions, self.partitions, log_session)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopped = self._is_loaded = False
        self._lifecycle: BrokerLifecycle | None = None
        self._quorum: BrokerQuorum | None = None
        self._servers, self._kafka = list[Server](), cast("KafkaListeners | None", None)
        self._replica_manager = ReplicaManager(
            config,
            self.partitions,
            self._changes,
            self._log_manager,
            self._disk,
            self._pool,
            self._metrics,
            wall_ms,
            monotonic_ms,
            self._broker_epoch,
            self._task_done,
        )
        self._log_dirs = LogDirs(
            config.node_id,
            self._log_manager,
            self._disk,
            self._channel,
            self._broker_epoch,
            self._replica_manager.drop_failed,
            self._fail,
        )
        self._replica_manager.on_found, self._replica_manager.on_lost = self._log_dirs.found, self._log_dirs.lost
        self._publisher = MetadataPublisher(config.node_id, self._replica_manager, self._published)
        self._forwarder = Forwarder(self._channel, lambda: self.partitions.image, self._publisher.until)
        self._groups = GroupsHandler(
            config, self.partitions, self._disk, self._forwarder, self._publisher.until, self._task_done
        )
        self._departures, self._publisher.on_roles_given = self._make_departures(), self._roles_given
        self._isr_changes = IsrChanges(
            config.node_id, self.partitions, self._channel, self._metrics, self._broker_epoch, monotonic_ms
        )
        self._trace = self._make_trace() if config.mesh_trace_sample else None

    def _broker_epoch(self) -> int:
        return self._lifecycle.broker_epoch if self._lifecycle else -1

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # somebody may never look: no warning then

    @property
    def quorum(self) -> BrokerQuorum:
        """This broker's replica of the metadata quorum; RuntimeError before it is open."""
        if self._quorum is None:
            raise RuntimeError("the metadata log is not open")
        return self._quorum

    @property
    def ready(self) -> bool:
        """Registered, unfenced, and caught up with the metadata that says so."""
        if self._lifecycle is None or self._is_stopped:
            return False
        me = self.partitions.image.brokers.get(self.config.node_id)
        return me is not None and me.broker_epoch == self._lifecycle.broker_epoch and not me.fenced

    @property
    def in_sync(self) -> bool:
        """Ready, and all its replicas are in sync or have been since it started: see `joining`."""
        return self.ready and self._joining.look()

    async def start(self) -> None:
        """Load the logs, listen, and begin to register; returns once it listens. InvalidConfigError in one line."""
        if self.config.node_id in [voter.id for voter in self.config.voters]:  # its fetches would count as that voter's
            raise InvalidConfigError(
                f"node.id {self.config.node_id} is a controller's (controller.quorum.voters: "
                f"{self.config.controller_quorum_voters!r}), a broker needs another"
            )
        try:
            await self._disk.run(lambda: self._log_manager.load(wall_ms()))
            self._is_loaded = True
            replica = await self._disk.run(lambda: open_replica(self.config, self._fs, self._log_manager))
            self._quorum = BrokerQuorum(
                self.config,
                replica,
                self._pool,
                self._channel,
                self._publisher,
                self.registry,
                self._fail,
                self._isolation.controller_changed,
                None if self._trace is None else self._trace.snapshot,
            )
            self._lifecycle = BrokerLifecycle(
                self.config,
                self._channel,
                self._isolation,
                incarnation_id=uuid.uuid4().bytes,
                is_leader_role=self._is_leader_role,
                previous_broker_epoch=self._log_manager.clean_shutdown_epoch,
                metadata_offset=lambda: self._publisher.published_offset,
                log_ends=self._replica_manager.log_ends,
                folders=self._log_manager.folders,
                offline_log_dirs=lambda: self._log_dirs.offline_ids,
            )
            self._log_dirs.on_change = self._lifecycle.folder_failed
            await self._listen()
        except BaseException:
            await self.abort()
            raise
        self._add_gauges()
        self._quorum.start()
        self._spawn(self._live(self._lifecycle), "lifecycle")
        self._spawn(self._isolation.run(), "isolation")
        self._spawn(self._isr_changes.run(), "isr-changes")
        self._spawn(self._groups.expire(), "expire-offsets")
        self._spawn(self._log_dirs.run(), "log-dirs")
        maintenance = Maintenance(
            self.config,
            self.partitions,
            self._changes,
            self._log_manager,
            self._disk,
            self._isr_changes,
            wall_ms,
            monotonic_ms,
        )
        self._spawn(maintenance.run(), "maintenance")
        if self._trace is not None:
            self._spawn(self._trace.run(self._forwarder, self._pool, lambda: self.ready), "mesh-trace")
        self._spawn(self._cleaner.run(), "cleaner")

    async def _listen(self) -> None:
        """One server for each listener, over the same handlers: who came by which is told its addresses."""
        config, own = self.config, self.config.inter_broker_listener_name
        if own not in [endpoint.name for endpoint in config.mesh_endpoints]:
            raise KafkaError(ErrorCode.INVALID_CONFIG, f"listeners has no {own} (inter.broker.listener.name)")
        parts = self._make_parts()
        handlers = make_handlers(parts)
        metrics = RequestMetrics()
        self.registry.register(metrics)
        observers = None if self._trace is None else self._trace.observers()
        pipeline = Pipeline(handlers, observers=observers, metrics=metrics)
        for endpoint in config.mesh_endpoints:
            name = "" if endpoint.name == own else endpoint.name
            tls = self.tls.mesh_server(endpoint.name)
            server = Server(pipeline, config.socket_request_max_bytes, name, tls)
            self._servers.append(server)
            self._ports[endpoint.name] = await server.start(endpoint.host, endpoint.port)
        self.grpc_port = self._ports[own]
        if config.kafka_endpoints:
            # Not loaded where no listener is configured.
            from kipmesh.node.broker.kafka_listeners import KafkaListeners, make_sasl
            from kipmesh.wire.handshake import connection_handlers

            sasl = make_sasl(config, self._known_image, self._publisher.until)
            connections = connection_handlers(KAFKA_APIS.values(), sasl)
            faulty = Pipeline({**handlers, **connections}, observers=observers, metrics=metrics, faults=parts.faults)
            self._kafka = KafkaListeners(config, faulty, self.registry, self.tls.files)
            self._ports |= await self._kafka.start()

    def _advertised(self) -> list[Listener]:
        advertised = [one for one in self.config.advertised_endpoints if one.name in self._ports]
        security = {one.name: self.config.protocol_number(one.name) for one in advertised}
        return [
            Listener(one.name, one.host, one.port or self._ports[one.name], security[one.name]) for one in advertised
        ]

    def _known_image(self) -> MetadataImage | None:
        """The metadata that this broker acts on; None before the first."""
        return self.partitions.image if self._publisher.has_published else None

    def _make_parts(self) -> BrokerParts:
        config = self.config
        produce = ProduceHandler(
            self.partitions,
            self._metrics,
            self._disk,
            wall_ms,
            queued_bytes_max=config.queued_max_request_bytes,
            listener=config.inter_broker_listener_name,
        )
        producer_ids = ProducerIdsHandler(config.node_id, self._channel, self._broker_epoch)
        fetch = FetchHandler(
            config.node_id,
            self.partitions,
            self.fetch_sessions,
            self._metrics,
            self._isr_changes.propose,
            monotonic_ms,
            cluster_id=config.cluster_id,
            response_bytes_max=config.fetch_max_bytes,
            follower_bytes_max=config.replica_fetch_response_max_bytes,
            selection=self._selection,
            rack=config.broker_rack,
            listener=config.inter_broker_listener_name,
        )
        auto_topics = AutoTopics(self._forwarder, lambda: self.partitions.image, self._publisher.until)
        metadata = MetadataHandler(
            self._known_image,
            cluster_id=config.cluster_id,
            listener=config.inter_broker_listener_name,
            controller_id=lambda: self._quorum.driver.leader_id if self._quorum else -1,
            selection=self._selection,
            create=auto_topics.create if config.auto_create_topics_enable else None,
            answered=self._metrics.metadata_answered,
            departures=self._departures,
        )
        faults = None
        if config.fault_injection_enable:
            from kipmesh.transport.faults import Faults  # not loaded where there are none

            faults = Faults()
        return BrokerParts(
            config=config,
            image=lambda: self.partitions.image,
            partitions=self.partitions,
            produce=produce,
            producer_ids=producer_ids,
            fetch=fetch,
            offsets=OffsetsHandler(self.partitions),
            metadata=metadata,
            log_dirs=LogDirsHandler(self._log_manager.folders, self.partitions, self._disk),
            groups=self._groups,
            forwarder=self._forwarder,
            faults=faults,
        )

    def _make_trace(self) -> MeshTrace:
        from kipmesh.node.broker.trace import MeshTrace  # seldom wanted: a start does not pay for it

        return MeshTrace(
            self.config,
            self.partitions,
            self.fetch_sessions,
            self.registry,
            lambda: None if self._quorum is None else self._quorum.replica.log,
        )

    def _add_gauges(self) -> None:
        gauge = self._metrics.gauge
        self.registry.register(PartitionCollector(self.partitions))
        self.registry.register(LogDirCollector(self._log_manager.folders))
        self.registry.register(FetchSessionCollector(self.fetch_sessions))
        self.registry.register(GroupLagCollector(self._groups.tables, self.partitions))
        for name, text, read in self._groups.gauges():
            gauge(name, text, read)
        gauge("kipmesh_broker_metadata_offset", "Last metadata offset applied.", lambda: self.partitions.image.offset)
        gauge("kipmesh_broker_fenced", "1 while the controller fences this broker.", lambda: float(not self.ready))
        gauge(
            "kipmesh_broker_isolated",
            "1 while no heartbeat was answered within the session timeout.",
            lambda: float(self._isolation.is_isolated),
        )

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._task_done)
        self._tasks.append(task)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert error is not None
            log.error("task failed", task=task.get_name(), error=str(error), exc_info=error)
            self._fail(error)

    async def _live(self, lifecycle: BrokerLifecycle) -> None:
        await lifecycle.register(self._advertised())
        self._publisher.registered(lifecycle.broker_epoch)
        await lifecycle.beat()

    def _make_departures(self) -> Departures:
        config, lost = self.config, LostLeaders(time.monotonic)
        self._replica_manager.on_reach_changed = lost.reach_changed
        fenced = FreshlyFenced(
            config.node_id, lambda: self.partitions.image, time.monotonic, config.broker_session_timeout_ms / 1000
        )
        kafka = [endpoint.name for endpoint in config.kafka_endpoints]
        return Departures(
            config.node_id, lost, Knocks(self._replica_manager.endpoint, lost.knocked, time.monotonic), fenced, kafka
        )

    def _roles_given(self, delta: MetadataDelta) -> None:
        self._groups.metadata_changed(delta)
        self._departures.metadata_changed(delta)

    async def _published(self) -> None:
        if self._lifecycle is not None:
            self._lifecycle.metadata_advanced()
        for server in self._servers:
            await server.set_serving(self.ready)

    async def stop(self) -> None:
        """Hand over leaderships, stop, and leave clean logs; idempotent."""
        if self._is_stopped:
            return
        if self.ready and self._lifecycle is not None:
            await self._lifecycle.shut_down(self.config.shutdown_grace_ms / 1000)
        broker_epoch = self._broker_epoch()
        await self._end(is_clean=True)
        if self._is_loaded and not self.failed.done():
            await self._disk.run(lambda: self._log_manager.checkpoint_high_watermarks(self._high_watermarks))
            await self._disk.run(lambda: self._log_manager.close(broker_epoch))
        self._disk.close()

    async def abort(self) -> None:
        """Stop as a crash would, as far as one process can: nothing is flushed or marked clean."""
        if self._is_stopped:
            return
        await self._end(is_clean=False)
        if self._is_loaded:
            await self._disk.run(self._log_manager.abandon)
        self._disk.close()

    async def _end(self, *, is_clean: bool) -> None:
        self._is_stopped = True
        self._cleaner.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._cleaner.close()
        if self._quorum is not None:  # first: the loader's task is the one that uses the replica manager
            await (self._quorum.stop() if is_clean else self._quorum.abort())
        self._groups.stop()
        self._high_watermarks = self._replica_manager.high_watermarks()
        await self._replica_manager.stop(is_clean=is_clean)
        if self._kafka is not None:
            await self._kafka.stop()
        if self._servers:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*(server.stop(STOP_GRACE_S) for server in self._servers))
        await self._departures.knocks.stop()
        await self._pool.close()
        self.tls.close()
        self._selection.close()
