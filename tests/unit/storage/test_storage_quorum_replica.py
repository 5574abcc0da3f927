"""Log, snapshots and `quorum-state` of a replica after faults and power failures (630-06, 630-12, 630-14)."""

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
    DIRECTORY,
    LIMITS,
    NOW,
    SEGMENT_BYTES,
    VOTERS,
    append,
    assert_snapshot_covers_log_start,
    flip,
    make_snapshot,
    open_replica,
    reopen,
    snapshots,
    start_receiving,
)

# -- effects


def test_effects_append_and_truncate() -> None:
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


def test_failed_append_is_rejected() -> None:
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


def test_partly_stored_append_is_log_changed() -> None:
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


def test_election_state_survives_power_failure() -> None:
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


def test_quorum_state_of_other_cluster_is_rejected() -> None:
    fs = FaultyFileSystem()
    open_replica(fs).persist(ElectionState(3))
    fs.crash()
    with pytest.raises(KafkaError, match=r"belongs to cluster c, but cluster.id is d") as caught:
        open_replica(fs, cluster_id="d")
    assert caught.value.code is ErrorCode.INCONSISTENT_CLUSTER_ID
    assert "\n" not in caught.value.message
    assert open_replica(fs).election.epoch == 3


def test_machine_starts_with_log_and_snapshots() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    old, new = make_snapshot(replica, 10), make_snapshot(replica, 20)
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


def test_leader_raises_log_start_to_snapshot_that_all_replicas_reached() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    make_snapshot(replica, 10)
    make_snapshot(replica, 20, timestamp_ms=NOW - LIMITS.lag_time_ms_max)
    assert plan(replica, 9) == 0
    assert plan(replica, 10) == 20  # the next snapshot is old enough
    assert plan(replica, 29, high_watermark=15) == 10
    assert plan(replica, 0, limits=LIMITS._replace(bytes_max=10)) == 20
    log_bytes = replica.log.bytes_from(0)
    assert replica.log.bytes_from(30) == 0
    assert replica.log.bytes_from(15) == log_bytes // 2
    sizes = sum(replica.store.size(each) or 0 for each in replica.store.snapshot_ids())
    assert plan(replica, 0, limits=LIMITS._replace(bytes_max=log_bytes + sizes)) == 0


def test_corrupt_snapshot_header_does_not_raise_log_start() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    path = f"{DIRECTORY}/{make_snapshot(replica, 10).end_offset:020d}-0000000001.checkpoint"
    make_snapshot(replica, 20)
    data = read_file(fs, path)
    write_file(fs, path, data[:70] + b"?" + data[71:], sync=True)
    assert plan(replica, 15) == 0


def test_follower_log_start_is_limited_by_leader_and_latest_snapshot() -> None:
    replica = open_replica(FaultyFileSystem())
    append(replica, 30)
    assert plan(replica, 0, leader_log_start=25) == 0
    make_snapshot(replica, 10)
    assert plan(replica, 0, leader_log_start=-1) == 0
    assert plan(replica, 0, leader_log_start=5) == 5
    assert plan(replica, 0, leader_log_start=25) == 10
    assert plan(replica, 0, leader_log_start=25, high_watermark=7) == 7


def test_clean_removes_snapshots_and_segments() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 60)
    make_snapshot(replica, 10)
    make_snapshot(replica, 40)
    new = make_snapshot(replica, 50)
    assert replica.clean() is None
    with pytest.raises(ValueError, match="log start must not exceed the latest snapshot"):
        replica.raise_log_start(51)
    replica.raise_log_start(40)
    assert replica.clean() == SnapshotChanged(new, SnapshotId(40, 1))
    assert len(snapshots(fs)) == 2
    bases = replica.log.segment_base_offsets
    append(replica, 1)
    assert replica.log.segment_base_offsets[0] > bases[0] == 0
    assert replica.clean() is None
    assert not [name for name in fs.list_dir(DIRECTORY) if name.endswith(".deleted")]
    replica.flush()
    replica = reopen(fs)
    assert replica.log.log_start_offset == 40
    assert replica.log.log_end_offset == 61
    assert_snapshot_covers_log_start(replica)


