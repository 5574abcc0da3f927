"""Prometheus metrics of a process's producers (526-10): an application registers one collector for all of them.

    producers = ProducerCollector()
    REGISTRY.register(producers)
    producers.add("orders", producer)  # a `kipmesh.client.Producer`, or a blocking one

Nothing else of the client imports this module. Scrapes come on another thread, and only look at numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

PRODUCERS_MAX = 1000
"""Producers of one process; each is a label value."""
_PREFIX = "kipmesh_producer_metadata_"


class HasMetrics(Protocol):
    """A producer, as this module sees it."""

    def metrics(self) -> Mapping[str, int | float]:
        """`Producer.metrics`."""


class ProducerCollector(Collector):
    """See the module. The label `client_id` is the name that a producer was added under."""

    def __init__(self) -> None:
        self._producers: dict[str, HasMetrics] = {}

    def add(self, client_id: str, producer: HasMetrics) -> None:
        """Export a producer; ValueError for a name that is taken, and for more than `PRODUCERS_MAX` of them."""
        if client_id in self._producers:
            raise ValueError(f"client_id: a producer {client_id!r} is exported already")
        if len(self._producers) >= PRODUCERS_MAX:
            raise ValueError(f"client_id: {PRODUCERS_MAX} producers are exported already")
        self._producers[client_id] = producer

    def remove(self, client_id: str) -> None:
        """Export it no more; KeyError when it was not."""
        del self._producers[client_id]

    def describe(self) -> Iterator[Metric]:
        """The names, for the registry."""
        return self._families({})

    def collect(self) -> Iterator[Metric]:
        """The values at this scrape."""
        return self._families({name: producer.metrics() for name, producer in list(self._producers.items())})

    def _families(self, seen: Mapping[str, Mapping[str, int | float]]) -> Iterator[Metric]:
        for what, text in (
            ("requests", "Metadata requests; urgent ones have at least one urgent topic."),
            ("topics", "Topics that metadata was asked for."),
            ("bytes", "Bytes of metadata requests and their answers."),
        ):
            family = CounterMetricFamily(_PREFIX + what, text, labels=["client_id", "urgency"])
            for client_id, values in seen.items():
                for urgency in ("urgent", "non_urgent"):
                    family.add_metric([client_id, urgency], values[f"metadata_{urgency}_{what}"])
            yield family
        for kind, name, text, key in (
            (CounterMetricFamily, "failed_requests", "Metadata requests without a usable answer.", "failed_requests"),
            (CounterMetricFamily, "evictions", "Topics forgotten because nothing was sent to them.", "evictions"),
            (CounterMetricFamily, "blocked_seconds", "Time that calls of send waited for metadata.", "blocked_s"),
            (GaugeMetricFamily, "cached_topics", "Topics whose metadata is known.", "cached_topics"),
        ):
            one = kind(_PREFIX + name, text, labels=["client_id"])
            for client_id, values in seen.items():
                one.add_metric([client_id], values[f"metadata_{key}"])
            yield one
