"""Cleaning of the metadata log: when the log start may rise (630-05), and deletions after it is durable (630-06)."""

from __future__ import annotations

import asyncio

import pytest

from kipmesh.core.raft.leadership import Leadership
from kipmesh.core.snapshot.retention import RetentionLimits
from kipmesh.messages import SnapshotId
from kipmesh.node import monotonic_ms
from kipmesh.node.quorum import snapshot_maker
from tests.unit.node.quorum.loader_support import (
    DIRECTORY,
    Member,
    change,
    image_of,
    running,
    topic,
    until,
    write_snapshot,
)

WEEK_MS = 604_800_000
DAY_MS = 86_400_000


class CleanedMember(Member):
    """A log of 24 committed records with snapshots at 4 and 24, cleaned every 5 ms."""

    def __init__(self, retention: RetentionLimits | None = None) -> None:
        super().__init__(retention=retention, clean_interval_s=0.005, segment_bytes=512)
        image = image_of(topic(1), topic(2))
        self.append(topic(1))
        self.append(topic(2))
        self.older = write_snapshot(self.replica, image)
        for number in range(20):
            self.append(change(1, number % 3 + 1))
        self.newer = write_snapshot(
            self.replica, image_of(topic(1), topic(2), *[change(1, number % 3 + 1) for number in range(20)])
        )
        self.post(self.replica.register_snapshot(self.newer))
        self.posted.clear()
        self.high_watermark = self.end

    @property
    def start(self) -> int:
        return self.replica.log.log_start_offset

    async def cleaned(self) -> None:
        """Wait for several rounds of cleaning."""
        await asyncio.sleep(0.05)


def record_fetch(leadership: Leadership, replica_id: int, offset: int, ago_ms: int = 0) -> None:
    replica = leadership.replica(replica_id, 0)
    assert replica is not None
    replica.record_fetch(offset, offset, monotonic_ms() - ago_ms)


async def test_leader_raises_log_start_to_slowest_live_replica() -> None:
    member = CleanedMember(RetentionLimits(lag_time_ms_max=1 << 60))
    leadership = member.lead()
    record_fetch(leadership, 2, 24)
    async with running(member):
        await member.cleaned()
        assert member.start == 0, "voter 3 has not fetched yet"
        record_fetch(leadership, 3, 4)
        await until(lambda: member.start == 4)
        record_fetch(leadership, 77, 10)
        record_fetch(leadership, 3, 24)
        await member.cleaned()
        assert member.start == 4, "a live observer counts"
        record_fetch(leadership, 77, 10, ago_ms=300_001)
        await until(lambda: member.replica.store.snapshot_ids() == [member.newer])
        assert member.start == 24
        await until(lambda: member.posted)
        assert (member.posted[-1].latest, member.posted[-1].earliest) == (member.newer, member.newer)
    assert not member.failures


@pytest.mark.parametrize(
    ("retention", "start"),
    [
        (RetentionLimits(WEEK_MS, 100 << 20), 24),
        (RetentionLimits(1 << 60, 100 << 20), 0),
        (RetentionLimits(1 << 60, 1), 24),
    ],
    ids=["above age limit", "within both limits", "above size limit"],
)
async def test_retention_by_age_and_size_ignores_absent_voters(retention: RetentionLimits, start: int) -> None:
    member = CleanedMember(retention)  # the records have timestamps of 1970
    member.lead()
    async with running(member):
        await (until(lambda: member.start == start) if start else member.cleaned())
        assert member.start == start


async def test_follower_raises_log_start_to_leader_and_latest_snapshot() -> None:
    member = CleanedMember()
    async with running(member):
        await member.cleaned()
        assert member.start == 0, "the log start of the leader is unknown"
        member.machine.leader_log_start = 10
        await until(lambda: member.replica.store.snapshot_ids() == [member.newer])
        assert member.start == 10
        member.machine.leader_log_start = 1000
        await until(lambda: member.start == 24)
    assert not member.failures


async def test_cleaning_deletes_nothing_before_log_start_is_durable() -> None:
    """630-06."""
    member = CleanedMember()
    segments = member.replica.log.segment_base_offsets
    member.machine.leader_log_start = 24
    member.fs.fail("sync", 28, path="log-start-offset-checkpoint", times=1000)
    async with running(member):
        await until(lambda: member.start == 24)
        await member.cleaned()
        assert member.replica.store.snapshot_ids() == [member.older, member.newer]
        assert member.replica.log.segment_base_offsets == segments
        assert not [name for name in member.fs.list_dir(DIRECTORY) if name.endswith(".deleted")]
        assert not member.failures
        member.fs.faults.clear()
        await until(lambda: member.replica.store.snapshot_ids() == [member.newer])
        await until(lambda: len(member.replica.log.segment_base_offsets) < len(segments))


async def test_cleaning_deletes_segments_below_log_start() -> None:
    member = CleanedMember()
    before = len(member.replica.log.segment_base_offsets)
    assert before > 2
    member.machine.leader_log_start = 24
    async with running(member):
        await until(lambda: len(member.replica.log.segment_base_offsets) < before)


async def test_cleaning_without_snapshot_keeps_log() -> None:
    member = Member(clean_interval_s=0.005)
    member.append(topic(1))
    member.machine.leader_log_start = 1
    async with running(member):
        member.commit()
        await asyncio.sleep(0.05)
        assert member.replica.log.log_start_offset == 0
    assert not member.failures


async def test_installed_snapshot_triggers_cleaning() -> None:
    member = CleanedMember()
    member.loader._maker.clean_interval_s = 3600.0
    async with running(member):
        wanted = member.install(image_of(topic(9), epoch=4, offset=90))
        await member.applied()
        await until(lambda: member.replica.store.snapshot_ids() == [wanted])
        assert isinstance(wanted, SnapshotId)


async def test_unexpected_error_of_cleaning_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(maker: snapshot_maker.SnapshotMaker) -> int:
        raise ValueError("bug")

    monkeypatch.setattr(snapshot_maker.SnapshotMaker, "_plan_log_start", plan)
    member = CleanedMember()
    async with running(member):
        await until(lambda: member.failures)
    assert isinstance(member.failures[0], ValueError)
    assert len(member.failures) == 1