def test_clean_removes_nothing_on_full_disk() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 60)
    make_snapshot(replica, 40)
    make_snapshot(replica, 50)
    replica.raise_log_start(50)
    fs.capacity_bytes = fs.used_bytes
    with pytest.raises(StorageError):
        replica.clean()
    assert len(snapshots(fs)) == 2
    fs.capacity_bytes = None
    assert replica.clean() is not None
    assert len(snapshots(fs)) == 1


def test_snapshot_below_log_start_is_ignored() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    new = make_snapshot(replica, 20)
    replica.raise_log_start(20)
    assert replica.clean() is None
    writer = replica.store.create(SnapshotId(10, 1), last_contained_log_timestamp=0, now_ms=NOW)
    writer.freeze()
    assert replica.register_snapshot(SnapshotId(10, 1)) == SnapshotChanged(new, new)
    assert replica.clean() is None
    assert replica.store.snapshot_ids() == [new]


# -- installing


def test_installed_snapshot_replaces_log() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    make_snapshot(replica, 10)
    replica.flush()
    start_receiving(replica, 50, 2).complete()
    new = SnapshotId(50, 2)
    assert replica.install(new) == SnapshotChanged(new, new)
    assert (replica.log.log_start_offset, replica.log.log_end_offset, replica.log.latest_epoch) == (50, 50, -1)
    assert replica.store.snapshot_ids() == [new]
    append(replica, 3, epoch=2)
    replica.flush()
    replica = reopen(fs)
    assert (replica.log.log_start_offset, replica.log.log_end_offset) == (50, 53)
    assert_snapshot_covers_log_start(replica)


def test_late_snapshot_does_not_lower_latest() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    make_snapshot(replica, 10)
    machine = replica.machine(RaftConfig(1, VOTERS, "c"))
    machine.start(0, 0.5)
    before = replica.register_snapshot(SnapshotId(10, 1))
    start_receiving(replica, 50, 2).complete()
    machine.step(replica.install(SnapshotId(50, 2)), 1, 0.5)
    machine.step(before, 2, 0.5)
    assert machine.latest_snapshot == machine.earliest_snapshot == SnapshotId(50, 2)


# -- power failures: each scenario is repeated with a power failure before every operation


class CuttingFileSystem(FaultyFileSystem):
    """Fails every operation from a given one, as if the process ended there. The test then calls `crash`."""

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
    start_receiving(replica, 50, 2).complete()
    replica.install(SnapshotId(50, 2))


def _install_over_a_diverged_end(replica: QuorumReplica) -> None:
    append(replica, 9, epoch=7)
    replica.flush()
    start_receiving(replica, 50, 2).complete()
    replica.install(SnapshotId(50, 2))


def _make(replica: QuorumReplica) -> None:
    make_snapshot(replica, 25)


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
def test_power_failure_at_any_operation_leaves_recoverable_state(
    work: Callable[[QuorumReplica], None], rng_seed: int | None
) -> None:
    operations = 0
    while True:
        rng = None if rng_seed is None else Random(rng_seed * 1000 + operations)
        fs = CuttingFileSystem()
        replica = open_replica(fs)
        append(replica, 30)
        make_snapshot(replica, 10)
        make_snapshot(replica, 20)
        replica.flush()
        replica.persist(ElectionState(7, 2))
        replica.manager.checkpoint_recovery_points()  # missing batches below count as damage
        fs.left = operations
        is_cut = False
        try:
            work(replica)
            replica.log.abandon()
            fs.crash(rng)
            open_replica(fs)  # a power failure during recovery
        except (OSError, StorageError):
            is_cut = True
        fs.left = None
        replica = reopen(fs, rng)
        assert_snapshot_covers_log_start(replica)
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
    """Return a disk with snapshots at 10 and 20 of a log that ends at 30."""
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    make_snapshot(replica, 10)
    make_snapshot(replica, 20)
    replica.raise_log_start(start)
    replica.clean()
    replica.flush()
    replica.log.abandon()
    return fs


