"""How long requests by gRPC took: Kafka's `RequestMetrics`, the time from a whole request to its answer.

That has the time which a request waits by its own wish: a fetch for bytes or the high watermark, a produce request for
replicas. Requests by Kafka's own protocol are timed where that is spoken (`kipmesh.wire.metrics`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

BUCKETS_MS = (0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 30_000)


class RequestTimes:
    """Of one node; called for each method that a server has, gives what is told of its requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._times = Histogram(
            "kafka_network_requestmetrics_totaltimems",
            "Time from a request to its answer, waits included, in ms.",
            ("request",),
            buckets=BUCKETS_MS,
            registry=registry,
        )

    def __call__(self, service: str, method: str) -> Callable[[Any, float], None]:
        """A function of a request and the seconds that it took. Fetches of replicas and of consumers are two kinds."""
        name, labels = method.removesuffix("Stream"), self._times.labels  # a series only for what is asked

        def of_clients_and_nodes(request: Any, took_s: float) -> None:
            labels("FetchFollower" if request.replica_id >= 0 else "FetchConsumer").observe(took_s * 1000)

        def of_anybody(_request: Any, took_s: float) -> None:
            labels(name).observe(took_s * 1000)

        return of_clients_and_nodes if name == "Fetch" else of_anybody
