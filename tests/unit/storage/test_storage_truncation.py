"""Truncation of a log during flushes and searches on other threads, and its durability."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import pytest

from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.storage import Log, LogManager, OpenFiles, StorageError, checkpoint, open_log
from kipmesh.storage.fs import File
from kipmesh.storage.log.segment import Segment
from kipmesh.testing import produced_batch
from simulation.faulty_fs import FaultyFileSystem

NOW = 1_700_000_000_000
DIRECTORY = "/data/t-0"
ID = bytes(range(16))
RECOVERY_POINTS = "/data/recovery-point-offset-checkpoint"


class HookedFileSystem(FaultyFileSystem):
    """Runs a function once, on another thread, before or after the next operation on a path."""

    def __init__(self) -> None:
        super().__init__()
        self._hook: tuple[str, str, Callable[[], object]] | None = None
        self.make_dirs("/data")
        self.sync_dir("/")
        self.errors: list[Exception] = []

    def meanwhile(self, operation: str, path: str, work: Callable[[], object]) -> None:
        self._hook = (operation, path, work)

    def _run(self, operation: str, path: str) -> None:
        if self._hook is None or self._hook[0] != operation or self._hook[1] not in path:
            return
        work, self._hook = self._hook[2], None

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                self.errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    def remove(self, path: str) -> None:
        self._run("before remove", path)
        super().remove(path)
        self._run("after remove", path)

    def rename(self, old: str, new: str) -> None:
        self._run("before rename", old)
        super().rename(old, new)
        self._run("after rename", old)

    def sync_dir(self, path: str) -> None:
        self._run("before sync_dir", path)
        super().sync_dir(path)


def make_log(fs: FaultyFileSystem, *, config: Mapping[str, object] | None = None, **options: Any) -> Log:
    keys = {"segment.bytes": 200, "index.interval.bytes": 100, **(config or {})}
    return open_log(fs, DIRECTORY, "t", 0, TopicConfig.parse(keys), NOW, topic_id=ID, **options)


def start(fs: FaultyFileSystem) -> LogManager:
    config = TopicConfig.parse({"segment.bytes": 200, "index.interval.bytes": 100})
    manager = LogManager(fs, ("/data",), cluster_id="cluster", node_id=1, defaults=config)
    manager.load(NOW)
    return manager


def append(log: Log, count: int = 1, *, epoch: int = 0, now_ms: int = NOW) -> None:
    for _ in range(count):
        log.append_as_leader(produced_batch([b"v" * 100], timestamp_ms=now_ms), epoch, now_ms)


def segment_path(base_offset: int, suffix: str = ".log") -> str:
    return f"{DIRECTORY}/{base_offset:020d}{suffix}"


@pytest.fixture
def fs() -> Iterator[HookedFileSystem]:
    fs = HookedFileSystem()
    yield fs
    assert fs.errors == []


# -- flush during a truncation


def opens_files(log: Log, others: str) -> None:
    """Open the log's files, as a concurrent search or flush does."""
    if others == "flush":
        log.flush()
        return
    with pytest.raises(KafkaError, match="being truncated"):
        log.max_timestamp_offset(99)
    for suffix in (".log", ".index", ".timeindex"):
        with contextlib.suppress(FileNotFoundError):
            log.files.get(segment_path(2, suffix))


@pytest.mark.parametrize("others", ["flush", "search"])
@pytest.mark.parametrize("moment", ["before remove", "after remove"])
@pytest.mark.parametrize("suffix", [".log", ".index", ".timeindex"])
def test_flush_during_truncation_keeps_no_removed_file_open(
    fs: HookedFileSystem, others: str, moment: str, suffix: str
) -> None:
    log = make_log(fs)
    append(log, 4)
    assert log.segment_base_offsets == (0, 1, 2, 3)
    fs.meanwhile(moment, segment_path(2, suffix), lambda: opens_files(log, others))
    log.truncate_to(1)
    assert log.recovery_point == 0
    append(log, 3, epoch=1)
    content = log.read(2, 1000, 9, True)
    log.flush()
    assert (log.recovery_point, log.segment_base_offsets) == (4, (0, 1, 2, 3))
    fs.crash()
    again = make_log(fs, recovery_point=4)
    assert again.log_end_offset == 4
    assert again.read(2, 1000, 9, True) == content


@pytest.mark.parametrize("moment", ["before rename", "after rename"])
def test_flush_during_retention_succeeds(fs: HookedFileSystem, moment: str) -> None:
    log = make_log(fs, config={"retention.bytes": 200})
    append(log, 5)
    fs.meanwhile(moment, segment_path(1), log.flush)
    assert log.run_retention(NOW, 5) == 3
    assert log.failed is None
    assert log.recovery_point == 3
    log.flush()
    assert log.recovery_point == 5


