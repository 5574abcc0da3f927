"""Idempotent producers of a log: snapshots on disk after restarts, truncations, retention and torn writes."""

from __future__ import annotations

from typing import Any

import pytest

from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.core.producer.sequences import ProducerEntry
from kipmesh.storage import Log, open_log
from kipmesh.storage.fs import read_file, write_file
from kipmesh.storage.log.producer_snapshots import decode_snapshot, encode_snapshot, snapshot_offset
from kipmesh.testing import produced_batch
from simulation.faulty_fs import FaultyFileSystem

NOW = 1_700_000_000_000
DIRECTORY = "/data/t-0"


def make_fs() -> FaultyFileSystem:
    fs = FaultyFileSystem()
    fs.make_dirs("/data")
    fs.sync_dir("/")
    return fs


def make_log(fs: FaultyFileSystem, topic: str = "t", **options: Any) -> Log:
    config = TopicConfig.parse({"segment.bytes": 2000, "index.interval.bytes": 100})
    return open_log(fs, DIRECTORY, topic, 0, config, NOW, topic_id=b"i" * 16, **options)


def append(log: Log, sequence: int, *, pid: int = 5, epoch: int = 0, size: int = 100) -> tuple[int, int]:
    """Return the first offset and the number of bytes written."""
    batch = produced_batch([b"v" * size], timestamp_ms=NOW, producer=(pid, epoch, sequence))
    info = log.append_as_leader(batch, 0, NOW)
    return info.first_offset, info.size_bytes


def snapshots(fs: FaultyFileSystem) -> list[int]:
    return sorted(offset for name in fs.list_dir(DIRECTORY) if (offset := snapshot_offset(name)) is not None)


def test_duplicate_batch_is_not_written_again() -> None:
    log = make_log(make_fs())
    first, size = append(log, 0)
    assert (first, size > 0) == (0, True)
    append(log, 1)
    before = log.size_bytes
    assert append(log, 0) == (0, 0)
    assert (log.log_end_offset, log.size_bytes) == (2, before)
    with pytest.raises(KafkaError) as caught:
        append(log, 3)
    assert caught.value.code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert log.log_end_offset == 2


def test_followers_track_producers_of_replicated_batches() -> None:
    leader_log = make_log(make_fs())
    for sequence in range(20):
        append(leader_log, sequence)
    follower = make_log(make_fs())
    while follower.log_end_offset < 20:
        follower.append_as_follower(leader_log.read(follower.log_end_offset, 1500, 1 << 60, True), NOW)
    assert [append(follower, sequence)[0] for sequence in range(15, 20)] == list(range(15, 20))
    assert append(follower, 20) == (20, append(leader_log, 20)[1])


@pytest.mark.parametrize("clean", [True, False])
def test_restart_restores_last_five_batches_of_producer(clean: bool) -> None:
    fs = make_fs()
    log = make_log(fs)
    for sequence in range(50):
        append(log, sequence)
        append(log, sequence, pid=6, epoch=2)
    assert len(log.segment_base_offsets) > 3
    assert snapshots(fs) == list(log.segment_base_offsets[1:])
    if clean:
        log.close()
        assert snapshots(fs)[-1] == 100
    again = make_log(fs, clean=clean, recovery_point=60)
    for sequence in range(45, 50):
        assert append(again, sequence) == (2 * sequence, 0)
        assert append(again, sequence, pid=6, epoch=2) == (2 * sequence + 1, 0)
    assert append(again, 50)[0] == 100
    with pytest.raises(KafkaError) as caught:
        append(again, 49, pid=6, epoch=1)
    assert caught.value.code == ErrorCode.INVALID_PRODUCER_EPOCH


def test_torn_producer_snapshot_falls_back_to_older_one_or_whole_log() -> None:
    for keep in (0, 2):
        fs = make_fs()
        log = make_log(fs)
        for sequence in range(50):
            append(log, sequence)
        log.close()
        for offset in snapshots(fs)[keep:]:
            path = f"{DIRECTORY}/{offset:020d}.snapshot"
            write_file(fs, path, read_file(fs, path)[:-3], sync=True)
        again = make_log(fs, clean=True)
        assert [append(again, sequence)[1] for sequence in range(45, 50)] == [0] * 5
        assert append(again, 50)[0] == 50
        assert len(snapshots(fs)) == keep


