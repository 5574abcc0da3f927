"""Job audit: reading of segments, checkpoints and snapshots, intact and with each kind of damage."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.messages import SnapshotId
from kipmesh.storage import RealFileSystem, checkpoint, open_log
from kipmesh.storage.quorum.snapshots import SnapshotStore
from kipmesh.testing import produced_batch
from kipmesh_jobs.audit import inventory as inventory_module
from kipmesh_jobs.audit.inventory import (
    KINDS,
    SCHEMA,
    Finding,
    Inventory,
    data_directories,
    drop_deleted,
    parse_replicas,
    replicas_of_cluster,
    take_inventory,
    tasks_of,
)
from kipmesh_jobs.audit.job import Options
from kipmesh_jobs.audit.scan import CUT, GARBAGE, TORN, WRONG_CRC, scan
from kipmesh_jobs.audit.source import (
    BATCHES_SCHEMA,
    FileToRead,
    SegmentsDataSource,
    SegmentsReader,
    plan_tasks,
    segment_rows,
    snapshot_row,
)
from kipmesh_jobs.frame import JobError

NOW = 1_700_000_000_000
COLUMNS = BATCHES_SCHEMA.names


def write_log(
    data: Path, topic: str = "t", count: int = 12, *, seed: int = 1, compression: int = 0, topic_id: bytes = b"i" * 16
) -> list[Path]:
    """Write a log with the production code, in batches of one to three records. Return its segments."""
    rng = random.Random(seed)
    config = TopicConfig.parse({"segment.bytes": 1000, "index.interval.bytes": 100})
    log = open_log(RealFileSystem(), str(data / f"{topic}-0"), topic, 0, config, NOW, topic_id=topic_id)
    sequence = 0
    for _ in range(count):
        values = [rng.randbytes(rng.randrange(20, 90)) for _ in range(rng.randrange(1, 4))]
        log.append_as_leader(produced_batch(values, compression=compression, producer=(7, 0, sequence)), 3, NOW)
        sequence += len(values)
    log.close()
    return sorted((data / f"{topic}-0").glob("*.log"))


def rows_of(path: Path, *, is_last: bool = True, records_below: int = 0) -> list[dict[str, Any]]:
    file = FileToRead("a", "t", 0, str(path), int(path.stem), path.stat().st_size, is_last, records_below)
    return [dict.fromkeys(COLUMNS) | row for row in segment_rows(file)]


def damages(rows: Sequence[dict[str, Any]]) -> list[object]:
    return [row["damage"] for row in rows if row["damage"]]


def batches_of(data: bytes) -> list[tuple[int, int]]:
    return [(position, header.size_bytes) for position, header in record_batch.iterate(data)]


# -- segments


def test_intact_segment_yields_its_batches(tmp_path: Path) -> None:
    segments = write_log(tmp_path)
    assert len(segments) > 1
    rows = [row for segment in segments for row in rows_of(segment)]
    assert not damages(rows)
    assert all(row["crc_ok"] for row in rows)
    assert [row["base_offset"] for row in rows[1:]] == [int(row["last_offset"]) + 1 for row in rows[:-1]]
    assert {(row["leader_epoch"], row["producer_id"], row["producer_epoch"]) for row in rows} == {(3, 7, 0)}
    assert len({row["digest"] for row in rows}) == len(rows)


def test_flipped_bit_of_record_is_reported_as_wrong_crc_with_position(tmp_path: Path) -> None:
    segment = write_log(tmp_path)[0]
    data = bytearray(segment.read_bytes())
    position, size = batches_of(bytes(data))[1]
    data[position + size - 3] ^= 4
    segment.write_bytes(data)
    rows = rows_of(segment)
    assert damages(rows) == [WRONG_CRC]
    assert rows[1]["position"] == position
    assert rows[1]["crc_ok"] is False
    assert rows[1]["base_offset"] == int(rows[0]["last_offset"]) + 1


def test_flipped_bit_of_leader_epoch_changes_digest(tmp_path: Path) -> None:
    segment = write_log(tmp_path)[0]
    data = bytearray(segment.read_bytes())
    before = rows_of(segment)
    data[15] ^= 1  # the leader epoch, which the CRC does not cover
    segment.write_bytes(data)
    after = rows_of(segment)
    assert not damages(after)
    assert after[0]["digest"] != before[0]["digest"]
    assert [row["digest"] for row in after[1:]] == [row["digest"] for row in before[1:]]


@pytest.mark.parametrize(("is_last", "kind"), [(True, TORN), (False, CUT)])
@pytest.mark.parametrize("cut", [1, 30, 70])
def test_truncated_segment_is_torn_tail_only_if_it_is_the_last(
    tmp_path: Path, is_last: bool, kind: str, cut: int
) -> None:
    segment = write_log(tmp_path)[0]
    data = segment.read_bytes()
    position, size = batches_of(data)[-1]
    segment.write_bytes(data[: position + min(cut, size - 1)])
    rows = rows_of(segment, is_last=is_last)
    assert damages(rows) == [kind]
    assert rows[-1]["position"] == position
    assert rows[-1]["base_offset"] is None


@pytest.mark.parametrize(("is_last", "kind"), [(True, TORN), (False, GARBAGE)])
def test_trailing_zeros_are_torn_tail_of_last_segment_and_garbage_elsewhere(
    tmp_path: Path, is_last: bool, kind: str
) -> None:
    segment = write_log(tmp_path)[0]
    segment.write_bytes(segment.read_bytes() + bytes(70_000))
    rows = rows_of(segment, is_last=is_last)
    assert damages(rows) == [kind]
    assert rows[-1]["size_bytes"] == 70_000


def test_reading_continues_after_garbage(tmp_path: Path) -> None:
    segment = write_log(tmp_path)[0]
    data = segment.read_bytes()
    position, size = batches_of(data)[1]
    segment.write_bytes(data[:position] + os.urandom(size) + data[position + size :])
    rows = rows_of(segment)
    assert damages(rows) == [GARBAGE]
    assert len(rows) == len(batches_of(data))


def test_missing_and_unreadable_files_yield_rows_with_damage(tmp_path: Path) -> None:
    rows = [
        next(segment_rows(FileToRead("a", "t", 0, path, 0, 10, True, 0)))
        for path in (str(tmp_path / "gone.log"), str(tmp_path))
    ]
    assert [row["damage"] for row in rows] == ["vanished", "unreadable"]
    assert all(row["text"] for row in rows)


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 1 << 32), st.data())
def test_scan_loses_one_batch_per_flipped_bit(seed: int, data: st.DataObject) -> None:
    rng = random.Random(seed)
    parts, offset = [], 0
    for _ in range(6):
        produced = produced_batch([rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 4))])
        parts.append(record_batch.assign(produced, offset, 1))
        offset = record_batch.parse_header(parts[-1]).next_offset
    whole = b"".join(parts)
    at = data.draw(st.integers(0, len(whole) - 1))
    bit = data.draw(st.integers(0, 7))
    damaged = bytearray(whole)
    damaged[at] ^= 1 << bit
    found = list(scan(bytes(damaged), is_last=False))
    assert found[0].position == 0
    for batch, following in pairwise(found):
        assert following.position == batch.position + batch.size_bytes
    assert found[-1].position + found[-1].size_bytes == len(whole)
    before = {batch.digest for batch in scan(whole, is_last=False)}
    after = {batch.digest for batch in found if not batch.damage}
    assert len(before - after) == 1


def test_segment_is_read_up_to_its_listed_size(tmp_path: Path) -> None:
    batch = record_batch.assign(produced_batch([b"v"]), 0, 1)
    path = tmp_path / "00000000000000000000.log"
    file = FileToRead("a", "topic", 0, str(path), 0, len(batch), True, 0)
    for content, expected in ((batch + batch, [(0, len(batch))]), (batch[:40], [(0, 40)]), (b"", [])):
        path.write_bytes(content)
        assert [(row["position"], row["size_bytes"]) for row in segment_rows(file)] == expected


@pytest.mark.parametrize("compression", [0, 1, 3])
def test_records_have_digests_in_compacted_part_of_log(tmp_path: Path, compression: int) -> None:
    segment = write_log(tmp_path, compression=compression)[0]
    rows = rows_of(segment, records_below=4)
    for row in rows:
        records = row["records"]
        assert (records is None) == (int(row["base_offset"]) >= 4)
        if records is not None:
            offsets = [record["offset"] for record in records]
            assert offsets == list(range(row["base_offset"], row["last_offset"] + 1))
            assert len({record["digest"] for record in records}) == len(offsets)


# -- log directories


def test_inventory_reads_log_directories_and_checkpoints(tmp_path: Path) -> None:
    data = tmp_path / "node" / "data"
    data.mkdir(parents=True)
    segments = write_log(data)
    checkpoint.write_offsets(
        RealFileSystem(), str(data / checkpoint.HIGH_WATERMARK_CHECKPOINT), {("t", 0): 9, ("gone", 1): 5, ("new", 0): 0}
    )
    checkpoint.write_offsets(RealFileSystem(), str(data / checkpoint.CLEANER_CHECKPOINT), {("t", 0): 4})
    (data / checkpoint.LOG_START_CHECKPOINT).write_text("malformed")
    inventory = take_inventory([("a", str(tmp_path / "node"))])
    (log,) = inventory.logs
    assert (log.replica, log.topic, log.partition, log.high_watermark, log.cleaned_to) == ("a", "t", 0, 9, 4)
    assert log.topic_id == checkpoint.uuid_text(b"i" * 16)
    assert [segment.path for segment in log.segments] == list(map(str, segments))
    assert [segment.is_last for segment in log.segments] == [False] * (len(segments) - 1) + [True]
    assert sorted((problem.kind, problem.topic, problem.offset) for problem in inventory.problems if problem.topic) == [
        ("missing_log", "gone", 5)
    ]
    assert [problem.kind for problem in inventory.problems if problem.topic is None] == ["bad_checkpoint"]


def test_inventory_drops_log_deleted_during_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for topic in ("before", "later", "recreated", "stays"):
        write_log(tmp_path, topic)

    def topic_id_then_deleted(directory: str) -> str:
        found = topic_id(directory)
        if "before" in directory:
            shutil.rmtree(directory)
        return found

    topic_id = inventory_module._topic_id
    with monkeypatch.context() as patch:
        patch.setattr(inventory_module, "_topic_id", topic_id_then_deleted)
        inventory = take_inventory([("a", str(tmp_path))])
    assert {log.topic: bool(log.segments) for log in inventory.logs} == {
        "before": False, "later": True, "recreated": True, "stays": True
    }  # fmt: skip
    assert not inventory.problems
    shutil.rmtree(tmp_path / "later-0")
    shutil.rmtree(tmp_path / "recreated-0")
    write_log(tmp_path, "recreated", topic_id=b"j" * 16)
    drop_deleted(inventory)
    assert [log.topic for log in inventory.logs] == ["stays"]
    assert [(problem.kind, problem.topic) for problem in inventory.problems] == [
        ("vanished", topic) for topic in ("before", "later", "recreated")
    ]


def test_inventory_filters_topics_and_requires_data_directory(tmp_path: Path) -> None:
    write_log(tmp_path, "t")
    write_log(tmp_path, "u")
    assert {log.topic for log in take_inventory([("a", str(tmp_path))], ["u"]).logs} == {"u"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match=r"replica b: no data directory in .*empty;"):
        take_inventory([("b", str(tmp_path / "empty"))])
    assert data_directories(str(tmp_path)) == [str(tmp_path)]


@pytest.mark.parametrize("text", ["a", "=path", "a=", "a=nowhere"])
def test_invalid_replica_option_is_rejected(text: str) -> None:
    with pytest.raises(JobError, match="--replica"):
        parse_replicas([text])


def test_replicas_are_read_from_cluster_state(tmp_path: Path) -> None:
    (tmp_path / "leader-1").mkdir()
    nodes = [
        {"name": "leader-1", "role": "leader", "dir": str(tmp_path / "leader-1")},
        {"name": "consumer-1", "role": "consumer", "dir": str(tmp_path / "consumer-1")},
    ]
    (tmp_path / "cluster.json").write_text(f'{{"nodes": {nodes}}}'.replace("'", '"'))
    assert replicas_of_cluster(tmp_path) == [("leader-1", str(tmp_path / "leader-1"))]
    (tmp_path / "cluster.json").write_text("{")
    with pytest.raises(JobError, match=r"--mesh .*cluster\.json cannot be read"):
        replicas_of_cluster(tmp_path)


def test_tasks_are_limited_by_bytes_and_files() -> None:
    assert list(tasks_of([5, 5, 20, 1, 1, 1, 1], 10, 3)) == [[0, 1], [2], [3, 4, 5], [6]]
    assert list(tasks_of([], 10, 3)) == []


def test_audit_changes_no_file(tmp_path: Path) -> None:
    segments = write_log(tmp_path)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()}
    for path in before:
        path.chmod(0o444)
    take_inventory([("a", str(tmp_path))])
    for segment in segments:
        rows_of(segment)
    assert before == {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()
    }


# -- snapshots


def write_snapshot(directory: Path, values: Sequence[bytes], *, now_ms: int = NOW) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    writer = SnapshotStore(RealFileSystem(), str(directory)).create(
        SnapshotId(40, 2), last_contained_log_timestamp=NOW, now_ms=now_ms
    )
    for _ in writer.write(values):
        pass
    writer.freeze()
    return next(directory.glob("*.checkpoint"))


def snapshot_of(path: Path) -> dict[str, Any]:
    return snapshot_row(FileToRead("a", "__cluster_metadata", 0, str(path), 40, path.stat().st_size, False, 0, 2))


def test_snapshot_digest_depends_on_records_only(tmp_path: Path) -> None:
    first = snapshot_of(write_snapshot(tmp_path / "a", [b"x", b"y", b"z"]))
    second = snapshot_of(write_snapshot(tmp_path / "b", [b"z", b"x", b"y"], now_ms=NOW + 5))
    third = snapshot_of(write_snapshot(tmp_path / "c", [b"x", b"y", b"y"]))
    assert first["records"] == second["records"] == third["records"] == 3
    assert first["digest"] == second["digest"]
    assert first["digest"] != third["digest"]
    assert "damage" not in first


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_damaged_snapshot_yields_row_with_damage(tmp_path: Path, damage: str) -> None:
    path = write_snapshot(tmp_path, [b"x" * 50] * 20)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"flip": bytes(data), "cut": bytes(data[:-80]), "empty": b"", "gone": b""}[damage])
    file = FileToRead("a", "__cluster_metadata", 0, str(path), 40, len(data), False, 0, 2)
    if damage == "gone":
        path.unlink()
    row = snapshot_row(file)
    assert row["damage"] == ("vanished" if damage == "gone" else GARBAGE)
    assert row["text"]


def test_latest_snapshot_sets_high_watermark_of_metadata_log(tmp_path: Path) -> None:
    write_log(tmp_path, "__cluster_metadata")
    path = write_snapshot(tmp_path / "__cluster_metadata-0", [b"x"])
    (path.parent / f"{7:020d}-{1:010d}.checkpoint.corrupt").write_bytes(b"")
    inventory: Inventory = take_inventory([("a", str(tmp_path))])
    assert inventory.logs[0].high_watermark == 40
    assert [problem.kind for problem in inventory.problems] == ["snapshot_aside"]


# -- data source and command


def test_data_source_plans_tasks_and_reads_arrow_batches(tmp_path: Path) -> None:
    write_log(tmp_path)
    options = {"replicas": f'["a={tmp_path}"]', "content": "segments", "records": "none", "topics": ""}
    (task,) = plan_tasks(options)
    (batch,) = SegmentsReader(options).read(task)
    assert batch.num_rows == 12
    assert batch.schema.names == COLUMNS


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({}, "replicas"),
        ({"replicas": "a=b"}, "replicas"),
        ({"replicas": '["a=b"]', "content": "indexes"}, "content"),
        ({"replicas": '["a=b"]', "records": "some"}, "records"),
        ({"replicas": '["a=b"]', "topic": "t"}, "topic"),
    ],
)
def test_data_source_rejects_invalid_options(options: dict[str, str], option: str) -> None:
    with pytest.raises(JobError, match=option):
        SegmentsDataSource(options).schema()


def test_each_kind_of_finding_has_severity_and_all_columns() -> None:
    names = [part.split()[0] for part in SCHEMA.replace("\n", "").split(",")]
    for kind in KINDS:
        row = Finding(kind, "a", "t", 0, 1, "file", "text").row()
        assert sorted(row) == sorted(names)
        assert row["severity"] in ("error", "warning")
    assert Options().replicas is None
