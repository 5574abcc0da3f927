"""A metadata log that lost durable data: a voter refuses to start, an observer fetches everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.raft import ElectionState
from kipmesh.core.raft.types import TruncateLog
from kipmesh.storage import LogManager, StorageError
from kipmesh.storage.fs import RealFileSystem, read_file, write_file
from kipmesh.storage.quorum.quorum_replica import QuorumReplica, log_config
from simulation.faulty_fs import FaultyFileSystem
from tests.unit.storage.quorum_replica_support import (
    DIRECTORY,
    NOW,
    SEGMENT_BYTES,
    append,
    make_snapshot,
    open_replica,
    reopen,
    start_receiving,
)

BATCHES = 30


def stopped(*, clean: bool = True, snapshot_end: int = 0) -> FaultyFileSystem:
    """Return the disk of a stopped replica with 30 checkpointed batches in four segments."""
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    replica.persist(ElectionState(1, voted_id=2))
    append(replica, BATCHES)
    if snapshot_end:
        make_snapshot(replica, snapshot_end)
    replica.flush()
    if clean:
        replica.manager.close(-1)
    else:
        replica.manager.checkpoint_recovery_points()
        replica.manager.abandon()
    return fs


def segments(fs: FaultyFileSystem) -> list[str]:
    return sorted(f"{DIRECTORY}/{name}" for name in fs.list_dir(DIRECTORY) if name.endswith(".log"))


def content(fs: FaultyFileSystem) -> dict[str, bytes]:
    """Return all files except indexes, which are derived."""
    return {name: read_file(fs, f"{DIRECTORY}/{name}") for name in fs.list_dir(DIRECTORY) if not name.endswith("index")}


def refused(fs: FaultyFileSystem, why: str) -> str:
    """Assert that two starts fail with the same error and change nothing. Return the message."""
    before, messages = content(fs), set()
    for _ in range(2):
        with pytest.raises(KafkaError, match=why) as caught:
            open_replica(fs)
        messages.add(caught.value.message)
        assert content(fs) == before
    assert len(messages) == 1
    line = messages.pop()
    assert "\n" not in line
    assert "move its metadata directory away" in line
    assert caught.value.code is ErrorCode.KAFKA_STORAGE_ERROR
    return line


def assert_observer_starts_empty(fs: FaultyFileSystem) -> None:
    replica = open_replica(fs, is_voter=False)
    assert (replica.log.log_start_offset, replica.log.log_end_offset) == (0, 0)
    assert replica.latest_snapshot is None
    append(replica, 3)
    replica.flush()
    assert reopen(fs, is_voter=False).log.log_end_offset == 3


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("snapshot_end", [0, 20, 30])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_voter_refuses_log_with_flipped_byte(clean: bool, snapshot_end: int, number: int) -> None:
    fs = stopped(clean=clean, snapshot_end=snapshot_end)
    path = segments(fs)[number]
    data = bytearray(read_file(fs, path))
    data[150] ^= 1
    write_file(fs, path, bytes(data), sync=True)
    offset = int(path[-24:-4]) + 1
    assert f"{path} is corrupt at offset {offset} (wrong CRC" in refused(fs, "is corrupt")
    assert_observer_starts_empty(fs)


@pytest.mark.parametrize("clean", [True, False])
def test_voter_refuses_shortened_log(clean: bool) -> None:
    fs = stopped(clean=clean)
    path = segments(fs)[-1]
    write_file(fs, path, read_file(fs, path)[:-30], sync=True)
    assert f"{path} is corrupt at offset {BATCHES - 1} (the batch at" in refused(fs, "is incomplete")
    write_file(fs, path, b"", sync=True)
    refused(fs, f"ends at offset {int(path[-24:-4])}, but everything below {BATCHES} was durable")
    fs.remove(path)
    refused(fs, f"ends at offset {int(path[-24:-4])}, but everything below {BATCHES} was durable")
    assert_observer_starts_empty(fs)


@pytest.mark.parametrize("clean", [True, False])
def test_voter_refuses_log_without_segment(clean: bool) -> None:
    fs = stopped(clean=clean)
    paths = segments(fs)
    fs.remove(paths[1])
    refused(fs, f"ends at offset {int(paths[1][-24:-4])}, ")
    for path in segments(fs):
        fs.remove(path)
    refused(fs, f"ends at offset 0, but everything below {BATCHES} was durable")


def test_snapshot_replaces_log_that_ends_too_early() -> None:
    fs = stopped(clean=False, snapshot_end=BATCHES)
    for path in segments(fs)[1:]:
        fs.remove(path)
    replica = open_replica(fs)
    assert (replica.log.log_start_offset, replica.log.log_end_offset) == (BATCHES, BATCHES)


def test_complete_log_replaced_by_shorter_snapshot_is_not_damaged() -> None:
    """The leader's snapshot contradicts the end of the log. The process was killed before it replaced the log."""
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, BATCHES)
    replica.flush()
    replica.manager.checkpoint_recovery_points()
    start_receiving(replica, BATCHES - 1, 2).complete()
    replica.manager.abandon()
    again = open_replica(fs)
    assert (again.log.log_start_offset, again.log.log_end_offset) == (BATCHES - 1, BATCHES - 1)


