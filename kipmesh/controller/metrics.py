"""Metrics of a controller, with Apache Kafka's names where Kafka has them. Gauges are evaluated at each scrape."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from kipmesh.core.metadata.image import MetadataImage

_CONTROLLER = "kafka_controller_kafkacontroller_"


class GaugeSource(Protocol):
    """The properties of a `QuorumController` that the gauges read. `active` is None while the controller is
    inactive."""

    active: Any

    @property
    def image(self) -> MetadataImage:
        """The metadata image of this node."""

    @property
    def pending_operations(self) -> int:
        """Number of operations that are queued or not yet committed."""

    @property
    def waiting_fetches(self) -> int:
        """Number of fetches that wait for new records."""


class ControllerMetrics:
    """Counters of a controller, registered in `registry`. `watch` adds the gauges after the node has loaded its log."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        counter = partial(Counter, registry=registry)
        self.unclean_elections = counter(
            "kafka_controller_controllerstats_uncleanleaderelections",
            "Partitions whose new leader was not in the last ISR",
        )
        self.elections = counter("kafka_controller_controllerstats_leaderelections", "Partitions with a new leader")
        self.timed_out_heartbeats = counter(
            f"{_CONTROLLER}timedoutbrokerheartbeatcount", "Brokers fenced because their heartbeats timed out"
        )
        self.lost_brokers = counter("kipmesh_controller_lost_brokers", "Brokers fenced after a lost connection")
        self.records = counter("kipmesh_controller_records", "Metadata records appended")
        self.operations = counter("kipmesh_controller_operations", "Decisions by operation", ["operation"])
        self.new_active_controllers = counter(
            f"{_CONTROLLER}newactivecontrollerscount", "Changes of the active controller seen by this node"
        )

    def watch(self, controller: GaugeSource) -> None:
        """Register the gauges of `controller`. They are evaluated on the thread that serves `/metrics`."""
        it = controller
        for name, text, value in (
            (
                "activecontrollercount",
                "1 on the active controller, else 0",
                lambda: int(it.active is not None),
            ),
            ("globaltopiccount", "Topics", lambda: len(it.image.topics)),
            ("globalpartitioncount", "Partitions", lambda: it.image.partition_count),
            (
                "preferredreplicaimbalancecount",
                "Partitions not led by their preferred leader",
                lambda: it.image.imbalance_count,
            ),
            ("offlinepartitionscount", "Partitions without a leader", lambda: len(it.image.leaderless)),
            ("fencedbrokercount", "Registered brokers that are fenced", lambda: _brokers(it.image, fenced=True)),
            ("activebrokercount", "Registered brokers that are not fenced", lambda: _brokers(it.image, fenced=False)),
            ("lastappliedrecordoffset", "Offset of the last applied record", lambda: it.image.offset),
        ):
            Gauge(_CONTROLLER + name, text, registry=self._registry).set_function(value)
        for name, text, value in (
            ("fetches", "Fetches waiting for new records", lambda: it.waiting_fetches),
            ("operations", "Operations that are queued or not yet committed", lambda: it.pending_operations),
        ):
            Gauge(f"kipmesh_controller_waiting_{name}", text, registry=self._registry).set_function(value)


def _brokers(image: MetadataImage, *, fenced: bool) -> int:
    return sum(broker.fenced is fenced for broker in list(image.brokers.values()))
