"""The consumer service's own metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kipmesh.client import FetchStats


class FetchCollector(Collector):
    """How the streams' consumers fetch, by sessions and without (227-19); `read` gives what was counted so far."""

    def __init__(self, read: Callable[[], FetchStats]) -> None:
        self._read = read

    def describe(self) -> Iterator[Metric]:
        """The names, for the registry."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """The values at this scrape."""
        stats = self._read()
        yield GaugeMetricFamily(
            "kipmesh_consumer_fetch_sessions_open", "Fetch sessions that brokers keep for streams", value=stats.sessions
        )
        fetches = CounterMetricFamily("kipmesh_consumer_fetches", "Fetches of streams, by kind", labels=["kind"])
        fetches.add_metric(["full"], stats.full_fetches)
        fetches.add_metric(["incremental"], stats.incremental_fetches)
        fetches.add_metric(["aside"], stats.fetches_aside)
        yield fetches
        resets = CounterMetricFamily(
            "kipmesh_consumer_fetch_session_resets", "Fetch sessions that were given up, by cause", labels=["cause"]
        )
        for cause, count in sorted(stats.resets.items()):
            resets.add_metric([cause], count)
        yield resets


class ServiceMetrics:
    """What Kafka has no name for: streams and what they delivered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.streams_open = Gauge("kipmesh_consumer_streams_open", "Streams that are open now", registry=registry)
        self.partitions_assigned = Gauge(
            "kipmesh_consumer_partitions_assigned", "Partitions that streams have by the group", registry=registry
        )
        self.streams_refused = Counter(
            "kipmesh_consumer_streams_refused_total", "Streams refused for streams.max", registry=registry
        )
        self.streams_ended = Counter(
            "kipmesh_consumer_streams_ended_total", "Streams that ended, by why", ["reason"], registry=registry
        )
        self.records_delivered = Counter(
            "kipmesh_consumer_records_delivered_total", "Records that went to readers", registry=registry
        )
        self.bytes_delivered = Counter(
            "kipmesh_consumer_delivered_bytes_total", "Bytes of bodies that went to readers", registry=registry
        )