def test_corrupt_snapshot_does_not_replace_log_that_ends_too_early() -> None:
    fs = stopped(clean=False, snapshot_end=BATCHES)
    for path in segments(fs)[1:]:
        fs.remove(path)
    snapshot = next(f"{DIRECTORY}/{name}" for name in fs.list_dir(DIRECTORY) if name.endswith(".checkpoint"))
    write_file(fs, snapshot, read_file(fs, snapshot)[:-1], sync=True)
    for _ in range(2):
        with pytest.raises(KafkaError, match=f"but everything below {BATCHES} was durable"):
            open_replica(fs)


def test_torn_tail_above_recovery_point_is_truncated() -> None:
    fs = stopped(clean=False)
    replica = open_replica(fs)
    append(replica, 2)
    path = f"{DIRECTORY}/{replica.log.segment_base_offsets[-1]:020d}.log"
    replica.manager.abandon()
    write_file(fs, path, read_file(fs, path)[:-30], sync=True)
    replica = open_replica(fs)
    assert replica.log.log_end_offset == BATCHES + 1


def test_truncated_batches_are_not_damage() -> None:
    fs = stopped()
    replica = open_replica(fs)
    replica.change_log(TruncateLog(5), NOW)
    replica.manager.abandon()  # killed before the next append
    assert open_replica(fs).log.log_end_offset == 5


def test_full_disk_prevents_truncation() -> None:
    fs = stopped()
    replica = open_replica(fs)
    fs.capacity_bytes = fs.used_bytes
    replica.change_log(TruncateLog(5), NOW)
    assert isinstance(replica.last_rejection, StorageError)
    assert replica.log.log_end_offset == BATCHES
    assert replica.log.failed is None
    fs.capacity_bytes = None
    replica.change_log(TruncateLog(5), NOW)
    assert replica.log.log_end_offset == 5


def test_flush_during_truncation_does_not_raise_checkpointed_recovery_point() -> None:
    fs = stopped()
    replica = open_replica(fs)
    manager = replica.manager
    with manager.truncating(replica.log, 5):
        replica.flush()
        manager.checkpoint_recovery_points()
        assert "__cluster_metadata 0 5\n" in read_file(fs, "/data/recovery-point-offset-checkpoint").decode()
    manager.checkpoint_recovery_points()
    assert f" {BATCHES}\n" in read_file(fs, "/data/recovery-point-offset-checkpoint").decode()


# -- quorum-state


