"""A metadata log that is not as it was made durable: a voter refuses to start, an observer fetches anew."""

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
    FOLDER,
    NOW,
    SEGMENT_BYTES,
    append,
    make,
    open_replica,
    received,
    reopen,
)

BATCHES = 30


def stopped(*, clean: bool = True, snapshot_end: int = 0) -> FaultyFileSystem:
    """A log of 30 batches in four segments, all of it checkpointed."""
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    replica.persist(ElectionState(1, voted_id=2))
    append(replica, BATCHES)
    if snapshot_end:
        make(replica, snapshot_end)
    replica.flush()
    if clean:
        replica.manager.close(-1)
    else:
        replica.manager.checkpoint_recovery_points()
        replica.manager.abandon()
    return fs


def segments(fs: FaultyFileSystem) -> list[str]:
    return sorted(f"{FOLDER}/{name}" for name in fs.list_dir(FOLDER) if name.endswith(".log"))


def content(fs: FaultyFileSystem) -> dict[str, bytes]:
    """All but indexes, which are made of the rest."""
    return {name: read_file(fs, f"{FOLDER}/{name}") for name in fs.list_dir(FOLDER) if not name.endswith("index")}


def refused(fs: FaultyFileSystem, why: str) -> str:
    """Twice with the same words, and nothing on disk is changed."""
    before, said = content(fs), set()
    for _ in range(2):
        with pytest.raises(KafkaError, match=why) as caught:
            open_replica(fs)
        said.add(caught.value.message)
        assert content(fs) == before
    assert len(said) == 1
    line = said.pop()
    assert "\n" not in line
    assert "move its metadata folder away" in line
    assert caught.value.code is ErrorCode.KAFKA_STORAGE_ERROR
    return line


def emptied(fs: FaultyFileSystem) -> None:
    replica = open_replica(fs, is_voter=False)
    assert (replica.log.log_start_offset, replica.log.log_end_offset) == (0, 0)
    assert replica.latest_snapshot is None
    append(replica, 3)
    replica.flush()
    assert reopen(fs, is_voter=False).log.log_end_offset == 3


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("snapshot_end", [0, 20, 30])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_flipped_byte_is_refused(clean: bool, snapshot_end: int, number: int) -> None:
    fs = stopped(clean=clean, snapshot_end=snapshot_end)
    path = segments(fs)[number]
    data = bytearray(read_file(fs, path))
    data[150] ^= 1
    write_file(fs, path, bytes(data), sync=True)
    offset = int(path[-24:-4]) + 1
    assert f"{path} is damaged at offset {offset} (wrong CRC" in refused(fs, "is damaged")
    emptied(fs)


@pytest.mark.parametrize("clean", [True, False])
def test_a_log_that_is_shorter_than_it_was_is_refused(clean: bool) -> None:
    fs = stopped(clean=clean)
    path = segments(fs)[-1]
    write_file(fs, path, read_file(fs, path)[:-30], sync=True)
    assert f"{path} is damaged at offset {BATCHES - 1} (the batch at" in refused(fs, "is cut")
    write_file(fs, path, b"", sync=True)
    refused(fs, f"ends at offset {int(path[-24:-4])}, though everything below {BATCHES} was durable")
    fs.remove(path)
    refused(fs, f"ends at offset {int(path[-24:-4])}, though everything below {BATCHES} was durable")
    emptied(fs)


@pytest.mark.parametrize("clean", [True, False])
def test_a_missing_segment_is_refused(clean: bool) -> None:
    fs = stopped(clean=clean)
    paths = segments(fs)
    fs.remove(paths[1])
    refused(fs, f"ends at offset {int(paths[1][-24:-4])}, ")
    for path in segments(fs):
        fs.remove(path)
    refused(fs, f"ends at offset 0, though everything below {BATCHES} was durable")


def test_a_snapshot_takes_the_place_of_what_is_missing_below_it() -> None:
    fs = stopped(clean=False, snapshot_end=BATCHES)
    for path in segments(fs)[1:]:
        fs.remove(path)
    replica = open_replica(fs)
    assert (replica.log.log_start_offset, replica.log.log_end_offset) == (BATCHES, BATCHES)


def test_a_whole_log_that_gave_way_to_a_shorter_snapshot_is_no_damage() -> None:
    """The leader's snapshot contradicts the log's end, and the process was killed before it had taken its place."""
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, BATCHES)
    replica.flush()
    replica.manager.checkpoint_recovery_points()
    received(replica, BATCHES - 1, 2).complete()
    replica.manager.abandon()
    again = open_replica(fs)
    assert (again.log.log_start_offset, again.log.log_end_offset) == (BATCHES - 1, BATCHES - 1)


def test_but_not_a_corrupt_one() -> None:
    fs = stopped(clean=False, snapshot_end=BATCHES)
    for path in segments(fs)[1:]:
        fs.remove(path)
    snapshot = next(f"{FOLDER}/{name}" for name in fs.list_dir(FOLDER) if name.endswith(".checkpoint"))
    write_file(fs, snapshot, read_file(fs, snapshot)[:-1], sync=True)
    for _ in range(2):
        with pytest.raises(KafkaError, match=f"though everything below {BATCHES} was durable"):
            open_replica(fs)


