"""The request trace of a broker: consistency with its metrics, limits, and exclusion of requests for the trace."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kipmesh import messages as m
from kipmesh.broker import BrokerNode
from kipmesh.broker.observability.trace import (
    BATCH_BYTES_MAX,
    TRACE_TOPIC,
    RequestTrace,
    TraceQueue,
    TraceWriter,
    batches_of,
)
from kipmesh.core import record_batch
from kipmesh.core.errors import ErrorCode
from kipmesh.node.quorum.metrics import SnapshotSeen
from kipmesh.transport.grpc.client import ConnectionPool
from kipmesh.transport.grpc.server import RequestContext
from tests.unit.broker.broker_cluster import BrokerCluster, eventually, leader_of

TRACED = {"mesh.trace.sample": 1, "mesh.trace.flush.interval.ms": 50}


def batch(*values: bytes) -> bytes:
    stamp = time.time_ns() // 1_000_000
    return record_batch.build([(None, value) for value in values], base_offset=0, leader_epoch=-1, timestamp_ms=stamp)


def metric(node: BrokerNode, name: str, **labels: str) -> float:
    return node.registry.get_sample_value(name, labels) or 0.0


def trace_of(node: BrokerNode) -> RequestTrace:
    assert node.parts.trace is not None
    return node.parts.trace


async def read_trace(cluster: BrokerCluster) -> list[dict[str, Any]]:
    """Fetch and return all entries of the trace topic."""
    topic = next(iter(cluster.brokers.values())).hosted_replicas.image.topic_by_name(TRACE_TOPIC)
    assert topic is not None
    entries = []
    for index, state in topic.partitions.items():
        replica = cluster.brokers[state.leader].hosted_replicas.get(topic.topic_id, index)
        assert replica is not None
        end, offset = replica.log.log_end_offset, 0
        await eventually(lambda r=replica, e=end: r.high_watermark >= e, "the entries are committed")
        while True:
            data = await cluster.fetch(TRACE_TOPIC, offset, partition=index, via=state.leader)
            if not data.records:
                break
            for position, header in record_batch.iterate(data.records):
                for record in record_batch.read_records(data.records, position, header):
                    assert record.value is not None
                    entries.append(json.loads(record.value))
                offset = header.next_offset
    return entries


async def wait_for_writes(cluster: BrokerCluster) -> None:
    """Wait until the topic has the entries of all requests up to now."""
    for node in cluster.brokers.values():
        queue = trace_of(node).queue
        sampled = queue.sampled.total()
        await eventually(lambda q=queue, n=sampled: q.written + q.dropped.total() >= n, "the trace is written")


@pytest.fixture
async def traced(tmp_path: Path) -> AsyncIterator[BrokerCluster]:
    cluster = BrokerCluster(tmp_path, **TRACED)
    await cluster.start()
    yield cluster
    await cluster.stop()


async def consume_by_session(
    cluster: BrokerCluster, topic_id: bytes, partitions: int, pool: ConnectionPool, rack: str
) -> None:
    """Send a full fetch of all partitions and three incremental fetches to broker 1."""
    requested = [m.FetchPartition(p, -1, 0, partition_max_bytes=1 << 20) for p in range(partitions)]
    topics, session = [m.FetchTopic("", topic_id, requested)], 0
    for epoch in range(4):
        request = m.FetchRequest(
            session_id=session, session_epoch=epoch, topics=topics if epoch == 0 else [], rack_id=rack
        )
        response = await pool.get(f"127.0.0.1:{cluster.ports[1]}").call("Broker", "Fetch", request, 10)
        assert not response.error_code
        session = response.session_id


async def test_trace_totals_match_broker_metrics(traced: BrokerCluster) -> None:
    topic_id = await traced.create("t", 4, 3)
    leader = await leader_of(traced, topic_id)
    assert leader == 1
    for partition in range(4):
        assert (await traced.produce("t", batch(b"x" * 500, b"y"), partition=partition)).error_code == 0
    far, near = ConnectionPool("far"), ConnectionPool("near")
    await consume_by_session(traced, topic_id, 4, far, "rack-b")
    await consume_by_session(traced, topic_id, 4, near, "rack-a")
    await traced.call(2, "Metadata", m.MetadataRequest([m.MetadataRequestTopic(name="t")]))
    await far.close()
    await near.close()
    await wait_for_writes(traced)
    entries = await read_trace(traced)
    await wait_for_writes(traced)
    for node_id, node in traced.brokers.items():
        of_node = [entry for entry in entries if entry["broker"] == node_id]
        fetches = [entry for entry in of_node if entry["kind"] == "fetch" and entry["replica"] < 0]
        for role in ("leader", "follower"):
            for relation in ("same", "cross"):
                traced_bytes = sum(e[f"{role}_bytes"] for e in fetches if e["relation"] == relation)
                counted = metric(node, "kipmesh_broker_consumer_fetched_bytes_total", role=role, rack=relation)
                assert traced_bytes == counted, (node_id, role, relation)
        # Follower fetches continue during the reads, so only counters of the trace itself are compared.
        assert not trace_of(node).queue.dropped.total()
    of_far = [entry for entry in entries if entry["kind"] == "fetch" and entry["client"] == "far"]
    assert [entry["fetch"] for entry in of_far] == ["full", "incremental", "incremental", "incremental"]
    assert [entry["named"] for entry in of_far] == [4, 0, 0, 0]
    assert {entry["session_partitions"] for entry in of_far} == {4}
    assert of_far[0]["leader_bytes"] == of_far[0]["record_bytes"] > 2000
    assert {entry["relation"] for entry in of_far} == {"cross"}
    assert of_far[0]["request_bytes"] > of_far[1]["request_bytes"]
    assert of_far[0]["response_bytes"] > of_far[0]["record_bytes"]
    produced = [e for e in entries if e["kind"] == "produce" and e["client"] == "tests"]
    assert sum(entry["records"] for entry in produced) == 8
    requested = [e for e in entries if e["kind"] == "metadata" and e["client"] == "tests" and e["broker"] == 2]
    assert [(e["asked"], e["answered"], e["partitions"], e["all_topics"]) for e in requested] == [(1, 1, 4, False)]


async def test_trace_saved_bytes_match_session_metrics(traced: BrokerCluster) -> None:
    topic_id = await traced.create("t", 20, 3)
    pool = ConnectionPool("reader")
    await consume_by_session(traced, topic_id, 20, pool, "")
    await pool.close()
    node = traced.brokers[1]

    def equal() -> bool:
        """Compare written, pending and excluded entries with the metric in one step, as followers keep fetching."""
        trace = trace_of(node)
        pending = list(trace.queue._entries)
        saved = sum(e["saved_request_bytes"] + e["saved_response_bytes"] for e in pending if e["kind"] == "fetch")
        counts = Counter(entry["kind"] for entry in pending)
        assert trace.queue.written + counts.total() <= trace.queue.sampled.total()
        return trace.own_saved_bytes + saved + found["saved"] == metric(
            node, "kipmesh_broker_fetch_session_saved_bytes_total"
        )

    found: dict[str, float] = {"saved": 0}
    for _ in range(100):
        await wait_for_writes(traced)
        entries = [e for e in await read_trace(traced) if e["broker"] == 1 and e["kind"] == "fetch"]
        found["saved"] = sum(e["saved_request_bytes"] + e["saved_response_bytes"] for e in entries)
        if (
            found["saved"]
            and len(entries) + len(trace_of(node).queue) == trace_of(node).queue.sampled["fetch"]
            and equal()
        ):
            break
    else:
        pytest.fail("the trace and the metric never matched")
    # Three incremental fetches without changes saved the request and response lists of 20 partitions.
    reader = [e for e in entries if e["client"] == "reader" and e["fetch"] == "incremental"]
    assert [e["saved_request_bytes"] for e in reader] == [20 * 32] * 3
    assert [e["saved_response_bytes"] for e in reader[1:]] == [20 * 42] * 2


async def test_trace_excludes_its_own_requests(traced: BrokerCluster) -> None:
    await traced.create("t")
    await wait_for_writes(traced)
    node = traced.brokers[1]
    await eventually(lambda: trace_of(node).own["fetch"] and trace_of(node).own["produce"], "own requests counted")
    await read_trace(traced)
    await traced.call(1, "Metadata", m.MetadataRequest([m.MetadataRequestTopic(name=TRACE_TOPIC)]))
    assert trace_of(node).own["metadata"] == 1
    await traced.call(1, "Metadata", m.MetadataRequest([m.MetadataRequestTopic(name="t")]))
    await wait_for_writes(traced)
    entries = await read_trace(traced)
    assert not [e for e in entries if e["kind"] == "produce"]
    assert not [e for e in entries if e["kind"] == "fetch" and e["client"] == "tests"]
    assert [e["partitions"] for e in entries if e["kind"] == "metadata" and e["client"] == "tests"] == [1]
    status = [entry for entry in entries if entry["kind"] == "status" and entry["broker"] == 1]
    assert status[-1]["own"]["produce"] > 0
    assert status[-1]["dropped"] == {"rate": 0, "queue": 0, "write": 0}


async def test_trace_is_disabled_by_default(tmp_path: Path) -> None:
    cluster = BrokerCluster(tmp_path)
    await cluster.start()
    await cluster.create("t")
    assert (await cluster.produce("t", batch(b"x"))).error_code == 0
    await cluster.call(1, "Metadata", m.MetadataRequest(None))
    assert all(node.parts.trace is None for node in cluster.brokers.values())
    assert cluster.brokers[1].hosted_replicas.image.topic_by_name(TRACE_TOPIC) is None
    assert cluster.brokers[1].registry.get_sample_value("kipmesh_broker_trace_written_total") is None
    await cluster.stop()


async def test_refused_trace_write_is_counted_and_harmless(tmp_path: Path) -> None:
    cluster = BrokerCluster(tmp_path, **TRACED)
    await cluster.start_controllers()
    await cluster.start_broker(1, **{"mesh.trace.sample": 0})
    await cluster.ready(1)
    await cluster.create(TRACE_TOPIC, 1, 1, max_message_bytes="100")
    await cluster.create("t", 1, 1)
    await cluster.start_broker(2)
    await cluster.ready(2)
    await cluster.call(2, "Metadata", m.MetadataRequest(None))
    node = cluster.brokers[2]
    await eventually(lambda: metric(node, "kipmesh_broker_trace_dropped_total", reason="write") >= 1, "a refused write")
    assert metric(node, "kipmesh_broker_trace_written_total") == 0
    assert (await cluster.call(2, "Metadata", m.MetadataRequest(None))).error_code == 0
    assert not node.failed.done()
    await cluster.stop()


async def test_trace_records_created_fetched_and_loaded_snapshots(tmp_path: Path) -> None:
    small = {
        "metadata.snapshot.min.changed_records.ratio": 0.01,
        "metadata.log.max.record.bytes.between.snapshots": 2000,
        "metadata.max.retention.bytes": 1,
        "metadata.log.segment.bytes": 1000,
    }
    cluster = BrokerCluster(tmp_path, **TRACED, **small)
    cluster.controller_keys = small
    await cluster.start()
    for number in range(20):
        topic = m.CreatableTopic(f"t-{number}", 2, 2)
        assert not (await cluster.call(1, "CreateTopics", m.CreateTopicsRequest([topic], 10_000), "Admin")).topics[0][2]
    await eventually(lambda: cluster.brokers[1].quorum.driver.machine.leader_log_start > 0, "the log starts above 0")
    joined = await cluster.start_broker(4)
    await cluster.ready(4)
    metric_name = "kafka_controller_kafkacontroller_gensnapshotlatencyms_count"
    before = metric(cluster.brokers[1], metric_name)
    await wait_for_writes(cluster)
    snapshots = [entry for entry in await read_trace(cluster) if entry["kind"] == "snapshot"]
    by_event = {event: [e for e in snapshots if e["event"] == event] for event in ("made", "fetched", "loaded")}
    assert all(by_event.values()), by_event
    for entry in snapshots:
        assert entry["bytes"] > 0
        assert entry["took_ms"] >= 0
        assert entry["replay_records"] == entry["end_offset"] > 0
    made = [entry for entry in by_event["made"] if entry["broker"] == 1]
    assert 0 < before <= len(made) <= metric(cluster.brokers[1], metric_name)  # the broker may have created more since
    assert all(entry["records"] > 0 and entry["replay_bytes"] > 0 for entry in made)
    fetched = by_event["fetched"][0]
    assert fetched["broker"] == 4
    store = joined.quorum.replica.store
    size = store.size(m.SnapshotId(fetched["end_offset"], fetched["snapshot_epoch"]))
    assert size in (None, fetched["bytes"])  # None: a newer snapshot has replaced it
    await cluster.stop()


# -- limits


def entry(kind: str = "fetch") -> dict[str, Any]:
    return {"kind": kind}


def test_full_trace_queue_drops_and_counts_entries() -> None:
    queue = TraceQueue(queue_max=3, rate_max=100, now_ms=lambda: 0)
    for _ in range(5):
        queue.put(entry())
    assert (len(queue), queue.dropped["queue"], queue.sampled["fetch"]) == (3, 2, 5)
    assert len(queue.take(2)) == 2
    queue.put(entry("metadata"))
    assert [taken["kind"] for taken in queue.take(10)] == ["fetch", "metadata"]


def test_entries_put_back_come_first_within_queue_limit() -> None:
    queue = TraceQueue(queue_max=4, rate_max=100, now_ms=lambda: 0)
    for number in range(4):
        queue.put(entry() | {"n": number})
    taken = queue.take(3)
    queue.put(entry() | {"n": 4})
    queue.put_back(taken)
    assert [left["n"] for left in queue.take(10)] == [0, 1, 3, 4]
    assert queue.dropped["queue"] == 1


@pytest.mark.parametrize("error", [RuntimeError("no"), asyncio.CancelledError()], ids=["error", "cancellation"])
async def test_entries_of_failed_flush_are_counted_as_dropped(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = BrokerCluster(tmp_path, **TRACED | {"mesh.trace.flush.interval.ms": 60_000})
    await cluster.start()
    await cluster.create(TRACE_TOPIC)
    node, sent = cluster.brokers[3], 0
    await eventually(
        lambda: node.hosted_replicas.image.topic_by_name(TRACE_TOPIC) is not None, "the topic is in the image"
    )
    writer = TraceWriter(node.config, node.hosted_replicas, node.parts.forwarder, node.parts.pool)

    async def send(*_: object) -> ErrorCode:
        nonlocal sent
        sent += 1
        if sent == 2:
            raise error
        return ErrorCode.NONE

    monkeypatch.setattr(writer, "_send", send)
    queue = TraceQueue(100, 1000)
    for number in range(9):  # a batch holds two of these
        queue.put({"kind": "fetch", "number": number, "client": "c" * (BATCH_BYTES_MAX // 3)})
    with pytest.raises(type(error)):
        await writer.flush(queue, lambda: {"kind": "status"})
    assert len(queue) == 0
    assert queue.written > 0
    assert queue.written + queue.dropped["write"] == 9
    await cluster.stop()


def test_trace_queue_drops_entries_above_rate_until_next_second() -> None:
    now = [10_500]
    queue = TraceQueue(queue_max=100, rate_max=4, now_ms=lambda: now[0])
    for _ in range(6):
        queue.put(entry())
    assert (len(queue), queue.dropped["rate"]) == (4, 2)
    now[0] = 11_000
    queue.put(entry())
    assert (len(queue), queue.dropped["rate"]) == (5, 2)


def test_trace_batches_are_bounded_and_hold_all_entries() -> None:
    entries = [{"kind": "status"}, *({"kind": "fetch", "client": "c" * 255, "n": n} for n in range(3000))]
    batches = list(batches_of(entries, 5))
    assert [record for _, records in batches for record in records] == entries[1:]
    assert len(batches) > 1
    found = []
    for data, _ in batches:
        assert len(data) < BATCH_BYTES_MAX * 1.1
        record_batch.check_crc(data, 0, record_batch.parse_header(data))
        found += [
            json.loads(r.value or b"") for r in record_batch.read_records(data, 0, record_batch.parse_header(data))
        ]
    assert found == entries


async def test_failed_snapshot_trace_does_not_raise(tmp_path: Path) -> None:
    cluster = BrokerCluster(tmp_path)
    await cluster.start()
    node = cluster.brokers[1]

    def closed() -> None:
        raise OSError("the log is closed")

    seen = SnapshotSeen("loaded", m.SnapshotId(5, 1), 1, 1, 1)
    broken = RequestTrace(node.config, node.hosted_replicas, node.fetch_sessions, closed)
    broken.snapshot(seen)
    assert len(broken.queue) == 0
    working = RequestTrace(node.config, node.hosted_replicas, node.fetch_sessions, lambda: None)
    working.snapshot(seen)
    assert [(taken["kind"], taken["end_offset"]) for taken in working.queue.take(2)] == [("snapshot", 5)]
    await cluster.stop()


async def test_trace_samples_each_request_independently(tmp_path: Path) -> None:
    cluster = BrokerCluster(tmp_path, **TRACED | {"mesh.trace.sample": 0.25, "mesh.trace.flush.interval.ms": 60_000})
    await cluster.start()
    await cluster.create("t")
    node, drawn = cluster.brokers[3], iter([0.2, 0.25, 0.9, 0.0] * 5)
    trace = RequestTrace(node.config, node.hosted_replicas, node.fetch_sessions, lambda: None, draw=drawn.__next__)
    observe = trace.observers()["Metadata"]
    request = m.MetadataRequest([m.MetadataRequestTopic(name="t")])
    response = await cluster.call(3, "Metadata", request)
    for _ in range(20):
        observe(RequestContext("c" * 1000, ""), request, response, 10, 20)
    found = trace.queue.take(100)
    assert len(found) == 10
    assert {sampled["sample"] for sampled in found} == {0.25}
    assert {(len(sampled["client"]), sampled["request_bytes"], sampled["response_bytes"]) for sampled in found} == {
        (255, 10, 20)
    }
    await cluster.stop()
