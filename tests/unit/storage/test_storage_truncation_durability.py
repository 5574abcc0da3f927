"""Truncations are durable before later appends. Regression tests of bugs found by the quorum simulator."""

from __future__ import annotations

import errno
from random import Random

import pytest

from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import KafkaError
from kipmesh.storage.fs import File
from kipmesh.storage.log.log_loader import open_log
from simulation.faulty_fs import FaultyFileSystem

CONFIG = TopicConfig.parse({"segment.bytes": 400})


def batch(size: int) -> bytes:
    return record_batch.build([(None, bytes(size))], base_offset=0, leader_epoch=0, timestamp_ms=0)


def test_truncated_batches_of_full_segment_stay_removed_after_power_failure() -> None:
    fs = FaultyFileSystem()
    fs.make_dirs("/data")
    fs.sync_dir("/")
    log = open_log(fs, "/data/t-0", "t", 0, CONFIG, 0)
    for _ in range(3):
        log.append_as_leader(batch(40), 1, 0)
    log.flush()
    log.truncate_to(2)
    log.append_as_leader(batch(200), 2, 0)  # does not fit: the next segment starts at the truncation offset
    log.flush()
    assert log.segment_base_offsets == (0, 2)
    assert log.recovery_point == 3
    fs.crash()
    found = open_log(fs, "/data/t-0", "t", 0, CONFIG, 0)
    assert (found.log_end_offset, found.latest_epoch) == (3, 2)


class FirstWritten:
    """A random generator with which a power failure keeps only the first operation after a file's last sync."""

    def randint(self, low: int, high: int) -> int:
        return min(low + 1, high)

    def random(self) -> float:
        return 1.0


@pytest.mark.parametrize("is_killed", [False, True], ids=["one process", "killed and started again"])
def test_partial_write_on_full_disk_stays_removed_after_power_failure(is_killed: bool) -> None:
    fs = FaultyFileSystem()
    fs.make_dirs("/data")
    fs.sync_dir("/")
    log = open_log(fs, "/data/t-0", "t", 0, CONFIG, 0)
    for _ in range(2):
        log.append_as_leader(batch(40), 1, 0)
    log.flush()
    fs.fail("write", errno.ENOSPC, path=".log", torn_bytes=24)
    with pytest.raises(KafkaError):
        log.append_as_leader(batch(40), 1, 0)
    if is_killed:
        log.abandon()
        log = open_log(fs, "/data/t-0", "t", 0, CONFIG, 0, recovery_point=2)
    log.append_as_leader(batch(300), 1, 0)  # does not fit the segment
    log.flush()
    assert log.segment_base_offsets == (0, 2)
    assert log.recovery_point == 3
    fs.crash(FirstWritten())  # type: ignore[arg-type]
    found = open_log(fs, "/data/t-0", "t", 0, CONFIG, 0, recovery_point=2)
    assert found.log_end_offset == 3


@pytest.mark.parametrize("seed", range(50))
def test_truncated_batches_stay_removed_below_next_segment(seed: int) -> None:
    fs = FaultyFileSystem()
    fs.make_dirs("/data")
    fs.sync_dir("/")
    log = open_log(fs, "/data/t-0", "t", 0, CONFIG, 0)
    log.append_as_leader(batch(40), 1, 0)
    log.flush()
    log.append_as_leader(batch(40), 1, 0)  # not durable and on no other replica
    log.append_as_leader(batch(40), 1, 0)
    log.truncate_to(1)
    log.append_as_leader(batch(40), 2, 0)
    log.append_as_leader(batch(300), 2, 0)  # does not fit the segment
    assert log.segment_base_offsets == (0, 2)
    fs.crash(Random(seed))
    found = open_log(fs, "/data/t-0", "t", 0, CONFIG, 0, recovery_point=1)
    batches = [found.read(offset, 1, found.log_end_offset, True) for offset in range(found.log_end_offset)]
    history = [record_batch.parse_header(each, 0).partition_leader_epoch for each in batches]
    assert history in ([1], [1, 1], [1, 1, 1], [1, 2], [1, 2, 2])


def test_running_flush_does_not_make_later_truncation_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = FaultyFileSystem()
    fs.make_dirs("/data")
    log = open_log(fs, "/data/t-0", "t", 0, CONFIG, 0)
    for _ in range(3):
        log.append_as_leader(batch(40), 1, 0)
    log.truncate_to(2)
    segment = log.segments.active
    file = segment.files.get(segment.path)
    sync = file.sync
    synced: list[File] = []

    def counted(self: File) -> None:
        synced.append(self)
        sync()

    def slow() -> None:
        """Sync of a flush on another thread. The log rolls before it completes."""
        monkeypatch.setattr(type(file), "sync", counted)
        log.append_as_leader(batch(300), 2, 0)
        assert log.segment_base_offsets == (0, 2)
        assert synced == [file]
        sync()

    monkeypatch.setattr(type(file), "sync", lambda _self: slow())
    log.flush()
    assert not segment.has_unsynced_truncation


def test_truncation_that_cannot_be_synced_fails_log() -> None:
    fs = FaultyFileSystem()
    fs.make_dirs("/data")
    log = open_log(fs, "/data/t-0", "t", 0, CONFIG, 0)
    for _ in range(3):
        log.append_as_leader(batch(40), 1, 0)
    log.truncate_to(2)
    fs.fail("sync", errno.ENOSPC, path=".log")
    for _ in range(2):
        with pytest.raises(KafkaError):
            log.append_as_leader(batch(300), 2, 0)
    assert log.log_end_offset == 2


def test_epochs_after_lost_log_start_are_rebuilt_from_batches() -> None:
    fs = FaultyFileSystem()
    fs.make_dirs("/data")
    fs.sync_dir("/")
    log = open_log(fs, "/data/t-0", "t", 0, CONFIG, 0)
    three = record_batch.build([(None, bytes(80))] * 3, base_offset=0, leader_epoch=0, timestamp_ms=0)
    for _ in range(2):  # one segment per batch
        log.append_as_leader(three, 4, 0)
    log.increment_log_start_offset(2)
    log.flush()  # the epochs start at 2 now; the manager would checkpoint the log start
    fs.sync_dir("/data")
    fs.crash()
    found = open_log(fs, "/data/t-0", "t", 0, CONFIG, 0, recovery_point=6)
    assert (found.log_start_offset, found.log_end_offset) == (0, 6)
    assert found.segment_base_offsets == (0, 3)
    assert found.epochs.entries == ((4, 0),)
