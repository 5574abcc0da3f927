"""Metrics of a broker, under the names of Kafka's exporters, or `kipmesh_*` where Kafka has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.core.replica.selection import SelectorFailure
from kipmesh.core.replica.serving import OffsetCase
from kipmesh.messages import MetadataRequest

_ROLES = {True: "leader", False: "follower"}


class BrokerMetrics:
    """Counters that the broker's parts increment, and gauges that are computed at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        topic = "kafka_server_brokertopicmetrics_"
        self._bytes_in = counter(topic + "bytesin", "Bytes of batches appended for producers.")
        self._messages_in = counter(topic + "messagesin", "Records appended for producers.")
        self._bytes_out = counter(topic + "bytesout", "Bytes of batches fetched by consumers.")
        self._replication_bytes_in = counter(topic + "replicationbytesin", "Bytes fetched from leaders.")
        self._replication_bytes_out = counter(topic + "replicationbytesout", "Bytes fetched by followers.")
        self._reassignment_bytes_in = counter(
            topic + "reassignmentbytesin", "Bytes fetched from leaders by replicas that a reassignment adds."
        )
        self._throttled_bytes = counter(
            "kipmesh_broker_throttled_replication_bytes",
            "Bytes fetched from leaders under follower.replication.throttled.rate.",
        )
        self._produce_requests = counter(
            topic + "totalproducerequests", "Partitions in produce requests to which a batch was appended."
        )
        requests = counter("kipmesh_broker_fetch_requests", "Fetch requests, by role of the client.", ("role",))
        self._fetch_consumer, self._fetch_follower = map(requests.labels, ("consumer", "follower"))
        self.duplicates = counter(
            "kipmesh_broker_duplicate_batches",
            "Batches that idempotent producers repeated. They are not appended again.",
        )
        self.produce_failed = counter(
            "kipmesh_broker_produce_failures", "Batches that were refused, by error.", ("error",)
        )
        self.replication_failed = counter(
            "kipmesh_broker_replication_failures",
            "Fetched partitions whose records could not be appended, by error.",
            ("error",),
        )
        self.fetches_failed = counter(
            "kipmesh_broker_fetcher_transport_failures", "Fetches of followers without a response."
        )
        self._isr_shrinks = counter("kafka_server_replicamanager_isrshrinks", "ISR shrinks proposed to the controller.")
        self._isr_expands = counter(
            "kafka_server_replicamanager_isrexpands", "ISR expansions proposed to the controller."
        )
        fetches = counter("kipmesh_broker_fetcher_fetches", "Fetches of followers with a response, by kind.", ("kind",))
        self._full_fetches, self._incremental_fetches = map(fetches.labels, ("full", "incremental"))
        self.session_resets = counter(
            "kipmesh_broker_fetcher_session_resets",
            "Fetch sessions that this follower abandoned, by cause.",
            ("cause",),
        )
        self.selector_failed = counter(
            "kipmesh_broker_replica_selector_errors", "Failures of the replica selector, by kind.", ("error",)
        )
        self.redirected = counter(
            "kipmesh_broker_fetch_redirects",
            "Fetched partitions redirected to a preferred read replica, by replica.",
            ("replica",),
        )
        served = counter(
            "kipmesh_broker_consumer_fetched_bytes",
            "Bytes fetched by consumers, by role of the replica and rack of the consumer.",
            ("role", "rack"),
        )
        cases = counter(
            "kipmesh_broker_fetch_offset_cases",
            "Fetched partitions of consumers at offsets without records, by case and role of the replica.",
            ("case", "role"),
        )
        for failure in SelectorFailure:
            self.selector_failed.labels(failure.value)
        self._served = {
            (is_leader, rack): served.labels(_ROLES[is_leader], rack)
            for is_leader, rack in product(_ROLES, ("same", "cross", "unknown"))
        }
        self._cases = {
            (case, is_leader): cases.labels(case.value, role)
            for case in OffsetCase
            if case.is_counted
            for is_leader, role in _ROLES.items()
        }
        metadata = counter("kipmesh_broker_metadata_requests", "Metadata requests, by requested kind.", ("kind",))
        self._metadata_requests = {kind: metadata.labels(kind) for kind in ("all", "brokers", "topics")}
        self._metadata_topics = counter("kipmesh_broker_metadata_topics", "Topics in Metadata responses.")

    def metadata_responded(self, request: MetadataRequest, topics: int) -> None:
        """Count a Metadata request by its kind, and the topics in its response."""
        kind = "all" if request.topics is None else "topics" if request.topics else "brokers"
        self._metadata_requests[kind].inc()
        self._metadata_topics.inc(topics)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Register a gauge that `read` computes at each scrape."""
        Gauge(name, text, registry=self._registry).set_function(read)

    def produced(self, size_bytes: int, records: int) -> None:
        """Count an appended batch."""
        self._bytes_in.inc(size_bytes)
        self._messages_in.inc(records)
        self._produce_requests.inc()

    def fetched(self, is_follower: bool, size_bytes: int) -> None:
        """Count a fetch response."""
        if is_follower:
            self._fetch_follower.inc()
            self._replication_bytes_out.inc(size_bytes)
        else:
            self._fetch_consumer.inc()
            self._bytes_out.inc(size_bytes)

    def served(self, size_bytes: int, *, is_leader: bool, rack: str) -> None:
        """Count bytes that a consumer read from a replica. `rack` is `same`, `cross` or `unknown`."""
        self._served[is_leader, rack].inc(size_bytes)

    def offset_case(self, case: OffsetCase, *, is_leader: bool) -> None:
        """Count a consumer's fetch at one of the four offset cases (392-03 to 392-06)."""
        self._cases[case, is_leader].inc()

    def replicated(self, size_bytes: int) -> None:
        """Count bytes that a follower appended."""
        if size_bytes:
            self._replication_bytes_in.inc(size_bytes)

    def reassigned(self, size_bytes: int, *, is_throttled: bool) -> None:
        """Count bytes that a replica appended while a reassignment adds it."""
        self._reassignment_bytes_in.inc(size_bytes)
        if is_throttled:
            self._throttled_bytes.inc(size_bytes)

    def session_fetched(self, *, is_full: bool) -> None:
        """Count a response to a follower's fetch."""
        (self._full_fetches if is_full else self._incremental_fetches).inc()

    def isr_change_proposed(self, *, is_expansion: bool) -> None:
        """Count an ISR change that was proposed to the controller."""
        (self._isr_expands if is_expansion else self._isr_shrinks).inc()


