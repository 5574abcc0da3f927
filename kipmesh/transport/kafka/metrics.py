"""Metrics of Kafka connections, with Apache Kafka's names where Kafka has them. Evaluated at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

NO_REQUEST = ("malformed", "length", "size", "api", "version")
"""Reasons for closing a connection because of an invalid request."""
ENDED = (
    *NO_REQUEST,
    *("idle", "stalled", "held", "slow", "handshake"),
    *("authentication", "unauthenticated", "users not known", "acks-0", "failed", "fault"),
)
"""Reasons for closing a connection. All have a sample from the start, so that `rate()` sees the first occurrence."""
REFUSED = ("max.connections", "max.connections.per.ip")
SOFTWARE_MAX = 64
"""Maximum number of client software names and versions with their own series; further ones count as `other`."""


class WireMetrics(Collector):
    """Metrics of one broker's Kafka connections. `collect` runs on a different thread from the other methods.

    `queued_bytes` and `unsent_bytes` return the values of the two memory gauges.
    """

    def __init__(self, queued_bytes: Callable[[], int], unsent_bytes: Callable[[], int]) -> None:
        self._queued_bytes = queued_bytes
        self._unsent_bytes = unsent_bytes
        self.ended: Counter[str] = Counter(dict.fromkeys(ENDED, 0))
        """Connections that the broker closed, by reason."""
        self.refused: Counter[str] = Counter(dict.fromkeys(REFUSED, 0))
        """Connections that the broker refused, by limit."""
        self._open: Counter[str] = Counter()
        self._created: Counter[str] = Counter()
        self._closed: Counter[str] = Counter()
        self._software: Counter[tuple[str, str]] = Counter()

    def add_listener(self, listener: str) -> None:
        """Export the series of a listener before its first connection."""
        for counts in (self._open, self._created, self._closed):
            counts[listener] += 0

    def opened(self, listener: str) -> None:
        """Count an accepted connection."""
        self._open[listener] += 1
        self._created[listener] += 1

    def closed(self, listener: str) -> None:
        """Count the end of an accepted connection."""
        self._open[listener] -= 1
        self._closed[listener] += 1

    def software(self, name: str, version: str) -> None:
        """Count a connection by the client software that it reported, or as `other` beyond SOFTWARE_MAX series."""
        if (name, version) not in self._software and len(self._software) >= SOFTWARE_MAX:
            name = version = "other"
        self._software[name, version] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all connections."""
        yield from self._connections()
        yield GaugeMetricFamily(
            "kipmesh_wire_queued_request_bytes", "Bytes of requests in progress.", self._queued_bytes()
        )
        yield GaugeMetricFamily(
            "kipmesh_wire_unsent_response_bytes", "Bytes of responses not yet read by clients.", self._unsent_bytes()
        )

    describe = collect

    def _connections(self) -> Iterator[Metric]:
        prefix = "kafka_server_socket_server_metrics_connection_"
        yield _filled(GaugeMetricFamily(prefix + "count", "Open connections.", labels=["listener"]), self._open)
        for name, text, label, counts in (
            (prefix + "creation", "Accepted connections.", "listener", self._created),
            (prefix + "close", "Closed connections.", "listener", self._closed),
            ("kipmesh_wire_connections_refused", "Refused connections, by limit.", "limit", self.refused),
            ("kipmesh_wire_connections_ended", "Connections closed by the broker, by reason.", "reason", self.ended),
        ):
            yield _filled(CounterMetricFamily(name, text, labels=[label]), counts)
        malformed = sum(self.ended[reason] for reason in NO_REQUEST)
        yield CounterMetricFamily("kipmesh_wire_malformed_frames", "Frames that are not valid requests.", malformed)
        software = CounterMetricFamily(
            "kipmesh_wire_client_software", "Connections by reported client software.", labels=["name", "version"]
        )
        for labels, count in list(self._software.items()):
            software.add_metric(labels, count)
        yield software


def _filled(family: Metric, counts: Counter[str]) -> Metric:
    for label, count in list(counts.items()):
        family.add_metric([label], count)  # type: ignore[attr-defined]
    return family
