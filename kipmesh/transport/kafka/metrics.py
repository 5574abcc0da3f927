"""Metrics of the Kafka listener's connections, with Kafka's names where Kafka has them. Read at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

NO_REQUEST = ("malformed", "length", "size", "api", "version")
"""Why a connection ended that sent what is no request."""
ENDED = (
    *NO_REQUEST,
    *("idle", "stalled", "held", "slow", "handshake"),
    *("authentication", "unauthenticated", "users not known", "acks-0", "failed", "fault"),
)
"""Why connections are closed by the broker; each is told from the start, so that the first one is seen as a change."""
REFUSED = ("max.connections", "max.connections.per.ip")
SOFTWARE_MAX = 64
"""Names and versions of client software that are told apart; the others are one."""


class WireMetrics(Collector):
    """Of one broker, all its listeners together where none is named. Scrapes come from another thread."""

    def __init__(self, queued_bytes: Callable[[], int], unsent_bytes: Callable[[], int]) -> None:
        self._queued_bytes = queued_bytes
        self._unsent_bytes = unsent_bytes
        self._ended: Counter[str] = Counter(dict.fromkeys(ENDED, 0))
        self._refused: Counter[str] = Counter(dict.fromkeys(REFUSED, 0))
        self._open: Counter[str] = Counter()
        self._created: Counter[str] = Counter()
        self._closed: Counter[str] = Counter()
        self._software: Counter[tuple[str, str]] = Counter()

    def listens(self, listener: str) -> None:
        """A listener begins; it is told of before it has a connection."""
        for counts in (self._open, self._created, self._closed):
            counts[listener] += 0

    def opened(self, listener: str) -> None:
        """A connection is served."""
        self._open[listener] += 1
        self._created[listener] += 1

    def closed(self, listener: str) -> None:
        """It is gone."""
        self._open[listener] -= 1
        self._closed[listener] += 1

    def refused(self, limit: str) -> None:
        """A connection was not served, for this limit."""
        self._refused[limit] += 1

    def ended(self, reason: str) -> None:
        """A connection was closed by this side."""
        self._ended[reason] += 1

    def software(self, name: str, version: str) -> None:
        """A client said what it is."""
        if (name, version) not in self._software and len(self._software) >= SOFTWARE_MAX:
            name = version = "other"
        self._software[name, version] += 1

    def collect(self) -> Iterator[Metric]:
        """See the module."""
        yield from self._connections()
        yield GaugeMetricFamily(
            "kipmesh_wire_queued_request_bytes", "Bytes of requests that are not answered yet.", self._queued_bytes()
        )
        yield GaugeMetricFamily(
            "kipmesh_wire_unsent_response_bytes", "Bytes of responses that clients do not take.", self._unsent_bytes()
        )

    describe = collect

    def _connections(self) -> Iterator[Metric]:
        prefix = "kafka_server_socket_server_metrics_connection_"
        yield _filled(GaugeMetricFamily(prefix + "count", "Connections.", labels=["listener"]), self._open)
        for name, text, counts in (
            ("creation", "Connections that were made.", self._created),
            ("close", "Connections that ended.", self._closed),
        ):
            yield _filled(CounterMetricFamily(prefix + name, text, labels=["listener"]), counts)
        refused = CounterMetricFamily(
            "kipmesh_wire_connections_refused", "Connections refused, by the limit.", labels=["limit"]
        )
        yield _filled(refused, self._refused)
        ended = CounterMetricFamily(
            "kipmesh_wire_connections_ended", "Connections that the broker closed, by reason.", labels=["reason"]
        )
        yield _filled(ended, self._ended)
        malformed = sum(self._ended[reason] for reason in NO_REQUEST)
        yield CounterMetricFamily("kipmesh_wire_malformed_frames", "Frames that are no request.", malformed)
        software = CounterMetricFamily(
            "kipmesh_wire_client_software", "Connections by what clients say they are.", labels=["name", "version"]
        )
        for labels, count in list(self._software.items()):
            software.add_metric(labels, count)
        yield software


def _filled(family: Metric, counts: Counter[str]) -> Metric:
    for label, count in list(counts.items()):
        family.add_metric([label], count)  # type: ignore[attr-defined]
    return family
