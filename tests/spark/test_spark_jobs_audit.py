"""The audit job: no findings on the files of a cluster, and a finding for each kind of damage in a copy."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from kipmesh.client import NewTopic
from kipmesh.client.sync import AdminClient, Producer
from kipmesh.cluster import LocalCluster
from kipmesh.core import record_batch
from kipmesh.core.snapshot.ids import parse_file_name
from kipmesh.messages import SnapshotId
from kipmesh.storage import RealFileSystem, checkpoint
from kipmesh.storage.quorum.snapshots import SnapshotStore
from kipmesh_jobs.audit.job import Options, run
from kipmesh_jobs.frame import JobRun, Outcome, Settings

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]
RECORDS = 1_500
NODES = ("leader-1", "follower-1", "follower-2", "controller-1")
CONFIG = {"metadata.log.max.record.bytes.between.snapshots": 2_000, "log.cleaner.backoff.ms": 200}
COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "8000", "min.cleanable.dirty.ratio": "0.01"}


@pytest.fixture(scope="module")
def written(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data directories of a stopped cluster with a topic, a compacted topic, and snapshots of many topics."""
    directory = tmp_path_factory.mktemp("cluster")
    with LocalCluster(mode="single", dir=directory, config=CONFIG) as cluster:
        with AdminClient(cluster.bootstrap) as admin:
            admin.create_topics(
                [NewTopic("flights", 2, 3, {"segment.bytes": "8000"}), NewTopic("keys", 1, 3, COMPACTED)]
            )
            with Producer(cluster.bootstrap) as producer:
                for i in range(RECORDS):
                    producer.send("flights", b"flight %d" % i * 3, key=b"k%d" % i, partition=i % 2)
                    producer.send("keys", b"value %d" % i * 3, key=b"k%d" % (i % 50), partition=0)
                    if i % 20 == 0:
                        producer.flush()
                producer.flush()
            admin.create_topics([NewTopic(f"topic-{i}", 1, 3, {}) for i in range(20)])
        wait_for(lambda: len(list(directory.rglob("*.checkpoint"))) >= 3 and cleaned_replicas(directory) == 3)
    return directory


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert condition()


def cleaned_replicas(directory: Path) -> int:
    files = [path for path in directory.rglob(checkpoint.CLEANER_CHECKPOINT) if "keys" in path.read_text()]
    return len(files)


