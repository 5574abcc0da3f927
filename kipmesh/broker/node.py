"""The broker process: the order in which its parts start and stop.

Leader and follower services run the same object with different roles in the registration. Tasks: the metadata quorum's
driver and loader (the only one that changes which replicas are hosted), registration and heartbeats, one fetcher per
leader, ISR changes, log directories, maintenance, the cleaner and offset expiry. A task that fails ends the node
through `failed`.

A broker listens before it has loaded the metadata, which may take long. It is alive, but not ready until it is
registered and unfenced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from kipmesh.broker.listeners import Listeners
from kipmesh.broker.membership.quorum import BrokerQuorum, open_replica
from kipmesh.broker.parts import BrokerParts
from kipmesh.broker.replication.isr_changes import StartupIsrCheck
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.node import wall_ms
from kipmesh.node.tls import ProcessTls
from kipmesh.storage.fs import FileSystem, RealFileSystem

log = structlog.get_logger(__name__)


class BrokerNode:
    """One broker. Create and use it inside one event loop.

    `failed` is a future that receives the first fatal error as its exception. Without one it stays pending. The
    constructor raises InvalidConfigError for an unusable replica selector or unusable certificates.
    """

    def __init__(self, config: BrokerConfig, *, is_leader_role: bool, fs: FileSystem | None = None) -> None:
        self.config = config
        self.registry = CollectorRegistry(auto_describe=True)
        self.tls = ProcessTls(config, self.registry)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fs = fs or RealFileSystem()
        self.is_leader_role = is_leader_role
        self.parts = BrokerParts(self)
        self.hosted_replicas = self.parts.hosted_replicas
        self.fetch_sessions = self.parts.fetch_sessions
        self.startup_isr_check = StartupIsrCheck(config.node_id, self.hosted_replicas)
        self.listeners = Listeners(config, self.registry, self.tls, self.parts)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopped = self._is_loaded = False

    @property
    def grpc_port(self) -> int:
        """Port of `inter.broker.listener.name`, or 0 before the broker listens."""
        return self.listeners.ports.get(self.config.inter_broker_listener_name, 0)

    @property
    def quorum(self) -> BrokerQuorum:
        """The broker's replica of the metadata quorum. Raises RuntimeError before its log is open."""
        if self.parts.quorum is None:
            raise RuntimeError("the metadata log is not open")
        return self.parts.quorum

    @property
    def ready(self) -> bool:
        """Whether the broker's own metadata image shows its current registration as unfenced. False once stopped."""
        me = self.hosted_replicas.image.brokers.get(self.config.node_id)
        is_current = me is not None and me.broker_epoch == self.parts.broker_epoch() and not me.fenced
        return is_current and not self._is_stopped

    @property
    def in_sync(self) -> bool:
        """Whether the broker is ready, and all its replicas are in their ISRs or have been since the start."""
        return self.ready and self.startup_isr_check.all_in_sync()

    async def start(self) -> None:
        """Load the logs, bind the listeners and start the tasks. Returns before the broker is registered.

        Raises KafkaError for an invalid configuration, for example the `node.id` of a voter or the data directory of
        another node; StorageError if a disk fails; AddressError if an address cannot be bound.
        """
        config, parts = self.config, self.parts
        if config.node_id in [voter.id for voter in config.voters]:  # its fetches would count as the voter's
            raise InvalidConfigError(
                f"node.id must not be the id of a voter, got {config.node_id} "
                f"with controller.quorum.voters={config.controller_quorum_voters}"
            )
        try:
            await parts.disk.run(lambda: parts.log_manager.load(wall_ms()))
            self._is_loaded = True
            parts.lifecycle.previous_broker_epoch = parts.log_manager.clean_shutdown_epoch
            replica = await parts.disk.run(lambda: open_replica(config, self.fs, parts.log_manager))
            parts.quorum = BrokerQuorum(
                config=config,
                replica=replica,
                pool=parts.pool,
                channel=parts.channel,
                publisher=parts.publisher,
                registry=self.registry,
                on_failure=self.fail,
                controller_changed=parts.isolation.controller_changed,
                on_snapshot=None if parts.trace is None else parts.trace.snapshot,
            )
            await self.listeners.start()
        except BaseException:
            await self.abort()
            raise
        gauge = parts.metrics.gauge
        gauge("kipmesh_broker_fenced", "1 while the controller fences this broker.", lambda: float(not self.ready))
        gauge(
            "kipmesh_broker_isolated",
            "1 while no controller responded to a heartbeat within the session timeout.",
            lambda: float(parts.isolation.is_isolated),
        )
        parts.quorum.start()
        self._spawn(self._register(), "lifecycle")
        self._spawn(parts.isolation.run(), "isolation")
        self._spawn(parts.isr_changes.run(), "isr-changes")
        self._spawn(parts.groups.expire(), "expire-offsets")
        self._spawn(parts.log_dirs.run(parts.replica_manager.drop_failed), "log-dirs")
        self._spawn(parts.maintenance.run(), "maintenance")
        if parts.trace is not None:
            self._spawn(parts.trace.run(parts.forwarder, parts.pool, lambda: self.ready), "mesh-trace")
        self._spawn(parts.cleaner.run(), "cleaner")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self.task_done)
        self._tasks.append(task)

    def task_done(self, task: asyncio.Task[None]) -> None:
        """Implement `Owner`: fail the node if the task ended with an exception. A cancelled task is ignored."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task failed", task=task.get_name(), error=str(error), exc_info=error)
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Implement `Owner`: set `error` as the exception of `failed`. Errors after the first are ignored."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # marks it as retrieved: no warning if it is never awaited

    async def _register(self) -> None:
        lifecycle = self.parts.lifecycle
        await lifecycle.register(self.listeners.advertised())
        self.parts.publisher.registered(lifecycle.broker_epoch)
        await lifecycle.send_heartbeats()

    async def published(self) -> None:
        """Implement `Owner`: update the gRPC health status. While fenced, also send a heartbeat immediately."""
        self.parts.lifecycle.metadata_advanced()
        await self.listeners.set_serving(self.ready)

    async def stop(self) -> None:
        """Move leaderships to other brokers for up to `shutdown.grace.ms`, stop, and mark the shutdown as clean.

        After a fatal error (`failed`) the shutdown is not marked as clean. Idempotent.
        """
        if self._is_stopped:
            return
        parts = self.parts
        if self.ready:
            await parts.lifecycle.shut_down(self.config.shutdown_grace_ms / 1000)
        broker_epoch = parts.broker_epoch()
        high_watermarks = await self._end(is_clean=True)
        if self._is_loaded and not self.failed.done():
            await parts.disk.run(lambda: parts.log_manager.checkpoint_high_watermarks(high_watermarks))
            await parts.disk.run(lambda: parts.log_manager.close(broker_epoch))
        parts.disk.close()

    async def abort(self) -> None:
        """Stop as in a crash: flush nothing and write no clean-shutdown marker. Idempotent."""
        if self._is_stopped:
            return
        await self._end(is_clean=False)
        if self._is_loaded:
            await self.parts.disk.run(self.parts.log_manager.abandon)
        self.parts.disk.close()

    async def _end(self, *, is_clean: bool) -> dict[tuple[str, int], int]:
        """Stop all parts. Returns the high watermarks by topic and partition, read after the last metadata change."""
        self._is_stopped = True
        parts = self.parts
        parts.cleaner.throttle.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await parts.cleaner.close()
        if parts.quorum is not None:  # first: its loader uses the replica manager
            await (parts.quorum.stop() if is_clean else parts.quorum.abort())
        parts.groups.stop()
        high_watermarks = parts.replica_manager.high_watermarks()
        await parts.replica_manager.stop(is_clean=is_clean)
        await self.listeners.stop()
        await parts.gate.probes.stop()
        await parts.pool.close()
        self.tls.close()
        parts.selection.close()
        return high_watermarks
