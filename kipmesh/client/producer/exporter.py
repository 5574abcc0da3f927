"""Prometheus collector for the metadata metrics of all producers of a process (526-10).

    producers = ProducerCollector()
    REGISTRY.register(producers)
    producers.add("orders", producer)  # asynchronous or blocking

No other module imports this one, so the client does not require prometheus_client. Scrapes may run on any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

PRODUCERS_MAX = 1000
"""Maximum number of exported producers. Bounds the label values of `client_id`."""
_PREFIX = "kipmesh_producer_metadata_"


class HasMetrics(Protocol):
    """A producer, asynchronous or blocking, whose metrics can be exported."""

    def metrics(self) -> Mapping[str, int | float]:
        """Return the metadata counters by name, as `Producer.metrics` does. Any thread may call it."""


class ProducerCollector(Collector):
    """Exports the metrics of the added producers, with their names in the label `client_id`."""

    def __init__(self) -> None:
        self._producers: dict[str, HasMetrics] = {}

    def add(self, client_id: str, producer: HasMetrics) -> None:
        """Export a producer. Raises ValueError if the name is in use or `PRODUCERS_MAX` is reached."""
        if client_id in self._producers:
            raise ValueError(f"producer {client_id!r} is already exported; use another client_id")
        if len(self._producers) >= PRODUCERS_MAX:
            raise ValueError(f"cannot export more than {PRODUCERS_MAX} producers; remove one first")
        self._producers[client_id] = producer

    def remove(self, client_id: str) -> None:
        """Stop exporting a producer. Raises KeyError if it is not exported."""
        del self._producers[client_id]

    def describe(self) -> Iterator[Metric]:
        """Yield the metric families without samples. The registry calls this method at registration."""
        return self._families({})

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families with the current values of all producers."""
        return self._families({name: producer.metrics() for name, producer in list(self._producers.items())})

    def _families(self, producers: Mapping[str, Mapping[str, int | float]]) -> Iterator[Metric]:
        for name, text in (
            ("requests", "Metadata requests; an urgent request has at least one urgent topic."),
            ("topics", "Topics in metadata requests."),
            ("bytes", "Bytes of metadata requests and responses."),
        ):
            family = CounterMetricFamily(_PREFIX + name, text, labels=["client_id", "urgency"])
            for client_id, values in producers.items():
                for urgency in ("urgent", "non_urgent"):
                    family.add_metric([client_id, urgency], values[f"metadata_{urgency}_{name}"])
            yield family
        for kind, name, text, key in (
            (CounterMetricFamily, "failed_requests", "Metadata requests without a valid response.", "failed_requests"),
            (CounterMetricFamily, "evictions", "Topics evicted because no records were sent to them.", "evictions"),
            (CounterMetricFamily, "blocked_seconds", "Time that calls of send waited for metadata.", "blocked_s"),
            (GaugeMetricFamily, "cached_topics", "Topics with cached metadata.", "cached_topics"),
        ):
            metric = kind(_PREFIX + name, text, labels=["client_id"])
            for client_id, values in producers.items():
                metric.add_metric([client_id], values[f"metadata_{key}"])
            yield metric
