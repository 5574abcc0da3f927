"""The kip-report job: a generated trace against simple sums, and a trace of a cluster against its metrics."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kipmesh.cluster import LocalCluster
from kipmesh.cluster.single import SingleCluster
from kipmesh_jobs.frame import JobError, JobRun, Settings
from kipmesh_jobs.kip_report.job import Interval, Options, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(600)]
HOUR = 3_600_000
BASE = 1_772_359_200_000


def job_run(spark: SparkSession, directory: Path) -> JobRun:
    job = JobRun("kip-report", Settings(directory, as_json=True))
    job.directory.begin()
    job.use(spark)
    return job


# --- a generated trace


def random_entry(rng: random.Random) -> dict[str, Any]:
    common = {
        "v": 1,
        "ts": BASE + rng.randrange(3 * HOUR),
        "broker": rng.randrange(3),
        "started": BASE,
        "client": f"client-{rng.randrange(4)}",
        "sample": rng.choice((1.0, 0.5, 0.25)),
        "request_bytes": rng.randrange(500),
        "response_bytes": 500 + rng.randrange(500),
    }
    match rng.choice(("fetch", "fetch", "metadata", "produce")):
        case "metadata":
            return common | {
                "kind": "metadata",
                "asked": rng.randrange(5),
                "all_topics": rng.random() < 0.3,
                "error": 0,
            }
        case "produce":
            return common | {"kind": "produce", "records": rng.randrange(1000), "record_bytes": rng.randrange(99_999)}
    replica = rng.choice((-1, -1, 2))
    fetch = common | {
        "kind": "fetch",
        "replica": replica,
        "fetch": rng.choice(("full", "incremental", "error")),
        "error": 0,
        "record_bytes": rng.randrange(500),
        "saved_request_bytes": rng.randrange(99),
        "saved_response_bytes": 42,
    }
    if replica < 0:
        fetch |= {"relation": rng.choice(("same", "cross", "unknown")), "leader_bytes": 7, "follower_bytes": 11}
        fetch |= {"saved_cross_rack_bytes": rng.randrange(11)}
    return fetch


def simple_sums(entries: list[dict[str, Any]]) -> dict[str, float]:
    """Return the expected sums by a loop over the entries."""
    sums: dict[str, float] = defaultdict(float)
    for entry in entries:
        weight = 1 / entry["sample"]
        match entry["kind"]:
            case "fetch":
                reader = "followers" if entry["replica"] >= 0 else "consumers"
                sums["fetches"] += weight
                sums["incremental_fetches"] += weight * (entry["fetch"] == "incremental")
                sums[f"{reader}_saved_bytes"] += weight * (entry["saved_request_bytes"] + entry["saved_response_bytes"])
                sums["fetched_record_bytes"] += weight * entry["record_bytes"]
                if entry["replica"] < 0:
                    for role in ("leader", "follower"):
                        sums[f"{entry['relation']}_rack_{role}_bytes"] += weight * entry[f"{role}_bytes"]
                    sums["saved_cross_rack_bytes"] += weight * entry["saved_cross_rack_bytes"]
            case "metadata":
                sums["metadata_requests"] += weight
                sums["metadata_topics_asked"] += weight * entry["asked"]
                sums["metadata_bytes"] += weight * (entry["request_bytes"] + entry["response_bytes"])
                sums["metadata_requests_for_all"] += weight * entry["all_topics"]
            case "produce":
                sums["produced_records"] += weight * entry["records"]
                sums["produced_bytes"] += weight * entry["record_bytes"]
    return sums


def test_report_of_a_generated_trace_equals_simple_sums(
    spark: SparkSession, cluster: LocalCluster, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    from kipmesh.client.sync import Producer

    rng = random.Random(5)
    entries = [random_entry(rng) for _ in range(3000)]
    snapshot = {
        "v": 1,
        "kind": "snapshot",
        "ts": BASE + 5,
        "broker": 1,
        "started": BASE,
        "sample": 1.0,
        "event": "made",
    }
    snapshot |= {
        "end_offset": 500,
        "records": 20,
        "bytes": 900,
        "took_ms": 3,
        "replay_records": 500,
        "replay_bytes": 9000,
    }
    snapshot |= {"replay_bytes_exact": True, "snapshot_epoch": 1}
    status = {"v": 1, "kind": "status", "ts": BASE, "broker": 1, "started": BASE, "sample": 1.0}
    statuses = [
        status | {"sampled": {"fetch": 9}, "dropped": {"rate": 0, "queue": 0, "write": 0}, "own": {}},
        status | {"sampled": {"fetch": 90, "metadata": 10}, "dropped": {"rate": 3, "queue": 4, "write": 0}, "own": {}},
    ]
    bad = [b"\xff\xfe", b"{", b'{"kind":"other","ts":1,"broker":1,"sample":1}', b'{"kind":"fetch"}', None]
    bad.append(b'{"kind":"fetch","ts":1,"broker":1,"sample":0}')
    topic = new_topic(2)
    with Producer(cluster.bootstrap) as producer:
        for number, entry in enumerate([*entries, snapshot, *statuses]):
            producer.send(topic, json.dumps(entry).encode(), partition=number % 2)
        for value in bad:
            producer.send(topic, value, partition=0)
        producer.flush()
    outcome = run(job_run(spark, tmp_path), Options(cluster.bootstrap, topic))
    for name, total in simple_sums(entries).items():
        assert outcome.summary[name] == round(total), name
    assert outcome.summary["dead_letters"] == len(bad)
    assert outcome.summary["entries"] == len(entries) + 1
    assert (outcome.summary["sampled_entries"], outcome.summary["dropped_entries"]) == (100, 7)
    assert (outcome.summary["sample_min"], outcome.summary["sample_max"]) == (0.25, 1.0)
    assert outcome.summary["snapshots"]["made"]["replay_bytes"] == 9000
    by_both = spark.read.parquet(str(tmp_path / "work" / "parquet" / "by_time_and_client")).collect()
    assert len(by_both) == 12
    for row in by_both:
        begin = int(row["time"].timestamp() * 1000) if row["time"].tzinfo else _utc_ms(row["time"])
        matching = [e for e in entries if e["client"] == row["client"] and e["ts"] // HOUR * HOUR == begin]
        for name, total in simple_sums(matching).items():
            assert row[name] == round(total), (row["client"], row["time"], name)
    dead = spark.read.parquet(str(tmp_path / "work" / "parquet" / "dead_letters")).collect()
    assert {row["reason"] for row in dead} == {
        "not the JSON of an entry",
        "no known kind",
        "lacks ts or broker",
        "sample is not above 0 and at most 1",
    }
    assert {row["topic"] for row in dead} == {topic}


def test_status_counts_of_a_running_broker_are_limited_to_the_requested_time(
    spark: SparkSession,
) -> None:
    from kipmesh_jobs.kip_report import tables

    def status(started: int, ts: int, sampled: int, queue: int) -> dict[str, Any]:
        counts = {"sampled": {"fetch": sampled}, "dropped": {"rate": 0, "queue": queue, "write": 1}}
        return {"kind": "status", "ts": ts, "broker": 1, "started": started, "sample": 1.0, **counts}

    lines = [status(BASE, BASE + 10, 70, 2), status(BASE, BASE + 20, 100, 5), status(BASE + 12, BASE + 30, 9, 3)]
    entries = spark.createDataFrame([(None, json.dumps(line).encode()) for line in lines], "topic STRING, value BINARY")
    entries = entries.selectExpr("topic", "0 AS partition", "0L AS offset", "value")
    rows = {}
    for since in (None, BASE + 10):
        found, is_cut = tables.collected(tables.status(tables.parse(entries), since).orderBy("started"), None, 10)
        rows[since] = [(row["sampled"], row["dropped_queue"], row["dropped_write"]) for row in found]
        assert not is_cut
    assert rows == {None: [(100, 5, 1), (9, 3, 1)], BASE + 10: [(30, 3, 0), (9, 3, 1)]}


def test_collected_table_is_cut_at_the_row_limit(spark: SparkSession) -> None:
    from kipmesh_jobs.kip_report import tables

    for count in (3, 4):
        rows, is_cut = tables.collected(spark.range(count), "id", 3)
        assert [row["id"] for row in rows] == list(range(count))[:-4:-1]
        assert is_cut == (count > 3)


def _utc_ms(naive: Any) -> int:
    from datetime import UTC

    return int(naive.astimezone(UTC).timestamp() * 1000)


def test_report_explains_a_topic_without_a_trace(
    spark: SparkSession, cluster: LocalCluster, new_topic: Callable[..., str], send: Callable[..., None], tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=r"no trace entries; set mesh\.trace\.sample"):
        run(job_run(spark, tmp_path / "a"), Options(cluster.bootstrap, new_topic()))
    topic = new_topic()
    send(topic, 3)
    with pytest.raises(JobError, match="only 3 other values"):
        run(job_run(spark, tmp_path / "b"), Options(cluster.bootstrap, topic))
    with pytest.raises(JobError, match="nowhere"):
        run(job_run(spark, tmp_path / "c"), Options(cluster.bootstrap, "nowhere"))


# --- the trace of a cluster

TRACING = {
    "mesh.trace.sample": 1,
    "mesh.trace.rate.max": 1_000_000,
    "mesh.trace.flush.interval.ms": 100,
    "replica.selector.class": "RackAwareReplicaSelector",
    "metadata.log.max.record.bytes.between.snapshots": 1000,
    "metadata.snapshot.min.changed_records.ratio": 0.01,
}


@pytest.fixture
def traced(spark: SparkSession) -> Iterator[LocalCluster]:
    with LocalCluster(mode="single", config=TRACING) as cluster:
        yield cluster


def total(cluster: LocalCluster, node: str, name: str, **labels: str) -> float:
    """Return the sum of a broker's counters with this name and these labels."""
    assert isinstance(cluster._running, SingleCluster)
    registry = cluster._running.node_object(node).registry
    found = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found or labels, name
    return float(sum(found))