def opened(fs: FaultyFileSystem, *, is_voter: bool, voters: tuple[int, ...] = (1, 2, 3)) -> QuorumReplica:
    """Open the replica without writing a `quorum-state` first."""
    manager = LogManager(fs, ("/data",), cluster_id="c", node_id=1, defaults=log_config(SEGMENT_BYTES))
    manager.load(NOW)
    try:
        return QuorumReplica.open(
            manager, cluster_id="c", voters=voters, is_voter=is_voter, segment_bytes=SEGMENT_BYTES, now_ms=NOW
        )
    finally:
        manager.abandon()


def test_voter_without_quorum_state_refuses_to_start() -> None:
    fs = stopped()
    fs.remove(f"{DIRECTORY}/quorum-state")
    refused(fs, "quorum-state with this voter's vote is missing, but the log ends at 30")
    replica = opened(fs, is_voter=False)
    assert replica.log.log_end_offset == BATCHES


def test_single_voter_starts_without_quorum_state() -> None:
    fs = stopped()
    fs.remove(f"{DIRECTORY}/quorum-state")
    assert opened(fs, is_voter=True, voters=(1,)).log.log_end_offset == BATCHES


@pytest.mark.parametrize("is_voter", [True, False])
@pytest.mark.parametrize("voters", [(1,), (1, 2), (1, 2, 4), (1, 2, 3, 4)])
def test_quorum_state_of_other_voters_is_rejected(voters: tuple[int, ...], is_voter: bool) -> None:
    fs = stopped()
    before = content(fs)
    names = ", ".join(str(each) for each in voters)
    with pytest.raises(
        KafkaError, match=f"has the voters 1, 2, 3, but controller.quorum.voters has {names}; the voters"
    ) as it:
        opened(fs, is_voter=is_voter, voters=voters)
    assert it.value.code is ErrorCode.INCONSISTENT_VOTER_SET
    assert "\n" not in it.value.message
    assert content(fs) == before
    assert opened(fs, is_voter=is_voter, voters=(3, 2, 1)).log.log_end_offset == BATCHES


def test_unreadable_quorum_state_error_has_remediation() -> None:
    fs = stopped()
    write_file(fs, f"{DIRECTORY}/quorum-state", b"{", sync=True)
    refused(fs, "quorum-state: it is not Kafka's JSON")


def test_on_a_real_disk(tmp_path: Path) -> None:
    fs = RealFileSystem()
    for number in range(2):
        manager = LogManager(fs, (str(tmp_path),), cluster_id="c", node_id=1, defaults=log_config(SEGMENT_BYTES))
        manager.load(NOW)
        replica = QuorumReplica.open(
            manager, cluster_id="c", voters=(1,), is_voter=number == 0, segment_bytes=SEGMENT_BYTES, now_ms=NOW
        )
        assert replica.log.log_end_offset == 0  # in the second iteration the log was damaged
        append(replica, 20)
        manager.close(-1)
        path = tmp_path / "__cluster_metadata-0" / f"{0:020d}.log"
        data = bytearray(path.read_bytes())
        data[100] ^= 4
        path.write_bytes(data)


def test_leader_epochs_are_checked_against_checkpoint() -> None:
    fs = stopped()
    path = segments(fs)[-1]
    data = bytearray(read_file(fs, path))
    data[15] ^= 2  # the lowest byte of the first batch's leader epoch
    write_file(fs, path, bytes(data), sync=True)
    refused(fs, r"is corrupt at offset \d+ \(leader epoch 3, expected 1\)")
    fs.remove(f"{DIRECTORY}/leader-epoch-checkpoint")
    refused(fs, r"is corrupt at offset \d+ \(leader epoch 1, expected 3\)")


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("position", [0, 7, 8, 11, 16, 17, 22])
def test_voter_refuses_corrupt_header(clean: bool, position: int) -> None:
    fs = stopped(clean=clean)
    path = segments(fs)[0]
    data = bytearray(read_file(fs, path))
    second = 12 + int.from_bytes(data[8:12], "big")
    data[second + position] ^= 0x41
    write_file(fs, path, bytes(data), sync=True)
    refused(fs, r"is corrupt at offset 1 \(")
