"""Test support: a replica of the metadata quorum on a `FaultyFileSystem`."""

from __future__ import annotations

from random import Random

from kipmesh.core import record_batch
from kipmesh.core.raft import ElectionState
from kipmesh.core.raft.types import (
    AppendAsLeader,
    LogChanged,
)
from kipmesh.core.snapshot.retention import RetentionLimits
from kipmesh.messages import SnapshotId
from kipmesh.storage import LogManager
from kipmesh.storage.fs import read_file, write_file
from kipmesh.storage.quorum.quorum_replica import QuorumReplica, log_config
from kipmesh.storage.quorum.snapshots import ReceivedSnapshot
from simulation.faulty_fs import FaultyFileSystem

DIRECTORY = "/data/__cluster_metadata-0"
VOTERS = (1, 2, 3)
NOW = 1_700_000_000_000
LIMITS = RetentionLimits()
SEGMENT_BYTES = 1024


def open_replica(
    fs: FaultyFileSystem, *, is_voter: bool = True, cluster_id: str = "c", directory: str = "/data"
) -> QuorumReplica:
    manager = LogManager(fs, (directory,), cluster_id="c", node_id=1, defaults=log_config(SEGMENT_BYTES))
    manager.load(NOW)
    try:
        replica = QuorumReplica.open(
            manager,
            cluster_id=cluster_id,
            voters=VOTERS,
            is_voter=is_voter,
            segment_bytes=SEGMENT_BYTES,
            now_ms=NOW,
        )
        if not fs.exists(f"{replica.log.dir}/quorum-state"):  # every voter has one before its first append
            replica.persist(ElectionState())
    except BaseException:
        manager.abandon()
        raise
    return replica


def reopen(fs: FaultyFileSystem, rng: Random | None = None, *, is_voter: bool = True) -> QuorumReplica:
    """Open the replica after a power failure."""
    fs.crash(rng)
    return open_replica(fs, is_voter=is_voter)


def append(replica: QuorumReplica, count: int, epoch: int = 1) -> None:
    for number in range(count):
        batch = record_batch.build(
            [(None, b"%02d" % number * 20)], base_offset=0, leader_epoch=0, timestamp_ms=NOW + number
        )
        assert replica.change_log(AppendAsLeader(1, batch, epoch), NOW) == LogChanged()


def make_snapshot(replica: QuorumReplica, end: int, epoch: int = 1, *, timestamp_ms: int = NOW) -> SnapshotId:
    snapshot_id = SnapshotId(end, epoch)
    writer = replica.store.create(snapshot_id, last_contained_log_timestamp=timestamp_ms, now_ms=NOW)
    try:
        writer.append([b"state at %d" % end])
        writer.freeze()
    finally:
        writer.discard()
    replica.register_snapshot(snapshot_id)
    return snapshot_id


def snapshot_bytes(end: int, epoch: int) -> bytes:
    """Return the snapshot file that another replica would have."""
    other = open_replica(FaultyFileSystem())
    append(other, end, epoch)
    snapshot_id = make_snapshot(other, end, epoch)
    data = other.store.read(snapshot_id, 0, 1 << 20)
    assert data is not None
    return data


def start_receiving(replica: QuorumReplica, end: int, epoch: int) -> ReceivedSnapshot:
    transfer = replica.receive(SnapshotId(end, epoch))
    transfer.write(0, snapshot_bytes(end, epoch))
    return transfer


def snapshots(fs: FaultyFileSystem) -> list[str]:
    return sorted(name for name in fs.list_dir(DIRECTORY) if ".checkpoint" in name and name[0].isdigit())


def flip(fs: FaultyFileSystem, snapshot_id: SnapshotId) -> None:
    path = f"{DIRECTORY}/{snapshot_id.end_offset:020d}-{snapshot_id.epoch:010d}.checkpoint"
    data = bytearray(read_file(fs, path))
    data[len(data) // 2] ^= 1
    write_file(fs, path, bytes(data), sync=True)


def assert_snapshot_covers_log_start(replica: QuorumReplica) -> None:
    log, ids = replica.log, replica.store.snapshot_ids()
    assert all(each.end_offset >= log.log_start_offset for each in ids)
    if log.log_start_offset > 0:
        assert ids
        assert log.log_start_offset <= ids[-1].end_offset <= log.log_end_offset
    assert replica.latest_snapshot == (ids[-1] if ids else None)
    assert replica.earliest_snapshot == (ids[0] if ids else None)
