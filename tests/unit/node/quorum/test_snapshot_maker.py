"""Snapshots are made beside the image, of what is committed only, and leave nothing when they fail (630-03, 630-04)."""

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
    FOLDER,
    NEVER,
    Member,
    change,
    image_of,
    running,
    sample,
    soon,
    topic,
    topic_id,
    until,
)


def loaded(member: Member, snapshot_id: SnapshotId) -> MetadataImage:
    loader = ImageLoader(member.replica.store.open(snapshot_id), snapshot_id)
    for _ in loader.steps():
        pass
    return loader.image


def files(member: Member) -> list[str]:
    return [name.partition(".")[2] for name in sorted(member.fs.list_dir(FOLDER)) if ".checkpoint" in name]


async def test_a_snapshot_of_what_is_committed_is_made_and_told() -> None:
    member = Member(snapshots=ALWAYS)
    member.append(topic(1))
    member.append(topic(2))
    async with running(member):
        member.commit(2)
        await until(lambda: member.posted)
        assert member.posted == [SnapshotChanged(SnapshotId(2, 1), SnapshotId(2, 1))]
        made = loaded(member, SnapshotId(2, 1))
        assert made.topics == image_of(topic(1)).topics
        assert made.timestamp_ms == member.loader.image.timestamp_ms
        member.commit()
        await until(lambda: len(member.posted) == 2)
        assert member.replica.latest_snapshot == SnapshotId(4, 1)
    assert files(member) == ["checkpoint", "checkpoint"]
    assert not member.failures


async def test_the_state_machine_goes_on_and_the_snapshot_is_of_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """630-03."""
    monkeypatch.setattr(pacing, "SLICE_S", 0.0)
    member = Member(snapshots=SnapshotLimits(0.0, 1 << 40, 1))
    for number in range(20):
        member.append(topic(number, 500))
    async with running(member):
        begun_at = len(member.published)
        member.commit()
        await soon(lambda: files(member) == ["checkpoint.part"])
        of_then = image_of(*[topic(number, 500) for number in range(20)])
        published = 0
        while not member.posted:
            before = len(member.published)
            member.append(change(published % 20, 2))
            member.commit()

            def has_published(before: int = before) -> bool:
                return len(member.published) > before

            await soon(has_published)
            published += not member.posted
        assert published >= 2, "applied and published while it was made"
        assert loaded(member, member.posted[0].latest).topics == of_then.topics
        assert begun_at <= len(member.published)
    assert not member.failures


async def test_an_active_controllers_snapshot_waits_for_the_high_watermark() -> None:
    member = Member(snapshots=SnapshotLimits(0.0, 200, 0))
    async with running(member):
        await member.applied()
        member.own(topic(1))
        member.own(topic(2))
        member.commit(2)
        await until(lambda: files(member) == ["checkpoint.part"])
        await asyncio.sleep(0.02)
        assert (files(member), member.posted) == (["checkpoint.part"], [])
        member.commit(4)
        await until(lambda: member.posted)
        assert member.posted[0].latest == SnapshotId(4, 1)


async def test_a_snapshot_of_what_was_cut_is_dropped() -> None:
    member = Member(snapshots=SnapshotLimits(0.0, 200, 0))
    async with running(member):
        await member.applied()
        member.own(topic(1))
        member.own(topic(2))
        member.commit(2)
        await until(lambda: files(member) == ["checkpoint.part"])
        member.cut(2)
        member.append(topic(3), epoch=2)
        member.commit(4)
        await until(lambda: member.posted)
        assert member.posted[0].latest == SnapshotId(4, 2)
        assert list(loaded(member, SnapshotId(4, 2)).topic_names) == ["t1", "t3"]
    assert files(member) == ["checkpoint"]
    assert sample(member.registry, "kafka_controller_kafkacontroller_gensnapshotlatencyms_count") == 1


async def test_a_snapshot_that_the_leaders_overtakes_is_dropped() -> None:
    member = Member(snapshots=SnapshotLimits(0.0, 200, 0))
    async with running(member):
        await member.applied()
        member.own(topic(1))
        member.own(topic(2))
        member.commit(2)
        await until(lambda: files(member) == ["checkpoint.part"])
        wanted = member.install(image_of(topic(5), epoch=3, offset=50))
        await until(lambda: files(member) == ["checkpoint"])
        await member.applied()
        assert member.replica.store.snapshot_ids() == [wanted]
    assert not member.failures


@pytest.mark.parametrize("where", ["open", "write", "sync", "rename"])
async def test_a_failing_disk_delays_a_snapshot_and_ends_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "RETRY_MS", 0)
    monkeypatch.setattr("kipmesh.node.quorum.loader.IDLE_S", 0.01)
    member = Member(snapshots=ALWAYS)
    member.append(topic(1))
    member.fs.fail(where, 28, path=".checkpoint.part", times=2)
    async with running(member):
        member.commit()
        await until(lambda: member.posted or member.failures)
        assert member.posted[0].latest == SnapshotId(2, 1)
        assert sample(member.registry, "kipmesh_metadata_snapshot_failures_total") == 2
        member.append(topic(2))
        member.commit()
        await member.applied()
    assert not member.failures


async def test_after_a_full_disk_the_next_try_is_in_a_while() -> None:
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


async def test_a_stop_while_making_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "SLICE_S", 0.0)
    member = Member(snapshots=ALWAYS)
    for number in range(50):
        member.append(topic(number, 200))
    async with running(member):
        member.commit()
        await soon(lambda: files(member) == ["checkpoint.part"])
    assert files(member) == []
    assert not member.failures


async def test_a_stop_waits_for_the_thread_that_completes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(snapshots=ALWAYS)
    loop = asyncio.get_running_loop()
    entered, ended = asyncio.Event(), []
    freeze = SnapshotWriter.freeze

    def slow(writer: SnapshotWriter) -> int:
        loop.call_soon_threadsafe(entered.set)
        time.sleep(0.05)
        size = freeze(writer)
        ended.append(size)
        return size

    monkeypatch.setattr(SnapshotWriter, "freeze", slow)
    member.append(topic(1))
    async with running(member):
        member.commit()
        await entered.wait()
        await member.loader.stop()
        assert ended
    assert files(member) == ["checkpoint"]


async def test_what_was_added_does_not_count_and_what_was_changed_does() -> None:
    """630-04: the first at once, the next only when half of its records are changed or deleted."""
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
        assert len(member.posted) == 1, "three of eight records, each once"
        member.append(change(3, 2))
        member.commit()
        await until(lambda: len(member.posted) == 2)


async def test_what_a_loaded_snapshot_has_does_not_make_another() -> None:
    member = Member(snapshots=ALWAYS)
    wanted = image_of(topic(5), epoch=3, offset=50)
    async with running(member):
        member.install(wanted)
        await member.applied()
        await asyncio.sleep(0.02)
        assert len(member.posted) == 1, "the installed one"


async def test_never_is_never_and_the_interval_alone_is_enough() -> None:
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


async def test_the_collector_does_not_look_at_the_image_while_a_snapshot_is_made() -> None:
    member = Member(snapshots=ALWAYS)
    member.append(topic(1))
    async with running(member):
        member.commit()
        await until(lambda: member.posted)
        assert gc.get_freeze_count() > 0
        assert not any(one is member.loader.image.topics for one in gc.get_objects())
    gc.unfreeze()
    assert member.loader.image.partition(topic_id(1), 0) is not None
