"""Preferred replicas of a consumer, from configuration, metadata and the consumer's own selector (392-15 to 392-17).

`ReplicaSelection` supplies each `PartitionReader` with metadata and the selector's result; the reader selects the
replica (`rules.preferred_replica`). `ReplicaReturn` refreshes metadata so that a recovered replica is used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kipmesh.client.cluster import Cluster
from kipmesh.client.consumer.rules.reader import PartitionReader
from kipmesh.client.consumer.rules.values import PartitionView, ReaderConfig, SelectionMode
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
"""Logged failures of the selector. A broken selector fails for each partition at each update, so others are counted."""


def rack_in_metadata(config: ConsumerConfig) -> str:
    """Return the rack for Metadata requests; empty unless `replica.selection.mode=metadata` (392-15)."""
    return config.client_rack if config.replica_selection_mode == "metadata" else ""


def reset_policy(config: ConsumerConfig) -> int | None:
    """Return `auto.offset.reset` as TIMESTAMP_EARLIEST or TIMESTAMP_LATEST; None for `none` and `error`."""
    return {"earliest": TIMESTAMP_EARLIEST, "latest": TIMESTAMP_LATEST}.get(config.auto_offset_reset)


def ineffective_settings(config: ConsumerConfig) -> list[str]:
    """Return one message for each replica selection setting that has no effect in combination with the others."""
    mode, messages = config.replica_selection_mode, []
    if mode != "consumer":
        messages += [
            f"{key} has no effect with replica.selection.mode={mode}: brokers select the replica"
            for key, value in (
                ("replica.selector.class", config.replica_selector_class),
                ("replica.selector.config", config.replica_selector_config),
            )
            if value
        ]
    elif not config.replica_selector_class:
        messages.append("replica.selection.mode=consumer fetches from leaders without replica.selector.class")
    if mode == "fetch":
        if config.replica_selection_policy != "leader":
            messages.append("replica.selection.policy has no effect with replica.selection.mode=fetch")
    elif config.replica_selection_policy == "leader":
        messages.append(f"replica.selection.mode={mode} has no effect with replica.selection.policy=leader")
    if mode == "metadata" and not config.client_rack:
        messages.append("replica.selection.mode=metadata has no effect without client.rack")
    return messages


class ReplicaSelection:
    """Creates the partition readers of a consumer and their metadata views.

    Logs a warning for settings without effect. Raises InvalidConfigError if the selector cannot be loaded.
    """

    def __init__(self, config: ConsumerConfig, cluster: Cluster) -> None:
        for line in ineffective_settings(config):
            log.warning("setting has no effect client_id=%s reason=%s", config.client_id, line)
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
            configs = {**config.as_dict(), **_selector_config(config.replica_selector_config)}
            self._selector = GuardedSelector(load_selector(config.replica_selector_class, configs), self._log_failure)

    def reader(self) -> PartitionReader:
        """Create the reader of a newly assigned partition."""
        return PartitionReader(self.config, lambda attempts: int(self._cluster.backoff.delay_s(attempts) * 1000))

    @property
    def selector_failures(self) -> int:
        """Number of failures of the consumer's own selector; 0 if it has none."""
        return sum(self._selector.failures.values()) if self._selector is not None else 0

    @property
    def changes_with_metadata(self) -> bool:
        """Whether a metadata update may select another replica: with policy preferred, except in mode fetch."""
        return self.config.mode is not SelectionMode.FETCH and self.config.prefers_replicas

    def of(self, topic: str, known: PartitionMetadata | None) -> PartitionView:
        """Return the reader's view of a partition's metadata; an empty view for None.

        Brokers that are not in the metadata count as offline. In mode consumer this calls the consumer's selector.
        """
        if known is None:
            return PartitionView()
        brokers = self._cluster.metadata.brokers
        replicas = tuple(known.replicas)
        offline = tuple([node for node in replicas if node not in brokers or node in known.offline_replicas])
        preferred = known.preferred_read_replica
        if self._selector is not None and self.config.prefers_replicas:
            preferred = NO_REPLICA
            if not self._selector.always_leader:
                endpoints = {node: NodeEndpoint(*brokers[node]) for node in replicas if node not in offline}
                view = view_of(leader_id=known.leader_id, replicas=replicas, isr=known.isr, endpoints=endpoints)
                topic_partition = selection.TopicPartition(topic, known.partition)
                preferred = preferred_read_replica(self._selector, topic_partition, self._client, view)
        leader_id = known.leader_id if known.leader_id in brokers else -1
        return PartitionView(leader_id, known.leader_epoch, replicas, tuple(known.isr), offline, preferred)

    def _log_failure(self, topic_partition: selection.TopicPartition, failure: SelectorFailure, cause: object) -> None:
        if self.selector_failures <= FAILURES_LOGGED:
            log.warning(
                "replica selector failed topic=%s partition=%d failure=%s cause=%r",
                *topic_partition,
                failure.value,
                cause,
            )

    def close(self) -> None:
        """Close the consumer's own selector, if any."""
        if self._selector is not None:
            self._selector.close()


def _selector_config(pairs: tuple[str, ...]) -> dict[str, str]:
    keys = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key.strip() and equals):
            raise InvalidConfigError(f"replica.selector.config must be a list of key=value, got {pair!r}")
        keys[key.strip()] = value.strip()
    return keys


@dataclass(slots=True, eq=False)
class ReplicaReturn:
    """Schedules metadata refreshes after partitions returned to their leader, in the modes `metadata` and `consumer`.

    The regular refresh alone would keep a consumer on the leader for up to `metadata.max.age.ms` after its replica has
    recovered. Metadata is therefore refreshed `first_s` (`retry.backoff.max.ms`) after the return and then at doubling
    intervals, until the partition is fetched from a replica or the interval reaches `last_s` (392-14). In mode `fetch`
    the leader redirects the consumer instead. Times are seconds of the loop's clock.
    """

    first_s: float
    last_s: float
    due_s: float | None = None
    """Time of the next refresh, or None."""
    _wait_s: float = 0.0
    _away: dict[TopicPartition, None] = field(default_factory=dict)

    def add(self, topic_partition: TopicPartition, now_s: float) -> None:
        """Record that a partition returned to its leader because its replica failed."""
        if topic_partition not in self._away:
            self._away[topic_partition] = None
            self._wait_s = self.first_s
            self.due_s = now_s + self.first_s

    def topics(self, now_s: float, is_away: Callable[[TopicPartition], bool]) -> set[str]:
        """Return the topics to refresh now, none before `due_s`, and schedule the next refresh.

        `is_away` returns whether a partition is still fetched from its leader.
        """
        if self.due_s is None or now_s < self.due_s:
            return set()
        self._away = {topic_partition: None for topic_partition in self._away if is_away(topic_partition)}
        topics = {topic for topic, _ in self._away}
        self._wait_s *= 2
        if not topics or self._wait_s >= self.last_s:
            self._away = {}
            self.due_s = None
        else:
            self.due_s = now_s + self._wait_s
        return topics
