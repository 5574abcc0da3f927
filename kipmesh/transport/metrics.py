"""Metrics of requests, with Apache Kafka's names where Kafka has them.

Counts are plain integers that are read at each scrape, because this is on the hot path. The time of a request includes
intended waits: a Fetch for records or the high watermark, a Produce for replicas.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode
from kipmesh.messages.table import Api

BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
GRPC_BUCKETS_MS = (0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 30_000)


class _Times:
    """A histogram of durations with fixed upper limits."""

    __slots__ = ("_limits", "buckets", "total")

    def __init__(self, limits: tuple[float, ...]) -> None:
        self._limits = limits
        self.buckets = [0] * (len(limits) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.total += value
        self.buckets[bisect_left(self._limits, value)] += 1

    def add_to(self, family: HistogramMetricFamily, label: str) -> None:
        count, buckets = 0, []
        for limit, number in zip((*map(str, map(float, self._limits)), "+Inf"), list(self.buckets), strict=True):
            count += number
            buckets.append((limit, count))
        family.add_metric((label,), buckets, self.total)


class _ApiNumbers:
    __slots__ = ("errors", "request_bytes", "response_bytes", "times", "versions")

    def __init__(self) -> None:
        self.versions: Counter[int] = Counter()
        self.errors: Counter[int] = Counter()
        self.request_bytes = 0
        self.response_bytes = 0
        self.times = _Times(BUCKETS_S)


class RequestMetrics(Collector):
    """Metrics of one node's requests from both front ends. `collect` runs on a different thread from `finished`."""

    def __init__(self) -> None:
        self._kafka: dict[str, _ApiNumbers] = {}
        self._grpc: dict[str, _Times] = {}

    def finished(
        self,
        api: Api,
        context: RequestContext,
        request: Any,
        response: Any,
        sizes: tuple[int, int],
        took_s: float,
    ) -> None:
        """Count a request that took `took_s` seconds. `sizes`: bytes of (request, response); not counted for gRPC."""
        if context.version is None:
            # Fetches of followers and of consumers are separate series, as in Apache Kafka.
            name = api.name
            if name == "Fetch":
                name = "FetchFollower" if request.replica_id >= 0 else "FetchConsumer"
            times = self._grpc.get(name)
            if times is None:
                times = self._grpc[name] = _Times(GRPC_BUCKETS_MS)
            times.observe(took_s * 1000)
            return
        numbers = self._kafka.get(api.name)
        if numbers is None:
            numbers = self._kafka[api.name] = _ApiNumbers()
        numbers.versions[context.version] += 1
        numbers.request_bytes += sizes[0]
        numbers.response_bytes += sizes[1]
        numbers.times.observe(took_s)
        if response is not None and (codes := api.errors(response)):
            numbers.errors.update(codes)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of both front ends."""
        prefix = "kafka_network_requestmetrics_"
        requests = CounterMetricFamily(prefix + "requests", "Completed requests.", labels=["request", "version"])
        received = CounterMetricFamily(prefix + "requestbytes", "Bytes of requests.", labels=["request"])
        errors = CounterMetricFamily(
            prefix + "errors", "Errors in responses, counting each item of a response.", labels=["request", "error"]
        )
        sent = CounterMetricFamily(prefix + "responsebytes", "Bytes of responses.", labels=["request"])
        times = HistogramMetricFamily(
            "kipmesh_wire_request_seconds", "Time from the last byte of a request to its response.", labels=["request"]
        )
        for name, numbers in list(self._kafka.items()):
            for version, count in list(numbers.versions.items()):
                requests.add_metric((name, str(version)), count)
            for code, count in list(numbers.errors.items()):
                errors.add_metric((name, ErrorCode.of(code).name), count)
            received.add_metric((name,), numbers.request_bytes)
            sent.add_metric((name,), numbers.response_bytes)
            numbers.times.add_to(times, name)
        grpc = HistogramMetricFamily(
            prefix + "totaltimems", "Time from a request to its response, including waits, in ms.", labels=["request"]
        )
        for name, histogram in list(self._grpc.items()):
            histogram.add_to(grpc, name)
        yield from (requests, errors, received, sent, times, grpc)

    describe = collect
