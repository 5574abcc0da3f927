"""The broker process: the order in which its parts start and stop.

Leader and follower services run the same object; only the role that it registers with differs. Tasks: the metadata
quorum's driver and loader (which alone changes what is hosted), the lifecycle (registration, heartbeats), one fetcher a
leader, the ISR changes, the housekeeping. A task that fails ends the node through `failed`.

A broker listens before it has loaded the metadata, which may take long: until then, and until it is registered and
unfenced, it is alive but not ready.
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
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.node import wall_ms
from kipmesh.node.tls import ProcessTls
from kipmesh.storage.fs import FileSystem, RealFileSystem

log = structlog.get_logger(__name__)


class BrokerNode:
    """One broker; make it and use it inside one event loop."""

    def __init__(self, config: BrokerConfig, *, is_leader_role: bool, fs: FileSystem | None = None) -> None:
        self.config = config
        self.registry = CollectorRegistry(auto_describe=True)
        self.tls = ProcessTls(config, self.registry)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fs = fs or RealFileSystem()
        self.parts = BrokerParts(
            config,
            self.registry,
            self.tls,
            self._fs,
            is_leader_role=is_leader_role,
            on_published=self._published,
            on_task_done=self._task_done,
            on_failure=self._fail,
        )
        self.hosted_replicas = self.parts.hosted_replicas
        self.fetch_sessions = self.parts.fetch_sessions
        self.listeners = Listeners(config, self.registry, self.tls, self.parts)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopped = self._is_loaded = False

    @property
    def grpc_port(self) -> int:
        """Of `inter.broker.listener.name`; 0 before the node listens."""
        return self.listeners.ports.get(self.config.inter_broker_listener_name, 0)

    @property
    def quorum(self) -> BrokerQuorum:
        """This broker's replica of the metadata quorum; RuntimeError before it is open."""
        if self.parts.quorum is None:
            raise RuntimeError("the metadata log is not open")
        return self.parts.quorum

    @property
    def ready(self) -> bool:
        """Registered, unfenced, and caught up with the metadata that says so."""
        me = self.hosted_replicas.image.brokers.get(self.config.node_id)
        is_current = me is not None and me.broker_epoch == self.parts.broker_epoch() and not me.fenced
        return is_current and not self._is_stopped

    @property
    def in_sync(self) -> bool:
        """Ready, and all its replicas are in sync or have been since it started: see `StartupIsrCheck`."""
        return self.ready and self.parts.startup_isr_check.all_in_sync()

    async def start(self) -> None:
        """Load the logs, listen, and begin to register; returns once it listens. InvalidConfigError in one line."""
        config, parts = self.config, self.parts
        if config.node_id in [voter.id for voter in config.voters]:  # its fetches would count as that voter's
            raise InvalidConfigError(
                f"node.id {config.node_id} is a controller's (controller.quorum.voters: "
                f"{config.controller_quorum_voters!r}), a broker needs another"
            )
        try:
            await parts.disk.run(lambda: parts.log_manager.load(wall_ms()))
            self._is_loaded = True
            parts.lifecycle.previous_broker_epoch = parts.log_manager.clean_shutdown_epoch
            replica = await parts.disk.run(lambda: open_replica(config, self._fs, parts.log_manager))
            parts.quorum = BrokerQuorum(
                config=config,
                replica=replica,
                pool=parts.pool,
                channel=parts.channel,
                publisher=parts.publisher,
                registry=self.registry,
                on_failure=self._fail,
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
            "1 while no heartbeat was answered within the session timeout.",
            lambda: float(parts.isolation.is_isolated),
        )
        parts.quorum.start()
        self._spawn(self._live(), "lifecycle")
        self._spawn(parts.isolation.run(), "isolation")
        self._spawn(parts.isr_changes.run(), "isr-changes")
        self._spawn(parts.groups.expire(), "expire-offsets")
        self._spawn(parts.log_dirs.run(), "log-dirs")
        self._spawn(parts.maintenance.run(), "maintenance")
        if parts.trace is not None:
            self._spawn(parts.trace.run(parts.forwarder, parts.pool, lambda: self.ready), "mesh-trace")
        self._spawn(parts.cleaner.run(), "cleaner")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._task_done)
        self._tasks.append(task)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task failed", task=task.get_name(), error=str(error), exc_info=error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # retrieved: no warning if the owner never awaits it

    async def _live(self) -> None:
        lifecycle = self.parts.lifecycle
        await lifecycle.register(self.listeners.advertised())
        self.parts.publisher.registered(lifecycle.broker_epoch)
        await lifecycle.beat()

    async def _published(self) -> None:
        self.parts.lifecycle.metadata_advanced()
        await self.listeners.set_serving(self.ready)

    async def stop(self) -> None:
        """Hand over leaderships, stop, and leave clean logs; idempotent."""
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
        """Stop as a crash would, as far as one process can: nothing is flushed or marked clean."""
        if self._is_stopped:
            return
        await self._end(is_clean=False)
        if self._is_loaded:
            await self.parts.disk.run(self.parts.log_manager.abandon)
        self.parts.disk.close()

    async def _end(self, *, is_clean: bool) -> dict[tuple[str, int], int]:
        """Stop all parts; returns the high watermarks as they were when the metadata's last change was applied."""
        self._is_stopped = True
        parts = self.parts
        parts.cleaner.throttle.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await parts.cleaner.close()
        if parts.quorum is not None:  # first: the loader's task is the one that uses the replica manager
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
