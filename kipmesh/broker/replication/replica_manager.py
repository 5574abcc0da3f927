"""Makes this broker host what the metadata assigns to it: creates and deletes logs and gives each replica its role.

One task, the metadata loader's, calls `apply`. Its work is O(changed partitions), or O(hosted partitions) where that is
less: after a snapshot every partition may have changed. Partitions are identified by topic id, so a topic that was
recreated under its name never uses its old log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import structlog

from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.fetcher import ReplicaFetcher
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.log_dirs import LogDirs
from kipmesh.broker.replication.replica import DirtyReplicas, Disk, Replica
from kipmesh.broker.replication.throttle import ReplicationThrottle
from kipmesh.core.config import BrokerConfig, TopicConfig
from kipmesh.core.errors import KafkaError
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage, PartitionKey, PartitionState, common
from kipmesh.core.metadata.records import NO_LEADER
from kipmesh.core.metadata.states import is_lost
from kipmesh.messages import PartitionLogEnd, TopicIdPartition
from kipmesh.node.quorum.pacing import Pace
from kipmesh.storage.fs import StorageError
from kipmesh.storage.log_manager import LogManager
from kipmesh.transport.grpc.client import ConnectionPool

log = structlog.get_logger(__name__)


class _Assignment(NamedTuple):
    """A partition that the metadata assigns to this broker."""

    topic_id: bytes
    topic: str
    partition: int
    state: PartitionState

    @property
    def key(self) -> PartitionKey:
        """The topic id and the partition number."""
        return self.topic_id, self.partition


@dataclass(eq=False, kw_only=True)
class ReplicaManager:
    """Owns the hosted replicas, the creation and deletion of their logs, and the fetchers.

    Args: now_ms: wall clock; monotonic_ms: clock for lag; broker_epoch: returns the epoch of this broker's
    registration; on_task_done: receives each fetcher's task when it ends; on_reachability_changed: receives a leader
    id and whether its fetcher cannot reach it.
    """

    config: BrokerConfig
    hosted_replicas: HostedReplicas
    dirty_replicas: DirtyReplicas
    log_manager: LogManager
    disk: Disk
    pool: ConnectionPool
    metrics: BrokerMetrics
    now_ms: Callable[[], int]
    monotonic_ms: Callable[[], int]
    broker_epoch: Callable[[], int]
    on_task_done: Callable[[asyncio.Task[None]], None]
    log_dirs: LogDirs
    on_reachability_changed: Callable[[int, bool], None] = lambda _leader_id, _is_unreachable: None

    def __post_init__(self) -> None:
        self._broker_id = self.config.node_id
        self._throttle = ReplicationThrottle(self.config, self.hosted_replicas, self.metrics, self.monotonic_ms)
        self._defaults = self.config.topic_defaults()
        self._topic_configs: dict[str, TopicConfig] = {}
        self._fetchers: dict[int, ReplicaFetcher] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_first = True

    async def apply(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """Make this broker host what `image` assigns to it. `delta` names the changes since the last call.

        Failures to create or open a log are logged and left to `retry`.
        """
        if delta.changed_brokers or image is not self.hosted_replicas.image:
            self.hosted_replicas.brokers_changed()
        self.hosted_replicas.image = image
        for name in (*delta.changed_topic_configs, *(topic.name for topic in delta.deleted_topics)):
            self._topic_configs.pop(name, None)
        await self._delete(delta, image)
        await self._host(self._assignments(image, delta.changed_partitions))
        self._update_configs(image, delta)
        if delta.changed_brokers:
            await self._update_brokers(delta)
        await self._stop_idle_fetchers()
        self._is_first = False

    async def retry(self) -> None:
        """Try again to host the partitions whose logs could not be created. Call it in the task that calls `apply`."""
        if self.hosted_replicas.unhosted:
            await self._host(self._assignments(self.hosted_replicas.image, set(self.hosted_replicas.unhosted)))

    # --- what to host ----------------------------------------------------------------------------------------------

    def _assignments(self, image: MetadataImage, changed: AbstractSet[PartitionKey]) -> list[_Assignment]:
        """Return those of `changed` that are assigned to this broker, grouped by topic."""
        mine = image.partitions_of_broker(self._broker_id)
        self.hosted_replicas.unhosted.difference_update(
            [key for key in self.hosted_replicas.unhosted if key in changed and key not in mine]
        )
        assignments = []
        for topic_id, partition in common(mine, changed):
            topic = image.topics[topic_id]
            assignments.append(_Assignment(topic_id, topic.name, partition, topic.partitions[partition]))
        return assignments

    async def _host(self, assignments: list[_Assignment]) -> None:
        await self._create_logs(assignments)
        await self._assign_roles(assignments)

    async def _delete(self, delta: MetadataDelta, image: MetadataImage) -> None:
        """Delete the logs of deleted topics and of partitions that moved away.

        The first call instead renames and keeps every log that the metadata does not assign to this broker.
        """
        candidates = {(topic.name, partition) for topic in delta.deleted_topics for partition in topic.partitions}
        candidates.update(self._moved_away(image, delta.changed_partitions))
        if self._is_first:
            candidates.update(self.log_manager.logs)
        deleted = []
        for name, partition in candidates:
            old_log = self.log_manager.get(name, partition)
            if old_log is None:
                continue
            # A power failure may have lost the file with the topic id: `create` decides about such a log.
            topic_id = old_log.topic_id or image.topic_names.get(name, b"")
            state = image.partition(topic_id, partition)
            if state is not None and self._broker_id in state.replicas:
                continue
            replica = self.hosted_replicas.get(old_log.topic_id, partition)
            if replica is not None:
                self._unhost(replica)
            deleted.append((name, partition))
        if deleted:
            await self.disk.run(partial(self._remove_logs, deleted, keep=self._is_first))
            log.info("logs removed", partitions=len(deleted), kept_on_disk=self._is_first)

    def _moved_away(self, image: MetadataImage, changed: AbstractSet[PartitionKey]) -> list[tuple[str, int]]:
        """Return those of `changed` whose logs may be on this broker although it is no longer a replica."""
        mine = image.partitions_of_broker(self._broker_id)
        logs = self.log_manager.logs
        if len(changed) <= len(logs):
            return [(image.topics[key[0]].name, key[1]) for key in changed if key not in mine]
        # A copy: the disk thread removes the logs of a failed directory at any time.
        keys = [(name, (log.topic_id, partition)) for (name, partition), log in list(logs.items())]
        return [(name, key[1]) for name, key in keys if key in changed and key not in mine]

    def _remove_logs(self, keys: list[tuple[str, int]], *, keep: bool) -> None:
        now_ms = self.now_ms()
        for name, partition in keys:
            try:
                if keep:  # the metadata may be wrong; Kafka renames such logs to `-stray`
                    self.log_manager.set_aside(name, partition)
                else:
                    self.log_manager.delete(name, partition, now_ms)
            except KafkaError as error:
                log.error("log not removed", topic=name, partition=partition, error=str(error))

    def _unhost(self, replica: Replica) -> None:
        replica.stop()
        self._throttle.remove(replica)
        for fetcher in self._fetchers.values():
            fetcher.unfollow(replica)
        self.hosted_replicas.remove(replica)

    async def _create_logs(self, assignments: Iterable[_Assignment]) -> None:
        hosted = self.hosted_replicas
        missing = [item for item in assignments if hosted.get(*item.key) is None]
        lost = {item.key for item in missing if not self._may_create(item)}
        if lost - hosted.unhosted:
            log.warning("replicas lost with their log directories", partitions=len(lost))
            hosted.unhosted.update(lost)
        missing = [item for item in missing if item.key not in lost]
        if not missing:
            return
        configs = {item.topic: self._topic_config(item.topic) for item in missing}
        replicas, refused = await self.disk.run(partial(self._create, missing, configs))
        for replica in replicas:
            if replica.log.failed is not None:  # its directory failed before `drop_failed` could see the replica
                hosted.unhosted.add(replica.key)
                self.log_dirs.report_lost(replica.key)
                continue
            hosted.add(replica)
            hosted.unhosted.discard(replica.key)
            if replica.must_checkpoint:
                self.dirty_replicas.high_watermarks[replica] = None
        for item, error in refused:
            if item.key not in hosted.unhosted:
                log.error("log not created", topic=item.topic, partition=item.partition, error=str(error))
                hosted.unhosted.add(item.key)
        await self._checkpoint_lowered()

    def _may_create(self, item: _Assignment) -> bool:
        """Whether a log may be created for this assignment.

        If the metadata marks the replica as lost, a new log requires that another broker leads and that no log
        directory is offline: an offline one may have the only copy of acknowledged records.
        """
        if not is_lost(item.state, self._broker_id):
            return True
        existing = self.log_manager.get(item.topic, item.partition)
        if existing is not None and existing.topic_id == item.topic_id:
            return True
        is_led = item.state.leader not in (NO_LEADER, self._broker_id)
        return is_led and all(directory.is_online for directory in self.log_manager.directories)

    def drop_failed(self) -> list[PartitionKey]:
        """Stop hosting the replicas whose logs have failed. Returns their topic ids and partition numbers."""
        failed = [replica for replica in self.hosted_replicas if replica.log.failed is not None]
        for replica in failed:
            self._unhost(replica)
        keys = [replica.key for replica in failed]
        self.hosted_replicas.unhosted.update(keys)
        return keys

    def _create(
        self, missing: list[_Assignment], configs: dict[str, TopicConfig]
    ) -> tuple[list[Replica], list[tuple[_Assignment, KafkaError]]]:
        """Open or create the logs, on the disk thread. Returns the replicas, and the failed assignments with errors."""
        now_ms = self.now_ms()
        replicas, refused = [], []
        for item in missing:
            try:
                existing = self.log_manager.get(item.topic, item.partition)
                if existing is not None and existing.topic_id not in (b"", item.topic_id):
                    self.log_manager.delete(item.topic, item.partition, now_ms)
                new_log = self.log_manager.create(
                    item.topic, item.partition, item.topic_id, configs[item.topic], now_ms
                )
            except KafkaError as error:
                refused.append((item, error))
                continue
            high_watermark = self.log_manager.high_watermarks.get((item.topic, item.partition), 0)
            replicas.append(Replica(self._broker_id, new_log, high_watermark, self.monotonic_ms, self.dirty_replicas))
        return replicas, refused

    # --- roles -----------------------------------------------------------------------------------------------------

    async def _assign_roles(self, assignments: Iterable[_Assignment]) -> None:
        pace = Pace()
        to_follow: dict[int, list[Replica]] = {}
        for item in assignments:
            replica = self.hosted_replicas.get(*item.key)
            if replica is not None:
                try:
                    self._assign_role(replica, item.state, to_follow)
                except StorageError as error:  # its log directory goes offline
                    log.error("role not assigned", topic=item.topic, partition=item.partition, error=error.message)
                if is_lost(item.state, self._broker_id):
                    self.log_dirs.report_recovered(replica)
            await pace.give_way()
        for leader_id, replicas in to_follow.items():
            self._follow(leader_id, replicas)

    def _assign_role(self, replica: Replica, state: PartitionState, to_follow: dict[int, list[Replica]]) -> None:
        self._throttle.role_changed(replica, state)
        if state.leader == self._broker_id:
            self._stop_following(replica)
            replica.become_leader(
                state,
                min_insync_replicas=_min_insync_replicas(self._topic_config(replica.topic), state),
                lag_max_ms=self.config.replica_lag_time_max_ms,
                eligible_epoch=self.hosted_replicas.eligible_epoch,
            )
        elif (replica.leader_id, replica.leader_epoch) != (state.leader, state.leader_epoch):
            self._stop_following(replica)
            replica.become_follower(state)
            if state.leader >= 0:
                to_follow.setdefault(state.leader, []).append(replica)

    def _stop_following(self, replica: Replica) -> None:
        fetcher = self._fetchers.get(replica.leader_id)
        if fetcher is not None:
            fetcher.unfollow(replica)

    def _follow(self, leader_id: int, replicas: list[Replica]) -> None:
        address = self._address(leader_id)
        if address is None:
            log.error("leader has no inter-broker listener", leader=leader_id)
            return
        fetcher = self._fetchers.get(leader_id)
        if fetcher is None:
            fetcher = self._fetchers[leader_id] = ReplicaFetcher(
                leader_id=leader_id,
                connection=self.pool.get(address),
                config=self.config,
                disk=self.disk,
                metrics=self.metrics,
                now_ms=self.now_ms,
                broker_epoch=self.broker_epoch,
                after_truncation=self._checkpoint_after_truncation,
                on_done=self.on_task_done,
                throttle=self._throttle,
                on_reachability_changed=self.on_reachability_changed,
            )
        fetcher.follow([replica for replica in replicas if replica.log.failed is None])

    async def _checkpoint_after_truncation(self) -> None:
        """Write lowered high watermarks and the recovery points to disk, and log a failure.

        Otherwise the next append to a truncated log would write them on the event loop.
        """
        await self._checkpoint_lowered()
        try:
            await self.disk.run(self.log_manager.checkpoint_recovery_points)
        except KafkaError as error:
            log.warning("recovery point checkpoint failed", error=str(error))

    async def _checkpoint_lowered(self) -> None:
        """Write high watermarks that moved back, and log a failure. Until then, their logs refuse appends."""
        if self.dirty_replicas.must_checkpoint:
            try:
                await self.dirty_replicas.checkpoint_high_watermarks(self.log_manager, self.disk)
            except KafkaError as error:
                log.warning("high watermark checkpoint failed", error=str(error))

    def endpoint(self, broker_id: int) -> tuple[str, int] | None:
        """Return host and port of a broker's inter-broker listener, or None if the image has none."""
        broker = self.hosted_replicas.image.brokers.get(broker_id)
        return broker.endpoints.get(self.config.inter_broker_listener_name) if broker else None

    def _address(self, broker_id: int) -> str | None:
        endpoint = self.endpoint(broker_id)
        return f"{endpoint[0]}:{endpoint[1]}" if endpoint else None

    async def _update_brokers(self, delta: MetadataDelta) -> None:
        """Reconnect to leaders with a new address, and let leaders ignore fenced joining replicas."""
        for broker_id in delta.changed_brokers:
            fetcher = self._fetchers.get(broker_id)
            address = self._address(broker_id)
            if fetcher is not None and address is not None and address != fetcher.address:
                fetcher.reconnect(self.pool.get(address))
        pace = Pace()
        for replica in self.hosted_replicas:
            replica.brokers_changed()
            await pace.give_way()

    async def _stop_idle_fetchers(self) -> None:
        for leader_id, fetcher in list(self._fetchers.items()):
            if not fetcher.partition_count:
                del self._fetchers[leader_id]
                await fetcher.stop()
                closing = asyncio.create_task(fetcher.close(), name=f"close-session-{leader_id}")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    # --- configuration ---------------------------------------------------------------------------------------------

    def _topic_config(self, name: str) -> TopicConfig:
        config = self._topic_configs.get(name)
        if config is None:
            overrides = self.hosted_replicas.image.topic_config(name)
            config = self._defaults.with_stored(overrides) if overrides else self._defaults
            self._topic_configs[name] = config
        return config

    def _update_configs(self, image: MetadataImage, delta: MetadataDelta) -> None:
        for name in delta.changed_topic_configs:
            topic = image.topic_by_name(name)
            if topic is None:
                continue
            config = self._topic_config(name)
            for partition, state in topic.partitions.items():
                replica = self.hosted_replicas.get(topic.topic_id, partition)
                if replica is not None:
                    replica.update_config(config)
                    replica.replicas_changed(state.replicas, _min_insync_replicas(config, state))

    # --- offsets and shutdown ----------------------------------------------------------------------------------------

    def log_ends(self, partitions: Iterable[TopicIdPartition]) -> list[PartitionLogEnd]:
        """Return the last leader epoch in the log and the log end offset of each of `partitions` that is hosted."""
        ends = []
        for one in partitions:
            replica = self.hosted_replicas.get(one.topic_id, one.partition)
            if replica is not None:
                end = PartitionLogEnd(*replica.key, replica.log.latest_epoch, replica.log.log_end_offset)
                ends.append(end)
        return ends

    def high_watermarks(self) -> dict[tuple[str, int], int]:
        """Return the high watermark of each hosted replica by topic and partition."""
        return {(replica.topic, replica.partition): replica.high_watermark for replica in self.hosted_replicas}

    async def stop(self, *, is_clean: bool) -> None:
        """Stop fetching and fail pending requests with NOT_LEADER_OR_FOLLOWER. The logs stay open.

        A clean stop also closes the fetch sessions at the leaders.
        """
        fetchers, self._fetchers = list(self._fetchers.values()), {}
        for fetcher in fetchers:
            await fetcher.stop()
        if is_clean:
            await asyncio.gather(*self._closing, *[fetcher.close() for fetcher in fetchers])
        for closing in self._closing:
            closing.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for replica in self.hosted_replicas:
            replica.stop()


def _min_insync_replicas(config: TopicConfig, state: PartitionState) -> int:
    """Return the required ISR size. Replicas being added do not raise it, so that adding them does not stop writes."""
    return min(config.min_insync_replicas, len(state.replicas) - len(state.adding_replicas))