class PartitionCollector(Collector):
    """Counts partitions by state, in one pass per scrape."""

    def __init__(self, hosted_replicas: HostedReplicas) -> None:
        self._hosted_replicas = hosted_replicas

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. O(partitions), without an allocation for each."""
        count = led = under_replicated = under_min_isr = 0
        for replica in self._hosted_replicas:
            count += 1
            leader = replica.leader
            if leader is not None:
                led += 1
                under_replicated += len(leader.isr) <= len(leader.followers)
                under_min_isr += leader.is_under_min_isr
        offset = self._hosted_replicas.image.offset
        yield GaugeMetricFamily("kipmesh_broker_metadata_offset", "Last applied metadata offset.", offset)
        prefix = "kafka_server_replicamanager_"
        yield GaugeMetricFamily(prefix + "partitioncount", "Partitions hosted by this broker.", count)
        yield GaugeMetricFamily(prefix + "leadercount", "Partitions led by this broker.", led)
        yield GaugeMetricFamily(
            prefix + "underreplicatedpartitions", "Led partitions whose ISR lacks a replica.", under_replicated
        )
        yield GaugeMetricFamily(
            prefix + "underminisrpartitioncount",
            "Led partitions whose ISR is below min.insync.replicas.",
            under_min_isr,
        )
