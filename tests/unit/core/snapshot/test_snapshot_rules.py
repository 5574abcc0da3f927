"""Snapshot rules: file names, schedule, log start, FetchSnapshot decisions and recovery."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kipmesh.core.snapshot.ids import FileKind, SnapshotFile, age_order, file_name, latest_end, parse_file_name
from kipmesh.core.snapshot.retention import (
    KeptSnapshot,
    LogExtent,
    ReplicaEnd,
    RetentionLimits,
    StartByFetching,
    StartFromLog,
    StartFromSnapshot,
    StartRefused,
    candidates,
    follower_log_start,
    leader_log_start,
    needs_snapshot,
    obsolete,
    start,
)
from kipmesh.core.snapshot.schedule import RETRY_MS, SnapshotLimits, SnapshotReason, SnapshotSchedule
from kipmesh.messages import SnapshotId

OFFSETS = st.integers(0, (1 << 63) - 1)
EPOCHS = st.integers(0, (1 << 31) - 1)
DAY_MS = 86_400_000
HOUR_MS = 3_600_000


# -- 630-01


@given(OFFSETS, EPOCHS, st.sampled_from(FileKind))
def test_snapshot_file_names_match_kafka_in_both_widths(end_offset: int, epoch: int, kind: FileKind) -> None:
    snapshot_id = SnapshotId(end_offset, epoch)
    name = file_name(snapshot_id, kind)
    assert name == f"{end_offset:020d}-{epoch:010d}.checkpoint{kind.value}"
    assert parse_file_name(name) == SnapshotFile(snapshot_id, kind)
    assert parse_file_name(f"{end_offset:020d}-{epoch:020d}.checkpoint{kind.value}") == SnapshotFile(snapshot_id, kind)


@pytest.mark.parametrize(
    "name",
    [
        "00000000000000000000.log",
        "leader-epoch-checkpoint",
        "0000000000000000010-0000000003.checkpoint",
        "00000000000000000100-000000000003.checkpoint",
        "00000000000000000100-0000000003.checkpoint.tmp",
        "00000000000000000100-0000000003.checkpoint.part.part",
        "x00000000000000000100-0000000003.checkpoint",
        "00000000000000000100-0000000003.checkpoint\n",
        "99999999999999999999-0000000003.checkpoint",
        "00000000000000000100-9999999999.checkpoint",
        "٠0000000000000000100-0000000003.checkpoint",
    ],
)
def test_other_file_names_are_not_snapshots(name: str) -> None:
    assert parse_file_name(name) is None


@pytest.mark.parametrize("snapshot_id", [(-1, 0), (0, -1), (1 << 63, 0), (0, 1 << 31)])
def test_invalid_snapshot_ids_are_refused(snapshot_id: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="invalid snapshot id"):
        file_name(SnapshotId(*snapshot_id))


def test_snapshots_are_ordered_by_epoch_then_offset() -> None:
    assert max([SnapshotId(9, 1), SnapshotId(5, 2), SnapshotId(6, 2)], key=age_order) == SnapshotId(6, 2)


@pytest.mark.parametrize(
    ("log", "snapshot", "latest"),
    [
        ((10, 2), None, (10, 2)),
        ((10, 2), (7, 2), (10, 2)),
        ((10, 2), (12, 2), (12, 2)),
        ((10, 2), (5, 3), (5, 3)),
        ((10, 3), (50, 2), (10, 3)),
        ((0, -1), (5, 0), (5, 0)),
        ((0, -1), None, (0, -1)),
    ],
)
def test_latest_end_is_later_of_log_and_snapshot(
    log: tuple[int, int], snapshot: tuple[int, int] | None, latest: tuple[int, int]
) -> None:  # 630-13
    assert latest_end(*log, None if snapshot is None else SnapshotId(*snapshot)) == SnapshotId(*latest)


# -- 630-04

LIMITS = SnapshotLimits(0.5, 1000, HOUR_MS)


def partitions(*numbers: int) -> set[tuple[bytes | str | int, ...]]:
    return {(b"t" * 16, number) for number in numbers}


def test_first_snapshot_is_due_by_bytes_only() -> None:
    schedule = SnapshotSchedule(LIMITS, 0)
    assert schedule.due(10 * HOUR_MS) is None
    schedule.applied((), 999)
    assert schedule.due(1) is None
    schedule.applied((), 1)
    assert schedule.due(1) is SnapshotReason.CHANGES


def test_later_snapshots_need_bytes_and_changed_records() -> None:
    schedule = SnapshotSchedule(LIMITS, 0)
    schedule.loaded(10, 0)
    schedule.applied(partitions(1, 2, 3, 4), 5000)
    schedule.applied(partitions(1, 2, 3, 4), 5000)
    assert schedule.due(1) is None
    schedule.applied(partitions(5), 1)
    assert schedule.due(1) is SnapshotReason.CHANGES
    schedule.applied(partitions(*range(100)), 1)
    assert schedule.changed_records == 5
    schedule = SnapshotSchedule(LIMITS, 0)
    schedule.loaded(10, 0)
    schedule.applied(partitions(*range(9)), 999)
    assert schedule.due(1) is None


def test_interval_makes_snapshot_due_after_any_append() -> None:
    schedule = SnapshotSchedule(LIMITS, 0)
    schedule.loaded(10, 500)
    assert schedule.due(HOUR_MS + 500) is None
    schedule.applied((), 1)
    assert schedule.due(HOUR_MS + 499) is None
    assert schedule.due(HOUR_MS + 500) is SnapshotReason.INTERVAL
    never = SnapshotSchedule(SnapshotLimits(interval_ms_max=0), 0)
    never.applied((), 1)
    assert never.due(100 * HOUR_MS) is None


def test_changes_during_snapshot_count_for_next_snapshot() -> None:
    schedule = SnapshotSchedule(LIMITS, 0)
    schedule.applied((), 1000)
    schedule.begin()
    assert schedule.is_in_progress
    with pytest.raises(RuntimeError):
        schedule.begin()
    schedule.applied(partitions(1, 2), 1500)
    assert schedule.due(2 * HOUR_MS) is None
    schedule.completed(4, 7)
    assert (schedule.is_in_progress, schedule.record_bytes, schedule.changed_records) == (False, 1500, 2)
    assert schedule.due(8) is SnapshotReason.CHANGES


def test_failed_snapshot_restores_counters_and_backs_off() -> None:
    schedule = SnapshotSchedule(LIMITS, 0)
    schedule.loaded(4, 0)
    schedule.applied(partitions(1), 800)
    schedule.begin()
    schedule.applied(partitions(1, 2), 300)
    schedule.failed(1000)
    assert (schedule.record_bytes, schedule.changed_records) == (1100, 2)
    assert schedule.due(1000 + RETRY_MS - 1) is None
    assert schedule.due(1000 + RETRY_MS) is SnapshotReason.CHANGES
    schedule.begin()
    schedule.loaded(4, 2000)
    assert schedule.due(2000 + HOUR_MS) is None
    schedule.applied(partitions(*range(4)), 5000)
    schedule.completed(1000, 3000)  # completion of the snapshot before the load
    schedule.failed(10 * HOUR_MS)
    assert schedule.due(3000) is SnapshotReason.CHANGES


# -- 630-05, 630-06

MIB = 1 << 20
NOW = 100 * DAY_MS


def kept(end_offset: int, *, age_ms: int = 0, size: int = MIB, after: int = 0) -> KeptSnapshot:
    return KeptSnapshot(SnapshotId(end_offset, 1), size, NOW - age_ms, after)


def voter(end: int) -> ReplicaEnd:
    return ReplicaEnd(1, True, end, 0)


def observer(end: int, age_ms: int = 0) -> ReplicaEnd:
    return ReplicaEnd(2, False, end, NOW - age_ms)


@pytest.mark.parametrize(
    ("log_start", "log_bytes", "snapshots", "replicas", "expected"),
    [
        (0, 0, [], [voter(500)], 0),
        (0, 0, [kept(100), kept(200)], [], 200),
        (0, 0, [kept(100), kept(200)], [voter(150), observer(300)], 100),
        (0, 0, [kept(100), kept(200)], [voter(150), observer(99)], 0),
        (0, 0, [kept(100), kept(200)], [voter(250), observer(99, 300_001)], 200),
        (0, 0, [kept(100), kept(200)], [voter(250), observer(99, 300_000)], 0),
        (0, 0, [kept(100), kept(200)], [voter(-1)], 0),
        (0, 0, [kept(100, age_ms=7 * DAY_MS), kept(200)], [voter(50)], 100),
        (0, 0, [kept(100, age_ms=7 * DAY_MS - 1)], [voter(50)], 0),
        # Above the size limit: advance as little as needed.
        (0, 200 * MIB, [kept(100, after=90 * MIB), kept(200, after=5 * MIB)], [voter(50)], 100),
        (0, 200 * MIB, [kept(100, after=150 * MIB), kept(200, after=5 * MIB)], [voter(50)], 200),
        (0, 200 * MIB, [kept(100, after=99 * MIB), kept(200, after=5 * MIB)], [voter(50)], 200),
        (0, 200 * MIB, [kept(100, size=300 * MIB, after=150 * MIB)], [voter(50)], 100),
        (0, 99 * MIB, [kept(100)], [voter(50)], 0),
        # Monotonic, and at most the high watermark.
        (150, 0, [kept(100), kept(200)], [voter(120)], 150),
        (100, 0, [kept(100), kept(400)], [voter(500)], 100),
    ],
)
def test_leader_log_start_follows_retention_rules(
    log_start: int, log_bytes: int, snapshots: list[KeptSnapshot], replicas: list[ReplicaEnd], expected: int
) -> None:
    limits = RetentionLimits()
    assert leader_log_start(log_start, 300, log_bytes, snapshots[::-1], replicas, NOW, limits) == expected


@given(
    st.integers(0, 30),
    st.integers(0, 300),
    st.lists(
        st.builds(KeptSnapshot, st.builds(SnapshotId, st.integers(0, 40), st.just(1)), *[st.integers(0, 100)] * 3),
        max_size=5,
        unique_by=lambda kept_: kept_.snapshot_id,
    ),
    st.lists(st.builds(ReplicaEnd, st.just(1), st.booleans(), st.integers(-1, 40), st.integers(0, 100)), max_size=4),
)
def test_leader_log_start_is_always_snapshot_end(
    log_start: int, log_bytes: int, snapshots: list[KeptSnapshot], replicas: list[ReplicaEnd]
) -> None:
    high_watermark = 35
    chosen = leader_log_start(
        log_start, high_watermark, log_bytes, snapshots, replicas, 100, RetentionLimits(50, 150, 30)
    )
    assert log_start <= chosen <= high_watermark
    if chosen > log_start:
        assert chosen in {snapshot.snapshot_id.end_offset for snapshot in snapshots}
        deleted = obsolete(chosen, [snapshot.snapshot_id for snapshot in snapshots])
        assert all(snapshot_id.end_offset < chosen for snapshot_id in deleted)
        assert len(deleted) < len(snapshots)


@pytest.mark.parametrize(
    ("own", "leaders", "latest", "expected"), [(0, 50, None, 0), (0, 50, 40, 40), (0, 50, 60, 50), (45, 50, 40, 45)]
)
def test_follower_log_start_is_bounded_by_leader_and_snapshot(
    own: int, leaders: int, latest: int | None, expected: int
) -> None:
    assert follower_log_start(own, leaders, None if latest is None else SnapshotId(latest, 1)) == expected


# -- 630-08


@pytest.mark.parametrize(
    ("offset", "epoch", "log_start", "oldest", "expected"),
    [
        (0, -1, 0, None, False),
        (0, -1, 0, (50, 2), False),
        (0, -1, 40, (50, 2), True),
        (39, 2, 40, (40, 2), True),
        (40, 2, 40, (40, 2), False),
        (40, 3, 40, (40, 2), True),
        (40, 1, 40, (40, 2), True),
        (41, 2, 40, (40, 2), False),
        (41, 3, 40, (40, 2), False),
        (41, 1, 40, (40, 2), True),
        (10, 1, 0, (50, 2), True),
        (10, 5, 0, None, False),
    ],
)
def test_needs_snapshot_compares_offset_and_epoch_with_oldest_snapshot(
    offset: int, epoch: int, log_start: int, oldest: tuple[int, int] | None, expected: bool
) -> None:
    oldest_id = None if oldest is None else SnapshotId(*oldest)
    assert needs_snapshot(offset, epoch, log_start, oldest_id) == expected


# -- 630-14


def test_candidates_are_newest_first() -> None:
    oldest, newest, middle = SnapshotId(5, 1), SnapshotId(3, 2), SnapshotId(9, 1)
    assert candidates([oldest, newest, middle]) == [newest, middle, oldest]


@pytest.mark.parametrize(
    ("valid", "log", "expected"),
    [
        (None, (0, 0, -1), StartFromLog()),
        (None, (0, 90, 3), StartFromLog()),
        ((50, 2), (0, 90, 3), StartFromSnapshot(SnapshotId(50, 2), False)),
        ((50, 2), (50, 90, 3), StartFromSnapshot(SnapshotId(50, 2), False)),
        ((50, 2), (20, 50, 2), StartFromSnapshot(SnapshotId(50, 2), False)),
        ((90, 2), (20, 50, 2), StartFromSnapshot(SnapshotId(90, 2), True)),
        ((50, 4), (20, 90, 3), StartFromSnapshot(SnapshotId(50, 4), True)),
        ((50, 4), (0, 0, -1), StartFromSnapshot(SnapshotId(50, 4), True)),
        ((50, 2), (60, 90, 3), None),
        (None, (60, 90, 3), None),
        (
            (95, 2),
            (0, 90, 3),
            StartFromSnapshot(SnapshotId(95, 2), True),
        ),  # a snapshot received to replace a diverged log
        ((90, 2), (0, 90, 3), StartFromSnapshot(SnapshotId(90, 2), True)),
        ((90, 3), (0, 90, 3), StartFromSnapshot(SnapshotId(90, 3), False)),
    ],
)
def test_start_uses_consistent_snapshot_and_log(
    valid: tuple[int, int] | None, log: tuple[int, int, int], expected: StartFromLog | StartFromSnapshot | None
) -> None:
    snapshot_id = None if valid is None else SnapshotId(*valid)
    extent = LogExtent(*log)
    observed = start(snapshot_id, [SnapshotId(70, 3)], extent, is_voter=False)
    decided = start(snapshot_id, [SnapshotId(70, 3)], extent, is_voter=True)
    if expected is not None:
        assert decided == observed == expected
        return
    assert observed == StartByFetching()
    assert isinstance(decided, StartRefused)
    assert "\n" not in decided.problem
    assert "00000000000000000070-0000000003.checkpoint" in decided.problem
