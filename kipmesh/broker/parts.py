"""The parts of a broker and the collaborators of each: the constructor calls are the table of who calls whom.

A lambda names a collaborator that is created later. `BrokerNode` starts and stops the parts.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry

from kipmesh.broker.groups.groups import GroupsHandler
from kipmesh.broker.membership.controller_channel import ControllerChannel
from kipmesh.broker.membership.forwarder import Forwarder
from kipmesh.broker.membership.lifecycle import BrokerLifecycle
from kipmesh.broker.membership.publisher import MetadataPublisher
from kipmesh.broker.membership.quorum import BrokerQuorum
from kipmesh.broker.observability.metrics import BrokerMetrics, partition_metrics
from kipmesh.broker.replication.cleaner import Cleaner
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.isolation import Isolation
from kipmesh.broker.replication.isr_changes import IsrChanges
from kipmesh.broker.replication.log_dirs import LogDirs
from kipmesh.broker.replication.maintenance import Maintenance
from kipmesh.broker.replication.replica import DirtyReplicas, Disk
from kipmesh.broker.replication.replica_manager import ReplicaManager
from kipmesh.broker.requests.fetch import FetchHandler
from kipmesh.broker.requests.fetch_sessions import fetch_session_metrics, log_session, make_session_cache
from kipmesh.broker.requests.metadata import MetadataHandler
from kipmesh.broker.requests.offsets import OffsetsHandler
from kipmesh.broker.requests.produce import ProduceHandler
from kipmesh.broker.requests.producer_ids import ProducerIdsHandler
from kipmesh.broker.requests.selection import ReplicaSelection
from kipmesh.broker.requests.unreachable_leaders import LeaderProbes, UnreachableLeaderGate, UnreachableLeaders
from kipmesh.core.config import BrokerConfig
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.node import monotonic_ms, wall_ms
from kipmesh.node.tls import ProcessTls
from kipmesh.storage.fs import FileSystem
from kipmesh.storage.log_manager import LogManager
from kipmesh.transport.grpc.client import ConnectionPool

if TYPE_CHECKING:
    from kipmesh.broker.observability.trace import RequestTrace
    from kipmesh.transport.faults import Faults


class Owner(Protocol):
    """The owner of the parts: supplies the configuration and receives events. Implemented by `BrokerNode`."""

    config: BrokerConfig
    registry: CollectorRegistry
    tls: ProcessTls
    fs: FileSystem
    is_leader_role: bool

    async def published(self) -> None:
        """Called after new metadata was published on this broker."""

    def task_done(self, task: asyncio.Task[None]) -> None:
        """Called when a task of a part has ended. Its exception, if any, must end the node."""

    def fail(self, error: BaseException) -> None:
        """Called when a part failed with an error that must end the node."""


class BrokerParts:
    """The parts of one broker, not started yet. Raises InvalidConfigError if the replica selector cannot be loaded."""

    def __init__(self, owner: Owner) -> None:
        self.config = config = owner.config
        self.hosted_replicas = hosted = HostedReplicas(MetadataImage())
        self.dirty_replicas = DirtyReplicas()
        self.metrics = BrokerMetrics(owner.registry)
        # Before any part with resources: it may refuse the configuration.
        self.selection = ReplicaSelection(config, hosted, self.metrics, monotonic_ms)
        self.disk = Disk(f"broker-{config.node_id}")
        self.log_manager = LogManager(
            owner.fs,
            config.log_dirs,
            cluster_id=config.cluster_id,
            node_id=config.node_id,
            defaults=config.topic_defaults(),
            open_files_max=config.log_open_files_max,
            on_directory_failed=lambda path, error: self.log_dirs.directory_failed(path, error),
            metadata_dir=config.metadata_log_dir,
        )
        self.pool = ConnectionPool(f"broker-{config.node_id}", owner.tls.mesh_client())
        self.channel = ControllerChannel(config.voters, self.pool)
        self.quorum: BrokerQuorum | None = None  # None until the metadata log is open
        self._create_replication(owner)
        self._create_membership(owner)
        self._create_requests(owner)
        self.trace: RequestTrace | None = None
        if config.mesh_trace_sample:
            from kipmesh.broker.observability.trace import RequestTrace  # rarely used: imported on demand

            self.trace = RequestTrace(
                config, hosted, self.fetch_sessions, lambda: self.quorum.replica.log if self.quorum else None
            )
            self.metrics.export(self.trace.metrics)
        self.faults: Faults | None = None
        if config.fault_injection_enable:
            from kipmesh.transport.faults import Faults  # rarely used: imported on demand

            self.faults = Faults()
        self.metrics.export(partition_metrics, hosted)
        self.metrics.export(fetch_session_metrics, self.fetch_sessions)
        self.metrics.export(self.log_dirs.metrics)
        self.metrics.export(self.groups.metrics)

    def _create_replication(self, owner: Owner) -> None:
        config, hosted, dirty, manager = self.config, self.hosted_replicas, self.dirty_replicas, self.log_manager
        disk, channel, metrics = self.disk, self.channel, self.metrics
        self.isolation = Isolation(hosted, config.broker_session_timeout_ms, monotonic_ms)
        self.isr_changes = IsrChanges(config.node_id, hosted, channel, metrics, self.broker_epoch, monotonic_ms)
        self.log_dirs = LogDirs(
            broker_id=config.node_id,
            log_manager=manager,
            disk=disk,
            channel=channel,
            broker_epoch=self.broker_epoch,
            on_failure=owner.fail,
            on_change=lambda: self.lifecycle.heartbeat_due.set(),
        )
        self.unreachable_leaders = UnreachableLeaders(time.monotonic)
        self.replica_manager = ReplicaManager(
            config=config,
            hosted_replicas=hosted,
            dirty_replicas=dirty,
            log_manager=manager,
            disk=disk,
            pool=self.pool,
            metrics=metrics,
            now_ms=wall_ms,
            monotonic_ms=monotonic_ms,
            broker_epoch=self.broker_epoch,
            on_task_done=owner.task_done,
            log_dirs=self.log_dirs,
            on_reachability_changed=self.unreachable_leaders.reachability_changed,
        )
        self.cleaner = Cleaner(config, hosted, manager, disk, metrics, wall_ms)
        self.maintenance = Maintenance(config, hosted, dirty, manager, disk, self.isr_changes, wall_ms, monotonic_ms)

    def _create_membership(self, owner: Owner) -> None:
        self.publisher = MetadataPublisher(
            self.config.node_id, self.replica_manager, owner.published, self._roles_assigned
        )
        self.lifecycle = BrokerLifecycle(
            self.config,
            self.channel,
            self.isolation,
            is_leader_role=owner.is_leader_role,
            metadata_offset=lambda: self.publisher.published_offset,
            log_ends=self.replica_manager.log_ends,
            directories=self.log_manager.directories,
            offline_log_dirs=lambda: self.log_dirs.offline_ids,
        )
        self.forwarder = Forwarder(self.channel, self.hosted_replicas, self.publisher.wait_until)

    def _create_requests(self, owner: Owner) -> None:
        config, hosted, metrics = self.config, self.hosted_replicas, self.metrics
        self.gate = UnreachableLeaderGate(
            broker_id=config.node_id,
            hosted_replicas=hosted,
            unreachable=self.unreachable_leaders,
            probes=LeaderProbes(self.replica_manager.endpoint, self.unreachable_leaders.record_probe, time.monotonic),
            now_s=time.monotonic,
            linger_s=config.broker_session_timeout_ms / 1000,
            listeners=frozenset(endpoint.name for endpoint in config.kafka_endpoints),
        )
        self.fetch_sessions = make_session_cache(config, self.dirty_replicas.subscriptions, hosted, log_session)
        self.fetch = FetchHandler(
            config, hosted, self.fetch_sessions, metrics, self.isr_changes.propose, monotonic_ms, self.selection
        )
        self.produce = ProduceHandler(config, hosted, metrics, self.disk, wall_ms)
        self.producer_ids = ProducerIdsHandler(config.node_id, self.channel, self.broker_epoch)
        self.offsets = OffsetsHandler(hosted)
        self.metadata = MetadataHandler(
            config,
            self.publisher.published_image,
            controller_id=lambda: self.quorum.driver.election.leader_id if self.quorum else -1,
            selection=self.selection,
            forwarder=self.forwarder,
            on_response=metrics.metadata_responded,
            gate=self.gate,
        )
        self.groups = GroupsHandler(config, hosted, self.disk, self.forwarder, owner.task_done)

    def broker_epoch(self) -> int:
        """Return the epoch of this broker's registration, or -1 before it."""
        return self.lifecycle.broker_epoch

    def _roles_assigned(self, delta: MetadataDelta) -> None:
        self.groups.metadata_changed(delta)
        self.gate.metadata_changed(delta)