def test_a_torn_tail_beyond_the_recovery_point_is_cut() -> None:
    fs = stopped(clean=False)
    replica = open_replica(fs)
    append(replica, 2)
    path = f"{FOLDER}/{replica.log.segment_base_offsets[-1]:020d}.log"
    replica.manager.abandon()
    write_file(fs, path, read_file(fs, path)[:-30], sync=True)
    replica = open_replica(fs)
    assert replica.log.log_end_offset == BATCHES + 1


def test_what_was_cut_is_not_missed() -> None:
    fs = stopped()
    replica = open_replica(fs)
    replica.change_log(TruncateLog(5), NOW)
    replica.manager.abandon()  # killed before anything was appended
    assert open_replica(fs).log.log_end_offset == 5


def test_a_full_disk_lets_nothing_be_cut() -> None:
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


def test_a_flush_beside_a_cut_does_not_raise_what_is_checkpointed() -> None:
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
    """Opened, without a `quorum-state` of the tests' own."""
    manager = LogManager(fs, ("/data",), cluster_id="c", node_id=1, defaults=log_config(SEGMENT_BYTES))
    manager.load(NOW)
    try:
        return QuorumReplica.open(
            manager, cluster_id="c", voters=voters, is_voter=is_voter, segment_bytes=SEGMENT_BYTES, now_ms=NOW
        )
    finally:
        manager.abandon()


def test_a_voter_that_forgot_its_vote_is_refused() -> None:
    fs = stopped()
    fs.remove(f"{FOLDER}/quorum-state")
    refused(fs, "quorum-state is missing, and with it the vote of a log that ends at 30")
    replica = opened(fs, is_voter=False)
    assert replica.log.log_end_offset == BATCHES


def test_the_only_voter_of_an_older_version_goes_on_without() -> None:
    fs = stopped()
    fs.remove(f"{FOLDER}/quorum-state")
    assert opened(fs, is_voter=True, voters=(1,)).log.log_end_offset == BATCHES


@pytest.mark.parametrize("is_voter", [True, False])
@pytest.mark.parametrize("voters", [(1,), (1, 2), (1, 2, 4), (1, 2, 3, 4)])
def test_other_voters_are_refused(voters: tuple[int, ...], is_voter: bool) -> None:
    fs = stopped()
    before = content(fs)
    names = ", ".join(str(each) for each in voters)
    with pytest.raises(
        KafkaError, match=f"is of the voters 1, 2, 3, but controller.quorum.voters names {names}: a"
    ) as it:
        opened(fs, is_voter=is_voter, voters=voters)
    assert it.value.code is ErrorCode.INCONSISTENT_VOTER_SET
    assert "\n" not in it.value.message
    assert content(fs) == before
    assert opened(fs, is_voter=is_voter, voters=(3, 2, 1)).log.log_end_offset == BATCHES


def test_a_quorum_state_that_cannot_be_read_says_the_way_out() -> None:
    fs = stopped()
    write_file(fs, f"{FOLDER}/quorum-state", b"{", sync=True)
    refused(fs, "quorum-state: it is not Kafka's JSON")


def test_on_a_real_disk(tmp_path: Path) -> None:
    fs = RealFileSystem()
    for number in range(2):
        manager = LogManager(fs, (str(tmp_path),), cluster_id="c", node_id=1, defaults=log_config(SEGMENT_BYTES))
        manager.load(NOW)
        replica = QuorumReplica.open(
            manager, cluster_id="c", voters=(1,), is_voter=number == 0, segment_bytes=SEGMENT_BYTES, now_ms=NOW
        )
        assert replica.log.log_end_offset == 0  # the second time it was damaged
        append(replica, 20)
        manager.close(-1)
        path = tmp_path / "__cluster_metadata-0" / f"{0:020d}.log"
        data = bytearray(path.read_bytes())
        data[100] ^= 4
        path.write_bytes(data)


def test_an_epoch_that_no_crc_covers_is_checked() -> None:
    fs = stopped()
    path = segments(fs)[-1]
    data = bytearray(read_file(fs, path))
    data[15] ^= 2  # the lowest byte of the first batch's leader epoch
    write_file(fs, path, bytes(data), sync=True)
    refused(fs, r"is damaged at offset \d+ \(leader epoch 3, expected 1\)")
    fs.remove(f"{FOLDER}/leader-epoch-checkpoint")
    refused(fs, r"is damaged at offset \d+ \(leader epoch 1, expected 3\)")


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("position", [0, 7, 8, 11, 16, 17, 22])
def test_a_damaged_header_is_refused(clean: bool, position: int) -> None:
    fs = stopped(clean=clean)
    path = segments(fs)[0]
    data = bytearray(read_file(fs, path))
    second = 12 + int.from_bytes(data[8:12], "big")
    data[second + position] ^= 0x41
    write_file(fs, path, bytes(data), sync=True)
    refused(fs, r"is damaged at offset 1 \(")