def test_producer_snapshots_above_recovery_point_are_ignored() -> None:
    fs = make_fs()
    log = make_log(fs)
    for sequence in range(50):
        append(log, sequence)
    offset = snapshots(fs)[-1]
    lie = encode_snapshot([ProducerEntry(5, 9, 100, offset - 1, 0, NOW)])
    write_file(fs, f"{DIRECTORY}/{offset:020d}.snapshot", lie, sync=True)
    again = make_log(fs, clean=False, recovery_point=offset - 1)
    assert append(again, 49) == (49, 0)
    assert offset not in snapshots(fs)


def test_truncation_restores_earlier_producer_state() -> None:
    fs = make_fs()
    log = make_log(fs)
    for sequence in range(50):
        append(log, sequence)
    for sequence in range(3):
        append(log, sequence, pid=6)
    append(log, 0, epoch=1)
    for end in (52, 48, 20):  # within a new producer's batches, before an epoch, and in another segment
        log.truncate_to(end)
        assert not [offset for offset in snapshots(fs) if offset > log.log_end_offset]
        known = min(end, 50)
        for sequence in range(known - 5, known):
            assert append(log, sequence) == (sequence, 0), end
    assert append(log, 20)[0] == 20
    assert append(log, 0, pid=6)[0] == 21


def test_emptied_log_has_no_producers() -> None:
    fs = make_fs()
    log = make_log(fs)
    for sequence in range(50):
        append(log, sequence)
    log.truncate_fully_and_start_at(200)
    assert snapshots(fs) == []
    assert append(log, 7)[0] == 200


def test_retention_deletes_snapshots_but_keeps_producers() -> None:
    fs = make_fs()
    log = make_log(fs)
    for sequence in range(50):
        append(log, sequence)
    log.update_config(TopicConfig.parse({"segment.bytes": 2000, "retention.bytes": 0}))
    assert log.run_retention(NOW, 50)
    assert snapshots(fs) == [50]
    assert append(log, 49) == (49, 0)
    log.close()
    again = make_log(fs, clean=True)
    assert (again.log_start_offset, append(again, 49)) == (50, (49, 0))
    assert append(again, 50)[0] == 50


def test_expired_producers_are_forgotten() -> None:
    fs = make_fs()
    log = make_log(fs)
    append(log, 0)
    assert log.producers.states.expire(NOW) == 0
    assert log.producers.states.expire(NOW + 1) == 1
    assert append(log, 7)[0] == 1


def test_log_without_producers_has_no_snapshot() -> None:
    fs = make_fs()
    log = make_log(fs)
    for _ in range(5):
        log.append_as_leader(produced_batch([b"v"]), 0, NOW)
    log.close()
    assert snapshots(fs) == []
    again = make_log(fs, clean=True)
    assert again.log_end_offset == 5


def test_log_without_snapshots_gets_them_after_restart() -> None:
    fs = make_fs()
    log = make_log(fs)
    for _ in range(50):
        log.append_as_leader(produced_batch([b"v" * 100]), 0, NOW)
    log.close()
    for offset in snapshots(fs):
        fs.remove(f"{DIRECTORY}/{offset:020d}.snapshot")
    again = make_log(fs, clean=True)
    assert snapshots(fs) == [again.segment_base_offsets[-1]], "so that no later start reads what is before"


def test_metadata_log_tracks_no_producers() -> None:
    fs = make_fs()
    log = make_log(fs, CLUSTER_METADATA_TOPIC)
    for _ in range(2):
        append(log, 0, size=1500)
    assert log.log_end_offset == 2
    log.close()
    assert snapshots(fs) == []


def test_invalid_producer_snapshots_are_rejected() -> None:
    entries = [ProducerEntry(1, 0, 5, 9, 2, NOW), ProducerEntry(2, 3, -1, -1, 0, NOW)]
    good = encode_snapshot(entries)
    assert decode_snapshot(good) == entries
    flipped = good[:-1] + bytes([good[-1] ^ 1])
    for bad in (b"", good[:7], good[:-1], good + b"x", flipped, b"\0\2" + good[2:]):
        with pytest.raises(CorruptRecordError):
            decode_snapshot(bad)
    assert snapshot_offset("00000000000000000042.snapshot") == 42
    assert snapshot_offset("42.snapshot") is None
    assert snapshot_offset("00000000000000000042.log") is None