def test_flush_overtaken_by_truncation_does_not_advance_recovery_point(fs: HookedFileSystem) -> None:
    log = make_log(fs)
    append(log, 4)
    epochs = log.epochs

    def cut() -> None:
        log.truncate_to(1)
        append(log, 3, epoch=1)

    taken = log._snapshot

    def take() -> tuple[Sequence[Segment], int]:
        snapshot = taken()
        cut()
        return snapshot

    log.durability.flush(take, epochs)
    assert log.recovery_point == 0


def test_recreated_partition_uses_new_files(fs: HookedFileSystem) -> None:
    manager = start(fs)
    old = manager.create("t", 0, ID, TopicConfig(), NOW)
    append(old, 3)
    fs.meanwhile("before rename", DIRECTORY, lambda: old.files.get(segment_path(0)))
    manager.delete("t", 0, NOW)
    new = manager.create("t", 0, bytes(reversed(ID)), TopicConfig(), NOW)
    append(new, 2, epoch=7)
    new.flush()
    assert fs.list_dir(DIRECTORY)[segment_path(0).rpartition("/")[2]].size_bytes == new.size_bytes
    manager.abandon()


def test_deletion_waits_for_running_flush(fs: HookedFileSystem) -> None:
    manager = start(fs)
    old = manager.create("t", 0, ID, TopicConfig(), NOW)
    append(old, 3, epoch=7)
    entered, deleted = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert not deleted.wait(0.2)

    fs.meanwhile("before rename", "leader-epoch-checkpoint", slow)
    flush = threading.Thread(target=old.flush)
    flush.start()
    assert entered.wait(60)
    manager.delete("t", 0, NOW)
    deleted.set()
    flush.join(60)
    append(manager.create("t", 0, ID, TopicConfig(), NOW))
    old.epochs.assign(8, 3)
    old.durability.flush(old._snapshot, old.epochs)  # a flush requested before the deletion that starts after it
    assert not fs.exists(f"{DIRECTORY}/leader-epoch-checkpoint")
    manager.abandon()


def test_flush_makes_renames_of_truncation_durable(fs: HookedFileSystem) -> None:
    log = make_log(fs)
    append(log, 4)
    log.flush()
    log.truncate_to(2)
    log.flush()
    fs.crash()
    assert sorted(name for name in fs.list_dir(DIRECTORY) if name.endswith(".log")) == [
        f"{n:020d}.log" for n in range(3)
    ]


def test_flush_makes_first_segment_of_known_epoch_durable(fs: HookedFileSystem) -> None:
    log = make_log(fs)
    log.assign_epoch(0)
    log.flush()
    append(log)
    log.flush()
    fs.crash()
    assert make_log(fs, recovery_point=log.recovery_point).log_end_offset == 1


# -- the timer of flush.ms


def test_append_during_flush_restarts_flush_timer(fs: HookedFileSystem) -> None:
    log = make_log(fs, config={"flush.ms": 1000, "segment.bytes": 100_000})
    append(log)
    taken = log._snapshot

    def take() -> tuple[Sequence[Segment], int]:
        snapshot = taken()
        append(log, now_ms=NOW + 500)
        return snapshot

    log.durability.flush(take, log.epochs)
    assert (log.recovery_point, log.log_end_offset) == (1, 2)
    assert not log.needs_flush(NOW + 1499)
    assert log.needs_flush(NOW + 1500)


def test_void_flush_keeps_flush_timer(fs: HookedFileSystem) -> None:
    log = make_log(fs, config={"flush.ms": 1000, "segment.bytes": 100_000})
    append(log, 3)
    taken = log._snapshot

    def take() -> tuple[Sequence[Segment], int]:
        snapshot = taken()
        log.truncate_to(2)
        return snapshot

    log.durability.flush(take, log.epochs)
    assert log.recovery_point == 0
    assert log.needs_flush(NOW + 1000)


def test_full_disk_for_epoch_checkpoint_is_transient(fs: HookedFileSystem) -> None:
    log = make_log(fs, config={"flush.ms": 1000, "segment.bytes": 100_000})
    append(log)
    fs.fail("write", errno.ENOSPC, path="leader-epoch-checkpoint")
    with pytest.raises(StorageError, match="No space"):
        log.flush()
    assert (log.failed, log.recovery_point) == (None, 0)
    assert log.needs_flush(NOW + 1000)
    append(log)
    log.flush()
    assert log.recovery_point == 2
    append(log, epoch=1)
    fs.fail("write", path="leader-epoch-checkpoint")
    with pytest.raises(StorageError):
        log.flush()
    assert log.failed is not None


# -- the recovery point on disk


