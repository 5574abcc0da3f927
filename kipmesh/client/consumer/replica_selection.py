"""The replicas that a consumer prefers: by configuration, metadata, and the consumer's own selector (392-15 to 392-17).

`ReplicaSelection` gives each `PartitionReader` what metadata and the selector say; the reader decides
(`rules.preferred_replica`). `ReplicaReturn` refreshes metadata so that a replica that was left is found again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from kipmesh.client.cluster import Cluster
from kipmesh.client.consumer.rules.reader import PartitionReader
from kipmesh.client.consumer.rules.values import PartitionNews, ReaderConfig, SelectionMode
from kipmesh.client.types import TIMESTAMP_EARLIEST, TIMESTAMP_LATEST, PartitionMetadata, TopicPartition
from kipmesh.core.config import ConsumerConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.core.replica import selection
from kipmesh.core.replica.selection import ClientMetadata, GuardedSelector, SelectorFailure
from kipmesh.core.replica.selection_views import NO_REPLICA, preferred_read_replica, view_of
from kipmesh.core.replica.selector_loader import load_selector
from kipmesh.messages import NodeEndpoint

log = logging.getLogger(__name__)

FAILURES_LOGGED: Final = 5
"""A broken selector fails for each partition at each update: after so many it is counted only."""


def rack_in_metadata(config: ConsumerConfig) -> str:
    """The rack that Metadata requests carry (392-15)."""
    return config.client_rack if config.replica_selection_mode == "metadata" else ""


def reset_policy(config: ConsumerConfig) -> int | None:
    """`auto.offset.reset` as a timestamp; None for `none` and `error`."""
    return {"earliest": TIMESTAMP_EARLIEST, "latest": TIMESTAMP_LATEST}.get(config.auto_offset_reset)


def ineffective(config: ConsumerConfig) -> list[str]:
    """What is set and does nothing, as the other settings are; a line each."""
    mode, said = config.replica_selection_mode, []
    if mode != "consumer":
        said += [
            f"{key} has no effect with replica.selection.mode={mode}: brokers choose"
            for key, value in (
                ("replica.selector.class", config.replica_selector_class),
                ("replica.selector.config", config.replica_selector_config),
            )
            if value
        ]
    elif not config.replica_selector_class:
        said.append("replica.selection.mode=consumer reads from leaders without replica.selector.class")
    if mode == "fetch":
        if config.replica_selection_policy != "leader":
            said.append("replica.selection.policy has no effect with replica.selection.mode=fetch")
    elif config.replica_selection_policy == "leader":
        said.append(f"replica.selection.mode={mode} has no effect with replica.selection.policy=leader")
    if mode == "metadata" and not config.client_rack:
        said.append("replica.selection.mode=metadata has no effect without client.rack")
    return said


class ReplicaSelection:
    """Makes the readers of a consumer, and their news. Raises InvalidConfigError for a selector that cannot be."""

    def __init__(self, config: ConsumerConfig, cluster: Cluster) -> None:
        for line in ineffective(config):
            log.warning("%s: %s", config.client_id, line)
        mode = SelectionMode(config.replica_selection_mode)
        self.config = ReaderConfig(
            reset_to=reset_policy(config),
            has_rack=bool(config.client_rack),
            mode=mode,
            prefers_replicas=config.replica_selection_policy == "preferred",
            metadata_max_age_ms=config.metadata_max_age_ms,
            retry_backoff_max_ms=config.retry_backoff_max_ms,
            fetch_max_wait_ms=config.fetch_max_wait_ms,
        )
        self._cluster = cluster
        self._client = ClientMetadata(config.client_rack, config.client_id)
        self._selector: GuardedSelector | None = None
        if mode is SelectionMode.CONSUMER:
            configs = {**config.as_dict(), **_own_keys(config.replica_selector_config)}
            self._selector = GuardedSelector(load_selector(config.replica_selector_class, configs), self._failed)

    def reader(self) -> PartitionReader:
        """A new partition's reader."""
        return PartitionReader(self.config, lambda attempts: int(self._cluster.backoff.delay_s(attempts) * 1000))

    @property
    def selector_failures(self) -> int:
        """What the consumer's own selector did wrong so far."""
        return sum(self._selector.failures.values()) if self._selector is not None else 0

    @property
    def changes_with_metadata(self) -> bool:
        """Whether each update of metadata may choose another replica."""
        return self.config.mode is not SelectionMode.FETCH and self.config.prefers_replicas

    def of(self, topic: str, known: PartitionMetadata | None) -> PartitionNews:
        """What metadata says; brokers that it does not name are offline."""
        if known is None:
            return PartitionNews()
        brokers = self._cluster.metadata.brokers
        replicas = tuple(known.replicas)
        offline = tuple([node for node in replicas if node not in brokers or node in known.offline_replicas])
        preferred = known.preferred_read_replica
        if self._selector is not None and self.config.prefers_replicas:
            preferred = self._select(self._selector, selection.TopicPartition(topic, known.partition), known, offline)
        leader_id = known.leader_id if known.leader_id in brokers else -1
        return PartitionNews(leader_id, known.leader_epoch, replicas, tuple(known.isr), offline, preferred)

    def _select(
        self,
        selector: GuardedSelector,
        where: selection.TopicPartition,
        known: PartitionMetadata,
        offline: tuple[int, ...],
    ) -> int:
        if selector.always_leader:
            return NO_REPLICA
        brokers = self._cluster.metadata.brokers
        endpoints = {
            node: NodeEndpoint(node, brokers[node].host, brokers[node].port, brokers[node].rack)
            for node in known.replicas
            if node not in offline
        }
        view = view_of(leader_id=known.leader_id, replicas=known.replicas, isr=known.isr, endpoints=endpoints)
        return preferred_read_replica(selector, where, self._client, view)

    def _failed(self, where: selection.TopicPartition, failure: SelectorFailure, what: object) -> None:
        if self.selector_failures <= FAILURES_LOGGED:
            log.warning("the replica selector failed for %s-%d (%s): %r", *where, failure.value, what)

    def close(self) -> None:
        """End the selector."""
        if self._selector is not None:
            self._selector.close()


