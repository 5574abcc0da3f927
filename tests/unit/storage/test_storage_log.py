"""Single cases of one log: rejected batches and disk failures."""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.storage import Log, OpenFiles, RealFileSystem, StorageError, open_log
from kipmesh.storage.fs import File
from kipmesh.storage.log.validation import AppendInfo
from kipmesh.testing import produced_batch
from simulation.faulty_fs import FaultyFileSystem

NOW = 1_700_000_000_000
DIRECTORY = "/data/t-0"
LOG_FILE = f"{DIRECTORY}/{0:020d}.log"


def make_fs(**options: int) -> FaultyFileSystem:
    fs = FaultyFileSystem(**options)
    fs.make_dirs("/data")
    fs.sync_dir("/")
    return fs


def make_log(fs: FaultyFileSystem, *, config: Mapping[str, object] | None = None, **options: Any) -> Log:
    keys = {"segment.bytes": 2000, "index.interval.bytes": 100, **(config or {})}
    return open_log(fs, DIRECTORY, "t", 0, TopicConfig.parse(keys), NOW, topic_id=b"i" * 16, **options)


def append(log: Log, count: int = 1, *, size: int = 100, epoch: int = 0, now_ms: int = NOW) -> int:
    return log.append_as_leader(produced_batch([b"v" * size] * count, timestamp_ms=now_ms), epoch, now_ms).last_offset


def everything(log: Log) -> bytes:
    data, offset = b"", log.log_start_offset
    while offset < log.log_end_offset:
        part = log.read(offset, 1 << 20, 1 << 60, True)
        data += part
        offset = list(record_batch.iterate(part))[-1][1].next_offset
    return data


def seal(batch: bytes) -> bytes:
    """Return the batch with a valid CRC."""
    return batch[:17] + struct.pack(">I", crc32c(batch[21:])) + batch[21:]


# -- rejected batches


def patched(position: int, data: bytes) -> bytes:
    batch = produced_batch([b"v"] * 3, timestamp_ms=NOW)
    return seal(batch[:position] + data + batch[position + len(data) :])