def test_corrupt_newest_snapshot_is_set_aside(caplog: pytest.LogCaptureFixture) -> None:
    fs = prepared()
    flip(fs, SnapshotId(20, 1))
    replica = reopen(fs)
    assert replica.latest_snapshot == SnapshotId(10, 1)
    assert "corrupt snapshot set aside" in caplog.text
    assert "00000000000000000020-0000000001.checkpoint.corrupt" in snapshots(fs)
    assert_snapshot_covers_log_start(replica)


@pytest.mark.parametrize("is_missing", [True, False])
def test_without_valid_snapshot_voter_refuses_and_observer_empties_log(is_missing: bool) -> None:
    fs = prepared(start=20)
    if is_missing:
        fs.remove(f"{DIRECTORY}/00000000000000000020-0000000001.checkpoint")
        fs.sync_dir(DIRECTORY)
    else:
        flip(fs, SnapshotId(20, 1))
    for _ in range(2):
        with pytest.raises(KafkaError, match="starts at offset 20 and no valid snapshot") as caught:
            reopen(fs)
        assert "\n" not in caught.value.message
        assert "move its metadata" in caught.value.message
    replica = reopen(fs, is_voter=False)
    assert (replica.log.log_start_offset, replica.log.log_end_offset) == (0, 0)
    assert replica.latest_snapshot is None
    assert not replica.store.snapshot_ids()
    replica.log.abandon()
    fs.release("/data/.lock", fs.crashes)
    assert open_replica(fs, is_voter=False).log.log_end_offset == 0
    assert reopen(fs, is_voter=False).log.log_start_offset == 0


def test_log_that_ends_before_snapshot_is_replaced() -> None:
    fs = prepared()
    for name in fs.list_dir(DIRECTORY):
        if name.endswith(".log") and not name.startswith("00000000000000000000."):
            fs.remove(f"{DIRECTORY}/{name}")
    file = fs.open(f"{DIRECTORY}/00000000000000000000.log")
    file.truncate(150)
    file.sync()
    fs.sync_dir(DIRECTORY)
    replica = reopen(fs)
    assert (replica.log.log_start_offset, replica.log.log_end_offset) == (20, 20)
    assert_snapshot_covers_log_start(replica)


def test_part_file_of_previous_process_is_removed() -> None:
    fs = prepared()
    stale = f"{DIRECTORY}/00000000000000000025-0000000001.checkpoint.part"
    write_file(fs, stale, b"half of it", sync=True)
    fs.sync_dir(DIRECTORY)
    replica = reopen(fs)
    assert replica.latest_snapshot == SnapshotId(20, 1)
    assert not fs.exists(stale)
    assert replica.receive(SnapshotId(25, 1)).size_bytes == 0


def test_disk_failure_at_start_raises_storage_error() -> None:
    fs = prepared()
    for operation in ("sync_dir", "open"):
        fs.crash()
        fs.fail(operation, path="__cluster_metadata-0", times=100)
        with contextlib.suppress(OSError), pytest.raises(StorageError):
            open_replica(fs)
        fs.faults.clear()
    assert_snapshot_covers_log_start(reopen(fs))


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
        make_snapshot(replica, 20 + 30 * number)
        replica.persist(ElectionState(number + 1))
        replica.raise_log_start(20 + 30 * number)
        replica.clean()
        manager.close(-1)


def test_received_snapshot_does_not_count_before_install() -> None:
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    own = make_snapshot(replica, 10)
    new = SnapshotId(50, 2)
    start_receiving(replica, 50, 2).complete()
    assert replica.register_snapshot(own) == SnapshotChanged(own, own)
    assert replica.clean() is None
    replica.discard(new)
    assert replica.store.snapshot_ids() == [own]
    with pytest.raises(StorageError, match="does not exist in"):
        replica.install(new)
    assert replica.log.log_end_offset == 30