def wait_written(cluster: LocalCluster, node: str) -> None:
    """Wait until all entries sampled so far are in the topic."""
    sampled = total(cluster, node, "kipmesh_broker_trace_sampled_total")
    deadline = time.monotonic() + 120
    while total(cluster, node, "kipmesh_broker_trace_written_total") < sampled:
        assert time.monotonic() < deadline, f"the trace of {node} is not written"
        time.sleep(0.05)


def read_all(cluster: LocalCluster, client: str, rack: str, topic: str, count: int) -> None:
    from kipmesh.client.sync import Consumer

    config = {"client.id": client, "client.rack": rack, "auto.offset.reset": "earliest"}
    with Consumer(cluster.bootstrap, **{key.replace(".", "_"): text for key, text in config.items()}) as consumer:
        consumer.subscribe([topic])
        seen = 0
        while seen < count:
            seen += len(consumer.poll(5000))


def test_report_of_a_cluster_trace_equals_broker_metrics(
    spark: SparkSession, traced: LocalCluster, tmp_path: Path
) -> None:
    from kipmesh.client import NewTopic
    from kipmesh.client.sync import AdminClient, Producer

    with AdminClient(traced.bootstrap) as admin:
        admin.create_topics([NewTopic("t", 6, 3)])
    with Producer(traced.bootstrap, client_id="writer") as producer:
        for number in range(2000):
            producer.send("t", b"%d" % number * 20, partition=number % 6)
        producer.flush()
    followers = ("follower-1", "follower-2")
    racks = [traced.node(name).rack for name in ("leader-1", *followers)]
    for number, rack in enumerate([*racks, "elsewhere"]):
        read_all(traced, f"reader-{number}", rack, "t", 2000)

    served = {
        (role, rack): sum(
            total(traced, name, "kipmesh_broker_consumer_fetched_bytes_total", role=role, rack=rack)
            for name in ("leader-1", *followers)
        )
        for role in ("leader", "follower")
        for rack in ("same", "cross", "unknown")
    }
    for name in followers:
        wait_written(traced, name)
    # Stop the followers, whose fetches would keep changing the leader's counters.
    for name in followers:
        traced.stop(name)
    wait_written(traced, "leader-1")
    saved = total(traced, "leader-1", "kipmesh_broker_fetch_session_saved_bytes_total")
    saved -= total(traced, "leader-1", "kipmesh_broker_trace_own_saved_bytes_total")
    fetches = total(traced, "leader-1", "kipmesh_broker_fetches_total")
    fetches -= total(traced, "leader-1", "kipmesh_broker_trace_own_total", kind="fetch")
    outcome = run(job_run(spark, tmp_path), Options(traced.bootstrap, interval=Interval.MINUTE))
    summary = outcome.summary
    for (role, rack), counted in served.items():
        assert summary[f"{rack}_rack_{role}_bytes"] == counted, (rack, role)
    # Reads from followers in two racks would have crossed racks to the leader otherwise.
    assert summary["saved_cross_rack_bytes"] == summary["same_rack_follower_bytes"] > 0
    assert summary["cross_rack_bytes"] > 0
    assert summary["produced_records"] == 2000
    assert summary["dropped_entries"] == 0
    entries = spark.read.parquet(str(tmp_path / "work" / "parquet" / "entries"))
    row = (
        entries.where("broker = 1 AND kind = 'fetch'")
        .selectExpr("sum(saved_request_bytes + saved_response_bytes)", "sum(record_bytes)", "count(*)")
        .first()
    )
    assert row is not None
    assert row[0] == saved > 0
    assert row[2] == fetches > 0
    snapshots = entries.where("kind = 'snapshot' AND event = 'made'").count()
    assert snapshots == summary["snapshots"]["made"]["count"] > 0
    assert "writer" in {client.client for client in entries.select("client").distinct().collect()}
