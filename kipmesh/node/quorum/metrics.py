"""Metrics of the metadata quorum and its snapshots (630-17), on controllers and brokers.

Names are Apache Kafka's where Kafka has one. Gauges are evaluated at each scrape on a thread of the probe server, so
they only read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kipmesh.core.errors import ErrorCode
from kipmesh.core.raft import State
from kipmesh.messages import FetchSnapshotResponse, SnapshotId
from kipmesh.node.quorum.driver import QuorumDriver

_CONTROLLER = "kafka_controller_kafkacontroller_"
_RAFT = "kafka_server_raftmetrics_"
_BUCKETS_MS = (1, 5, 10, 50, 100, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000)


class SnapshotSeen(NamedTuple):
    """A snapshot that this node made, fetched or loaded. `records`, `size_bytes` and `took_ms` are None if unknown."""

    event: str
    """`made`, `fetched` or `loaded`."""
    snapshot_id: SnapshotId
    records: int | None
    size_bytes: int | None
    took_ms: int | None


class QuorumMetrics:
    """Metrics of one quorum replica, registered in `registry`. `watch` adds the gauges of a driver."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.on_snapshot: Callable[[SnapshotSeen], None] | None = None
        """Called for each snapshot, in the event loop."""
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, buckets=_BUCKETS_MS, registry=registry)
        self.generate_ms = histogram(f"{_CONTROLLER}gensnapshotlatencyms", "Time to make a snapshot, in ms")
        self.load_ms = histogram(f"{_CONTROLLER}loadsnapshotlatencyms", "Time to load a snapshot, in ms")
        self.snapshot_bytes = self._gauge(f"{_CONTROLLER}snapshotsizebytes", "Size of the latest snapshot, in bytes")
        self.failures = counter(
            "kipmesh_metadata_snapshot_failures", "Snapshots that could not be written, for example on a full disk"
        )
        self._requests_served = counter(
            "kipmesh_metadata_fetch_snapshot_requests", "FetchSnapshot requests served, by error", ("error",)
        )
        self._requests_served.labels(ErrorCode.NONE.name)
        self._bytes_served = counter(
            "kipmesh_metadata_fetch_snapshot_bytes", "Bytes of snapshots sent to other replicas"
        )
        self._made_s = time.monotonic()
        self._gauge(
            "kafka_server_snapshotemitter_latestsnapshotgeneratedagems",
            "Time since the last snapshot that this node made, or since its start, in ms",
        ).set_function(lambda: (time.monotonic() - self._made_s) * 1000)
        self.corrupt_on_load = 0
        """Number of snapshots that were valid when they were checked, but corrupt when they were loaded."""
        self.is_loading = self._gauge("kipmesh_metadata_loading", "1 while the metadata is being loaded")
        self.load_progress = self._gauge(
            "kipmesh_metadata_load_progress", "Fraction of the snapshot that is loaded, from 0 to 1"
        )
        self.loaded_records = self._gauge(
            "kipmesh_metadata_loaded_records", "Records read from the snapshot that was loaded last"
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self._registry)

    def snapshot_made(self, snapshot_id: SnapshotId, records: int, size_bytes: int, took_ms: int) -> None:
        """Record that this node has written a snapshot of `size_bytes` in `took_ms`."""
        self._made_s = time.monotonic()
        self.generate_ms.observe(took_ms)
        self.snapshot_bytes.set(size_bytes)
        self._notify(SnapshotSeen("made", snapshot_id, records, size_bytes, took_ms))

    def snapshot_served(self, response: FetchSnapshotResponse) -> None:
        """Count a FetchSnapshot response to another replica: its error codes and its bytes."""
        parts = [part for topic in response.topics for part in topic.partitions]
        for code in [response.error_code] if response.error_code else [part.error_code for part in parts]:
            self._requests_served.labels(ErrorCode.of(code).name).inc()
        self._bytes_served.inc(sum(len(part.unaligned_records) for part in parts))

    def snapshot_loaded(self, snapshot_id: SnapshotId, records: int, size_bytes: int, took_ms: int) -> None:
        """Record that a snapshot was loaded into an image."""
        self.load_ms.observe(took_ms)
        self.snapshot_bytes.set(size_bytes)
        self._notify(SnapshotSeen("loaded", snapshot_id, records, size_bytes, took_ms))

    def snapshot_fetched(self, snapshot_id: SnapshotId, size_bytes: int | None, took_ms: int | None) -> None:
        """Record that a snapshot fetched from the leader has replaced the log. Unknown numbers are None."""
        self._notify(SnapshotSeen("fetched", snapshot_id, None, size_bytes, took_ms))

    def _notify(self, seen: SnapshotSeen) -> None:
        if self.on_snapshot is not None:
            self.on_snapshot(seen)

    def watch(self, quorum: QuorumDriver, applied_end: Callable[[], int]) -> None:
        """Register the gauges of `quorum`; `applied_end` returns the offset after the last applied record."""
        machine = quorum.machine

        def snapshot_lag() -> int:
            latest = quorum.replica.latest_snapshot
            return max(0, quorum.high_watermark - (latest.end_offset if latest else 0))

        def vote() -> int:
            """Return the id of the voted candidate: for a leader itself, although its election state omits that."""
            return machine.config.node_id if machine.state is State.LEADER else machine.election.voted_id

        def observers() -> int:
            leadership = machine.leadership
            return 0 if leadership is None else len(leadership.observers)

        def applied_lag() -> int:
            return max(0, quorum.high_watermark - applied_end())

        for name, text, value in (
            (f"{_CONTROLLER}snapshotlag", "Offsets between the latest snapshot and the high watermark", snapshot_lag),
            ("kipmesh_metadata_applied_lag", "Committed offsets that are not yet applied", applied_lag),
            (f"{_RAFT}current_leader", "Quorum leader, -1 if unknown", lambda: machine.advertised_election.leader_id),
            (f"{_RAFT}current_epoch", "Quorum epoch", lambda: machine.epoch),
            (f"{_RAFT}current_vote", "Candidate this voter voted for in this epoch, -1 if none", vote),
            (f"{_RAFT}high_watermark", "Metadata high watermark", lambda: quorum.high_watermark),
            (f"{_RAFT}log_end_offset", "Metadata log end offset", lambda: machine.log.log_end_offset),
            (f"{_RAFT}log_end_epoch", "Epoch of the metadata log's last batch", lambda: machine.last_epoch),
            ("kipmesh_metadata_log_start_offset", "Metadata log start offset", lambda: machine.log.log_start_offset),
            (f"{_RAFT}number_of_voters", "Number of voters", lambda: len(machine.config.voters)),
            (f"{_RAFT}number_of_observers", "Number of observers known to the leader", observers),
            (f"{_CONTROLLER}lastcommittedrecordoffset", "Last committed offset", lambda: quorum.high_watermark - 1),
        ):
            self._gauge(name, text).set_function(value)
        self._registry.register(_QuorumCollector(self, quorum))


