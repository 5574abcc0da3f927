"""`kipmesh snapshot dump`, and `kipmesh log dump` of a metadata log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kipmesh.cli.common import CommandError
from kipmesh.cli.main import app
from kipmesh.core import record_batch
from kipmesh.core.control_records import LeaderChange, encode_leader_change
from kipmesh.core.metadata import records as r
from kipmesh.messages import SnapshotId
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.quorum.snapshots import SnapshotStore


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    store = SnapshotStore(RealFileSystem(), str(tmp_path))
    writer = store.create(SnapshotId(10, 2), last_contained_log_timestamp=5, now_ms=7)
    writer.append([r.encode_record(r.TopicRecord("t", bytes(16))), r.encode_record(r.NoOpRecord())])
    writer.freeze()
    (file,) = tmp_path.iterdir()
    return file


def dump(*arguments: str | Path) -> tuple[int, list[dict[str, Any]], Exception | None]:
    done = CliRunner().invoke(app, [str(argument) for argument in (*arguments, "--json")])
    error = done.exception if isinstance(done.exception, Exception) else None
    return done.exit_code, [json.loads(line) for line in done.stdout.splitlines()], error


def test_snapshot_dump_decodes_records(snapshot: Path) -> None:
    code, lines, _ = dump("snapshot", "dump", snapshot)
    assert code == 0
    header, control, batch, topic, noop, footer, end = lines
    assert (header["is_control"], batch["is_control"], footer["is_control"]) == (True, False, True)
    assert control["control"] == {
        "type": "SNAPSHOT_HEADER",
        "data": {"version": 0, "last_contained_log_timestamp": 5},
    }
    assert topic["payload"] == {"type": "TopicRecord", "data": {"name": "t", "topic_id": "A" * 22}}
    assert noop["payload"] == {"type": "NoOpRecord", "data": {}}
    assert end["control"] == {"type": "SNAPSHOT_FOOTER", "data": {"version": 0}}
    code, lines, _ = dump("snapshot", "dump", snapshot, "--batches")
    assert (code, lines) == (0, [header, batch, footer])


def test_log_dump_reads_snapshots(snapshot: Path) -> None:
    code, lines, _ = dump("log", "dump", snapshot)
    assert code == 0
    assert lines == dump("snapshot", "dump", snapshot)[1]


def test_snapshot_dump_reports_damaged_files(snapshot: Path) -> None:
    whole = snapshot.read_bytes()
    footer = [position for position, _ in record_batch.iterate(whole)][-1]
    snapshot.write_bytes(whole[:footer])
    code, lines, error = dump("snapshot", "dump", snapshot)
    assert (code, len(lines)) == (1, 5)
    assert isinstance(error, CommandError)
    assert str(error).endswith(f"snapshot {snapshot.name}: it does not end with a footer")
    snapshot.write_bytes(whole[:-1])
    code, lines, _ = dump("snapshot", "dump", snapshot)
    assert code == 1
    assert "error" in lines[-1]
    snapshot.write_bytes(b"")
    assert dump("snapshot", "dump", snapshot)[0] == 1
    assert isinstance(dump("snapshot", "dump", snapshot.with_name("none"))[2], CommandError)


def test_log_dump_decodes_metadata_log(tmp_path: Path) -> None:
    directory = tmp_path / "__cluster_metadata-0"
    directory.mkdir()
    change = record_batch.build(
        [
            encode_leader_change(LeaderChange(1002, (1001, 1002, 1003), (1001, 1002))),
            (b"\0\0\0\2", b"\0\0"),
            (b"\0\0\0\x63", b"x"),
            (b"", b""),
        ],
        base_offset=0,
        leader_epoch=1,
        timestamp_ms=1,
        is_control=True,
    )
    batch = record_batch.build(
        [(None, r.encode_record(r.NoOpRecord())), (None, b"\1\x7f\0")], base_offset=4, leader_epoch=1, timestamp_ms=1
    )
    file = directory / "00000000000000000000.log"
    file.write_bytes(change + batch)
    code, lines, _ = dump("log", "dump", file)
    assert code == 0
    assert dump("log", "dump", file, "--print-records")[1] == lines
    assert dump("log", "dump", file, "--batches")[1] == [line for line in lines if "base_offset" in line]
    controls = [line["control"] for line in lines if "control" in line]
    assert controls == [
        {
            "type": "LEADER_CHANGE",
            "data": {"leader_id": 1002, "voters": [1001, 1002, 1003], "granting_voters": [1001, 1002]},
        },
        {"error": controls[1]["error"]},
        {"type": "99", "value": "eA"},
        {"error": "control record key must have at least 4 bytes, got 0"},
    ]
    assert "invalid control record: LeaderChangeMessage" in str(controls[1]["error"])
    payloads = [line["payload"] for line in lines if "payload" in line]
    assert payloads == [
        {"type": "NoOpRecord", "data": {}},
        {"error": "unknown metadata record: type 127 (unknown type) version 0"},
    ]