def _own_keys(pairs: tuple[str, ...]) -> dict[str, str]:
    keys = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key.strip() and equals):
            raise InvalidConfigError(f"configuration key 'replica.selector.config': {pair!r} is not key=value")
        keys[key.strip()] = value.strip()
    return keys


class ReplicaReturn:
    """The way back to a nearby replica in the modes `metadata` and `consumer`, of one consumer.

    A refresh every `metadata.max.age.ms` alone would leave a consumer with the leader for that long after its replica
    was back. So metadata is requested `retry.backoff.max.ms` after a replica was left, and again, each time after twice
    as long, until the partition is read from a replica again or the regular refresh is as good (392-14). In mode
    `fetch` the leader's next response redirects the consumer.
    Times are seconds of the loop's clock.
    """

    def __init__(self, first_s: float, last_s: float) -> None:
        """The first wait, and the one that the regular refresh makes needless."""
        self._first_s = first_s
        self._last_s = last_s
        self._wait_s = 0.0
        self._away: dict[TopicPartition, None] = {}
        self.due_s: float | None = None
        """When metadata is asked for; None for never."""

    def left(self, where: TopicPartition, now_s: float) -> None:
        """The partition is read from the leader, since its replica failed."""
        if where not in self._away:
            self._away[where] = None
            self._wait_s = self._first_s
            self.due_s = now_s + self._first_s

    def topics(self, now_s: float, is_away: Callable[[TopicPartition], bool]) -> set[str]:
        """The topics whose metadata is asked for now; `is_away` says what is not read from a replica yet."""
        if self.due_s is None or now_s < self.due_s:
            return set()
        self._away = {where: None for where in self._away if is_away(where)}
        topics = {topic for topic, _ in self._away}
        self._wait_s *= 2
        if not topics or self._wait_s >= self._last_s:
            self._away = {}
            self.due_s = None
        else:
            self.due_s = now_s + self._wait_s
        return topics
