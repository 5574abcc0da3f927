"""The parts of a broker, and which part talks to which. `BrokerNode` starts and stops them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from kipmesh.broker.groups.group_metrics import GroupCollector
from kipmesh.broker.groups.groups import GroupsHandler
from kipmesh.broker.membership.controller_channel import ControllerChannel
from kipmesh.broker.membership.forwarder import Forwarder
from kipmesh.broker.membership.lifecycle import BrokerLifecycle
from kipmesh.broker.membership.publisher import MetadataPublisher
from kipmesh.broker.membership.quorum import BrokerQuorum
from kipmesh.broker.observability.metrics import BrokerMetrics, PartitionCollector
from kipmesh.broker.replication.cleaner import Cleaner
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.isolation import Isolation
from kipmesh.broker.replication.isr_changes import IsrChanges, StartupIsrCheck
from kipmesh.broker.replication.log_dirs import LogDirCollector, LogDirs
from kipmesh.broker.replication.maintenance import Maintenance
from kipmesh.broker.replication.replica import DirtyReplicas, Disk
from kipmesh.broker.replication.replica_manager import ReplicaManager
from kipmesh.broker.requests.fetch import FetchHandler
from kipmesh.broker.requests.fetch_sessions import FetchSessionCollector, log_session, make_session_cache
from kipmesh.broker.requests.metadata import MetadataHandler
from kipmesh.broker.requests.offsets import OffsetsHandler
from kipmesh.broker.requests.produce import ProduceHandler
from kipmesh.broker.requests.producer_ids import ProducerIdsHandler
from kipmesh.broker.requests.selection import ReplicaSelection
from kipmesh.broker.requests.unreachable_leaders import LeaderProbes, LostLeaders, UnreachableLeaderGate
from kipmesh.core.config import BrokerConfig
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.node import monotonic_ms, wall_ms
from kipmesh.node.tls import ProcessTls
from kipmesh.storage.fs import FileSystem, StorageError
from kipmesh.storage.log.log import Log
from kipmesh.storage.log_manager import LogManager
from kipmesh.transport.grpc.client import ConnectionPool

if TYPE_CHECKING:
    from kipmesh.broker.observability.trace import RequestTrace
    from kipmesh.transport.faults import Faults


class BrokerParts:
    """One broker's, made inside the event loop; nothing runs yet, and the disk is untouched."""

    def __init__(
        self,
        config: BrokerConfig,
        registry: CollectorRegistry,
        tls: ProcessTls,
        fs: FileSystem,
        *,
        is_leader_role: bool,
        on_published: Callable[[], Awaitable[None]],
        on_task_done: Callable[[asyncio.Task[None]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.config = config
        self.hosted_replicas = hosted = HostedReplicas(MetadataImage())
        self.dirty_replicas = DirtyReplicas()
        self.metrics = BrokerMetrics(registry)
        # First: a plugin that cannot be loaded stops the node before it touches anything.
        self.selection = ReplicaSelection(config, hosted, self.metrics, monotonic_ms)
        self.disk = Disk(f"broker-{config.node_id}")
        self.log_manager = LogManager(
            fs,
            config.log_dirs,
            cluster_id=config.cluster_id,
            node_id=config.node_id,
            defaults=config.topic_defaults(),
            open_files_max=config.log_open_files_max,
            on_directory_failed=self._directory_failed,
            metadata_dir=config.metadata_log_dir,
        )
        self.pool = ConnectionPool(f"broker-{config.node_id}", tls.mesh_client())
        self.channel = ControllerChannel(config.voters, self.pool)
        self.quorum: BrokerQuorum | None = None
        """None until its log is open."""
        self._make_replication(on_task_done, on_failure)
        self._make_membership(on_published, is_leader_role=is_leader_role)
        self._make_requests(on_task_done)
        self.trace = self._make_trace(registry) if config.mesh_trace_sample else None
        for collector in (
            PartitionCollector(hosted),
            LogDirCollector(self.log_manager.directories),
            FetchSessionCollector(self.fetch_sessions),
            GroupCollector(self.groups, hosted),
        ):
            registry.register(collector)

    def _make_replication(
        self, on_task_done: Callable[[asyncio.Task[None]], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        config, hosted, disk = self.config, self.hosted_replicas, self.disk
        self.isolation = Isolation(hosted, config.broker_session_timeout_ms, monotonic_ms)
        self.startup_isr_check = StartupIsrCheck(config.node_id, hosted)
        self.isr_changes = IsrChanges(
            config.node_id, hosted, self.channel, self.metrics, self.broker_epoch, monotonic_ms
        )
        self.replica_manager = ReplicaManager(
            config=config,
            hosted_replicas=hosted,
            dirty_replicas=self.dirty_replicas,
            log_manager=self.log_manager,
            disk=disk,
            pool=self.pool,
            metrics=self.metrics,
            now_ms=wall_ms,
            monotonic_ms=monotonic_ms,
            broker_epoch=self.broker_epoch,
            on_task_done=on_task_done,
        )
        self.log_dirs = LogDirs(
            broker_id=config.node_id,
            log_manager=self.log_manager,
            disk=disk,
            channel=self.channel,
            broker_epoch=self.broker_epoch,
            drop_failed=self.replica_manager.drop_failed,
            on_failure=on_failure,
        )
        self.replica_manager.on_found = self.log_dirs.found
        self.replica_manager.on_lost = self.log_dirs.lost
        self.cleaner = Cleaner(config, hosted, self.log_manager, disk, self.metrics, wall_ms)
        self.maintenance = Maintenance(
            config=config,
            hosted_replicas=hosted,
            dirty_replicas=self.dirty_replicas,
            log_manager=self.log_manager,
            disk=disk,
            isr_changes=self.isr_changes,
            now_ms=wall_ms,
            monotonic_ms=monotonic_ms,
        )

    def _make_membership(self, on_published: Callable[[], Awaitable[None]], *, is_leader_role: bool) -> None:
        self.publisher = MetadataPublisher(self.config.node_id, self.replica_manager, on_published)
        self.publisher.on_roles_given = self._roles_given
        self.lifecycle = BrokerLifecycle(
            self.config,
            self.channel,
            self.isolation,
            incarnation_id=uuid.uuid4().bytes,
            is_leader_role=is_leader_role,
            previous_broker_epoch=-1,
            metadata_offset=lambda: self.publisher.published_offset,
            log_ends=self.replica_manager.log_ends,
            folders=self.log_manager.directories,
            offline_log_dirs=lambda: self.log_dirs.offline_ids,
        )
        self.log_dirs.on_change = self.lifecycle.beat_now
        self.forwarder = Forwarder(self.channel, self.hosted_replicas, self.publisher.until)

    def _make_requests(self, on_task_done: Callable[[asyncio.Task[None]], None]) -> None:
        config, hosted, metrics = self.config, self.hosted_replicas, self.metrics
        lost = LostLeaders(time.monotonic)
        self.replica_manager.on_reach_changed = lost.reach_changed
        self.gate = UnreachableLeaderGate(
            broker_id=config.node_id,
            hosted_replicas=hosted,
            lost=lost,
            probes=LeaderProbes(self.replica_manager.endpoint, lost.probed, time.monotonic),
            now_s=time.monotonic,
            linger_s=config.broker_session_timeout_ms / 1000,
            listeners=frozenset(endpoint.name for endpoint in config.kafka_endpoints),
        )
        self.fetch_sessions = make_session_cache(config, self.dirty_replicas.subscriptions, hosted, log_session)
        self.fetch = FetchHandler(
            config,
            hosted,
            self.fetch_sessions,
            metrics,
            propose_isr=self.isr_changes.propose,
            now_ms=monotonic_ms,
            selection=self.selection,
        )
        self.produce = ProduceHandler(config, hosted, metrics, self.disk, wall_ms)
        self.producer_ids = ProducerIdsHandler(config.node_id, self.channel, self.broker_epoch)
        self.offsets = OffsetsHandler(hosted)
        self.metadata = MetadataHandler(
            config,
            self.publisher.published_image,
            controller_id=self._controller_id,
            selection=self.selection,
            forwarder=self.forwarder,
            on_response=metrics.metadata_responded,
            gate=self.gate,
        )
        self.groups = GroupsHandler(config, hosted, self.disk, self.forwarder, on_task_done)
        self.faults: Faults | None = None
        """Faults for tests; None unless `fault.injection.enable`."""
        if config.fault_injection_enable:
            from kipmesh.transport.faults import Faults  # not loaded where there are none

            self.faults = Faults()

    def _make_trace(self, registry: CollectorRegistry) -> RequestTrace:
        from kipmesh.broker.observability.trace import RequestTrace  # seldom wanted: a start does not pay for it

        return RequestTrace(self.config, self.hosted_replicas, self.fetch_sessions, registry, self._metadata_log)

    # --- what parts need of parts that are made later -----------------------------------------------------------------

    def broker_epoch(self) -> int:
        """Of this broker's registration, -1 before."""
        return self.lifecycle.broker_epoch

    def _controller_id(self) -> int:
        return self.quorum.driver.election.leader_id if self.quorum else -1

    def _metadata_log(self) -> Log | None:
        return None if self.quorum is None else self.quorum.replica.log

    def _directory_failed(self, path: str, error: StorageError) -> None:
        self.log_dirs.failed(path, error)

    def _roles_given(self, delta: MetadataDelta) -> None:
        self.groups.metadata_changed(delta)
        self.gate.metadata_changed(delta)
