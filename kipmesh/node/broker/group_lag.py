"""How far behind the groups of one broker are: `kafka_consumergroup_lag`, computed at each scrape.

The coordinator of a group knows what is committed; how far the logs go it knows of the partitions that it has a replica
of, as their leader or as a follower that was told the leader's high watermark. Of the others it exports no lag, and
counts them, so that nobody takes a gap for a group that is up to date. Asking their leaders would cost requests for
every scrape; `kipmesh group describe` does that once.

Scrapes come on another thread: what the event loop changes is copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kipmesh.core.group.table import GroupTable
from kipmesh.node.broker.partitions import Partitions


class GroupLag(NamedTuple):
    """Records that are committed by producers and not by the group; None where this broker has no replica."""

    group_id: str
    topic: str
    partition: int
    lag: int | None


class GroupLagCollector(Collector):
    """The lag of each committed offset; `tables` gives what the coordinators here know."""

    def __init__(self, tables: Callable[[], Iterable[GroupTable]], partitions: Partitions) -> None:
        self._tables = tables
        self._partitions = partitions

    def describe(self) -> Iterator[Metric]:
        """The names, for the registry."""
        yield from self._families([])

    def collect(self) -> Iterator[Metric]:
        """O(committed offsets)."""
        yield from self._families(self.lags())

    def lags(self) -> Iterator[GroupLag]:
        """Of all committed offsets here."""
        for table in self._tables():
            for group_id, (topic, partition), offset in table.committed():
                yield GroupLag(group_id, topic, partition, self._lag(topic, partition, offset))

    def _lag(self, topic: str, partition: int, offset: int) -> int | None:
        topic_id = self._partitions.image.topic_names.get(topic)
        replica = None if topic_id is None else self._partitions.get(topic_id, partition)
        return None if replica is None else max(replica.told_high_watermark - offset, 0)

    def _families(self, lags: Iterable[GroupLag]) -> Iterator[Metric]:
        known = GaugeMetricFamily(
            "kafka_consumergroup_lag",
            "Records between a group's committed offset and the high watermark.",
            labels=["group", "topic", "partition"],
        )
        unknown = 0
        for group_id, topic, partition, lag in lags:
            if lag is None:
                unknown += 1
            else:
                known.add_metric([group_id, topic, str(partition)], lag)
        yield known
        text = "Committed offsets of the groups here in partitions of which this broker has no replica."
        yield GaugeMetricFamily("kipmesh_consumergroup_unknown_lags", text, unknown)
