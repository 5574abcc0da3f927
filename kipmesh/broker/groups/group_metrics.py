"""Metrics of the groups that a broker coordinates, computed at each scrape.

The coordinator knows the committed offsets. It knows the high watermark only of partitions that this broker hosts, as
leader or as follower. It exports no lag for other partitions but counts them, so that a gap does not look like a group
that is up to date. Requests to their leaders at each scrape would cost too much; `kipmesh group describe` sends them
once.

Scrapes run on another thread: tables of the event loop are copied first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kipmesh.broker.groups.groups import GroupsHandler
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.core.group.classic import GroupState

PREFIX = "kafka_coordinator_group_groupmetadatamanager_"


class GroupCollector(Collector):
    """Exports Kafka's gauges of groups, and `kafka_consumergroup_lag`."""

    def __init__(self, groups: GroupsHandler, hosted_replicas: HostedReplicas) -> None:
        self._groups = groups
        self._hosted_replicas = hosted_replicas

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. O(committed offsets)."""
        coordinators = self._groups.coordinators()
        states: Counter[GroupState] = Counter()
        for coordinator in coordinators:
            states.update(coordinator.group_states())
        offsets = sum(coordinator.table.offset_count for coordinator in coordinators)
        yield GaugeMetricFamily(
            PREFIX + "numoffsets", "Committed offsets of the groups that this broker coordinates.", offsets
        )
        yield GaugeMetricFamily(PREFIX + "numgroups", "Groups that this broker coordinates.", states.total())
        for state in GroupState:
            name = f"{PREFIX}numgroups{state.value.lower()}"
            yield GaugeMetricFamily(name, f"Groups that this broker coordinates in state {state.value}.", states[state])
        lags = GaugeMetricFamily(
            "kafka_consumergroup_lag",
            "Records between a group's committed offset and the high watermark.",
            labels=["group", "topic", "partition"],
        )
        unknown = 0
        for coordinator in coordinators:
            for group_id, (topic, partition), offset in coordinator.table.committed():
                lag = self._lag(topic, partition, offset)
                if lag is None:
                    unknown += 1
                else:
                    lags.add_metric([group_id, topic, str(partition)], lag)
        yield lags
        text = "Committed offsets without a lag, because this broker has no replica of their partition."
        yield GaugeMetricFamily("kipmesh_consumergroup_unknown_lags", text, unknown)

    def _lag(self, topic: str, partition: int, offset: int) -> int | None:
        """Return the records after the committed offset, or None if this broker has no replica."""
        topic_id = self._hosted_replicas.image.topic_names.get(topic)
        replica = None if topic_id is None else self._hosted_replicas.get(topic_id, partition)
        return None if replica is None else max(replica.leader_high_watermark - offset, 0)
