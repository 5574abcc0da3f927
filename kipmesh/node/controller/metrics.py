"""The controller's metrics, under the names that Kafka's dashboards use; gauges are read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from kipmesh.core.metadata.image import MetadataImage
from kipmesh.core.metadata.preferred import imbalance_count

_CONTROLLER = "kafka_controller_kafkacontroller_"


class ControllerMetrics:
    """Registers everything in `registry`; `watch` binds the gauges to a node that has started."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.unclean_elections = Counter(
            "kafka_controller_controllerstats_uncleanleaderelections",
            "Partitions whose leader was elected from outside the last in-sync replicas",
            registry=registry,
        )
        self.elections = Counter(
            "kafka_controller_controllerstats_leaderelections", "Partitions that got a leader", registry=registry
        )
        self.timed_out_heartbeats = Counter(
            f"{_CONTROLLER}timedoutbrokerheartbeatcount", "Brokers fenced for their silence", registry=registry
        )
        self.lost_brokers = Counter(
            "kipmesh_controller_lost_brokers", "Brokers fenced because their connection broke", registry=registry
        )
        self.records = Counter("kipmesh_controller_records", "Metadata records appended", registry=registry)
        self.operations = Counter(
            "kipmesh_controller_operations", "Requests and timers decided", ["operation"], registry=registry
        )
        self.new_active_controllers = Counter(
            f"{_CONTROLLER}newactivecontrollerscount", "Times that another controller became active", registry=registry
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self._registry)

    def watch(
        self,
        *,
        image: Callable[[], MetadataImage],
        is_active: Callable[[], bool],
        waiting_operations: Callable[[], int],
        waiting_fetches: Callable[[], int],
    ) -> None:
        """Gauges over the node; they are asked on the thread of `/metrics`."""
        for name, text, value in (
            ("activecontrollercount", "1 on the active controller", lambda: int(is_active())),
            ("globaltopiccount", "Topics", lambda: len(image().topics)),
            ("globalpartitioncount", "Partitions", lambda: image().partition_count),
            (
                "preferredreplicaimbalancecount",
                "Partitions not led by the first replica",
                lambda: imbalance_count(image()),
            ),
            ("offlinepartitionscount", "Partitions without a leader", lambda: len(image().leaderless)),
            ("fencedbrokercount", "Registered brokers that are fenced", lambda: _brokers(image(), fenced=True)),
            ("activebrokercount", "Registered brokers that are not fenced", lambda: _brokers(image(), fenced=False)),
            ("lastappliedrecordoffset", "Offset of the last applied record", lambda: image().offset),
        ):
            self._gauge(_CONTROLLER + name, text).set_function(value)
        for name, text, count in (
            ("waiting_fetches", "Fetches that wait for new records", waiting_fetches),
            ("waiting_operations", "Decisions whose answers wait to be committed", waiting_operations),
        ):
            self._gauge(f"kipmesh_controller_{name}", text).set_function(count)


def _brokers(image: MetadataImage, *, fenced: bool) -> int:
    return sum(broker.fenced is fenced for broker in list(image.brokers.values()))
