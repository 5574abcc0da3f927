"""The metrics of the groups that one broker coordinates, computed at each scrape.

The coordinator of a group knows what is committed. It knows the end of the logs that it has a replica of, as their
leader or as a follower with the leader's high watermark. Of the others it exports no lag, and counts them, so that a
gap does not pass for a group that is up to date. Requests to their leaders at every scrape would cost too much;
`kipmesh group describe` sends them once.

Scrapes come on another thread: what the event loop changes is copied first.
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
    """Kafka's gauges of groups, and `kafka_consumergroup_lag`."""

    def __init__(self, groups: GroupsHandler, hosted_replicas: HostedReplicas) -> None:
        self._groups = groups
        self._hosted_replicas = hosted_replicas

    def collect(self) -> Iterator[Metric]:
        """O(committed offsets)."""
        coordinators = self._groups.coordinators()
        states: Counter[GroupState] = Counter()
        for coordinator in coordinators:
            states.update(coordinator.group_states())
        offsets = sum(coordinator.table.offset_count for coordinator in coordinators)
        yield GaugeMetricFamily(PREFIX + "numoffsets", "Committed offsets of the groups here.", offsets)
        yield GaugeMetricFamily(PREFIX + "numgroups", "Groups whose coordinator is here.", states.total())
        for state in GroupState:
            name = f"{PREFIX}numgroups{state.value.lower()}"
            yield GaugeMetricFamily(name, f"Groups here that are {state.value}.", states[state])
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
        text = "Committed offsets of the groups here in partitions of which this broker has no replica."
        yield GaugeMetricFamily("kipmesh_consumergroup_unknown_lags", text, unknown)

    def _lag(self, topic: str, partition: int, offset: int) -> int | None:
        """Records that the group has not committed; None if this broker has no replica."""
        topic_id = self._hosted_replicas.image.topic_names.get(topic)
        replica = None if topic_id is None else self._hosted_replicas.get(topic_id, partition)
        return None if replica is None else max(replica.told_high_watermark - offset, 0)
