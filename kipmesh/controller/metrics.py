"""The controller's metrics, under the names that Kafka's dashboards use; gauges are read when they are scraped."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from kipmesh.core.metadata.image import MetadataImage

_CONTROLLER = "kafka_controller_kafkacontroller_"


class Watched(Protocol):
    """What the gauges read: a `QuorumController`."""

    active: Any

    @property
    def image(self) -> MetadataImage:
        """The metadata."""

    @property
    def waiting_operations(self) -> int:
        """Decisions that wait to be committed."""

    @property
    def waiting_fetches(self) -> int:
        """Fetches that wait for new records."""


class ControllerMetrics:
    """Registers everything in `registry`; `watch` binds the gauges to a node that has started."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        counter = partial(Counter, registry=registry)
        self.unclean_elections = counter(
            "kafka_controller_controllerstats_uncleanleaderelections",
            "Partitions whose leader was elected from outside the last in-sync replicas",
        )
        self.elections = counter("kafka_controller_controllerstats_leaderelections", "Partitions that got a leader")
        self.timed_out_heartbeats = counter(
            f"{_CONTROLLER}timedoutbrokerheartbeatcount", "Brokers fenced for their silence"
        )
        self.lost_brokers = counter("kipmesh_controller_lost_brokers", "Brokers fenced because their connection broke")
        self.records = counter("kipmesh_controller_records", "Metadata records appended")
        self.operations = counter("kipmesh_controller_operations", "Requests and timers decided", ["operation"])
        self.new_active_controllers = counter(
            f"{_CONTROLLER}newactivecontrollerscount", "Times that another controller became active"
        )

    def watch(self, controller: Watched) -> None:
        """Gauges over a controller; they are read on the thread of `/metrics`."""
        it = controller
        for name, text, value in (
            ("activecontrollercount", "1 on the active controller", lambda: int(it.active is not None)),
            ("globaltopiccount", "Topics", lambda: len(it.image.topics)),
            ("globalpartitioncount", "Partitions", lambda: it.image.partition_count),
            (
                "preferredreplicaimbalancecount",
                "Partitions not led by the first replica",
                lambda: it.image.imbalance_count,
            ),
            ("offlinepartitionscount", "Partitions without a leader", lambda: len(it.image.leaderless)),
            ("fencedbrokercount", "Registered brokers that are fenced", lambda: _brokers(it.image, fenced=True)),
            ("activebrokercount", "Registered brokers that are not fenced", lambda: _brokers(it.image, fenced=False)),
            ("lastappliedrecordoffset", "Offset of the last applied record", lambda: it.image.offset),
        ):
            Gauge(_CONTROLLER + name, text, registry=self._registry).set_function(value)
        for name, text, value in (
            ("fetches", "Fetches that wait for new records", lambda: it.waiting_fetches),
            ("operations", "Decisions whose answers wait to be committed", lambda: it.waiting_operations),
        ):
            Gauge(f"kipmesh_controller_waiting_{name}", text, registry=self._registry).set_function(value)


def _brokers(image: MetadataImage, *, fenced: bool) -> int:
    return sum(broker.fenced is fenced for broker in list(image.brokers.values()))
