"""Batches that change many partitions: other tasks run during the apply, but no task uses a partly applied image."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Generator, Iterator

import pytest

from kipmesh.core.metadata import image as images
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.fencing import FENCING_FEATURE
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.snapshot.schedule import SnapshotLimits
from kipmesh.messages import SnapshotId
from kipmesh.node.quorum import loader as loaders
from kipmesh.node.quorum import pacing
from tests.unit.node.quorum.loader_support import (
    ALWAYS,
    NEVER,
    Member,
    change,
    image_of,
    running,
    topic,
    topic_id,
    until,
    within_steps,
)

PARTITIONS = 40
BROKERS: list[r.Record] = [
    r.FeatureLevelRecord(FENCING_FEATURE, 1),
    *[r.RegisterBrokerRecord(broker_id, broker_epoch=broker_id, fenced=False) for broker_id in (1, 2, 3)],
]
FENCING: list[r.Record] = [r.BrokerRegistrationChangeRecord(1, 1, fenced=1)]
Steps = Generator[None, None, MetadataDelta]


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(images, "STEP_PARTITIONS", 1)
    monkeypatch.setattr(pacing, "SLICE_S", 0.0)
    yield
    gc.unfreeze()


def member_with_partitions(snapshots: SnapshotLimits = NEVER) -> Member:
    member = Member(snapshots=snapshots)
    member.append(BROKERS)
    member.append(topic(1, PARTITIONS))
    return member


def leaders(image: MetadataImage) -> set[int]:
    return {state.leader for state in image.topics[topic_id(1)].partitions.values()}


async def partly_applied_own_batch(member: Member) -> Steps:
    """Apply half of a batch in which the active controller fences a broker."""
    member.commit()
    await member.applied()
    steps = member.loader.apply_own_steps(member.append(FENCING))
    for _ in range(PARTITIONS // 2):
        next(steps)
    assert leaders(member.loader.image) == {1, 2}
    return steps


async def run_other_tasks() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def finish(steps: Steps) -> None:
    for _ in steps:
        pass


async def test_loader_yields_within_batch_and_publishes_it_completely() -> None:
    member = member_with_partitions()
    async with running(member):
        member.commit()
        await member.applied()
        image, published = member.loader.image, len(member.published)
        member.append(FENCING)
        member.commit()
        await within_steps(lambda: image.is_within_batch and leaders(image) == {1, 2})
        assert len(member.published) == published
        assert member.loader.applied_end == member.end - 1
        await member.applied()
        await until(lambda: len(member.published) > published)
        assert leaders(member.loader.image) == {2}
        _, _, delta = member.published[published]
        assert len(delta.changed_partitions) == PARTITIONS
        assert not member.failures


def test_new_topic_appears_with_all_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that sees fewer partitions would send keys to the wrong ones."""
    monkeypatch.setattr(images, "STEP_RECORDS", 3)
    member, image = Member(), MetadataImage()
    batch = member.append([*topic(1, 10), *topic(2, 10), *change(1, 2), *topic(3, 1)])
    steps = image.replay_steps(batch, MetadataDelta())
    seen = [[len(state.partitions) for state in image.topics.values()] for _ in steps]
    member.close()
    assert seen == [[10], [10, 10]]


async def test_loader_does_not_apply_partly_applied_own_batch_again() -> None:
    """The high watermark passes the batch, but only its owner applies it."""
    member = member_with_partitions()
    async with running(member):
        steps = await partly_applied_own_batch(member)
        image, published = member.loader.image, len(member.published)
        with pytest.raises(RuntimeError):
            member.append_and_apply(topic(2))
        member.commit()
        await run_other_tasks()
        assert member.loader.applied_end == member.end - 3  # the topic has two records
        assert len(member.published) == published
        assert image.is_within_batch
        finish(steps)
        assert leaders(image) == {2}
        await member.applied()
        assert member.loader.image is image
        assert list(image.topic_names) == ["t1", "t2"]
        assert not member.failures


async def test_changes_before_own_batch_are_published_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "APPLY_BYTES", 1)
    member = member_with_partitions()
    async with running(member):
        member.commit()
        await member.applied()
        published = len(member.published)
        member.append(change(1, 3))
        member.commit()
        await within_steps(lambda: member.loader.applied_end == member.end)
        steps = member.loader.apply_own_steps(member.append(FENCING))
        next(steps)
        await run_other_tasks()
        assert len(member.published) == published
        finish(steps)
        await until(lambda: len(member.published) > published)
        assert (topic_id(1), 0) in member.published[-1][2].changed_partitions
        assert not member.published[-1][1].is_within_batch


