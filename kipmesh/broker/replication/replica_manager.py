"""Makes this broker host what the metadata says: creates and deletes logs, gives every partition its role.

One task (the metadata loader's) calls `apply`; its work is O(what changed), and of that O(what is here) where that is
less: after a snapshot was loaded everything may have changed. A partition is known by its topic id: a topic that was
deleted and created again under its name never meets its old log.
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


class _Wanted(NamedTuple):
    """A partition that this broker is to host."""

    topic_id: bytes
    topic: str
    partition: int
    state: PartitionState


@dataclass(eq=False)
class ReplicaManager:
    """Owns the replicas, their logs' lives, and the fetchers."""

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

    def __post_init__(self) -> None:
        self._broker_id = self.config.node_id
        self._throttle = ReplicationThrottle(self.config, self.hosted_replicas, self.metrics, self.monotonic_ms)
        self._defaults = self.config.topic_defaults()
        self._topic_configs: dict[str, TopicConfig] = {}
        self._fetchers: dict[int, ReplicaFetcher] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_first = True
        self.on_found: Callable[[Replica], None] = lambda replica: None
        """Told of replicas that are here although the metadata calls them lost (`log_dirs`)."""
        self.on_lost: Callable[[PartitionKey], None] = lambda key: None
        """Told of those whose data folder failed before they were in service."""
        self.on_reach_changed: Callable[[int, bool], None] = lambda _leader_id, _is_lost: None
        """Told of a leader whose stream breaks (True), and when it answers again or is followed no more (False)."""

    async def apply(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """Follow what `delta` says has changed in `image`."""
        if delta.changed_brokers or image is not self.hosted_replicas.image:
            self.hosted_replicas.brokers_changed()
        self.hosted_replicas.image = image
        for name in (*delta.changed_topic_configs, *(topic.name for topic in delta.deleted_topics)):
            self._topic_configs.pop(name, None)
        await self._delete(delta, image)
        await self._host(self._wanted(image, delta.changed_partitions))
        self._update_configs(image, delta)
        if delta.changed_brokers:
            await self._follow_brokers(delta)
        await self._stop_idle_fetchers()
        self._is_first = False

    async def retry(self) -> None:
        """Host what the disk refused before; called by the task that calls `apply`."""
        if self.hosted_replicas.unhosted:
            await self._host(self._wanted(self.hosted_replicas.image, set(self.hosted_replicas.unhosted)))

    # --- what to host ----------------------------------------------------------------------------------------------

    def _wanted(self, image: MetadataImage, changed: AbstractSet[PartitionKey]) -> list[_Wanted]:
        """Those of `changed` that this broker is to have, partitions of a topic together."""
        mine = image.partitions_of_broker(self._broker_id)
        self.hosted_replicas.unhosted.difference_update(
            [key for key in self.hosted_replicas.unhosted if key in changed and key not in mine]
        )
        wanted = []
        for topic_id, partition in common(mine, changed):
            topic = image.topics[topic_id]
            wanted.append(_Wanted(topic_id, topic.name, partition, topic.partitions[partition]))
        return wanted

    async def _host(self, wanted: list[_Wanted]) -> None:
        await self._create_logs(wanted)
        await self._give_roles(wanted)

    async def _delete(self, delta: MetadataDelta, image: MetadataImage) -> None:
        """Logs of deleted topics and of partitions that moved away; at the start, what nothing names is set aside."""
        gone: set[tuple[str, int]] = set()
        for topic in delta.deleted_topics:
            gone.update((topic.name, partition) for partition in topic.partitions)
        gone.update(self._moved_away(image, delta.changed_partitions))
        if self._is_first:
            gone.update(self.log_manager.logs)
        deleted = []
        for name, partition in gone:
            held = self.log_manager.get(name, partition)
            if held is None:
                continue
            # A power cut may have taken the file with the id: `create` decides about such a log.
            topic_id = held.topic_id or image.topic_names.get(name, b"")
            state = image.partition(topic_id, partition)
            if state is not None and self._broker_id in state.replicas:
                continue
            replica = self.hosted_replicas.get(held.topic_id, partition)
            if replica is not None:
                self._forget(replica)
            deleted.append((name, partition))
        if deleted:
            await self.disk.run(partial(self._remove_logs, deleted, keep=self._is_first))
            log.info("logs set aside" if self._is_first else "logs deleted", partitions=len(deleted))

    def _moved_away(self, image: MetadataImage, changed: AbstractSet[PartitionKey]) -> list[tuple[str, int]]:
        """Those of `changed` whose logs may be here and that other brokers have now."""
        mine = image.partitions_of_broker(self._broker_id)
        logs = self.log_manager.logs
        if len(changed) <= len(logs):
            return [(image.topics[key[0]].name, key[1]) for key in changed if key not in mine]
        # A copy: on the disk's thread, a folder that fails takes its logs out at any time.
        keys = [(name, (log.topic_id, partition)) for (name, partition), log in list(logs.items())]
        return [(name, key[1]) for name, key in keys if key in changed and key not in mine]

    def _remove_logs(self, keys: list[tuple[str, int]], *, keep: bool) -> None:
        now_ms = self.now_ms()
        for name, partition in keys:
            try:
                if keep:  # it may be the metadata that is wrong: Kafka's `-stray`
                    self.log_manager.set_aside(name, partition)
                else:
                    self.log_manager.delete(name, partition, now_ms)
            except KafkaError as error:
                log.error("log cannot be removed", topic=name, partition=partition, error=str(error))

    def _forget(self, replica: Replica) -> None:
        replica.stop()
        self._throttle.forget(replica)
        for fetcher in self._fetchers.values():
            fetcher.forget(replica)
        self.hosted_replicas.remove(replica)

    async def _create_logs(self, wanted: Iterable[_Wanted]) -> None:
        missing = [item for item in wanted if self.hosted_replicas.get(item.topic_id, item.partition) is None]
        lost = {(item.topic_id, item.partition) for item in missing if not self._may_create(item)}
        if lost - self.hosted_replicas.unhosted:
            log.warning("replicas were in data folders that have failed", partitions=len(lost))
            self.hosted_replicas.unhosted.update(lost)
        missing = [item for item in missing if (item.topic_id, item.partition) not in lost]
        if not missing:
            return
        configs = {item.topic: self._topic_config(item.topic) for item in missing}
        replicas, refused = await self.disk.run(partial(self._create, missing, configs))
        for replica in replicas:
            if replica.log.failed is not None:  # its folder went offline meanwhile, and `drop_failed` missed it
                self.hosted_replicas.unhosted.add((replica.topic_id, replica.partition))
                self.on_lost((replica.topic_id, replica.partition))
                continue
            self.hosted_replicas.add(replica)
            self.hosted_replicas.unhosted.discard((replica.topic_id, replica.partition))
            if replica.must_checkpoint:
                self.dirty_replicas.high_watermarks[replica] = None
        for item, error in refused:
            if (item.topic_id, item.partition) not in self.hosted_replicas.unhosted:
                log.error("log cannot be created", topic=item.topic, partition=item.partition, error=str(error))
                self.hosted_replicas.unhosted.add((item.topic_id, item.partition))
        await self._checkpoint_lowered()

    def _may_create(self, item: _Wanted) -> bool:
        """Whether there may be a log here: none is made for a lost replica but beside a leader, nor while a folder
        is offline that may have the one that was."""
        if not is_lost(item.state, self._broker_id):
            return True
        held = self.log_manager.get(item.topic, item.partition)
        if held is not None and held.topic_id == item.topic_id:
            return True
        is_led = item.state.leader not in (NO_LEADER, self._broker_id)
        return is_led and all(folder.is_online for folder in self.log_manager.directories)

    def drop_failed(self) -> list[PartitionKey]:
        """Serve the replicas no more whose logs have failed; gives those."""
        failed = [replica for replica in self.hosted_replicas if replica.log.failed is not None]
        for replica in failed:
            self._forget(replica)
        keys = [(replica.topic_id, replica.partition) for replica in failed]
        self.hosted_replicas.unhosted.update(keys)
        return keys

    def _create(
        self, missing: list[_Wanted], configs: dict[str, TopicConfig]
    ) -> tuple[list[Replica], list[tuple[_Wanted, KafkaError]]]:
        """On the disk's thread: open or make the logs; those that the disk refuses come back with the error."""
        now_ms = self.now_ms()
        replicas, refused = [], []
        for item in missing:
            try:
                held = self.log_manager.get(item.topic, item.partition)
                if held is not None and held.topic_id not in (b"", item.topic_id):
                    self.log_manager.delete(item.topic, item.partition, now_ms)
                held = self.log_manager.create(item.topic, item.partition, item.topic_id, configs[item.topic], now_ms)
            except KafkaError as error:
                refused.append((item, error))
                continue
            high_watermark = self.log_manager.high_watermarks.get((item.topic, item.partition), 0)
            replicas.append(Replica(self._broker_id, held, high_watermark, self.monotonic_ms, self.dirty_replicas))
        return replicas, refused

    # --- roles -----------------------------------------------------------------------------------------------------

    async def _give_roles(self, wanted: Iterable[_Wanted]) -> None:
        pace = Pace()
        to_follow: dict[int, list[Replica]] = {}
        for item in wanted:
            replica = self.hosted_replicas.get(item.topic_id, item.partition)
            if replica is not None:
                try:
                    self._give_role(replica, item.state, to_follow)
                except StorageError as error:  # its folder goes offline
                    log.error("no role", topic=item.topic, partition=item.partition, error=error.message)
                if is_lost(item.state, self._broker_id):
                    self.on_found(replica)
            await pace.give_way()
        for leader_id, replicas in to_follow.items():
            self._follow(leader_id, replicas)

    def _give_role(self, replica: Replica, state: PartitionState, to_follow: dict[int, list[Replica]]) -> None:
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
            fetcher.forget(replica)

    def _follow(self, leader_id: int, replicas: list[Replica]) -> None:
        address = self._address(leader_id)
        if address is None:
            log.error("the leader has no listener for replicas", leader=leader_id)
            return
        fetcher = self._fetchers.get(leader_id)
        if fetcher is None:
            fetcher = self._fetchers[leader_id] = ReplicaFetcher(
                leader_id,
                self.pool.get(address),
                self.config,
                self.disk,
                self.metrics,
                self.now_ms,
                self.broker_epoch,
                self._checkpoint_after_truncation,
                self.on_task_done,
                self._throttle,
                self.on_reach_changed,
            )
        fetcher.follow([replica for replica in replicas if replica.log.failed is None])

    async def _checkpoint_after_truncation(self) -> None:
        """Off the loop: or else the next append to a log that was cut writes the recovery points first."""
        await self._checkpoint_lowered()
        try:
            await self.disk.run(self.log_manager.checkpoint_recovery_points)
        except KafkaError as error:
            log.warning("recovery points not written", error=str(error))

    async def _checkpoint_lowered(self) -> None:
        """Write high watermarks that went back; housekeeping tries again, and until then these logs do not grow."""
        if self.dirty_replicas.must_checkpoint:
            try:
                await self.dirty_replicas.checkpoint_high_watermarks(self.log_manager, self.disk)
            except KafkaError as error:
                log.warning("high watermarks not written", error=str(error))

    def endpoint(self, broker_id: int) -> tuple[str, int] | None:
        """Host and port where a broker listens for the others, as far as this one knows."""
        broker = self.hosted_replicas.image.brokers.get(broker_id)
        return broker.endpoints.get(self.config.inter_broker_listener_name) if broker else None

    def _address(self, broker_id: int) -> str | None:
        endpoint = self.endpoint(broker_id)
        return f"{endpoint[0]}:{endpoint[1]}" if endpoint else None

    async def _follow_brokers(self, delta: MetadataDelta) -> None:
        """Leaders that came back elsewhere get new connections; leaders stop waiting for fenced joiners."""
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

    # --- questions -------------------------------------------------------------------------------------------------

    def log_ends(self, wanted: Iterable[TopicIdPartition]) -> list[PartitionLogEnd]:
        """Where this broker's logs of these partitions end; those that it has not are left out."""
        ends = []
        for one in wanted:
            replica = self.hosted_replicas.get(one.topic_id, one.partition)
            if replica is not None:
                log = replica.log
                ends.append(PartitionLogEnd(one.topic_id, one.partition, log.latest_epoch, log.log_end_offset))
        return ends

    def high_watermarks(self) -> dict[tuple[str, int], int]:
        """What to checkpoint."""
        return {(replica.topic, replica.partition): replica.high_watermark for replica in self.hosted_replicas}

    async def stop(self, *, is_clean: bool) -> None:
        """Stop fetching and answer those who wait; a clean stop also ends the sessions at the leaders."""
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
    """What is needed of the replicas that are not just being added: or else a second one stops a topic's writes."""
    return min(config.min_insync_replicas, len(state.replicas) - len(state.adding_replicas))
