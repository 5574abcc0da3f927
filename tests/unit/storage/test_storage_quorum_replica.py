"""Log, snapshots and `quorum-state` of a replica: 630-06, 630-12, 630-14 after faults and power cuts at any point."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kipmesh.core import record_batch
from kipmesh.core.control_records import LeaderChange
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.raft import ElectionState, RaftConfig
from kipmesh.core.raft.types import (
    AppendAsFollower,
    AppendAsLeader,
    AppendLeaderChange,
    AppendRejected,
    LogChanged,
    Read,
    SnapshotChanged,
    TruncateLog,
)
from kipmesh.core.snapshot.retention import ReplicaEnd
from kipmesh.messages import SnapshotId
from kipmesh.storage import LogManager, StorageError
from kipmesh.storage.fs import RealFileSystem, read_file, write_file
from kipmesh.storage.quorum.quorum_replica import QuorumReplica, log_config
from simulation.faulty_fs import Fault, FaultyFileSystem
from tests.unit.storage.quorum_replica_support import (
    FOLDER,
    LIMITS,
    NOW,
    SEGMENT_BYTES,
    VOTERS,
    append,
    assert_630_06,
    flip,
    make,
    open_replica,
    received,
    reopen,
    snapshots,
)

# -- what effects do


def test_effects_change_the_log() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    change = LeaderChange(1, VOTERS, VOTERS)
    assert replica.change_log(AppendLeaderChange(1, change), NOW) == LogChanged()
    append(replica, 5, epoch=1)
    assert replica.flush() == 6
    batches = replica.read(Read(2, 1 << 20, 5))
    assert [header.base_offset for _, header in record_batch.iterate(batches)] == [2, 3, 4]
    assert replica.change_log(TruncateLog(2), NOW) == LogChanged()
    assert replica.change_log(AppendAsFollower(batches), NOW) == LogChanged()
    assert replica.log.log_end_offset == 5
    assert replica.log.config.max_message_bytes > 1 << 30


def test_what_the_log_does_not_take_is_rejected() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 3)
    batch = record_batch.build([(None, b"x")], base_offset=3, leader_epoch=1, timestamp_ms=NOW)
    assert replica.change_log(AppendAsFollower(batch[:-1] + b"y"), NOW) == AppendRejected()
    assert isinstance(replica.last_rejection, CorruptRecordError)
    assert replica.change_log(AppendAsLeader(1, batch, 0), NOW) == AppendRejected()
    assert replica.last_rejection.code is ErrorCode.FENCED_LEADER_EPOCH
    fs.capacity_bytes = fs.used_bytes
    assert replica.change_log(AppendAsLeader(1, batch, 1), NOW) == AppendRejected()
    assert isinstance(replica.last_rejection, StorageError)
    assert replica.log.log_end_offset == 3
    fs.capacity_bytes = None
    append(replica, 1)
    fs.fail("write", errno.EIO)
    with pytest.raises(StorageError):
        replica.change_log(AppendAsLeader(1, batch, 1), NOW)


def test_a_part_of_a_followers_batches_is_a_change() -> None:
    fs = FaultyFileSystem()
    leader = open_replica(FaultyFileSystem())
    append(leader, 40)
    batches = b""
    for base in leader.log.segment_base_offsets:
        batches += leader.read(Read(base, 1 << 20, 40))
    replica = open_replica(fs)
    fs.capacity_bytes = fs.used_bytes + 2 * SEGMENT_BYTES
    assert replica.change_log(AppendAsFollower(batches), NOW) == LogChanged()
    assert 0 < replica.log.log_end_offset < 40
    assert replica.last_rejection is not None


def test_an_election_is_kept() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    replica.persist(ElectionState(3, -1, 2))
    replica = reopen(fs)
    assert replica.election == ElectionState(3, -1, 2)
    machine = replica.machine(RaftConfig(1, VOTERS, "c"))
    assert machine.epoch == 3
    fs.fail("rename")
    with pytest.raises(StorageError, match="quorum-state"):
        replica.persist(ElectionState(4))
    assert replica.election.epoch == 3


def test_a_quorum_state_of_another_cluster_is_refused() -> None:
    fs = FaultyFileSystem()
    open_replica(fs).persist(ElectionState(3))
    fs.crash()
    with pytest.raises(KafkaError, match="is of cluster c, this is d") as caught:
        open_replica(fs, cluster_id="d")
    assert caught.value.code is ErrorCode.INCONSISTENT_CLUSTER_ID
    assert "\n" not in caught.value.message
    assert open_replica(fs).election.epoch == 3


def test_the_machine_begins_with_log_and_snapshots() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    old, new = make(replica, 10), make(replica, 20)
    replica.flush()
    machine = replica.machine(RaftConfig(1, VOTERS, "c"))
    assert (machine.latest_snapshot, machine.earliest_snapshot) == (new, old)
    assert (machine.high_watermark, machine.durable_end) == (20, 30)


# -- cleaning


def plan(replica: QuorumReplica, reached: int, **options: object) -> int:
    arguments: dict[str, Any] = {
        "leader_log_start": None,
        "replicas": [ReplicaEnd(2, True, reached, NOW)],
        "high_watermark": replica.log.log_end_offset,
        "now_ms": NOW,
        "limits": LIMITS,
    }
    return replica.plan_clean(**(arguments | options))


def test_a_leader_plans_by_what_all_have_reached() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    make(replica, 10)
    make(replica, 20, timestamp_ms=NOW - LIMITS.lag_time_ms_max)
    assert plan(replica, 9) == 0
    assert plan(replica, 10) == 20  # the next is old enough
    assert plan(replica, 29, high_watermark=15) == 10
    assert plan(replica, 0, limits=LIMITS._replace(bytes_max=10)) == 20
    log_bytes = replica.log.bytes_from(0)
    assert replica.log.bytes_from(30) == 0
    assert replica.log.bytes_from(15) == log_bytes // 2
    sizes = sum(replica.store.size(each) or 0 for each in replica.store.snapshot_ids())
    assert plan(replica, 0, limits=LIMITS._replace(bytes_max=log_bytes + sizes)) == 0


def test_a_snapshot_whose_header_is_corrupt_is_no_reason_to_raise_the_start() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    path = f"{FOLDER}/{make(replica, 10).end_offset:020d}-0000000001.checkpoint"
    make(replica, 20)
    data = read_file(fs, path)
    write_file(fs, path, data[:70] + b"?" + data[71:], sync=True)
    assert plan(replica, 15) == 0


def test_a_follower_plans_by_its_leader_and_its_own_latest() -> None:
    replica = open_replica(FaultyFileSystem())
    append(replica, 30)
    assert plan(replica, 0, leader_log_start=25) == 0
    make(replica, 10)
    assert plan(replica, 0, leader_log_start=-1) == 0
    assert plan(replica, 0, leader_log_start=5) == 5
    assert plan(replica, 0, leader_log_start=25) == 10
    assert plan(replica, 0, leader_log_start=25, high_watermark=7) == 7


def test_cleaning_lets_snapshots_and_segments_go() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 60)
    make(replica, 10)
    make(replica, 40)
    new = make(replica, 50)
    assert replica.clean() is None
    with pytest.raises(ValueError, match="no snapshot reaches offset 51"):
        replica.raise_log_start(51)
    replica.raise_log_start(40)
    assert replica.clean() == SnapshotChanged(new, SnapshotId(40, 1))
    assert len(snapshots(fs)) == 2
    bases = replica.log.segment_base_offsets
    append(replica, 1)
    assert replica.log.segment_base_offsets[0] > bases[0] == 0
    assert replica.clean() is None
    assert not [name for name in fs.list_dir(FOLDER) if name.endswith(".deleted")]
    replica.flush()
    replica = reopen(fs)
    assert replica.log.log_start_offset == 40
    assert replica.log.log_end_offset == 61
    assert_630_06(replica)


def test_a_full_disk_lets_nothing_go() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 60)
    make(replica, 40)
    make(replica, 50)
    replica.raise_log_start(50)
    fs.capacity_bytes = fs.used_bytes
    with pytest.raises(StorageError):
        replica.clean()
    assert len(snapshots(fs)) == 2
    fs.capacity_bytes = None
    assert replica.clean() is not None
    assert len(snapshots(fs)) == 1


def test_a_snapshot_that_the_log_start_passed_goes() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    new = make(replica, 20)
    replica.raise_log_start(20)
    assert replica.clean() is None
    writer = replica.store.create(SnapshotId(10, 1), last_contained_log_timestamp=0, now_ms=NOW)
    writer.freeze()
    assert replica.made(SnapshotId(10, 1)) == SnapshotChanged(new, new)
    assert replica.clean() is None
    assert replica.store.snapshot_ids() == [new]


# -- installing


def test_a_received_snapshot_takes_the_logs_place() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    make(replica, 10)
    replica.flush()
    received(replica, 50, 2).complete()
    new = SnapshotId(50, 2)
    assert replica.install(new) == SnapshotChanged(new, new)
    assert (replica.log.log_start_offset, replica.log.log_end_offset, replica.log.latest_epoch) == (50, 50, -1)
    assert replica.store.snapshot_ids() == [new]
    append(replica, 3, epoch=2)
    replica.flush()
    replica = reopen(fs)
    assert (replica.log.log_start_offset, replica.log.log_end_offset) == (50, 53)
    assert_630_06(replica)


def test_what_is_told_late_does_not_go_back() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    make(replica, 10)
    machine = replica.machine(RaftConfig(1, VOTERS, "c"))
    machine.start(0, 0.5)
    before = replica.made(SnapshotId(10, 1))
    received(replica, 50, 2).complete()
    machine.step(replica.install(SnapshotId(50, 2)), 1, 0.5)
    machine.step(before, 2, 0.5)
    assert machine.latest_snapshot == machine.earliest_snapshot == SnapshotId(50, 2)


# -- power cuts: the work is repeated, with the power cut before each operation in turn


class CuttingFileSystem(FaultyFileSystem):
    """Everything fails from some operation on, as in a process that ends; then `crash` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.left: int | None = None

    def check(self, operation: str, path: str) -> Fault | None:
        if self.left is not None and operation in ("write", "sync", "sync_dir", "rename", "remove", "open", "list"):
            if self.left <= 0:
                raise OSError(errno.EIO, "the power is gone", path)
            self.left -= 1
        return super().check(operation, path)


