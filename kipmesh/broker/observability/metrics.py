"""Metrics of a broker, under the names of Kafka's exporters, or `kipmesh_*` where Kafka has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
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

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        topic, isr, ours = "kafka_server_brokertopicmetrics_", "kafka_server_replicamanager_isr", "kipmesh_broker_"
        self._bytes_in = counter(topic + "bytesin", "Bytes of batches appended for producers.")
        self._messages_in = counter(topic + "messagesin", "Records appended for producers.")
        self._bytes_out = counter(topic + "bytesout", "Bytes of batches fetched by consumers.")
        self._replication_bytes_in = counter(topic + "replicationbytesin", "Bytes fetched from leaders.")
        self._replication_bytes_out = counter(topic + "replicationbytesout", "Bytes fetched by followers.")
        text = "Bytes fetched from leaders by replicas that a reassignment adds."
        self._reassignment_bytes_in = counter(topic + "reassignmentbytesin", text)
        text = "Bytes fetched from leaders under follower.replication.throttled.rate."
        self._throttled_bytes = counter(ours + "throttled_replication_bytes", text)
        text = "Partitions in produce requests to which a batch was appended."
        self._produce_requests = counter(topic + "totalproducerequests", text)
        requests = counter(ours + "fetch_requests", "Fetch requests, by role of the client.", "role")
        self._fetch_consumer, self._fetch_follower = map(requests.labels, ("consumer", "follower"))
        text = "Batches that idempotent producers repeated. They are not appended again."
        self.duplicates = counter(ours + "duplicate_batches", text)
        self.produce_failed = counter(ours + "produce_failures", "Batches that were refused, by error.", "error")
        text = "Fetched partitions whose records could not be appended, by error."
        self.replication_failed = counter(ours + "replication_failures", text, "error")
        text = "Fetches of followers without a response."
        self.fetches_failed = counter(ours + "fetcher_transport_failures", text)
        self._isr_shrinks = counter(isr + "shrinks", "ISR shrinks proposed to the controller.")
        self._isr_expands = counter(isr + "expands", "ISR expansions proposed to the controller.")
        fetches = counter(ours + "fetcher_fetches", "Fetches of followers with a response, by kind.", "kind")
        self._full_fetches, self._incremental_fetches = map(fetches.labels, ("full", "incremental"))
        text = "Fetch sessions that this follower abandoned, by cause."
        self.session_resets = counter(ours + "fetcher_session_resets", text, "cause")
        text = "Failures of the replica selector, by kind."
        self.selector_failed = counter(ours + "replica_selector_errors", text, "error")
        for failure in SelectorFailure:
            self.selector_failed.labels(failure.value)
        text = "Fetched partitions redirected to a preferred read replica, by replica."
        self.redirected = counter(ours + "fetch_redirects", text, "replica")
        text = "Bytes fetched by consumers, by role of the replica and rack of the consumer."
        served = counter(ours + "consumer_fetched_bytes", text, "role", "rack")
        self._served = {
            (is_leader, rack): served.labels(_ROLES[is_leader], rack)
            for is_leader, rack in product(_ROLES, ("same", "cross", "unknown"))
        }
        text = "Fetched partitions of consumers at offsets without records, by case and role of the replica."
        cases = counter(ours + "fetch_offset_cases", text, "case", "role")
        self._cases = {
            (case, is_leader): cases.labels(case.value, _ROLES[is_leader])
            for case, is_leader in product(OffsetCase, _ROLES)
            if case.is_counted
        }
        metadata = counter(ours + "metadata_requests", "Metadata requests, by requested kind.", "kind")
        self._metadata_requests = {kind: metadata.labels(kind) for kind in ("all", "brokers", "topics")}
        self._metadata_topics = counter(ours + "metadata_topics", "Topics in Metadata responses.")

    def metadata_responded(self, request: MetadataRequest, topics: int) -> None:
        """Count a Metadata request as `all`, `topics` or `brokers`. `topics` is the number in the response."""
        kind = "all" if request.topics is None else "topics" if request.topics else "brokers"
        self._metadata_requests[kind].inc()
        self._metadata_topics.inc(topics)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Register a gauge that `read` computes at each scrape, on another thread."""
        Gauge(name, text, registry=self._registry).set_function(read)

    def export(self, collect: Callable[..., Iterator[Metric]], *arguments: Any) -> None:
        """Export the metrics that `collect(*arguments)` yields at each scrape, on another thread."""
        self._registry.register(MetricsFunction(partial(collect, *arguments)))

    def produced(self, size_bytes: int, records: int) -> None:
        """Count a batch that was appended for a producer, its bytes and its records."""
        self._bytes_in.inc(size_bytes)
        self._messages_in.inc(records)
        self._produce_requests.inc()

    def fetched(self, is_follower: bool, size_bytes: int) -> None:
        """Count a fetch response to a follower or a consumer, and the bytes of its records."""
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
        """Count a consumer's fetch whose offset is in one of the four cases without records (392-03 to 392-06)."""
        self._cases[case, is_leader].inc()

    def replicated(self, size_bytes: int) -> None:
        """Count bytes that replicas on this broker appended as followers."""
        if size_bytes:
            self._replication_bytes_in.inc(size_bytes)

    def reassigned(self, size_bytes: int, *, is_throttled: bool) -> None:
        """Count bytes that a replica being added by a reassignment appended. Throttled bytes also count separately."""
        self._reassignment_bytes_in.inc(size_bytes)
        if is_throttled:
            self._throttled_bytes.inc(size_bytes)

    def session_fetched(self, *, is_full: bool) -> None:
        """Count a response that this broker's fetchers received, by whether the fetch was full or incremental."""
        (self._full_fetches if is_full else self._incremental_fetches).inc()

    def isr_change_proposed(self, *, is_expansion: bool) -> None:
        """Count an ISR change that was proposed to the controller."""
        (self._isr_expands if is_expansion else self._isr_shrinks).inc()


class MetricsFunction(Collector):
    """A `Collector` that exports the metrics that a function yields at each scrape.

    Scrapes run on another thread, so the function must copy the event loop's tables before it iterates over them.
    """

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        """Yield the function's metrics."""
        return self._collect()


def counter_family(name: str, text: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    """Return a counter family with one sample per item of `counts`, whose key is the value of `label`.

    The event loop may change `counts` meanwhile.
    """
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in dict(counts).items():
        family.add_metric([value], count)
    return family


def partition_metrics(hosted_replicas: HostedReplicas) -> Iterator[Metric]:
    """Yield the applied metadata offset and the numbers of hosted partitions by state. O(partitions)."""
    count = led = under_replicated = under_min_isr = 0
    for replica in hosted_replicas:
        count += 1
        leader = replica.leader
        if leader is not None:
            led += 1
            under_replicated += len(leader.isr) <= len(leader.followers)
            under_min_isr += leader.is_under_min_isr
    prefix = "kafka_server_replicamanager_"
    for name, text, value in (
        ("kipmesh_broker_metadata_offset", "Last applied metadata offset.", hosted_replicas.image.offset),
        (prefix + "partitioncount", "Partitions hosted by this broker.", count),
        (prefix + "leadercount", "Partitions led by this broker.", led),
        (prefix + "underreplicatedpartitions", "Led partitions whose ISR lacks a replica.", under_replicated),
        (prefix + "underminisrpartitioncount", "Led partitions whose ISR is below min.insync.replicas.", under_min_isr),
    ):
        yield GaugeMetricFamily(name, text, value)