def test_lowered_recovery_point_is_checkpointed_once_before_next_append(fs: HookedFileSystem) -> None:
    manager = start(fs)
    logs = [manager.create("t", partition, ID, TopicConfig(), NOW) for partition in range(3)]
    for log in logs:
        append(log, 5)
        log.flush()
    manager.checkpoint_recovery_points()
    syncs = fs.syncs
    for log in logs:
        log.truncate_to(2)
    assert fs.syncs == syncs
    assert set(checkpoint.read_offsets(fs, RECOVERY_POINTS).values()) == {5}
    fs.fail("rename", errno.ENOSPC, path="recovery-point")
    with pytest.raises(StorageError, match="cannot write the recovery points"):
        append(logs[0])
    assert [(log.log_end_offset, log.failed) for log in logs] == [(2, None)] * 3
    syncs = fs.syncs
    for log in logs:
        log.append_as_follower(record_batch.assign(produced_batch([b"v"]), 2, 1), NOW)
    assert fs.syncs == syncs + 2  # the file and its directory, once for all logs
    assert set(checkpoint.read_offsets(fs, RECOVERY_POINTS).values()) == {2}
    manager.abandon()


def test_append_needs_no_checkpoint_after_that_of_the_manager(fs: HookedFileSystem) -> None:
    manager = start(fs)
    log = manager.create("t", 0, ID, TopicConfig(), NOW)
    append(log, 5)
    log.flush()
    log.truncate_to(2)
    fs.meanwhile("before rename", "recovery-point", lambda: log.truncate_to(1))
    manager.checkpoint_recovery_points()
    syncs = fs.syncs
    append(log)  # the second truncation came after the checkpoint had read its values
    assert fs.syncs == syncs + 2
    assert checkpoint.read_offsets(fs, RECOVERY_POINTS) == {("t", 0): 1}
    append(log)
    assert fs.syncs == syncs + 2
    manager.abandon()


def test_older_checkpoint_does_not_replace_newer_one(fs: HookedFileSystem) -> None:
    manager = start(fs)
    log = manager.create("t", 0, ID, TopicConfig(), NOW)
    append(log, 5)
    log.flush()
    second = threading.Thread(target=lambda: append(log))

    def cut_and_append() -> None:
        log.truncate_to(2)
        second.start()  # waits for the running checkpoint
        second.join(0.2)
        assert second.is_alive()

    fs.meanwhile("before rename", "recovery-point", cut_and_append)
    manager.checkpoint_recovery_points()
    second.join(60)
    assert checkpoint.read_offsets(fs, RECOVERY_POINTS) == {("t", 0): 2}
    manager.abandon()


@pytest.mark.parametrize("seed", range(20))
def test_power_failure_after_truncation_keeps_log_consistent(fs: HookedFileSystem, seed: int) -> None:
    manager = start(fs)
    log = manager.create("t", 0, ID, TopicConfig.parse({"segment.bytes": 400}), NOW)
    append(log, 9)
    log.flush()
    manager.checkpoint_recovery_points()
    log.truncate_to(4)
    if seed % 2:
        append(log, 7, epoch=1)
    manager.abandon()
    fs.crash(Random(seed))
    log = start(fs).logs["t", 0]
    assert log.log_end_offset >= 4
    offset, epochs = 0, []
    while offset < log.log_end_offset:
        for position, header in record_batch.iterate(data := log.read(offset, 1000, 99, True)):
            record_batch.check_crc(data, position, header)
            epochs.append(header.partition_leader_epoch)
            offset = header.next_offset
    assert epochs == sorted(epochs)


@pytest.mark.parametrize("is_killed", [False, True], ids=["one process", "killed and started again"])
@pytest.mark.parametrize("restarts", [False, True], ids=["cut", "begun anew"])
def test_truncated_records_are_not_below_high_watermark_after_power_failure(
    fs: HookedFileSystem, restarts: bool, is_killed: bool
) -> None:
    """The power failure drops everything written after the last sync."""
    manager = start(fs)
    log = manager.create("t", 0, ID, TopicConfig.parse({"segment.bytes": 400}), NOW)
    append(log, 9)
    manager.checkpoint_high_watermarks({("t", 0): 4})
    log.flush()
    manager.checkpoint_recovery_points()
    log.truncate_fully_and_start_at(4) if restarts else log.truncate_to(4)
    if is_killed:
        manager.abandon()
        manager = start(fs)
        log = manager.logs["t", 0]
    append(log, 5, epoch=1)
    manager.checkpoint_high_watermarks({("t", 0): 9})
    manager.abandon()
    fs.crash()
    manager = start(fs)
    log = manager.logs["t", 0]
    end = min(log.log_end_offset, manager.high_watermarks.get(("t", 0), 0))
    assert all(log.epochs.epoch_of(offset) == 1 for offset in range(4, end))