async def test_snapshot_waits_for_end_of_own_batch() -> None:
    member = member_with_partitions(ALWAYS)
    async with running(member):
        member.commit()
        await until(lambda: member.posted)
        before = member.replica.latest_snapshot
        assert before == SnapshotId(member.end, 1)
        steps = await partly_applied_own_batch(member)
        member.commit()
        await run_other_tasks()
        assert member.loader.image.is_within_batch
        finish(steps)
        await until(lambda: member.replica.latest_snapshot != before)
        assert member.replica.latest_snapshot == SnapshotId(member.end, 1)
        assert not member.failures


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_truncated_own_batch_is_finished_before_image_is_replaced(is_replaced: bool) -> None:
    """A deposed leader drops its image only after the owner of the batch has finished."""
    member = member_with_partitions()
    async with running(member):
        steps = await partly_applied_own_batch(member)
        image, base = member.loader.image, member.end - 1
        if is_replaced:
            wanted = image_of(BROKERS, topic(1, 2), epoch=2, offset=100)
            member.install(wanted)
        else:
            member.truncate(base)
        await run_other_tasks()
        assert member.loader.image is image
        assert member.loader.applied_end == 0
        finish(steps)
        await until(lambda: member.loader.image is not image)
        await member.applied()
        assert leaders(member.loader.image) == {1}
        assert member.loader.applied_end == (wanted.offset + 1 if is_replaced else base)
        assert not member.failures


async def test_changes_before_truncated_own_batch_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "APPLY_BYTES", 1)
    member = member_with_partitions()
    member.append(topic(2))
    async with running(member):
        member.commit()
        await member.applied()
        image = member.loader.image
        member.append([r.RemoveTopicRecord(topic_id(2))])
        base = member.end
        member.commit()
        await within_steps(lambda: member.loader.applied_end == base)
        steps = member.loader.apply_own_steps(member.append(FENCING))
        next(steps)
        await run_other_tasks()
        member.truncate(base)
        finish(steps)
        await until(lambda: member.loader.image is not image)
        await member.applied()
        assert [deleted.name for _, _, delta in member.published for deleted in delta.deleted_topics] == ["t2"]


async def test_snapshot_installed_within_batch_waits_for_its_end() -> None:
    """On an observer: every published image is a state that the cluster had."""
    member = member_with_partitions()
    states: list[set[int]] = []

    async def publish(image: MetadataImage, delta: MetadataDelta) -> None:
        await Member.publish(member, image, delta)
        states.append(leaders(image))

    member.loader.publish = publish
    async with running(member):
        member.commit()
        await member.applied()
        image = member.loader.image
        member.append(FENCING)
        member.commit()
        await within_steps(lambda: image.is_within_batch and len(leaders(image)) > 1)
        member.install(image_of(BROKERS, topic(1, PARTITIONS, leader=3), epoch=2, offset=100))
        await until(lambda: member.loader.image is not image)
        await member.applied()
        assert states == [{1}, {2}, {3}]
        assert len(member.published[-1][2].changed_partitions) == PARTITIONS
        assert not image.failed
        assert not member.failures


async def test_image_abandoned_within_batch_is_reloaded() -> None:
    member = member_with_partitions()
    async with running(member):
        steps = await partly_applied_own_batch(member)
        image = member.loader.image
        steps.close()
        assert image.failed
        assert member.loader.applied_end == 0
        member.commit()
        await until(lambda: member.loader.image is not image)
        await member.applied()
        assert leaders(member.loader.image) == {2}
        assert not member.failures


async def test_loader_stopped_within_batch_marks_image_failed() -> None:
    member = member_with_partitions()
    async with running(member):
        member.commit()
        await member.applied()
        member.append(FENCING)
        member.commit()
        await within_steps(lambda: member.loader.image.is_within_batch)
    assert member.loader.image.failed
    assert member.loader.applied_end == 0


async def test_large_change_freezes_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(loaders, "FREEZE_PARTITIONS", PARTITIONS)
    monkeypatch.setattr(loaders, "freeze", lambda: frozen.append(member.loader.image.offset))
    member: Member = member_with_partitions()
    async with running(member):
        member.commit()
        await member.applied()
        assert not frozen
        member.append(FENCING)
        member.commit()
        await member.applied()
        assert frozen == [member.end - 1]
        member.append_and_apply([r.BrokerRegistrationChangeRecord(2, 2, fenced=1)])
        assert frozen == [member.end - 2, member.end - 1]
