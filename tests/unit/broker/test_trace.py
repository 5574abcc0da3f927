"""What a broker traces: against its own metrics, within its limits, and nothing of the trace itself."""

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
from tests.unit.broker.conftest_broker import Mesh, eventually, leader_of

TRACED = {"mesh.trace.sample": 1, "mesh.trace.flush.interval.ms": 50}


def batch(*values: bytes) -> bytes:
    stamp = time.time_ns() // 1_000_000
    return record_batch.build([(None, value) for value in values], base_offset=0, leader_epoch=-1, timestamp_ms=stamp)


def metric(node: BrokerNode, name: str, **labels: str) -> float:
    return node.registry.get_sample_value(name, labels) or 0.0


def trace_of(node: BrokerNode) -> RequestTrace:
    assert node.parts.trace is not None
    return node.parts.trace


async def read_trace(mesh: Mesh) -> list[dict[str, Any]]:
    """Every entry there is, by fetches that name nothing but the trace's partitions."""
    topic = next(iter(mesh.brokers.values())).hosted_replicas.image.topic_by_name(TRACE_TOPIC)
    assert topic is not None
    entries = []
    for index, state in topic.partitions.items():
        replica = mesh.brokers[state.leader].hosted_replicas.get(topic.topic_id, index)
        assert replica is not None
        end, offset = replica.log.log_end_offset, 0
        await eventually(lambda r=replica, e=end: r.high_watermark >= e, "what is written can be read")
        while True:
            data = await mesh.fetch(TRACE_TOPIC, offset, partition=index, via=state.leader)
            if not data.records:
                break
            for position, header in record_batch.iterate(data.records):
                for record in record_batch.read_records(data.records, position, header):
                    assert record.value is not None
                    entries.append(json.loads(record.value))
                offset = header.next_offset
    return entries


async def written(mesh: Mesh) -> None:
    """Until what has happened by now is in the topic."""
    for node in mesh.brokers.values():
        queue = trace_of(node).queue
        sampled = queue.sampled.total()
        await eventually(lambda q=queue, n=sampled: q.written + q.dropped.total() >= n, "the trace is written")


@pytest.fixture
async def traced(tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path, **TRACED)
    await mesh.start()
    yield mesh
    await mesh.stop()


async def consume_by_session(mesh: Mesh, topic_id: bytes, partitions: int, pool: ConnectionPool, rack: str) -> None:
    """A full fetch of all partitions and three incremental ones, at broker 1."""
    asked = [m.FetchPartition(p, -1, 0, partition_max_bytes=1 << 20) for p in range(partitions)]
    topics, session = [m.FetchTopic("", topic_id, asked)], 0
    for epoch in range(4):
        request = m.FetchRequest(
            session_id=session, session_epoch=epoch, topics=topics if epoch == 0 else [], rack_id=rack
        )
        response = await pool.get(f"127.0.0.1:{mesh.ports[1]}").call("Broker", "Fetch", request, 10)
        assert not response.error_code
        session = response.session_id


async def test_the_trace_adds_up_to_the_brokers_own_metrics(traced: Mesh) -> None:
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
    await written(traced)
    entries = await read_trace(traced)
    await written(traced)
    for node_id, node in traced.brokers.items():
        mine = [entry for entry in entries if entry["broker"] == node_id]
        fetches = [entry for entry in mine if entry["kind"] == "fetch" and entry["replica"] < 0]
        for role in ("leader", "follower"):
            for relation in ("same", "cross"):
                told = sum(e[f"{role}_bytes"] for e in fetches if e["relation"] == relation)
                counted = metric(node, "kipmesh_broker_consumer_fetched_bytes_total", role=role, rack=relation)
                assert told == counted, (node_id, role, relation)
        # Sessions go on while this is read, so what the metrics say is compared with what the trace has counted.
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
    asked = [e for e in entries if e["kind"] == "metadata" and e["client"] == "tests" and e["broker"] == 2]
    assert [(e["asked"], e["answered"], e["partitions"], e["all_topics"]) for e in asked] == [(1, 1, 4, False)]


async def test_bytes_saved_are_those_of_the_session_metrics(traced: Mesh) -> None:
    topic_id = await traced.create("t", 20, 3)
    pool = ConnectionPool("reader")
    await consume_by_session(traced, topic_id, 20, pool, "")
    await pool.close()
    node = traced.brokers[1]

    def equal() -> bool:
        """Followers go on fetching: at one moment, of what is written, waits and is left out."""
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
        await written(traced)
        entries = [e for e in await read_trace(traced) if e["broker"] == 1 and e["kind"] == "fetch"]
        found["saved"] = sum(e["saved_request_bytes"] + e["saved_response_bytes"] for e in entries)
        if (
            found["saved"]
            and len(entries) + len(trace_of(node).queue) == trace_of(node).queue.sampled["fetch"]
            and equal()
        ):
            break
    else:
        pytest.fail("trace and metric never were the same")
    # 20 partitions: three incremental fetches that named and got nothing saved all of both lists.
    reader = [e for e in entries if e["client"] == "reader" and e["fetch"] == "incremental"]
    assert [e["saved_request_bytes"] for e in reader] == [20 * 32] * 3
    assert [e["saved_response_bytes"] for e in reader[1:]] == [20 * 42] * 2


