"""Several data directories: placement of new logs, and failing disks."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID
from kipmesh.storage import Log, LogManager, RealFileSystem, StorageError, checkpoint
from kipmesh.storage.fs import FileSystem, read_file, write_file
from kipmesh.testing import produced_batch
from simulation.faulty_fs import FaultyFileSystem

NOW = 1_700_000_000_000
ID, OTHER_ID = bytes(range(16)), bytes(range(1, 17))
CONFIG = TopicConfig()


def start(fs: FileSystem, *paths: str, **options: Any) -> LogManager:
    manager = LogManager(fs, paths or ("/a", "/b", "/c"), cluster_id="cluster", node_id=1, defaults=CONFIG, **options)
    manager.load(NOW)
    return manager


def append(log: Log, count: int = 1) -> None:
    for _ in range(count):
        log.append_as_leader(produced_batch([b"v" * 100], timestamp_ms=NOW), 0, NOW)


def create(manager: LogManager, count: int) -> list[Log]:
    return [manager.create("t", partition, ID, CONFIG, NOW) for partition in range(count)]


def online(manager: LogManager) -> list[str]:
    return [directory.path for directory in manager.directories.online]


def test_new_logs_go_to_directory_with_fewest_logs(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "abc"]
    manager = start(RealFileSystem(), *paths)
    logs = create(manager, 7)
    manager.create(CLUSTER_METADATA_TOPIC, 0, CLUSTER_METADATA_TOPIC_ID, CONFIG, NOW)
    counts = {path: sum(log.dir.startswith(path) for log in logs) for path in paths}
    assert sorted(counts.values()) == [2, 2, 3]
    assert (tmp_path / "a" / "__cluster_metadata-0").is_dir()
    for log in logs:
        append(log, 2)
    manager.checkpoint_high_watermarks({("t", partition): 1 for partition in range(7)})
    manager.close(9)
    for path in paths:
        offsets = checkpoint.read_offsets(RealFileSystem(), f"{path}/recovery-point-offset-checkpoint")
        mine = {("t", log.partition): 2 for log in logs if log.dir.startswith(path)}
        assert {key: value for key, value in offsets.items() if key[0] == "t"} == mine
        assert (tmp_path / path / ".kafka_cleanshutdown").exists()
    properties = [checkpoint.read_meta_properties(RealFileSystem(), path) for path in paths]
    ids = {each.directory_id for each in properties if each is not None}
    assert len(ids) == 3
    manager = start(RealFileSystem(), *paths)
    assert manager.clean_shutdown_epoch == 9
    assert {checkpoint.uuid_text(directory.directory_id) for directory in manager.directories} == ids
    assert manager.high_watermarks.get(("t", 6), 0) == 1
    manager.close(9)


def test_metadata_directory_gets_no_other_log() -> None:
    fs = FaultyFileSystem()
    manager = start(fs, "/a", "/b", metadata_dir="/m/")
    metadata = manager.create(CLUSTER_METADATA_TOPIC, 0, CLUSTER_METADATA_TOPIC_ID, CONFIG, NOW)
    assert metadata.dir == "/m/__cluster_metadata-0"
    assert {log.dir[:2] for log in create(manager, 8)} == {"/a", "/b"}
    manager.close(1)
    manager = start(fs, "/a", "/m", "/b")  # an existing metadata log is not moved
    assert manager.directories.metadata_path == "/m"
    manager.close(1)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("/a", "/a/"), "none twice, got '/a, /a'"),
        (("/a", "/b/../a"), "none twice, got '/a, /b/../a'"),
        (("/a", "/a/b"), "log.dirs must not be nested, but /a/b is inside /a"),
        (("/c/d//e/", "/b", "/c"), "log.dirs must not be nested, but /c/d//e is inside /c"),
        (("x/../data", "data/b"), "log.dirs must not be nested, but data/b is inside x/../data"),
        (("/a", "/"), "log.dirs must not be nested, but /a is inside /"),
    ],
)
def test_repeated_and_nested_directories_are_rejected(paths: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"{message}$"):
        start(FaultyFileSystem(), *paths)


def test_directories_with_common_name_prefix_are_not_nested() -> None:
    start(FaultyFileSystem(), "/a", "/ab", "/b/a").close(1)


def test_all_logs_in_two_directories_are_named_in_one_error() -> None:
    fs = FaultyFileSystem()
    manager = start(fs, "/a", "/b")
    create(manager, 4)
    manager.close(1)
    for path in ("/a/t-1", "/a/t-3", "/b/t-0", "/b/t-2", "/b/u-0"):
        fs.make_dirs(path)
    with pytest.raises(StorageError) as refused:
        start(fs, "/a", "/b")
    assert refused.value.message == (
        "logs are in more than one data directory: t-0 in /a and /b, t-1 in /a and /b, t-2 in /a and /b, t-3 in /a and "
        "/b; move all but the newest copy of each elsewhere, restart, and delete them when these partitions are in sync"
    )
    for path in ("/a/t-1", "/a/t-3", "/b/t-0", "/b/t-2"):
        fs.remove_tree(path)
    start(fs, "/a", "/b").close(2)


@pytest.mark.parametrize("is_mount_point_left", [False, True])
@pytest.mark.parametrize(
    "notice",
    [
        lambda manager: manager.checkpoint_high_watermarks({("t", 0): 1, ("t", 1): 1}),
        lambda manager: manager.checkpoint_recovery_points(),
        lambda manager: manager.checkpoint_log_starts(),
        lambda manager: manager.create("u", 0, OTHER_ID, CONFIG, NOW),
    ],
    ids=["high watermarks", "recovery points", "log starts", "a new log"],
)
def test_missing_directory_goes_offline_and_is_not_recreated(
    tmp_path: Path, notice: Callable[[LogManager], object], is_mount_point_left: bool
) -> None:
    """After `rm -r` or `umount -l`, the open files of the logs still accept writes."""
    reported: list[tuple[str, StorageError]] = []
    paths = [str(tmp_path / name) for name in "ab"]
    manager = start(RealFileSystem(), *paths, on_directory_failed=lambda path, error: reported.append((path, error)))
    logs = create(manager, 2)
    for log in logs:
        append(log)
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    if is_mount_point_left:
        (tmp_path / "a").mkdir()
    append(logs[0])
    assert reported == []
    with pytest.raises(StorageError, match=r"the data directory is missing|cannot sync t-0"):
        notice(manager)
    assert {path for path, _ in reported} == {paths[0]}
    manager.take_offline(*reported[0])
    with pytest.raises(StorageError):
        append(logs[0])
    append(logs[1])
    assert manager.create("u", 0, OTHER_ID, CONFIG, NOW).dir == f"{paths[1]}/u-0"
    manager.checkpoint_high_watermarks({("t", 1): 1})
    manager.close(1)
    assert (list((tmp_path / "a").iterdir()) if is_mount_point_left else (tmp_path / "a").exists()) in ([], False)


@pytest.mark.parametrize("operation", ["write", "read", "sync"])
def test_logs_of_failed_directory_go_offline(operation: str) -> None:
    fs = FaultyFileSystem()
    reported: list[tuple[str, StorageError]] = []
    manager = start(fs, on_directory_failed=lambda path, error: reported.append((path, error)))
    logs = create(manager, 6)
    for log in logs:
        append(log)
    manager.checkpoint_high_watermarks({("t", log.partition): 1 for log in logs})
    bad = logs[1]
    path = bad.dir.rpartition("/")[0]
    fs.fail(operation, path=bad.dir)
    act: Callable[[], object] = {
        "write": lambda: append(bad),
        "read": lambda: bad.read(0, 1000, 1, True),
        "sync": bad.flush,
    }[operation]
    with pytest.raises(StorageError) as failure:
        act()
    assert [where for where, _ in reported] == [path]
    manager.take_offline(path, failure.value)
    manager.take_offline(path, failure.value)
    lost = [log for log in logs if log.dir.startswith(path)]
    assert len(lost) == 2
    for log in lost:
        with pytest.raises(StorageError):
            append(log)
        with pytest.raises(StorageError, match="offline data directory"):  # not recreated elsewhere
            manager.create("t", log.partition, ID, CONFIG, NOW)
    assert manager.create("t", lost[0].partition, OTHER_ID, CONFIG, NOW).log_end_offset == 0  # another topic id
    for log in logs:
        if log not in lost:
            append(log)
    fs.fail("write", path=path, times=1000)
    manager.checkpoint_recovery_points()
    manager.checkpoint_log_starts()
    manager.checkpoint_high_watermarks({("t", log.partition): 2 for log in logs})
    assert {manager.create("u", number, ID, CONFIG, NOW).dir.startswith(path) for number in range(6)} == {False}
    manager.close(4)
    fs.faults.clear()
    manager = start(fs, *[other for other in ("/a", "/b", "/c") if other != path])
    assert manager.clean_shutdown_epoch == 4
    manager.close(4)


def test_failed_directory_is_unclean_and_recovered_at_next_start() -> None:
    fs = FaultyFileSystem()
    manager = start(fs)
    logs = create(manager, 3)
    for log in logs:
        append(log, 3)
        log.flush()
    manager.checkpoint_recovery_points()
    path = logs[2].dir.rpartition("/")[0]
    manager.take_offline(path, StorageError("gone"))
    assert [directory.path for directory in manager.directories if not directory.is_online] == [path]
    manager.close(7)
    manager = start(fs)
    assert manager.clean_shutdown_epoch == -1
    assert manager.logs["t", 2].log_end_offset == 3
    manager.close(7)


def test_failed_checkpoint_does_not_prevent_those_of_other_directories() -> None:
    fs = FaultyFileSystem()
    reported: list[str] = []
    manager = start(fs, on_directory_failed=lambda path, error: reported.append(path))
    logs = create(manager, 3)
    for log in logs:
        append(log)
        log.flush()
    manager.checkpoint_recovery_points()
    for code, expected in ((errno.ENOSPC, []), (errno.EROFS, ["/a"])):
        fs.fail("write", code, path="/a/recovery-point")
        append(logs[1])
        append(logs[2])
        logs[1].flush()
        logs[2].flush()
        with pytest.raises(StorageError, match="cannot write recovery-point-offset-checkpoint"):
            manager.checkpoint_recovery_points()
        assert reported == expected
        for log in logs[1:]:
            directory = log.dir.rpartition("/")[0]
            offsets = checkpoint.read_offsets(fs, f"{directory}/recovery-point-offset-checkpoint")
            assert offsets["t", log.partition] == log.log_end_offset
    manager.abandon()


def test_failed_creation_reports_broken_directory() -> None:
    fs = FaultyFileSystem()
    reported: list[tuple[str, StorageError]] = []
    manager = start(fs, on_directory_failed=lambda path, error: reported.append((path, error)))
    fs.fail("open", path="/a/t-0")
    with pytest.raises(StorageError):
        manager.create("t", 0, ID, CONFIG, NOW)
    assert [path for path, _ in reported] == ["/a"]
    manager.take_offline(*reported[0])
    assert manager.create("t", 0, ID, CONFIG, NOW).dir in ("/b/t-0", "/c/t-0")
    manager.take_offline("/b", StorageError("gone"))
    manager.take_offline("/c", StorageError("gone"))
    with pytest.raises(StorageError, match="no data directory is online"):
        manager.create("t", 1, ID, CONFIG, NOW)
    manager.close(1)


def test_failed_creation_in_full_directory_leaves_no_files() -> None:
    """The next attempt may use another directory, and a log in two directories prevents a start."""
    fs = FaultyFileSystem()
    manager = start(fs, "/a", "/b")
    fs.fail("write", errno.ENOSPC, path="/a/t-0")
    with pytest.raises(StorageError, match="cannot load t-0"):
        manager.create("t", 0, ID, CONFIG, NOW)
    assert "t-0" not in fs.list_dir("/a")
    assert manager.create("u", 0, OTHER_ID, CONFIG, NOW).dir == "/a/u-0"
    log = manager.create("t", 0, ID, CONFIG, NOW)
    assert log.dir == "/b/t-0"
    append(log)
    manager.close(1)
    manager = start(fs, "/a", "/b")
    assert {where: log.dir for where, log in manager.logs.items()} == {("t", 0): "/b/t-0", ("u", 0): "/a/u-0"}
    manager.close(2)


@pytest.mark.parametrize(("operation", "path"), [("open", "/b/meta"), ("list", "/b"), ("read", "/b/t-")])
def test_directory_that_cannot_be_loaded_stays_offline(operation: str, path: str) -> None:
    fs = FaultyFileSystem()
    manager = start(fs)
    for log in create(manager, 6):
        append(log)
        log.flush()
    manager.checkpoint_recovery_points()
    fs.sync_dir("/")
    there = {log.partition for log in manager.logs.values() if log.dir.startswith("/b")}
    manager.abandon()
    fs.fail(operation, path=path)
    manager = start(fs)
    assert online(manager) == ["/a", "/c"]
    assert manager.clean_shutdown_epoch == -1
    assert {partition for _, partition in manager.logs} == set(range(6)) - there
    (left_out,) = [directory for directory in manager.directories if not directory.is_online]
    assert "cannot load data directory" in str(left_out.error)
    manager.close(3)
    manager = start(fs)
    assert len(manager.logs) == 6
    assert manager.clean_shutdown_epoch == -1
    manager.close(3)


def test_load_fails_without_metadata_directory() -> None:
    fs = FaultyFileSystem()
    manager = start(fs, metadata_dir="/b")
    manager.create(CLUSTER_METADATA_TOPIC, 0, CLUSTER_METADATA_TOPIC_ID, CONFIG, NOW)
    manager.close(1)
    fs.fail("list", path="/b")
    with pytest.raises(StorageError, match="cannot load data directories"):
        start(fs, metadata_dir="/b")
    manager = start(fs, metadata_dir="/b")  # the failed start released the other directories
    manager.close(1)


def test_directory_without_id_gets_one() -> None:
    fs = FaultyFileSystem()
    fs.make_dirs("/a")
    write_file(fs, "/a/meta.properties", b"cluster.id=cluster\nnode.id=1\nversion=1\n", sync=True)
    manager = start(fs, "/a")
    (directory,) = manager.directories
    assert len(directory.directory_id) == 16
    assert checkpoint.uuid_text(directory.directory_id).encode() in read_file(fs, "/a/meta.properties")
    manager.close(1)