@pytest.fixture
def replicas(written: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(written, copy)
    return copy


def audit(spark: SparkSession, replicas: Path, out: Path, **options: Any) -> Outcome:
    job = JobRun("audit", Settings(out, as_json=True))
    job.use(spark)
    job.directory.begin()
    return run(job, Options(replicas=[f"{name}={replicas / name}" for name in NODES], **options))


def segments(replicas: Path, node: str, log: str) -> list[Path]:
    return sorted((replicas / node / "data" / log).glob("*.log"))


def test_audit_of_an_undamaged_cluster_passes(spark: SparkSession, written: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = audit(spark, written, out)
    summary = outcome.summary
    assert outcome.passed
    assert summary["findings"] == {}, summary["first_findings"]
    assert summary["first_divergence"] is None
    assert summary["pairs_agreed"] == summary["pairs"] > 30
    assert summary["snapshots"] >= 3
    agreement = {
        (row.topic, row.partition, row.a, row.b): row
        for row in spark.read.parquet(str(out / "work" / "parquet" / "agreement")).collect()
    }
    for partition in (0, 1):
        row = agreement["flights", partition, "follower-1", "leader-1"]
        assert (row["from"], row.to, row.agrees_to, row.must_agree_to) == (0, 750, 750, 750)
    keys = agreement["keys", 0, "follower-1", "leader-1"]
    assert keys.cleaned_to > 0
    assert keys.equal > 0
    batches = spark.read.parquet(str(out / "work" / "parquet" / "batches"))
    of_leader = batches.where("topic = 'flights' and replica = 'leader-1'")
    assert of_leader.selectExpr("sum(record_count)").collect()[0][0] == RECORDS


def test_audit_locates_a_flipped_bit(spark: SparkSession, replicas: Path, tmp_path: Path) -> None:
    rng = random.Random(20_260)
    path = rng.choice(segments(replicas, "follower-2", "flights-1"))
    data = bytearray(path.read_bytes())
    position, header = rng.choice(list(record_batch.iterate(bytes(data))))
    data[position + rng.randrange(record_batch.HEADER_BYTES, header.size_bytes)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    outcome = audit(spark, replicas, tmp_path / "out", topics=["flights"])
    assert not outcome.passed
    assert outcome.summary["findings"] == {"divergence": 2, "crc": 1}
    first = outcome.summary["first_divergence"]
    assert (first["topic"], first["partition"], first["offset"]) == ("flights", 1, header.base_offset)
    replicas_at_offset = {replica["replica"]: replica for replica in first["replicas"]}
    assert replicas_at_offset.keys() == {"leader-1", "follower-1", "follower-2"}
    leader, sound, damaged = (replicas_at_offset[name] for name in ("leader-1", "follower-1", "follower-2"))
    assert leader["digest"] == sound["digest"] != damaged["digest"]
    assert (damaged["file"], damaged["position"]) == (str(path), position)
    assert damaged["crc_ok"] is False
    crc = next(finding for finding in outcome.summary["first_findings"] if finding["kind"] == "crc")
    assert (crc["replica"], crc["file"], crc["position"]) == ("follower-2", str(path), position)
    assert f"at offset {header.base_offset}" in outcome.lines[-1]
    assert str(path) in str(outcome.page)


def test_audit_reports_each_kind_of_damage(spark: SparkSession, replicas: Path, tmp_path: Path) -> None:
    # A changed leader epoch, which no CRC covers, in a compacted log: the audit compares its records, which are equal.
    kept = segments(replicas, "follower-1", "keys-0")[-1]
    last = bytearray(kept.read_bytes())
    last[15] ^= 1
    kept.write_bytes(last)
    # A missing segment in the middle, a torn tail of another log, and a log that ends below its high watermark.
    _, removed, _, *_ = segments(replicas, "follower-1", "flights-0")
    removed.unlink()
    torn = segments(replicas, "leader-1", "flights-1")[-1]
    torn.write_bytes(torn.read_bytes() + torn.read_bytes()[:40])
    short = segments(replicas, "follower-2", "flights-1")[-1]
    *_, (end, _) = record_batch.iterate(short.read_bytes())
    short.write_bytes(short.read_bytes()[:end])
    # A missing log directory and an unreadable checkpoint.
    shutil.rmtree(replicas / "follower-2" / "data" / "flights-0")
    (replicas / "leader-1" / "data" / checkpoint.LOG_START_CHECKPOINT).write_text("zero")
    # A snapshot with a flipped bit, and two snapshots with other records under its id (brokers may skip snapshots).
    directories = [next((replicas / node).rglob("__cluster_metadata-0")) for node in NODES[:3]]
    newest = max(
        (path for directory in directories for path in directory.glob("*.checkpoint")), key=lambda path: path.name
    )
    flip(newest)
    parsed = parse_file_name(newest.name)
    assert parsed is not None
    others = (directory for directory in directories if directory != newest.parent)
    for value, directory in zip((b"one", b"two"), others, strict=True):
        rewrite(directory / newest.name, parsed.snapshot_id, value)
    outcome = audit(spark, replicas, tmp_path / "out")
    found = outcome.summary["findings"]
    assert not outcome.passed
    expected = {"divergence", "gap", "torn", "short_log", "missing_log", "bad_checkpoint", "snapshot_corrupt"}
    assert expected | {"snapshot_differs"} <= found.keys()
    gap = next(finding for finding in outcome.summary["first_findings"] if finding["kind"] == "gap")
    assert (gap["replica"], gap["topic"], gap["partition"], gap["offset"]) == (
        "follower-1",
        "flights",
        0,
        int(removed.stem),
    )
    assert outcome.summary["first_divergence"]["offset"] == int(removed.stem)
    lacking = [
        replica["replica"] for replica in outcome.summary["first_divergence"]["replicas"] if replica["file"] is None
    ]
    assert lacking == ["follower-1"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, snapshot_id: SnapshotId, value: bytes) -> None:
    path.unlink(missing_ok=True)
    store = SnapshotStore(RealFileSystem(), str(path.parent))
    writer = store.create(snapshot_id, last_contained_log_timestamp=1, now_ms=1)
    for _ in writer.write([b"\x01\x02\x00" + value]):
        pass
    writer.freeze()


def test_uncommitted_batches_of_different_epochs_may_differ(
    spark: SparkSession, replicas: Path, tmp_path: Path
) -> None:
    # An unreplicated batch of an older epoch, and a batch of the next epoch at the same offset.
    for node, epoch, value in (("leader-1", 40, b"old"), ("follower-1", 41, b"new")):
        last = segments(replicas, node, "flights-0")[-1]
        batch = record_batch.build([(b"k", value)], base_offset=750, leader_epoch=epoch, timestamp_ms=1)
        last.write_bytes(last.read_bytes() + batch)
    outcome = audit(spark, replicas, tmp_path / "out", topics=["flights"])
    assert outcome.passed
    assert outcome.summary["findings"] == {"uncommitted": 1}
    # Two batches of one epoch at the same offset are a divergence, whatever the high watermark is.
    for node, value in (("leader-1", b"one"), ("follower-1", b"two")):
        last = segments(replicas, node, "flights-1")[-1]
        batch = record_batch.build([(b"k", value)], base_offset=750, leader_epoch=50, timestamp_ms=1)
        last.write_bytes(last.read_bytes() + batch)
    outcome = audit(spark, replicas, tmp_path / "again", topics=["flights"])
    assert not outcome.passed
    assert outcome.summary["findings"] == {"divergence": 1, "uncommitted": 1}
    assert outcome.summary["first_divergence"]["offset"] == 750