def test_high_watermark_is_not_raised_if_truncation_cannot_be_synced(fs: HookedFileSystem) -> None:
    manager = start(fs)
    log = manager.create("t", 0, ID, TopicConfig(), NOW)
    append(log, 9)
    manager.checkpoint_high_watermarks({("t", 0): 6})
    log.truncate_to(7)
    fs.fail("sync", path=".log")
    manager.checkpoint_high_watermarks({("t", 0): 7})
    assert manager.high_watermarks.get(("t", 0), 0) == 6
    assert log.failed is not None
    manager.checkpoint_high_watermarks({("t", 0): 5})  # a lower high watermark is always valid
    assert manager.high_watermarks.get(("t", 0), 0) == 5
    manager.abandon()


def test_batches_restored_after_truncation_are_removed(fs: HookedFileSystem) -> None:
    log = make_log(fs, config={"segment.bytes": 400})
    append(log, 9)
    bases = log.segment_base_offsets
    assert bases == (0, 2, 4, 6, 8)
    log.flush()
    kept = {name: read(fs, f"{DIRECTORY}/{name}") for name in fs.list_dir(DIRECTORY) if name.startswith(f"{4:020d}.")}
    log.truncate_to(3)
    log.abandon()
    for name, data in kept.items():
        fs.open(f"{DIRECTORY}/{name}", create=True).write_at(data, 0)
    again = make_log(fs, recovery_point=9)
    assert (again.log_end_offset, again.recovery_point, again.segment_base_offsets) == (3, 3, (0, 2))
    assert again.durability.is_checkpoint_stale
    append(again)
    assert not again.durability.is_checkpoint_stale


def read(fs: FaultyFileSystem, path: str) -> bytes:
    return fs.open(path).read_at(1 << 20, 0)


# -- durability after retention


def test_empty_active_segment_is_durable_before_retention_renames(fs: HookedFileSystem) -> None:
    log = make_log(fs, config={"retention.ms": 1000})
    append(log, 3)
    log.flush()
    successors: list[bool] = []

    def look() -> None:
        directory = fs._directory(DIRECTORY)
        successors.append(f"{3:020d}.log" in directory.durable)

    fs.meanwhile("before rename", segment_path(0), look)
    assert log.run_retention(NOW + 5000, 3) == 3
    assert successors == [True]


# -- searches on another thread


def test_search_interrupted_by_truncation_is_repeated(fs: HookedFileSystem) -> None:
    log = make_log(fs)
    for number in range(4):
        append(log, now_ms=NOW + number)
    found: list[object] = []

    class CuttingFiles(OpenFiles):
        def get(self, path: str, *, create: bool = False) -> File:
            if path == segment_path(2) and not found:
                found.append(None)
                log.truncate_to(1)
                append(log, now_ms=NOW + 5)
            return super().get(path, create=create)

    files = CuttingFiles(fs)
    for segment in log.segments.items:
        segment.files = files
    assert log.offset_for_timestamp(NOW + 2, 99) == (NOW + 5, 1, 0)
    assert log.failed is None


def test_search_fails_after_repeated_truncations(fs: HookedFileSystem) -> None:
    log = make_log(fs)
    append(log, 3)
    codes: list[ErrorCode] = []

    def search() -> None:
        with pytest.raises(KafkaError) as caught:
            log.max_timestamp_offset(3)
        codes.append(caught.value.code)

    fs.meanwhile("after remove", segment_path(2), search)
    log.truncate_to(1)
    assert codes == [ErrorCode.OFFSET_NOT_AVAILABLE]
    assert log.failed is None


def test_concurrent_searches_return_consistent_results() -> None:
    fs = FaultyFileSystem()
    fs.make_dirs("/data")
    log = make_log(fs, config={"segment.bytes": 4000, "index.interval.bytes": 0})
    append(log, 5)
    stop, problems, answers = threading.Event(), [], []

    def search() -> None:
        while not stop.is_set():
            try:
                answers.append((log.offset_for_timestamp(NOW, 5), log.max_timestamp_offset(5)))
            except KafkaError as error:
                if error.code != ErrorCode.OFFSET_NOT_AVAILABLE:
                    problems.append(error)

    thread = threading.Thread(target=search)
    thread.start()
    deadline = time.monotonic() + 60
    while not answers:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for round_number in range(30):
        for number in range(40):
            append(log, now_ms=NOW + number)
        log.truncate_to(5 + round_number % 3)
    stop.set()
    thread.join(60)
    assert problems == []
    assert set(answers) == {((NOW, 0, 0), (NOW, 0, 0))}
