"""A broker's metrics, under the names that Kafka dashboards use; `kipmesh_*` where Kafka has none."""

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
    """Counters that handlers move, and gauges that are computed when somebody looks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        topic = "kafka_server_brokertopicmetrics_"
        self._bytes_in = counter(topic + "bytesin", "Bytes of batches that producers wrote.")
        self._messages_in = counter(topic + "messagesin", "Records that producers wrote.")
        self._bytes_out = counter(topic + "bytesout", "Bytes of batches that consumers read.")
        self._replication_bytes_in = counter(topic + "replicationbytesin", "Bytes read from leaders.")
        self._replication_bytes_out = counter(topic + "replicationbytesout", "Bytes that followers read.")
        self._reassignment_bytes_in = counter(
            topic + "reassignmentbytesin", "Bytes read from leaders by replicas that a reassignment adds."
        )
        self._throttled_bytes = counter(
            "kipmesh_broker_throttled_replication_bytes", "Those that follower.replication.throttled.rate was for."
        )
        self._produce_requests = counter(topic + "totalproducerequests", "Partitions written by producers.")
        requests = counter("kipmesh_broker_fetch_requests", "Fetches by who asked.", ("role",))
        self._fetch_consumer, self._fetch_follower = map(requests.labels, ("consumer", "follower"))
        self.duplicates = counter(
            "kipmesh_broker_duplicate_batches", "Batches that idempotent producers sent again, not appended again."
        )
        self.produce_failed = counter("kipmesh_broker_produce_failures", "Batches refused, by error.", ("error",))
        self.replication_failed = counter(
            "kipmesh_broker_replication_failures",
            "Partitions whose fetched records were refused, by error.",
            ("error",),
        )
        self.fetches_failed = counter("kipmesh_broker_fetcher_transport_failures", "Follower fetches without answer.")
        self._isr_shrinks = counter("kafka_server_replicamanager_isrshrinks", "ISR shrinks asked for.")
        self._isr_expands = counter("kafka_server_replicamanager_isrexpands", "ISR expansions asked for.")
        fetches = counter("kipmesh_broker_fetcher_fetches", "Follower fetches answered, by kind.", ("kind",))
        self._full_fetches, self._incremental_fetches = map(fetches.labels, ("full", "incremental"))
        self.session_resets = counter(
            "kipmesh_broker_fetcher_session_resets", "Fetch sessions that this follower gave up, by cause.", ("cause",)
        )
        self.selector_failed = counter(
            "kipmesh_broker_replica_selector_errors", "What a replica selector did wrong, by kind.", ("error",)
        )
        self.redirected = counter(
            "kipmesh_broker_fetch_redirects", "Partitions of fetches sent to another replica.", ("replica",)
        )
        served = counter(
            "kipmesh_broker_consumer_fetched_bytes",
            "Bytes that consumers read, by this replica's role and by the consumer's rack.",
            ("role", "rack"),
        )
        cases = counter(
            "kipmesh_broker_fetch_offset_cases",
            "Consumers' reads of partitions at offsets without records, by case and by this replica's role.",
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
        asked = counter("kipmesh_broker_metadata_requests", "Metadata requests, by what they ask for.", ("kind",))
        self._metadata_requests = {kind: asked.labels(kind) for kind in ("all", "brokers", "topics")}
        self._metadata_topics = counter("kipmesh_broker_metadata_topics", "Topics that answers to Metadata told of.")

    def metadata_responded(self, request: MetadataRequest, topics: int) -> None:
        """A Metadata request for all topics, for the brokers alone, or for some topics, and how many were told of."""
        kind = "all" if request.topics is None else "topics" if request.topics else "brokers"
        self._metadata_requests[kind].inc()
        self._metadata_topics.inc(topics)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A number that `read` computes at every scrape."""
        Gauge(name, text, registry=self._registry).set_function(read)

    def produced(self, size_bytes: int, records: int) -> None:
        """A batch was appended."""
        self._bytes_in.inc(size_bytes)
        self._messages_in.inc(records)
        self._produce_requests.inc()

    def fetched(self, is_follower: bool, size_bytes: int) -> None:
        """A fetch was answered."""
        if is_follower:
            self._fetch_follower.inc()
            self._replication_bytes_out.inc(size_bytes)
        else:
            self._fetch_consumer.inc()
            self._bytes_out.inc(size_bytes)

    def served(self, size_bytes: int, *, is_leader: bool, rack: str) -> None:
        """A consumer got records of a partition here; `rack` is `same`, `cross` or `unknown`."""
        self._served[is_leader, rack].inc(size_bytes)

    def offset_case(self, case: OffsetCase, *, is_leader: bool) -> None:
        """A consumer asked for an offset that is one of the four cases (392-03 to 392-06)."""
        self._cases[case, is_leader].inc()

    def replicated(self, size_bytes: int) -> None:
        """A follower appended what it fetched."""
        if size_bytes:
            self._replication_bytes_in.inc(size_bytes)

    def reassigned(self, size_bytes: int, *, is_throttled: bool) -> None:
        """A replica that a reassignment adds appended what it fetched."""
        self._reassignment_bytes_in.inc(size_bytes)
        if is_throttled:
            self._throttled_bytes.inc(size_bytes)

    def session_fetched(self, *, is_full: bool) -> None:
        """A follower's fetch got an answer."""
        (self._full_fetches if is_full else self._incremental_fetches).inc()

    def isr_asked(self, grows: bool) -> None:
        """The controller was asked for another ISR."""
        (self._isr_expands if grows else self._isr_shrinks).inc()


class PartitionCollector(Collector):
    """How many partitions there are, of which kind: counted at each scrape, all in one walk."""

    def __init__(self, hosted_replicas: HostedReplicas) -> None:
        self._hosted_replicas = hosted_replicas

    def collect(self) -> Iterator[Metric]:
        """O(partitions), without anything made for each."""
        count = led = under_replicated = under_min_isr = 0
        for replica in self._hosted_replicas:
            count += 1
            leader = replica.leader
            if leader is not None:
                led += 1
                under_replicated += len(leader.isr) <= len(leader.followers)
                under_min_isr += leader.is_under_min_isr
        offset = self._hosted_replicas.image.offset
        yield GaugeMetricFamily("kipmesh_broker_metadata_offset", "Last metadata offset applied.", offset)
        prefix = "kafka_server_replicamanager_"
        yield GaugeMetricFamily(prefix + "partitioncount", "Partitions here.", count)
        yield GaugeMetricFamily(prefix + "leadercount", "Partitions led here.", led)
        yield GaugeMetricFamily(
            prefix + "underreplicatedpartitions", "Led partitions with an ISR that lacks a replica.", under_replicated
        )
        yield GaugeMetricFamily(
            prefix + "underminisrpartitioncount", "Led partitions below min.insync.replicas.", under_min_isr
        )