class _QuorumCollector(Collector):
    """A `Collector` of the metrics with labels, and of the number of corrupt snapshots from all sources."""

    def __init__(self, metrics: QuorumMetrics, quorum: QuorumDriver) -> None:
        self._metrics = metrics
        self._quorum = quorum

    def describe(self) -> tuple[GaugeMetricFamily, GaugeMetricFamily, CounterMetricFamily]:
        """Return the families without samples."""
        return (
            GaugeMetricFamily(f"{_RAFT}current_state", "1 for the current state of this replica", labels=["state"]),
            GaugeMetricFamily(
                f"{_RAFT}replica_lag",
                "Offsets between the leader's log end and a replica's, on the leader only",
                labels=["replica_id"],
            ),
            CounterMetricFamily(
                "kipmesh_metadata_corrupt_snapshots",
                "Snapshots that failed validation at start, after a fetch or while loading",
                labels=[],
            ),
        )

    def collect(self) -> Iterable[Metric]:
        """Return the families with current samples."""
        quorum, machine = self._quorum, self._quorum.machine
        states, lags, corrupt = self.describe()
        for state in State:
            states.add_metric([state.value], float(state is machine.state))
        leadership = machine.leadership
        if leadership is not None:
            end = machine.log.log_end_offset
            # Copies, because the event loop may add a replica meanwhile.
            for replica_id, replica in [*dict(leadership.voters).items(), *dict(leadership.observers).items()]:
                lags.add_metric([str(replica_id)], max(0, end - max(replica.end_offset, 0)))
        in_store = quorum.replica.store.corrupt_snapshots
        corrupt.add_metric([], self._metrics.corrupt_on_load + quorum.corrupt_snapshots + in_store)
        return states, lags, corrupt
