"""SnapshotMaker: snapshots of committed records, created while the image changes (630-03, 630-04)."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from kipmesh.core.metadata.image import MetadataImage
from kipmesh.core.raft.types import SnapshotChanged
from kipmesh.core.snapshot import schedule
from kipmesh.core.snapshot.schedule import SnapshotLimits
from kipmesh.messages import SnapshotId
from kipmesh.node.quorum import pacing
from kipmesh.storage.quorum.snapshot_file import ImageLoader
from kipmesh.storage.quorum.snapshots import SnapshotWriter
from tests.unit.node.quorum.loader_support import (
    ALWAYS,
    DIRECTORY,
    NEVER,
    Member,
    change,
    image_of,
    running,
    sample,
    topic,
    topic_id,
    until,
    within_steps,
)


def load(member: Member, snapshot_id: SnapshotId) -> MetadataImage:
    loader = ImageLoader(member.replica.store.open(snapshot_id), snapshot_id)
    for _ in loader.steps():
        pass
    return loader.image


def files(member: Member) -> list[str]:
    return [name.partition(".")[2] for name in sorted(member.fs.list_dir(DIRECTORY)) if ".checkpoint" in name]


async def test_maker_creates_and_registers_snapshot_of_committed_records() -> None:
    member = Member(snapshots=ALWAYS)
    member.append(topic(1))
    member.append(topic(2))
    async with running(member):
        member.commit(2)
        await until(lambda: member.posted)
        assert member.posted == [SnapshotChanged(SnapshotId(2, 1), SnapshotId(2, 1))]
        image = load(member, SnapshotId(2, 1))
        assert image.topics == image_of(topic(1)).topics
        assert image.timestamp_ms == member.loader.image.timestamp_ms
        member.commit()
        await until(lambda: len(member.posted) == 2)
        assert member.replica.latest_snapshot == SnapshotId(4, 1)
    assert files(member) == ["checkpoint", "checkpoint"]
    assert not member.failures


async def test_loader_applies_records_during_snapshot_of_earlier_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """630-03."""
    monkeypatch.setattr(pacing, "SLICE_S", 0.0)
    member = Member(snapshots=SnapshotLimits(0.0, 1 << 40, 1))
    for number in range(20):
        member.append(topic(number, 500))
    async with running(member):
        published_before = len(member.published)
        member.commit()
        await within_steps(lambda: files(member) == ["checkpoint.part"])
        expected = image_of(*[topic(number, 500) for number in range(20)])
        published = 0
        while not member.posted:
            before = len(member.published)
            member.append(change(published % 20, 2))
            member.commit()

            def has_published(before: int = before) -> bool:
                return len(member.published) > before

            await within_steps(has_published)
            published += not member.posted
        assert published >= 2, "records were applied and published during the snapshot"
        assert load(member, member.posted[0].latest).topics == expected.topics
        assert published_before <= len(member.published)
    assert not member.failures


async def test_snapshot_of_uncommitted_image_waits_for_high_watermark() -> None:
    member = Member(snapshots=SnapshotLimits(0.0, 200, 0))
    async with running(member):
        await member.applied()
        member.append_and_apply(topic(1))
        member.append_and_apply(topic(2))
        member.commit(2)
        await until(lambda: files(member) == ["checkpoint.part"])
        await asyncio.sleep(0.02)
        assert (files(member), member.posted) == (["checkpoint.part"], [])
        member.commit(4)
        await until(lambda: member.posted)
        assert member.posted[0].latest == SnapshotId(4, 1)


async def test_snapshot_of_truncated_records_is_dropped() -> None:
    member = Member(snapshots=SnapshotLimits(0.0, 200, 0))
    async with running(member):
        await member.applied()
        member.append_and_apply(topic(1))
        member.append_and_apply(topic(2))
        member.commit(2)
        await until(lambda: files(member) == ["checkpoint.part"])
        member.truncate(2)
        member.append(topic(3), epoch=2)
        member.commit(4)
        await until(lambda: member.posted)
        assert member.posted[0].latest == SnapshotId(4, 2)
        assert list(load(member, SnapshotId(4, 2)).topic_names) == ["t1", "t3"]
    assert files(member) == ["checkpoint"]
    assert sample(member.registry, "kafka_controller_kafkacontroller_gensnapshotlatencyms_count") == 1


async def test_snapshot_below_installed_snapshot_is_dropped() -> None:
    member = Member(snapshots=SnapshotLimits(0.0, 200, 0))
    async with running(member):
        await member.applied()
        member.append_and_apply(topic(1))
        member.append_and_apply(topic(2))
        member.commit(2)
        await until(lambda: files(member) == ["checkpoint.part"])
        wanted = member.install(image_of(topic(5), epoch=3, offset=50))
        await until(lambda: files(member) == ["checkpoint"])
        await member.applied()
        assert member.replica.store.snapshot_ids() == [wanted]
    assert not member.failures


@pytest.mark.parametrize("operation", ["open", "write", "sync", "rename"])
async def test_failed_snapshot_write_is_retried(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "RETRY_MS", 0)
    monkeypatch.setattr("kipmesh.node.quorum.loader.IDLE_S", 0.01)
    member = Member(snapshots=ALWAYS)
    member.append(topic(1))
    member.fs.fail(operation, 28, path=".checkpoint.part", times=2)
    async with running(member):
        member.commit()
        await until(lambda: member.posted or member.failures)
        assert member.posted[0].latest == SnapshotId(2, 1)
        assert sample(member.registry, "kipmesh_metadata_snapshot_failures_total") == 2
        member.append(topic(2))
        member.commit()
        await member.applied()
    assert not member.failures


async def test_failed_snapshot_is_not_retried_before_retry_delay() -> None:
    member = Member(snapshots=ALWAYS)
    member.append(topic(1))
    member.fs.fail("write", 28, path=".checkpoint.part")
    async with running(member):
        member.commit()
        await until(lambda: sample(member.registry, "kipmesh_metadata_snapshot_failures_total"))
        member.append(topic(2))
        member.commit()
        await member.applied()
        await asyncio.sleep(0.02)
        assert (files(member), member.posted) == ([], [])


async def test_stop_during_snapshot_deletes_partial_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "SLICE_S", 0.0)
    member = Member(snapshots=ALWAYS)
    for number in range(50):
        member.append(topic(number, 200))
    async with running(member):
        member.commit()
        await within_steps(lambda: files(member) == ["checkpoint.part"])
    assert files(member) == []
    assert not member.failures


async def test_stop_waits_for_thread_that_completes_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(snapshots=ALWAYS)
    loop = asyncio.get_running_loop()
    entered, ended = asyncio.Event(), []
    freeze = SnapshotWriter.freeze

    def freeze_slowly(writer: SnapshotWriter) -> int:
        loop.call_soon_threadsafe(entered.set)
        time.sleep(0.05)
        size = freeze(writer)
        ended.append(size)
        return size

    monkeypatch.setattr(SnapshotWriter, "freeze", freeze_slowly)
    member.append(topic(1))
    async with running(member):
        member.commit()
        await entered.wait()
        await member.loader.stop()
        assert ended
    assert files(member) == ["checkpoint"]


async def test_only_changed_records_count_for_next_snapshot() -> None:
    """630-04: after the first snapshot, the next is due when half of its records are changed or deleted."""
    member = Member(snapshots=SnapshotLimits(0.5, 1, 0))
    for number in range(4):
        member.append(topic(number))
    async with running(member):
        member.commit()
        await until(lambda: len(member.posted) == 1)
        for number in range(10, 20):
            member.append(topic(number))
        member.commit()
        await member.applied()
        await asyncio.sleep(0.02)
        assert len(member.posted) == 1
        for number in range(3):
            member.append(change(number, 2))
            member.append(change(number, 3))
        member.commit()
        await member.applied()
        await asyncio.sleep(0.02)
        assert len(member.posted) == 1, "three of eight records have changed"
        member.append(change(3, 2))
        member.commit()
        await until(lambda: len(member.posted) == 2)


async def test_installed_snapshot_causes_no_new_snapshot() -> None:
    member = Member(snapshots=ALWAYS)
    wanted = image_of(topic(5), epoch=3, offset=50)
    async with running(member):
        member.install(wanted)
        await member.applied()
        await asyncio.sleep(0.02)
        assert len(member.posted) == 1, "only the installed snapshot"


async def test_snapshot_interval_alone_triggers_snapshot() -> None:
    never, hourly = Member(snapshots=NEVER), Member(snapshots=SnapshotLimits(0.5, 1 << 40, 1))
    for member in (never, hourly):
        member.append(topic(1))
    async with running(never), running(hourly):
        never.commit()
        await asyncio.sleep(0.01)
        hourly.commit()
        await until(lambda: hourly.posted)
        await never.applied()
        assert not never.posted


async def test_snapshot_freezes_image_for_garbage_collector() -> None:
    member = Member(snapshots=ALWAYS)
    member.append(topic(1))
    async with running(member):
        member.commit()
        await until(lambda: member.posted)
        assert gc.get_freeze_count() > 0
        assert not any(tracked is member.loader.image.topics for tracked in gc.get_objects())
    gc.unfreeze()
    assert member.loader.image.partition(topic_id(1), 0) is not None