def _install(replica: QuorumReplica) -> None:
    received(replica, 50, 2).complete()
    replica.install(SnapshotId(50, 2))


def _install_over_a_diverged_end(replica: QuorumReplica) -> None:
    append(replica, 9, epoch=7)
    replica.flush()
    received(replica, 50, 2).complete()
    replica.install(SnapshotId(50, 2))


def _make(replica: QuorumReplica) -> None:
    make(replica, 25)


def _clean(replica: QuorumReplica) -> None:
    replica.raise_log_start(20)
    replica.clean()
    append(replica, 1)
    replica.clean()


def _cut(replica: QuorumReplica) -> None:
    replica.change_log(TruncateLog(23), NOW)
    append(replica, 12, epoch=3)
    replica.flush()
    replica.change_log(TruncateLog(31), NOW)
    replica.change_log(TruncateLog(22), NOW)
    append(replica, 10, epoch=4)
    replica.flush()


def _open(replica: QuorumReplica) -> None:
    replica.log.abandon()


WORK: list[Callable[[QuorumReplica], None]] = [_install, _install_over_a_diverged_end, _make, _clean, _cut, _open]


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
@pytest.mark.parametrize("rng_seed", [None, 1, 2, 3])
def test_power_cut_at_any_operation(work: Callable[[QuorumReplica], None], rng_seed: int | None) -> None:
    operations = 0
    while True:
        rng = None if rng_seed is None else Random(rng_seed * 1000 + operations)
        fs = CuttingFileSystem()
        replica = open_replica(fs)
        append(replica, 30)
        make(replica, 10)
        make(replica, 20)
        replica.flush()
        replica.persist(ElectionState(7, 2))
        replica.manager.checkpoint_recovery_points()  # what is missing from now on is damage
        fs.left = operations
        is_cut = False
        try:
            work(replica)
            replica.log.abandon()
            fs.crash(rng)
            open_replica(fs)  # recovering is cut as well
        except (OSError, StorageError):
            is_cut = True
        fs.left = None
        replica = reopen(fs, rng)
        assert_630_06(replica)
        assert replica.election == ElectionState(7, 2)
        latest = replica.latest_snapshot
        assert latest is not None
        assert latest.end_offset >= 20
        if latest.end_offset < 50:
            assert replica.log.log_end_offset >= (22 if work is _cut else 30)
        else:
            assert (replica.log.log_start_offset, replica.log.log_end_offset) == (50, 50)
        replica.machine(RaftConfig(1, VOTERS, "c")).start(0, 0.5)
        append(replica, 2, epoch=8)
        replica.flush()
        end = replica.log.log_end_offset
        assert reopen(fs, rng).log.log_end_offset == end
        if not is_cut:
            break
        operations += 1
    assert operations > 3


