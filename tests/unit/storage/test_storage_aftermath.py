"""State of a log, in memory and on disk, after truncations, flushes and failed appends."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

import pytest

from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError
from kipmesh.storage import Log, StorageError, open_log
from kipmesh.testing import produced_batch
from simulation.faulty_fs import FaultyFileSystem

NOW = 1_700_000_000_000
DIRECTORY = "/data/t-0"
ID = bytes(range(16))


@pytest.fixture
def fs() -> FaultyFileSystem:
    fs = FaultyFileSystem()
    fs.make_dirs("/data")
    fs.sync_dir("/")
    return fs


def make_log(fs: FaultyFileSystem, *, config: Mapping[str, object] | None = None, **options: Any) -> Log:
    keys = {"segment.bytes": 200, "index.interval.bytes": 100, **(config or {})}
    return open_log(fs, DIRECTORY, "t", 0, TopicConfig.parse(keys), NOW, topic_id=ID, **options)


def append(log: Log, count: int = 1, *, epoch: int = 0, now_ms: int = NOW) -> None:
    for _ in range(count):
        log.append_as_leader(produced_batch([b"v" * 100], timestamp_ms=now_ms), epoch, now_ms)


def segment_path(base_offset: int, suffix: str = ".log") -> str:
    return f"{DIRECTORY}/{base_offset:020d}{suffix}"


def read(fs: FaultyFileSystem, path: str) -> bytes:
    return fs.open(path).read_at(1 << 20, 0)


# -- state in memory after a truncation


def test_failed_truncation_is_permanent(fs: FaultyFileSystem) -> None:
    reported: list[StorageError] = []
    log = make_log(fs, on_failed=lambda _, error: reported.append(error))
    append(log, 4)
    fs.fail("remove", errno.ENOSPC)
    with pytest.raises(StorageError):
        log.truncate_to(1)
    assert reported == [log.failed]


@pytest.mark.parametrize("fully", [False, True])
def test_reads_after_truncation_return_new_batches(fs: FaultyFileSystem, fully: bool) -> None:
    log = make_log(fs, config={"segment.bytes": 100_000})
    append(log, 3)
    log.read(0, 200, 9, True)  # caches the position of offset 1
    log.truncate_fully_and_start_at(0) if fully else log.truncate_to(0)
    log.append_as_leader(produced_batch([b"w" * 300] * 2, timestamp_ms=NOW), 1, NOW)
    (_, header) = next(record_batch.iterate(log.read(1, 1000, 9, True)))
    assert (header.base_offset, header.last_offset, header.partition_leader_epoch) == (0, 1, 1)


def test_truncated_segment_is_sealed_again(fs: FaultyFileSystem) -> None:
    config = {"segment.bytes": 600, "index.interval.bytes": 5000}
    log = make_log(fs, config=dict(config))
    for number in range(4):
        append(log, now_ms=NOW + number)
    assert log.segment_base_offsets == (0, 3)
    log.truncate_to(2)
    log.close()
    log = make_log(fs, clean=True, config=dict(config))
    assert log.max_timestamp_offset(9) == (NOW + 1, 1, 0)
    append(log, now_ms=NOW + 7)
    log.close()
    assert make_log(fs, clean=True).max_timestamp_offset(9) == (NOW + 7, 2, 0)


def test_index_that_does_not_match_its_log_is_rebuilt(fs: FaultyFileSystem) -> None:
    log = make_log(fs, config={"segment.bytes": 2000, "index.interval.bytes": 0})
    append(log, 5)
    log.close()
    path = f"{DIRECTORY}/{0:020d}.index"
    good = read(fs, path)
    fs.open(path).write_at(b"\0\0\0\x09", len(good) - 8)
    make_log(fs, clean=True, config={"segment.bytes": 2000, "index.interval.bytes": 0}).close()
    assert read(fs, path) == good


# -- durability after a flush


def test_flush_makes_indexes_of_rolled_segments_durable(fs: FaultyFileSystem) -> None:
    log = make_log(fs, config={"segment.bytes": 1000, "index.interval.bytes": 0})
    append(log, 9)
    second = log.segment_base_offsets[1]
    log.flush()
    before = {suffix: read(fs, segment_path(0, suffix)) for suffix in (".index", ".timeindex")}
    assert second > 2
    assert all(before.values())
    fs.crash()
    assert {suffix: read(fs, segment_path(0, suffix)) for suffix in before} == before


@pytest.mark.parametrize("entries", [0, 1, 2])
def test_time_index_without_last_entries_is_rebuilt(fs: FaultyFileSystem, entries: int) -> None:
    """A power failure undid a truncation of the log, but not that of its time index."""
    log = make_log(fs, config={"segment.bytes": 1000, "index.interval.bytes": 0})
    for number in range(12):
        append(log, now_ms=NOW + number)
    log.flush()
    end = log.segment_base_offsets[1]
    assert end > 3
    index = fs.open(segment_path(0, ".timeindex"))
    index.truncate(12 * entries)
    index.sync()
    fs.crash()
    again = make_log(fs, clean=False, recovery_point=12, config={"segment.bytes": 1000, "index.interval.bytes": 0})
    found = [again.offset_for_timestamp(NOW + number, 12) for number in range(12)]
    assert [each and each.offset for each in found] == list(range(12))


# -- appends of followers


def test_corrupt_batch_does_not_change_empty_log(fs: FaultyFileSystem) -> None:
    lowered: list[int] = []
    log: Log = make_log(fs, checkpoint_recovery_point=lambda: lowered.append(log.recovery_point))
    log.truncate_fully_and_start_at(6)
    batches = record_batch.assign(produced_batch([b"v"] * 10), 0, 3)
    damaged = bytearray(record_batch.assign(produced_batch([b"v"]), 10, 3))
    damaged[-1] ^= 1
    with pytest.raises(CorruptRecordError):
        log.append_as_follower(batches + damaged, NOW)
    assert (log.log_start_offset, log.log_end_offset, log.segment_base_offsets) == (6, 6, (6,))
    log.flush()
    assert log.recovery_point == 6
    log.append_as_follower(batches, NOW)
    assert (log.log_start_offset, log.log_end_offset) == (6, 10)
    assert lowered == [0]


def test_failed_write_keeps_batches_written_before(fs: FaultyFileSystem) -> None:
    log = make_log(fs, config={"flush.ms": 1000})
    batches = b"".join(record_batch.assign(produced_batch([b"v" * 100]), offset, 0) for offset in range(3))
    fs.fail("open", errno.ENOSPC, path=segment_path(1))
    with pytest.raises(StorageError):
        log.append_as_follower(batches, NOW)
    assert (log.log_end_offset, log.failed) == (1, None)
    assert log.needs_flush(NOW + 1000)
