"""Data directories of a node: ownership, partitions, checkpoints, stops and crashes."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError, ErrorCode, InvalidConfigError, KafkaError
from kipmesh.storage import Log, LogManager, RealFileSystem, StorageError, checkpoint
from kipmesh.storage.fs import FileSystem, read_file, write_file
from kipmesh.testing import produced_batch
from simulation.faulty_fs import FaultyFileSystem

NOW = 1_700_000_000_000
ID = bytes(range(16))
OTHER_ID = bytes(range(1, 17))
CONFIG = TopicConfig.parse({"segment.bytes": 2000, "file.delete.delay.ms": 1000})


def start(fs: FileSystem, *paths: str, **options: Any) -> LogManager:
    settings: dict[str, Any] = {"cluster_id": "cluster", "node_id": 1, "defaults": CONFIG, **options}
    manager = LogManager(fs, paths or ("/data",), **settings)
    manager.load(NOW)
    return manager


def append(log: Log, count: int = 1, epoch: int = 0) -> None:
    for _ in range(count):
        log.append_as_leader(produced_batch([b"v" * 100], timestamp_ms=NOW), epoch, NOW)


def durable_root(fs: FaultyFileSystem) -> FaultyFileSystem:
    fs.make_dirs("/data")
    fs.sync_dir("/")
    return fs


def test_files_of_data_directory_have_kafkas_format(tmp_path: Path) -> None:
    manager = start(RealFileSystem(), str(tmp_path))
    append(manager.create("flights", 3, ID, CONFIG, NOW), 40)
    manager.logs["flights", 3].increment_log_start_offset(2)
    manager.checkpoint_high_watermarks({("flights", 3): 38, ("gone", 0): 5})
    manager.close(17)
    assert (tmp_path / "flights-3" / "partition.metadata").read_text() == "version: 0\ntopic_id: AAECAwQFBgcICQoLDA0ODw"
    assert (tmp_path / "flights-3" / "leader-epoch-checkpoint").read_text() == "0\n1\n0 2\n"
    assert (tmp_path / "replication-offset-checkpoint").read_text() == "0\n1\nflights 3 38\n"
    assert (tmp_path / "recovery-point-offset-checkpoint").read_text() == "0\n1\nflights 3 40\n"
    assert (tmp_path / "log-start-offset-checkpoint").read_text() == "0\n1\nflights 3 2\n"
    assert json.loads((tmp_path / ".kafka_cleanshutdown").read_text()) == {"version": 0, "brokerEpoch": 17}
    properties = dict(
        line.split("=") for line in (tmp_path / "meta.properties").read_text().splitlines() if "=" in line
    )
    assert len(properties.pop("directory.id")) == 22
    assert properties == {"cluster.id": "cluster", "node.id": "1", "version": "1"}
    names = {path.name for path in (tmp_path / "flights-3").iterdir()}
    assert {f"{0:020d}.log", f"{0:020d}.index", f"{0:020d}.timeindex"} <= names
    assert not any(name.endswith(".tmp") for name in names)


def test_clean_stop_needs_no_recovery_and_unclean_stop_does() -> None:
    fs = durable_root(FaultyFileSystem())
    manager = start(fs)
    assert manager.clean_shutdown_epoch == -1
    append(manager.create("t", 0, ID, CONFIG, NOW), 50)
    manager.checkpoint_high_watermarks({("t", 0): 45})
    identity = read_file(fs, "/data/meta.properties")
    manager.close(5)
    fs.crash()  # a power failure after a clean stop loses nothing
    manager = start(fs)
    assert manager.clean_shutdown_epoch == 5
    assert read_file(fs, "/data/meta.properties") == identity
    log = manager.logs["t", 0]
    assert (log.log_end_offset, log.recovery_point, log.topic_id, log.latest_epoch) == (50, 50, ID, 0)
    assert manager.high_watermarks.get(("t", 0), 0) == 45
    append(log, 10, epoch=1)
    manager.abandon()
    manager = start(fs)
    assert manager.clean_shutdown_epoch == -1
    assert manager.logs["t", 0].log_end_offset == 60
    assert manager.logs["t", 0].recovery_point == 50
    manager.abandon()


def test_unclean_stop_in_one_of_two_data_directories() -> None:
    fs = FaultyFileSystem()
    manager = start(fs, "/a", "/b")
    for partition in range(6):
        append(manager.create("t", partition, ID, CONFIG, NOW))
    assert sum(log.dir.startswith("/a/") for log in manager.logs.values()) == 3
    bad = next(log for log in manager.logs.values() if log.dir.startswith("/a/"))
    fs.fail("sync", path=bad.dir)
    manager.close(9)
    assert not fs.exists("/a/.kafka_cleanshutdown")
    assert fs.exists("/b/.kafka_cleanshutdown")
    manager = start(fs, "/a", "/b")
    assert manager.clean_shutdown_epoch == -1
    assert len(manager.logs) == 6
    manager.close(9)


def test_load_reports_progress() -> None:
    fs = FaultyFileSystem()
    manager = start(fs)
    for partition in range(3):
        manager.create("t", partition, ID, CONFIG, NOW)
    manager.close(1)
    reported: list[tuple[int, int]] = []
    start(fs, on_progress=lambda *numbers: reported.append(numbers)).close(1)
    assert reported == [(1, 3), (2, 3), (3, 3)]


# -- ownership


def test_directory_of_other_cluster_or_node_is_rejected(tmp_path: Path) -> None:
    start(RealFileSystem(), str(tmp_path)).close(1)
    with pytest.raises(KafkaError, match=r"belongs to cluster 'cluster', but cluster.id is 'other'") as caught:
        start(RealFileSystem(), str(tmp_path), cluster_id="other")
    assert caught.value.code == ErrorCode.INCONSISTENT_CLUSTER_ID
    with pytest.raises(InvalidConfigError, match=r"belongs to node 1, but node\.id is 2"):
        start(RealFileSystem(), str(tmp_path), node_id=2)
    manager = start(RealFileSystem(), str(tmp_path))
    assert manager.clean_shutdown_epoch == 1  # the failed attempts changed nothing
    manager.close(1)


def test_incomplete_meta_properties_are_rejected() -> None:
    fs = FaultyFileSystem()
    fs.make_dirs("/data")
    write_file(fs, "/data/meta.properties", b"version=1\n", sync=True)
    with pytest.raises(CorruptRecordError, match="lacks"):
        start(fs)


def test_directory_is_locked_against_second_process(tmp_path: Path) -> None:
    script = (
        "import sys; from kipmesh.storage import *; from kipmesh.core.config import TopicConfig\n"
        "m = LogManager(RealFileSystem(), [sys.argv[1]], cluster_id='cluster', node_id=1, defaults=TopicConfig())\n"
        "m.load(0); print('loaded', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"loaded\n"
        with pytest.raises(StorageError, match="in use by another process"):
            start(RealFileSystem(), str(tmp_path))
        other.kill()
    first = start(RealFileSystem(), str(tmp_path))
    with pytest.raises(StorageError, match="in use"):
        start(RealFileSystem(), str(tmp_path))
    first.close(1)


# -- creating and deleting partitions


def test_create_returns_existing_log_and_rejects_other_topic_id() -> None:
    manager = start(FaultyFileSystem())
    log = manager.create("t", 0, ID, CONFIG, NOW)
    assert manager.create("t", 0, ID, TopicConfig(), NOW) is log
    assert log.config == TopicConfig()
    with pytest.raises(KafkaError) as caught:
        manager.create("t", 0, OTHER_ID, CONFIG, NOW)
    assert caught.value.code == ErrorCode.INCONSISTENT_TOPIC_ID
    manager.close(1)


def test_delete_renames_immediately_and_removes_later() -> None:
    fs = FaultyFileSystem()
    manager = start(fs)
    log = manager.create("t", 0, ID, CONFIG, NOW)
    append(log)
    manager.delete("t", 0, NOW)
    manager.delete("t", 0, NOW)
    assert manager.get("t", 0) is None
    with pytest.raises(KafkaError, match="closed"):
        append(log)
    with pytest.raises(KafkaError, match="closed"):
        log.read(0, 1, 1, True)
    directories = [name for name, stat in fs.list_dir("/data").items() if stat.is_dir]
    assert len(directories) == 1
    assert directories[0].endswith("-delete")
    assert manager.remove_deleted(NOW + 999) == 0
    again = manager.create("t", 0, OTHER_ID, CONFIG, NOW)
    assert again.log_end_offset == 0
    assert manager.remove_deleted(NOW + 1000) == 1
    manager.delete("t", 0, NOW)
    manager.close(1)
    manager = start(fs)
    assert not [name for name, stat in fs.list_dir("/data").items() if stat.is_dir]
    manager.close(1)


def test_set_aside_keeps_records() -> None:
    fs = FaultyFileSystem()
    manager = start(fs)
    append(manager.create("t", 0, ID, CONFIG, NOW), 3)
    path = manager.set_aside("t", 0)
    assert path is not None
    assert path.endswith("-stray")
    assert manager.set_aside("t", 0) is None
    assert manager.get("t", 0) is None
    assert manager.create("t", 0, OTHER_ID, CONFIG, NOW).log_end_offset == 0
    manager.remove_deleted(1 << 60)
    manager.close(1)
    manager = start(fs)
    assert list(manager.logs) == [("t", 0)]
    assert len(list(record_batch.iterate(read_file(fs, f"{path}/{0:020d}.log")))) == 3
    append(manager.logs["t", 0])
    fs.fail("rename")
    with pytest.raises(StorageError, match="cannot set t-0 aside"):
        manager.set_aside("t", 0)
    manager.close(1)


@pytest.mark.parametrize("operation", ["write", "read", "sync"])
def test_permanent_failure_is_reported_once(operation: str) -> None:
    fs = FaultyFileSystem()
    reported: list[tuple[Log, StorageError]] = []
    manager = start(fs, on_log_failed=lambda *failure: reported.append(failure))
    log = manager.create("t", 0, ID, CONFIG, NOW)
    append(log)
    fs.fail("write", errno.ENOSPC)
    with pytest.raises(StorageError):
        append(log)
    assert not reported  # a full disk is transient
    fs.fail(operation, path=".log")
    with pytest.raises(StorageError):
        {"write": lambda: append(log), "read": lambda: log.read(0, 1000, 1, True), "sync": log.flush}[operation]()
    with pytest.raises(StorageError):
        append(log)
    assert reported == [(log, log.failed)]
    manager.close(1)
    assert len(reported) == 1


def test_log_with_long_name_can_be_deleted(tmp_path: Path) -> None:
    manager = start(RealFileSystem(), str(tmp_path))
    manager.create("n" * 249, 0, ID, CONFIG, NOW)
    manager.delete("n" * 249, 0, NOW)
    assert manager.remove_deleted(NOW + 1000) == 1
    manager.close(1)


def test_recreated_partition_does_not_get_old_offsets() -> None:
    fs = durable_root(FaultyFileSystem())
    manager = start(fs)
    append(manager.create("t", 0, ID, CONFIG, NOW), 50)
    manager.logs["t", 0].flush()
    manager.logs["t", 0].increment_log_start_offset(40)
    manager.checkpoint_recovery_points()
    manager.checkpoint_log_starts()
    manager.checkpoint_high_watermarks({("t", 0): 50})
    manager.delete("t", 0, NOW)
    log = manager.create("t", 0, OTHER_ID, CONFIG, NOW)
    append(log, 5)
    manager.abandon()
    segment = fs.open(f"{log.dir}/{0:020d}.log")
    segment.truncate(segment.size() - 1)
    manager = start(fs)
    log = manager.logs["t", 0]
    assert (log.log_start_offset, log.log_end_offset, log.recovery_point) == (0, 4, 0)
    assert manager.high_watermarks.get(("t", 0), 0) == 0
    manager.abandon()


def test_new_partitions_are_not_synced_before_checkpoint() -> None:
    fs = durable_root(FaultyFileSystem())
    manager = start(fs)
    before = fs.syncs
    for partition in range(50):
        manager.create("t", partition, ID, CONFIG, NOW)
    assert fs.syncs == before
    manager.checkpoint_recovery_points()
    assert fs.syncs - before == 50 * 2 + 1 + 2
    fs.crash()
    manager = start(fs)
    assert {log.topic_id for log in manager.logs.values()} == {ID}
    assert len(manager.logs) == 50
    manager.abandon()


@pytest.mark.parametrize("records", [0, 3])
def test_log_that_lost_its_topic_id_is_reused_only_if_empty(records: int) -> None:
    fs = FaultyFileSystem()
    manager = start(fs)
    append(manager.create("t", 0, ID, CONFIG, NOW), records)
    manager.abandon()
    write_file(fs, "/data/t-0/partition.metadata", b"", sync=True)
    manager = start(fs)
    assert manager.logs["t", 0].topic_id == b""
    log = manager.create("t", 0, ID, CONFIG, NOW)
    assert (log.topic_id, log.log_end_offset) == (ID, 0)
    strays = [name for name in fs.list_dir("/data") if name.endswith("-stray")]
    assert len(strays) == (1 if records else 0)
    manager.close(1)
    manager = start(fs)
    assert manager.logs["t", 0].topic_id == ID
    manager.close(1)


def test_metadata_log_is_separate_from_other_logs() -> None:
    fs = FaultyFileSystem()
    manager = start(fs)
    log = manager.create("__cluster_metadata", 0, b"", CONFIG, NOW)
    append(log, 3)
    assert manager.get("__cluster_metadata", 0) is log
    assert not manager.logs
    assert log.topic_id == bytes(15) + b"\1"
    manager.close(1)
    manager = start(fs)
    loaded = manager.get("__cluster_metadata", 0)
    assert loaded is not None
    assert (loaded.log_end_offset, loaded.recovery_point) == (3, 3)
    manager.close(1)


# -- checkpoints


def test_truncation_below_recovery_point_rewrites_checkpoint() -> None:
    fs = durable_root(FaultyFileSystem())
    manager = start(fs)
    log = manager.create("t", 0, ID, CONFIG, NOW)
    append(log, 40)
    log.flush()
    manager.checkpoint_recovery_points()
    log.truncate_to(20)
    append(log)
    assert checkpoint.read_offsets(fs, "/data/recovery-point-offset-checkpoint") == {("t", 0): 20}
    manager.abandon()


def test_corrupt_checkpoint_only_causes_recovery() -> None:
    fs = FaultyFileSystem()
    manager = start(fs)
    append(manager.create("t", 0, ID, CONFIG, NOW), 40)
    manager.logs["t", 0].flush()
    manager.checkpoint_recovery_points()
    manager.abandon()
    write_file(fs, "/data/recovery-point-offset-checkpoint", b"0\n7\nt 0", sync=True)
    write_file(fs, "/data/t-0/leader-epoch-checkpoint", b"0\n1\nx y\n", sync=True)
    manager = start(fs)
    log = manager.logs["t", 0]
    assert (log.log_end_offset, log.recovery_point, log.epochs.entries) == (40, 0, ((0, 0),))
    manager.abandon()


@pytest.mark.parametrize(
    "content", [b"x\n", b"1\n0\n", b"0\n2\nt 0 1\n", b"0\n1\nt 0\n", b"0\n1\nt x 1\n", b"0\n1\n\xff 0 1\n"]
)
def test_corrupt_checkpoint_raises_error(content: bytes) -> None:
    fs = FaultyFileSystem()
    write_file(fs, "/c", content, sync=True)
    with pytest.raises(CorruptRecordError):
        checkpoint.read_offsets(fs, "/c")


def test_failed_checkpoint_write_keeps_old_content() -> None:
    for operation in ("open", "write", "sync", "rename", "sync_dir"):
        for torn_bytes in (0, 5):
            fs = FaultyFileSystem()
            checkpoint.write_offsets(fs, "/c", {("t", 0): 1})
            fs.fail(operation, errno.ENOSPC, torn_bytes=torn_bytes if operation == "write" else 0)
            with pytest.raises(OSError, match="No space"):
                checkpoint.write_offsets(fs, "/c", {("t", 0): 2})
            assert not fs.exists("/c.tmp")
            fs.crash()
            assert checkpoint.read_offsets(fs, "/c") == {("t", 0): 1}
            checkpoint.write_offsets(fs, "/c", {("t", 0): 3})
            assert checkpoint.read_offsets(fs, "/c") == {("t", 0): 3}


def test_failed_checkpoint_raises_storage_error() -> None:
    fs = FaultyFileSystem()
    manager = start(fs)
    manager.create("t", 0, ID, CONFIG, NOW)
    writes: list[Callable[[], object]] = [
        lambda: manager.checkpoint_high_watermarks({("t", 0): 1}),
        manager.checkpoint_recovery_points,
        manager.checkpoint_log_starts,
    ]
    for write in writes:
        fs.fail("rename", errno.ENOSPC)
        with pytest.raises(StorageError):
            write()
        write()
    fs.fail("open", errno.ENOSPC, path="partition.metadata")
    with pytest.raises(StorageError):
        manager.create("t", 1, ID, CONFIG, NOW)
    assert manager.create("t", 1, ID, CONFIG, NOW).topic_id == ID
    manager.close(1)


def test_unreadable_clean_shutdown_marker_means_clean_stop_with_unknown_epoch() -> None:
    fs = FaultyFileSystem()
    start(fs).close(3)
    write_file(fs, "/data/.kafka_cleanshutdown", b"", sync=True)
    manager = start(fs)
    assert manager.clean_shutdown_epoch == -1
    assert not fs.exists("/data/.kafka_cleanshutdown")
    manager.close(3)
    assert read_file(fs, "/data/.kafka_cleanshutdown") == b'{"version":0,"brokerEpoch":3}'


def test_open_files_of_manager_are_limited() -> None:
    fs = FaultyFileSystem()
    manager = start(fs, open_files_max=10)
    for partition in range(40):
        append(manager.create("t", partition, ID, CONFIG, NOW), 30)
        assert fs.open_files <= 11
    manager.close(1)
    assert fs.open_files == 0


def test_unreadable_data_directory_raises_storage_error() -> None:
    fs = FaultyFileSystem()
    start(fs).close(1)
    fs.fail("list")
    with pytest.raises(StorageError, match="cannot load data directories /data"):
        start(fs)
    start(fs).close(1)