# -- starting (630-14)


def prepared(*, start: int = 0) -> FaultyFileSystem:
    """Snapshots at 10 and 20 of a log that ends at 30."""
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    make(replica, 10)
    make(replica, 20)
    replica.raise_log_start(start)
    replica.clean()
    replica.flush()
    replica.log.abandon()
    return fs


def test_a_corrupt_newest_snapshot_is_set_aside_for_the_older(caplog: pytest.LogCaptureFixture) -> None:
    fs = prepared()
    flip(fs, SnapshotId(20, 1))
    replica = reopen(fs)
    assert replica.latest_snapshot == SnapshotId(10, 1)
    assert "set aside" in caplog.text
    assert "00000000000000000020-0000000001.checkpoint.corrupt" in snapshots(fs)
    assert_630_06(replica)


@pytest.mark.parametrize("is_missing", [True, False])
def test_without_a_valid_snapshot_a_voter_refuses_and_an_observer_empties(is_missing: bool) -> None:
    fs = prepared(start=20)
    if is_missing:
        fs.remove(f"{FOLDER}/00000000000000000020-0000000001.checkpoint")
        fs.sync_dir(FOLDER)
    else:
        flip(fs, SnapshotId(20, 1))
    for _ in range(2):
        with pytest.raises(KafkaError, match="starts at offset 20 and no valid snapshot") as caught:
            reopen(fs)
        assert "\n" not in caught.value.message
        assert "move its metadata folder away" in caught.value.message
    replica = reopen(fs, is_voter=False)
    assert (replica.log.log_start_offset, replica.log.log_end_offset) == (0, 0)
    assert replica.latest_snapshot is None
    assert not replica.store.snapshot_ids()
    replica.log.abandon()
    fs.release("/data/.lock", fs.crashes)
    assert open_replica(fs, is_voter=False).log.log_end_offset == 0
    assert reopen(fs, is_voter=False).log.log_start_offset == 0


