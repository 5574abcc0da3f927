"""What the listener counts: Kafka's names where Kafka has some. Numbers are plain, and read at each scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kipmesh.core.errors import ErrorCode
from kipmesh.wire.api import Api

BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
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


class _ApiNumbers:
    __slots__ = ("buckets", "errors", "request_bytes", "response_bytes", "seconds", "versions")

    def __init__(self) -> None:
        self.versions: Counter[int] = Counter()
        self.errors: Counter[int] = Counter()
        self.request_bytes = 0
        self.response_bytes = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BUCKETS_S) + 1)


class WireMetrics(Collector):
    """Of one broker, all its listeners together where none is named. Scrapes come from another thread."""

    def __init__(self, queued_bytes: Callable[[], int], unsent_bytes: Callable[[], int]) -> None:
        self._queued_bytes = queued_bytes
        self._unsent_bytes = unsent_bytes
        self._apis: dict[str, _ApiNumbers] = {}
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

    def answered(self, api: Api, version: int, request_bytes: int, response_bytes: int, took_s: float) -> None:
        """A request is done, from its last byte to the first of its response."""
        numbers = self._apis.get(api.name)
        if numbers is None:
            numbers = self._apis[api.name] = _ApiNumbers()
        numbers.versions[version] += 1
        numbers.request_bytes += request_bytes
        numbers.response_bytes += response_bytes
        numbers.seconds += took_s
        numbers.buckets[bisect_left(BUCKETS_S, took_s)] += 1

    def failed(self, api: Api, codes: Iterable[int]) -> None:
        """A response has errors."""
        numbers = self._apis.get(api.name)
        if numbers is None:
            numbers = self._apis[api.name] = _ApiNumbers()
        numbers.errors.update(codes)

    def describe(self) -> Iterator[Metric]:
        """The same metrics."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """See the module."""
        yield from self._connections()
        yield from self._requests()
        yield GaugeMetricFamily(
            "kipmesh_wire_queued_request_bytes", "Bytes of requests that are not answered yet.", self._queued_bytes()
        )
        yield GaugeMetricFamily(
            "kipmesh_wire_unsent_response_bytes", "Bytes of responses that clients do not take.", self._unsent_bytes()
        )

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

    def _requests(self) -> Iterator[Metric]:
        prefix = "kafka_network_requestmetrics_"
        requests = CounterMetricFamily(prefix + "requests", "Requests answered.", labels=["request", "version"])
        received = CounterMetricFamily(prefix + "requestbytes", "Bytes of requests.", labels=["request"])
        errors = CounterMetricFamily(
            prefix + "errors", "Errors in responses, of all their items.", labels=["request", "error"]
        )
        sent = CounterMetricFamily(prefix + "responsebytes", "Bytes of responses.", labels=["request"])
        times = HistogramMetricFamily(
            "kipmesh_wire_request_seconds", "From a request's last byte to its response's first.", labels=["request"]
        )
        for name, numbers in list(self._apis.items()):
            for version, count in list(numbers.versions.items()):
                requests.add_metric((name, str(version)), count)
            for code, count in list(numbers.errors.items()):
                errors.add_metric((name, ErrorCode.of(code).name), count)
            received.add_metric((name,), numbers.request_bytes)
            sent.add_metric((name,), numbers.response_bytes)
            total, buckets = 0, []
            for limit, count in zip((*map(str, BUCKETS_S), "+Inf"), list(numbers.buckets), strict=True):
                total += count
                buckets.append((limit, total))
            times.add_metric((name,), buckets, numbers.seconds)
        yield from (requests, errors, received, sent, times)


def _filled(family: Metric, counts: Counter[str]) -> Metric:
    for label, count in list(counts.items()):
        family.add_metric([label], count)  # type: ignore[attr-defined]
    return family