async def test_the_trace_does_not_trace_itself(traced: Mesh) -> None:
    await traced.create("t")
    await written(traced)
    node = traced.brokers[1]
    await eventually(lambda: trace_of(node).own["fetch"] and trace_of(node).own["produce"], "own exchanges counted")
    await read_trace(traced)
    await traced.call(1, "Metadata", m.MetadataRequest([m.MetadataRequestTopic(name=TRACE_TOPIC)]))
    assert trace_of(node).own["metadata"] == 1
    await traced.call(1, "Metadata", m.MetadataRequest([m.MetadataRequestTopic(name="t")]))
    await written(traced)
    entries = await read_trace(traced)
    assert not [e for e in entries if e["kind"] == "produce"]
    assert not [e for e in entries if e["kind"] == "fetch" and e["client"] == "tests"]
    assert [e["partitions"] for e in entries if e["kind"] == "metadata" and e["client"] == "tests"] == [1]
    status = [entry for entry in entries if entry["kind"] == "status" and entry["broker"] == 1]
    assert status[-1]["own"]["produce"] > 0
    assert status[-1]["dropped"] == {"rate": 0, "queue": 0, "write": 0}


async def test_it_is_off_by_default(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    await mesh.start()
    await mesh.create("t")
    assert (await mesh.produce("t", batch(b"x"))).error_code == 0
    await mesh.call(1, "Metadata", m.MetadataRequest(None))
    assert all(node.parts.trace is None for node in mesh.brokers.values())
    assert mesh.brokers[1].hosted_replicas.image.topic_by_name(TRACE_TOPIC) is None
    assert mesh.brokers[1].registry.get_sample_value("kipmesh_broker_trace_written_total") is None
    await mesh.stop()


async def test_a_write_that_is_refused_is_only_counted(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, **TRACED)
    await mesh.start_controllers()
    await mesh.start_broker(1, **{"mesh.trace.sample": 0})
    await mesh.ready(1)
    await mesh.create(TRACE_TOPIC, 1, 1, max_message_bytes="100")
    await mesh.create("t", 1, 1)
    await mesh.start_broker(2)
    await mesh.ready(2)
    await mesh.call(2, "Metadata", m.MetadataRequest(None))
    node = mesh.brokers[2]
    await eventually(lambda: metric(node, "kipmesh_broker_trace_dropped_total", reason="write") >= 1, "a refusal")
    assert metric(node, "kipmesh_broker_trace_written_total") == 0
    assert (await mesh.call(2, "Metadata", m.MetadataRequest(None))).error_code == 0
    assert not node.failed.done()
    await mesh.stop()


async def test_snapshots_are_traced(tmp_path: Path) -> None:
    small = {
        "metadata.snapshot.min.changed_records.ratio": 0.01,
        "metadata.log.max.record.bytes.between.snapshots": 2000,
        "metadata.max.retention.bytes": 1,
        "metadata.log.segment.bytes": 1000,
    }
    mesh = Mesh(tmp_path, **TRACED, **small)
    mesh.controller_keys = small
    await mesh.start()
    for number in range(20):
        topic = m.CreatableTopic(f"t-{number}", 2, 2)
        assert not (await mesh.call(1, "CreateTopics", m.CreateTopicsRequest([topic], 10_000), "Admin")).topics[0][2]
    await eventually(lambda: mesh.brokers[1].quorum.driver.machine.leader_log_start > 0, "the log starts above 0")
    joined = await mesh.start_broker(4)
    await mesh.ready(4)
    made_name = "kafka_controller_kafkacontroller_gensnapshotlatencyms_count"
    before = metric(mesh.brokers[1], made_name)
    await written(mesh)
    snapshots = [entry for entry in await read_trace(mesh) if entry["kind"] == "snapshot"]
    by_event = {event: [e for e in snapshots if e["event"] == event] for event in ("made", "fetched", "loaded")}
    assert all(by_event.values()), by_event
    for entry in snapshots:
        assert entry["bytes"] > 0
        assert entry["took_ms"] >= 0
        assert entry["replay_records"] == entry["end_offset"] > 0
    made = [entry for entry in by_event["made"] if entry["broker"] == 1]
    assert 0 < before <= len(made) <= metric(mesh.brokers[1], made_name)  # it goes on making them
    assert all(entry["records"] > 0 and entry["replay_bytes"] > 0 for entry in made)
    fetched = by_event["fetched"][0]
    assert fetched["broker"] == 4
    store = joined.quorum.replica.store
    size = store.size(m.SnapshotId(fetched["end_offset"], fetched["snapshot_epoch"]))
    assert size in (None, fetched["bytes"])  # None: a newer one has replaced it since
    await mesh.stop()


# --- limits


def entry(kind: str = "fetch") -> dict[str, Any]:
    return {"kind": kind}


def test_a_full_queue_drops_and_counts() -> None:
    queue = TraceQueue(queue_max=3, rate_max=100, now_ms=lambda: 0)
    for _ in range(5):
        queue.put(entry())
    assert (len(queue), queue.dropped["queue"], queue.sampled["fetch"]) == (3, 2, 5)
    assert len(queue.take(2)) == 2
    queue.put(entry("metadata"))
    assert [one["kind"] for one in queue.take(10)] == ["fetch", "metadata"]


def test_what_is_put_back_is_first_and_within_the_limit() -> None:
    queue = TraceQueue(queue_max=4, rate_max=100, now_ms=lambda: 0)
    for number in range(4):
        queue.put(entry() | {"n": number})
    taken = queue.take(3)
    queue.put(entry() | {"n": 4})
    queue.put_back(taken)
    assert [one["n"] for one in queue.take(10)] == [0, 1, 3, 4]
    assert queue.dropped["queue"] == 1


@pytest.mark.parametrize("error", [RuntimeError("no"), asyncio.CancelledError()], ids=["an error", "the broker ends"])
async def test_entries_that_were_taken_when_a_write_raises_are_counted(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(tmp_path, **TRACED | {"mesh.trace.flush.interval.ms": 60_000})
    await mesh.start()
    await mesh.create(TRACE_TOPIC)
    node, sent = mesh.brokers[3], 0
    await eventually(lambda: node.hosted_replicas.image.topic_by_name(TRACE_TOPIC) is not None, "the topic is known")
    writer = TraceWriter(node.config, node.hosted_replicas, node.parts.forwarder, node.parts.pool)

    async def send(*_: object) -> ErrorCode:
        nonlocal sent
        sent += 1
        if sent == 2:
            raise error
        return ErrorCode.NONE

    monkeypatch.setattr(writer, "_send", send)
    queue = TraceQueue(100, 1000)
    for number in range(9):  # a batch has two of these and no more
        queue.put({"kind": "fetch", "number": number, "client": "c" * (BATCH_BYTES_MAX // 3)})
    with pytest.raises(type(error)):
        await writer.flush(queue, lambda: {"kind": "status"})
    assert len(queue) == 0
    assert queue.written > 0
    assert queue.written + queue.dropped["write"] == 9
    await mesh.stop()


def test_more_than_the_rate_is_dropped_until_the_next_second() -> None:
    now = [10_500]
    queue = TraceQueue(queue_max=100, rate_max=4, now_ms=lambda: now[0])
    for _ in range(6):
        queue.put(entry())
    assert (len(queue), queue.dropped["rate"]) == (4, 2)
    now[0] = 11_000
    queue.put(entry())
    assert (len(queue), queue.dropped["rate"]) == (5, 2)


def test_batches_are_small_and_hold_every_entry() -> None:
    entries = [{"kind": "status"}, *({"kind": "fetch", "client": "c" * 255, "n": n} for n in range(3000))]
    batches = list(batches_of(entries, 5))
    assert [one for _, inside in batches for one in inside] == entries[1:]
    assert len(batches) > 1
    found = []
    for data, _ in batches:
        assert len(data) < BATCH_BYTES_MAX * 1.1
        record_batch.check_crc(data, 0, record_batch.parse_header(data))
        found += [
            json.loads(r.value or b"") for r in record_batch.read_records(data, 0, record_batch.parse_header(data))
        ]
    assert found == entries


async def test_a_snapshot_that_cannot_be_traced_is_no_failure_of_the_quorum(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    await mesh.start()
    node = mesh.brokers[1]

    def closed() -> None:
        raise OSError("the log is closed")

    seen = SnapshotSeen("loaded", m.SnapshotId(5, 1), 1, 1, 1)
    broken = RequestTrace(node.config, node.hosted_replicas, node.fetch_sessions, closed)
    broken.snapshot(seen)
    assert len(broken.queue) == 0
    working = RequestTrace(node.config, node.hosted_replicas, node.fetch_sessions, lambda: None)
    working.snapshot(seen)
    assert [(one["kind"], one["end_offset"]) for one in working.queue.take(2)] == [("snapshot", 5)]
    await mesh.stop()


async def test_each_request_is_sampled_by_itself(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, **TRACED | {"mesh.trace.sample": 0.25, "mesh.trace.flush.interval.ms": 60_000})
    await mesh.start()
    await mesh.create("t")
    node, drawn = mesh.brokers[3], iter([0.2, 0.25, 0.9, 0.0] * 5)
    trace = RequestTrace(node.config, node.hosted_replicas, node.fetch_sessions, lambda: None, draw=drawn.__next__)
    observe = trace.observers()["Metadata"]
    request = m.MetadataRequest([m.MetadataRequestTopic(name="t")])
    response = await mesh.call(3, "Metadata", request)
    for _ in range(20):
        observe(RequestContext("c" * 1000, ""), request, response, 10, 20)
    found = trace.queue.take(100)
    assert len(found) == 10
    assert {one["sample"] for one in found} == {0.25}
    assert {(len(one["client"]), one["request_bytes"], one["response_bytes"]) for one in found} == {(255, 10, 20)}
    await mesh.stop()