def test_a_truncated_log_begins_with_its_snapshot() -> None:
    fs = prepared()
    for name in fs.list_dir(FOLDER):
        if name.endswith(".log") and not name.startswith("00000000000000000000."):
            fs.remove(f"{FOLDER}/{name}")
    file = fs.open(f"{FOLDER}/00000000000000000000.log")
    file.truncate(150)
    file.sync()
    fs.sync_dir(FOLDER)
    replica = reopen(fs)
    assert (replica.log.log_start_offset, replica.log.log_end_offset) == (20, 20)
    assert_630_06(replica)


def test_a_part_of_an_earlier_process_goes() -> None:
    fs = prepared()
    stale = f"{FOLDER}/00000000000000000025-0000000001.checkpoint.part"
    write_file(fs, stale, b"half of it", sync=True)
    fs.sync_dir(FOLDER)
    replica = reopen(fs)
    assert replica.latest_snapshot == SnapshotId(20, 1)
    assert not fs.exists(stale)
    assert replica.receive(SnapshotId(25, 1)).size_bytes == 0


def test_a_disk_that_fails_at_the_start_is_said() -> None:
    fs = prepared()
    for operation in ("sync_dir", "open"):
        fs.crash()
        fs.fail(operation, path="__cluster_metadata-0", times=100)
        with contextlib.suppress(OSError), pytest.raises(StorageError):
            open_replica(fs)
        fs.faults.clear()
    assert_630_06(reopen(fs))


def test_on_a_real_disk(tmp_path: object) -> None:
    fs = RealFileSystem()
    for number in range(2):
        manager = LogManager(fs, (str(tmp_path),), cluster_id="c", node_id=1, defaults=log_config(SEGMENT_BYTES))
        manager.load(NOW)
        replica = QuorumReplica.open(
            manager, cluster_id="c", voters=(1,), is_voter=True, segment_bytes=SEGMENT_BYTES, now_ms=NOW
        )
        assert replica.log.log_start_offset == 20 * number
        append(replica, 30)
        make(replica, 20 + 30 * number)
        replica.persist(ElectionState(number + 1))
        replica.raise_log_start(20 + 30 * number)
        replica.clean()
        manager.close(-1)


def test_a_received_snapshot_is_none_of_ours_before_it_is_installed() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    own = make(replica, 10)
    new = SnapshotId(50, 2)
    received(replica, 50, 2).complete()
    assert replica.made(own) == SnapshotChanged(own, own)
    assert replica.clean() is None
    replica.discard(new)
    assert replica.store.snapshot_ids() == [own]
    with pytest.raises(StorageError, match="is not in"):
        replica.install(new)
    assert replica.log.log_end_offset == 30
