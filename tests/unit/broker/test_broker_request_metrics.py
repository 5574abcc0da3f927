"""Metrics of requests: processing times, kinds of Metadata requests, and FetchSnapshot responses."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kipmesh import messages as m
from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.requests.metadata import MetadataHandler
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.node.quorum.metrics import QuorumMetrics
from kipmesh.transport.grpc.client import ConnectionPool
from kipmesh.transport.grpc.server import RequestContext, Server
from kipmesh.transport.metrics import RequestMetrics
from kipmesh.transport.pipeline import pipeline_of
from tests.unit.broker.broker_cluster import minimal_config

TIMES = "kafka_network_requestmetrics_totaltimems_count"


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


class Handlers:
    async def fetch(self, request: m.FetchRequest, context: RequestContext) -> m.FetchResponse:
        return m.FetchResponse()

    async def metadata(self, request: m.MetadataRequest, context: RequestContext) -> m.MetadataResponse:
        return m.MetadataResponse()


async def test_request_metrics_separate_consumer_and_follower_fetches() -> None:
    registry, metrics = CollectorRegistry(), RequestMetrics()
    registry.register(metrics)
    server = Server(pipeline_of({"Broker": Handlers()}, metrics=metrics))
    pool = ConnectionPool("tester")
    connection = pool.get(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
    for _ in range(2):
        await connection.call("Broker", "Fetch", m.FetchRequest(), 5)
        await connection.fetch(m.FetchRequest(replica_id=2), 5)
    await connection.fetch(m.FetchRequest(), 5)
    await connection.call("Broker", "Metadata", m.MetadataRequest(), 5)
    await pool.close()
    await server.stop(0)
    found = {kind: value(registry, TIMES, request=kind) for kind in ("FetchConsumer", "FetchFollower", "Metadata")}
    assert found == {"FetchConsumer": 3, "FetchFollower": 2, "Metadata": 1}
    assert value(registry, TIMES, request="Produce") is None
    assert 0 < (value(registry, "kafka_network_requestmetrics_totaltimems_sum", request="Metadata") or 0) < 60_000


async def test_broker_metrics_count_metadata_requests_by_kind() -> None:
    registry = CollectorRegistry()
    metrics = BrokerMetrics(registry)
    image = MetadataImage()
    handler = MetadataHandler(
        minimal_config(1),
        lambda: image,
        controller_id=lambda: 1,
        on_response=metrics.metadata_responded,
    )
    context = RequestContext("client", "peer")
    for request in (
        m.MetadataRequest(topics=None),
        m.MetadataRequest(),
        m.MetadataRequest(topics=[m.MetadataRequestTopic(name="a"), m.MetadataRequestTopic(name="b")]),
        m.MetadataRequest(topics=[m.MetadataRequestTopic(name="a")]),
    ):
        await handler.metadata(request, context)
    kinds = {
        kind: value(registry, "kipmesh_broker_metadata_requests_total", kind=kind)
        for kind in ("all", "brokers", "topics")
    }
    assert kinds == {"all": 1, "brokers": 1, "topics": 2}
    assert value(registry, "kipmesh_broker_metadata_topics_total") == 3


def test_quorum_metrics_count_snapshot_requests_and_export_snapshot_age() -> None:
    registry = CollectorRegistry()
    metrics = QuorumMetrics(registry)
    name, snapshot = "kipmesh_metadata_fetch_snapshot_requests_total", m.SnapshotId(10, 1)
    assert value(registry, name, error="NONE") == 0

    def snapshot_response(code: ErrorCode, data: bytes = b"") -> m.FetchSnapshotResponse:
        part = m.PartitionSnapshotResponse(error_code=code, snapshot_id=snapshot, unaligned_records=data)
        return m.FetchSnapshotResponse(topics=[m.TopicSnapshotResponse("__cluster_metadata", [part])])

    metrics.snapshot_served(snapshot_response(ErrorCode.NONE, b"x" * 100))
    metrics.snapshot_served(snapshot_response(ErrorCode.NONE, b"x" * 11))
    metrics.snapshot_served(snapshot_response(ErrorCode.SNAPSHOT_NOT_FOUND))
    metrics.snapshot_served(m.FetchSnapshotResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID))
    assert value(registry, name, error="NONE") == 2
    assert value(registry, name, error="SNAPSHOT_NOT_FOUND") == 1
    assert value(registry, name, error="INCONSISTENT_CLUSTER_ID") == 1
    assert value(registry, "kipmesh_metadata_fetch_snapshot_bytes_total") == 111
    age = "kafka_server_snapshotemitter_latestsnapshotgeneratedagems"
    before = value(registry, age)
    assert before is not None
    assert (value(registry, age) or 0) > before
    metrics.snapshot_made(snapshot, 5, 500, 1)
    assert 0 <= (value(registry, age) or 0) < (value(registry, age) or 0) + before