@pytest.mark.parametrize(
    ("batch", "code"),
    [
        (b"", ErrorCode.CORRUPT_MESSAGE),
        (produced_batch([b"v"])[:-1], ErrorCode.CORRUPT_MESSAGE),
        (produced_batch([b"v"])[:-1] + b"w", ErrorCode.CORRUPT_MESSAGE),
        (patched(16, b"\x01"), ErrorCode.CORRUPT_MESSAGE),
        (produced_batch([b"v"]) * 2, ErrorCode.INVALID_RECORD),
        (produced_batch([b"v" * 1500]), ErrorCode.MESSAGE_TOO_LARGE),
        (patched(23, b"\0\0\0\1"), ErrorCode.INVALID_RECORD),
        (patched(57, b"\0\0\0\4"), ErrorCode.INVALID_RECORD),
        (patched(57, b"\xff\xff\xff\xff"), ErrorCode.INVALID_RECORD),
        (patched(21, b"\0\x20"), ErrorCode.INVALID_RECORD),
        (patched(21, b"\0\x08"), ErrorCode.INVALID_TIMESTAMP),
        (patched(21, b"\0\x07"), ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        (patched(0, b"\0\0\0\0\0\0\0\1"), ErrorCode.INVALID_RECORD),
        (produced_batch([b"v"], timestamp_ms=NOW + 3_600_001), ErrorCode.INVALID_TIMESTAMP),
        (produced_batch([b"v"], timestamp_ms=NOW - 1001), ErrorCode.INVALID_TIMESTAMP),
    ],
)
def test_leader_rejects_invalid_batch(batch: bytes, code: ErrorCode) -> None:
    log = make_log(make_fs(), config={"max.message.bytes": 1000, "message.timestamp.before.max.ms": 1000})
    with pytest.raises(KafkaError) as caught:
        log.append_as_leader(batch, 0, NOW)
    assert caught.value.code == code
    assert log.log_end_offset == log.size_bytes == 0
    assert append(log) == 0


def test_batch_larger_than_segment_is_rejected() -> None:
    with pytest.raises(KafkaError) as caught:
        append(make_log(make_fs()), size=3000)
    assert caught.value.code == ErrorCode.RECORD_LIST_TOO_LARGE


def test_older_leader_epoch_is_rejected() -> None:
    log = make_log(make_fs())
    append(log, epoch=4)
    with pytest.raises(KafkaError) as caught:
        append(log, epoch=3)
    assert caught.value.code == ErrorCode.FENCED_LEADER_EPOCH


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_batches_raise_nothing_but_kafka_errors(data: st.DataObject) -> None:
    log = make_log(make_fs())
    batch = bytearray(produced_batch([b"v" * 50] * data.draw(st.integers(1, 3)), timestamp_ms=NOW))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, min(len(batch) - 1, 70)))
        batch[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        batch = batch[: data.draw(st.integers(0, len(batch)))] + data.draw(st.binary(max_size=20))
    if len(batch) > 21 and data.draw(st.booleans()):
        batch = bytearray(seal(bytes(batch)))
    sends: list[Callable[[], AppendInfo | None]] = [
        lambda: log.append_as_leader(bytes(batch), 0, NOW),
        lambda: log.append_as_follower(bytes(batch), NOW),
    ]
    for send in sends:
        end = log.log_end_offset
        info: AppendInfo | None
        try:
            info = send()
        except KafkaError:
            info = None
        assert log.log_end_offset == (end if info is None else info.last_offset + 1)
    assert log.failed is None
    content = everything(log)
    log.abandon()
    again = open_log(log.files, DIRECTORY, "t", 0, log.config, NOW)
    assert everything(again) == content


# -- log append time, base within a batch


def test_log_append_time() -> None:
    log = make_log(make_fs(), config={"message.timestamp.type": "LogAppendTime"})
    info = log.append_as_leader(produced_batch([b"v"] * 2, timestamp_ms=5), 0, NOW)
    assert (info.log_append_time_ms, info.max_timestamp) == (NOW, NOW)
    assert log.offset_for_timestamp(NOW, 10) == (NOW, 0, 0)
    assert log.max_timestamp_offset(10) == (NOW, 0, 0)


def test_follower_starts_with_batch_that_contains_log_start() -> None:
    leader = make_log(make_fs())
    append(leader, 10, epoch=3)
    leader.increment_log_start_offset(6)
    follower = make_log(make_fs())
    follower.truncate_fully_and_start_at(6)
    follower.append_as_follower(leader.read(6, 1 << 20, 1 << 60, True), NOW)
    assert (follower.log_start_offset, follower.log_end_offset, follower.epochs.entries) == (6, 10, ((3, 0),))
    assert follower.read(6, 1 << 20, 1 << 60, True) == leader.read(6, 1 << 20, 1 << 60, True)


def test_sequential_reads_use_no_index() -> None:
    fs = make_fs()
    log = make_log(fs)
    for _ in range(60):
        append(log)
    fs.fail("read", path="index", times=1000)
    assert len(list(record_batch.iterate(everything(log)))) == 60


# -- disk failures


def test_full_disk_truncates_partial_write_and_is_transient() -> None:
    fs = make_fs(capacity_bytes=5000)
    log = make_log(fs)
    while fs.used_bytes < 4700:
        append(log)
    end, content = log.log_end_offset, everything(log)
    with pytest.raises(StorageError) as caught:
        append(log, 5)
    assert caught.value.code == ErrorCode.KAFKA_STORAGE_ERROR
    for _ in range(3):
        with pytest.raises(StorageError):
            append(log, 5)
    assert (log.log_end_offset, log.failed) == (end, None)
    fs.capacity_bytes = None
    assert append(log) == end
    assert everything(log)[: len(content)] == content
    log.close()
    assert make_log(fs, clean=True).log_end_offset == end + 1


def test_torn_write_fails_log_permanently() -> None:
    fs = make_fs()
    log = make_log(fs)
    append(log)
    fs.fail("write", torn_bytes=70, path=".log")
    with pytest.raises(StorageError):
        append(log)
    for attempt in (lambda: append(log), lambda: log.read(0, 1, 1, True), log.flush, lambda: log.truncate_to(0)):
        with pytest.raises(StorageError):
            attempt()
    assert log.failed is not None
    log.abandon()
    assert make_log(fs).log_end_offset == 1


def test_partial_write_that_cannot_be_truncated_fails_log_on_full_disk() -> None:
    fs = make_fs()
    log = make_log(fs)
    append(log)
    fs.fail("write", errno.ENOSPC, torn_bytes=70, path=".log")
    fs.fail("truncate", errno.EIO)
    with pytest.raises(StorageError):
        append(log)
    assert log.failed is not None
    log.abandon()
    assert make_log(fs).log_end_offset == 1


@pytest.mark.parametrize("operation", ["sync", "sync_dir"])
def test_failed_fsync_is_never_retried(operation: str) -> None:
    fs = make_fs()
    log = make_log(fs)
    append(log)
    fs.fail(operation, errno.ENOSPC)
    with pytest.raises(StorageError):
        log.flush()
    syncs = fs.syncs
    for attempt in (log.flush, lambda: append(log), log.close):
        with pytest.raises(StorageError):
            attempt()
    assert fs.syncs == syncs
    assert log.recovery_point == 0


def test_index_write_is_delayed_on_full_disk() -> None:
    fs = make_fs()
    log = make_log(fs, config={"segment.bytes": 1 << 20})
    fs.fail("open", errno.ENOSPC, path="index", times=3)
    for _ in range(600):
        append(log, size=150)
    assert log.failed is None
    log.close()
    again = make_log(fs, clean=True)
    assert again.read(300, 300, 1 << 60, True)[:8] == struct.pack(">q", 300)


# -- durability


def test_needs_flush() -> None:
    log = make_log(make_fs(), config={"flush.messages": 3, "flush.ms": 1000})
    assert not log.needs_flush(NOW + 5000)
    append(log)
    assert not log.needs_flush(NOW + 999)
    assert log.needs_flush(NOW + 1000)
    append(log, 2)
    assert log.needs_flush(NOW)
    log.flush()
    assert not log.needs_flush(NOW + 5000)
    assert log.unflushed_messages == 0
    for _ in range(2):
        append(log)
    log.roll(NOW)
    assert log.needs_flush(NOW)


def test_flush_makes_writes_of_killed_process_durable() -> None:
    fs = make_fs()
    log = make_log(fs)
    append(log)
    log.abandon()
    log = make_log(fs)
    log.flush()
    fs.crash()
    assert make_log(fs, recovery_point=log.recovery_point).log_end_offset == 1


class SlowSync(FaultyFileSystem):
    """Blocks fsyncs of log files until released, except fsyncs of the log's owner."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def open(self, path: str, *, create: bool = False) -> File:
        file = super().open(path, create=create)
        if path.endswith(".log"):
            sync = file.sync

            def slow() -> None:
                if threading.current_thread() is not threading.main_thread():
                    self.entered.set()
                    assert self.go_on.wait(60)
                sync()

            file.sync = slow  # type: ignore[method-assign]
        return file


@pytest.mark.parametrize("cut", ["truncate", "truncate fully", "delete", "retention"])
def test_truncation_during_flush_keeps_recovery_point_valid(cut: str) -> None:
    fs = SlowSync()
    fs.make_dirs("/data")
    log = make_log(fs, config={"retention.ms": 1000})
    for _ in range(30):
        append(log)
    problems: list[BaseException] = []

    def flush() -> None:
        try:
            log.flush()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=flush)
    thread.start()
    assert fs.entered.wait(60)
    if cut == "truncate":
        log.truncate_to(3)
        for _ in range(40):
            append(log, epoch=1)
    elif cut == "truncate fully":
        log.truncate_fully_and_start_at(100)
        append(log, 3, epoch=1)
    elif cut == "retention":
        log.run_retention(NOW + 5000, 30)
        append(log, 3, epoch=1)
    else:
        log.abandon()
        fs.rename(DIRECTORY, DIRECTORY + "-delete")
    fs.go_on.set()
    thread.join(60)
    assert problems == []
    assert log.failed is None
    expected = {"truncate": 0, "truncate fully": 0, "retention": 30, "delete": 0}
    assert log.recovery_point == expected[cut]
    if cut != "delete":
        log.flush()
        assert log.recovery_point == log.log_end_offset


def test_truncation_below_recovery_point_is_checkpointed_before_next_append() -> None:
    reported = []
    log: Log = make_log(
        make_fs(), checkpoint_recovery_point=lambda: reported.append((log.recovery_point, log.log_end_offset))
    )
    for _ in range(4):
        append(log)
    log.truncate_to(3)
    append(log)
    assert reported == []
    log.flush()
    log.truncate_to(2)
    log.truncate_to(1)
    assert reported == []
    append(log, 2)
    assert reported == [(1, 1)]


def test_recovery_truncates_at_batch_of_older_epoch() -> None:
    """After an undone truncation, old batches follow new ones. Only their leader epoch is wrong."""
    fs = make_fs()
    log = make_log(fs)
    for _ in range(3):
        append(log, epoch=1)
    old = fs.open(LOG_FILE).read_at(10_000, 0)
    log.truncate_to(1)
    append(log, epoch=2)
    log.abandon()
    fs.open(LOG_FILE).write_at(old[log.size_bytes :], log.size_bytes)
    again = make_log(fs)
    assert (again.log_end_offset, again.epochs.entries) == (2, ((1, 0), (2, 1)))


def test_recovery_removes_segments_after_offset_gap() -> None:
    fs = make_fs()
    log = make_log(fs)
    for _ in range(40):
        append(log)
    bases = log.segment_base_offsets
    log.abandon()
    fs.remove(f"{DIRECTORY}/{bases[1]:020d}.log")
    again = make_log(fs)
    assert again.log_end_offset == bases[1]
    assert sum(name.endswith(".log") for name in fs.list_dir(DIRECTORY)) == 1


def test_log_end_survives_crash_after_retention_of_all_segments() -> None:
    fs = make_fs()
    log = make_log(fs, config={"retention.ms": 1000})
    for _ in range(40):
        append(log)
    log.flush()
    assert log.run_retention(NOW + 5000, 40) == 4
    assert (log.log_start_offset, log.log_end_offset, log.size_bytes) == (40, 40, 0)
    assert log.remove_deleted(NOW + 5000) == 0
    assert log.remove_deleted(NOW + 65_000) == 12
    fs.crash()
    again = make_log(fs, recovery_point=40)
    assert again.log_end_offset == 40


def test_retention_keeps_segments_above_high_watermark() -> None:
    log = make_log(make_fs(), config={"retention.ms": 1000})
    for _ in range(40):
        append(log)
    second = log.segment_base_offsets[1]
    assert log.run_retention(NOW + 5000, second - 1) == 0
    assert [log.held_back(NOW + 5000, mark) for mark in (second - 1, second + 1, 40)] == [4, 3, 0]
    assert log.held_back(NOW + 1000, second - 1) == 0
    assert log.run_retention(NOW + 5000, second + 1) == 1
    assert log.log_start_offset == second
    assert log.run_retention(NOW + 1000, 40) == 0


def test_retention_removes_by_size_and_below_log_start() -> None:
    log = make_log(make_fs(), config={"retention.bytes": 4000, "retention.ms": -1})
    for _ in range(100):
        append(log)
    log.run_retention(NOW, 100)
    assert 4000 <= log.size_bytes < 6000
    log.increment_log_start_offset(log.segment_base_offsets[1] + 1)
    assert log.run_retention(NOW, 100) == 1


def test_segments_roll_by_time_and_full_index() -> None:
    log = make_log(make_fs(), config={"segment.ms": 1000, "segment.bytes": 1 << 20, "segment.index.bytes": 64})
    append(log)
    append(log, now_ms=NOW + 1000)
    assert list(log.segment_base_offsets) == [0]
    append(log, now_ms=NOW + 1001)
    assert list(log.segment_base_offsets) == [0, 2]
    for _ in range(20):
        append(log, now_ms=NOW + 1001)
    assert len(log.segment_base_offsets) == 4
    log.maybe_roll(NOW + 2001)
    assert len(log.segment_base_offsets) == 4
    log.maybe_roll(NOW + 2002)
    assert log.segment_base_offsets[-1] == log.log_end_offset


def test_undecodable_batch_counts_as_one_record_in_timestamp_search() -> None:
    log = make_log(make_fs())
    log.append_as_leader(patched(61, b"\xff\xff\xff\xff\xff\xff"), 0, NOW)
    assert log.offset_for_timestamp(NOW, 10) == (NOW + 2, 0, 0)


def test_open_files_of_log_are_limited(tmp_path: Path) -> None:
    files = OpenFiles(RealFileSystem(), 5)
    logs = [
        open_log(files, str(tmp_path / f"t-{number}"), "t", number, TopicConfig(), NOW, topic_id=b"i" * 16)
        for number in range(20)
    ]
    for _ in range(3):
        for log in logs:
            append(log)
            assert len(files) <= 5
    for log in logs:
        assert len(list(record_batch.iterate(everything(log)))) == 3
        log.close()
    assert len(files) == 0
