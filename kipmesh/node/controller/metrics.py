"""The controller's metrics, under the names that Kafka's dashboards use; gauges are read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from kipmesh.core.metadata.image import MetadataImage

_CONTROLLER = "kafka_controller_kafkacontroller_"
_RAFT = "kafka_server_raftmetrics_"


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
        self.records = Counter("kipmesh_controller_records", "Metadata records appended", registry=registry)
        self.operations = Counter(
            "kipmesh_controller_operations", "Requests and timers decided", ["operation"], registry=registry
        )
        self.active = self._gauge(f"{_CONTROLLER}activecontrollercount", "1 on the active controller")

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self._registry)

    def watch_image(self, image: MetadataImage) -> None:
        """Gauges over the metadata."""
        for name, text, value in (
            ("globaltopiccount", "Topics", lambda: len(image.topics)),
            ("globalpartitioncount", "Partitions", lambda: image.partition_count),
            ("offlinepartitionscount", "Partitions without a leader", lambda: len(image.leaderless)),
            ("fencedbrokercount", "Registered brokers that are fenced", lambda: _brokers(image, fenced=True)),
            ("activebrokercount", "Registered brokers that are not fenced", lambda: _brokers(image, fenced=False)),
            ("lastappliedrecordoffset", "Offset of the last applied record", lambda: image.offset),
        ):
            self._gauge(_CONTROLLER + name, text).set_function(value)

    def watch_quorum(
        self,
        *,
        node_id: int,
        epoch: int,
        high_watermark: Callable[[], int],
        log_end_offset: Callable[[], int],
        observers: Callable[[], int],
        waiting_fetches: Callable[[], int],
        queued: Callable[[], int],
    ) -> None:
        """Gauges over the quorum of one voter."""
        self._gauge(f"{_RAFT}current_leader", "The quorum's leader").set(node_id)
        self._gauge(f"{_RAFT}current_vote", "Whom this voter voted for").set(node_id)
        self._gauge(f"{_RAFT}current_epoch", "The quorum's epoch").set(epoch)
        self._gauge(f"{_RAFT}number_of_voters", "Voters").set(1)
        for name, text, value in (
            (f"{_RAFT}high_watermark", "End of what is committed", high_watermark),
            (f"{_RAFT}log_end_offset", "End of the metadata log", log_end_offset),
            (f"{_RAFT}number_of_observers", "Replicas that fetch and are no voters", observers),
            (f"{_CONTROLLER}lastcommittedrecordoffset", "Last committed offset", lambda: high_watermark() - 1),
            ("kipmesh_controller_waiting_fetches", "Fetches that wait for new records", waiting_fetches),
            ("kipmesh_controller_queued_operations", "Operations that wait to be decided", queued),
        ):
            self._gauge(name, text).set_function(value)


def _brokers(image: MetadataImage, *, fenced: bool) -> int:
    return sum(broker.fenced is fenced for broker in list(image.brokers.values()))
