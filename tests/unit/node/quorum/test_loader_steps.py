"""One record may change many partitions: others run while it is applied, and nobody takes half of it for a state."""

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
    soon,
    topic,
    topic_id,
    until,
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


async def own_half_applied(member: Member) -> Steps:
    """An active controller has fenced a broker."""
    member.commit()
    await member.applied()
    steps = member.loader.apply_own_steps(member.append(FENCING))
    for _ in range(PARTITIONS // 2):
        next(steps)
    assert leaders(member.loader.image) == {1, 2}
    return steps


async def some_turns() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def come_to_the_end(steps: Steps) -> None:
    for _ in steps:
        pass


async def test_the_loader_gives_way_within_a_batch_and_publishes_it_whole() -> None:
    member = member_with_partitions()
    async with running(member):
        member.commit()
        await member.applied()
        image, published = member.loader.image, len(member.published)
        member.append(FENCING)
        member.commit()
        await soon(lambda: image.is_within_batch and leaders(image) == {1, 2})
        assert len(member.published) == published
        assert member.loader.applied_end == member.end - 1
        await member.applied()
        await until(lambda: len(member.published) > published)
        assert leaders(member.loader.image) == {2}
        _, _, delta = member.published[published]
        assert len(delta.changed_partitions) == PARTITIONS
        assert not member.failures


def test_a_new_topic_is_there_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sees fewer partitions than there are sends keys to others."""
    monkeypatch.setattr(images, "STEP_RECORDS", 3)
    member, image = Member(), MetadataImage()
    batch = member.append([*topic(1, 10), *topic(2, 10), *change(1, 2), *topic(3, 1)])
    steps = image.replay_steps(batch, MetadataDelta())
    seen = [[len(each.partitions) for each in image.topics.values()] for _ in steps]
    member.close()
    assert seen == [[10], [10, 10]]


async def test_the_watermark_passes_an_own_batch_that_is_half_applied() -> None:
    """It is applied once, by who began it."""
    member = member_with_partitions()
    async with running(member):
        steps = await own_half_applied(member)
        image, published = member.loader.image, len(member.published)
        with pytest.raises(RuntimeError):
            member.own(topic(2))
        member.commit()
        await some_turns()
        assert member.loader.applied_end == member.end - 3  # of the topic: two records
        assert len(member.published) == published
        assert image.is_within_batch
        come_to_the_end(steps)
        assert leaders(image) == {2}
        await member.applied()
        assert member.loader.image is image
        assert list(image.topic_names) == ["t1", "t2"]
        assert not member.failures


async def test_what_was_applied_before_an_own_batch_is_published_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "APPLY_BYTES", 1)
    member = member_with_partitions()
    async with running(member):
        member.commit()
        await member.applied()
        published = len(member.published)
        member.append(change(1, 3))
        member.commit()
        await soon(lambda: member.loader.applied_end == member.end)
        steps = member.loader.apply_own_steps(member.append(FENCING))
        next(steps)
        await some_turns()
        assert len(member.published) == published
        come_to_the_end(steps)
        await until(lambda: len(member.published) > published)
        assert (topic_id(1), 0) in member.published[-1][2].changed_partitions
        assert not member.published[-1][1].is_within_batch


async def test_no_snapshot_is_made_of_half_a_batch() -> None:
    member = member_with_partitions(ALWAYS)
    async with running(member):
        member.commit()
        await until(lambda: member.posted)
        before = member.replica.latest_snapshot
        assert before == SnapshotId(member.end, 1)
        steps = await own_half_applied(member)
        member.commit()
        await some_turns()
        assert member.loader.image.is_within_batch
        come_to_the_end(steps)
        await until(lambda: member.replica.latest_snapshot != before)
        assert member.replica.latest_snapshot == SnapshotId(member.end, 1)
        assert not member.failures


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_an_own_batch_that_is_half_applied_is_cut(is_replaced: bool) -> None:
    """A deposed leader: the image is thrown away, but not under who applies the batch."""
    member = member_with_partitions()
    async with running(member):
        steps = await own_half_applied(member)
        image, base = member.loader.image, member.end - 1
        if is_replaced:
            wanted = image_of(BROKERS, topic(1, 2), epoch=2, offset=100)
            member.install(wanted)
        else:
            member.cut(base)
        await some_turns()
        assert member.loader.image is image
        assert member.loader.applied_end == 0
        come_to_the_end(steps)
        await until(lambda: member.loader.image is not image)
        await member.applied()
        assert leaders(member.loader.image) == {1}
        assert member.loader.applied_end == (wanted.offset + 1 if is_replaced else base)
        assert not member.failures


async def test_what_was_applied_before_an_own_batch_that_is_cut_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
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
        await soon(lambda: member.loader.applied_end == base)
        steps = member.loader.apply_own_steps(member.append(FENCING))
        next(steps)
        await some_turns()
        member.cut(base)
        come_to_the_end(steps)
        await until(lambda: member.loader.image is not image)
        await member.applied()
        assert [gone.name for _, _, delta in member.published for gone in delta.deleted_topics] == ["t2"]


async def test_a_snapshot_that_comes_within_a_batch_waits_for_its_end() -> None:
    """Of an observer: what is published is a state of the cluster all the time."""
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
        await soon(lambda: image.is_within_batch and len(leaders(image)) > 1)
        member.install(image_of(BROKERS, topic(1, PARTITIONS, leader=3), epoch=2, offset=100))
        await until(lambda: member.loader.image is not image)
        await member.applied()
        assert states == [{1}, {2}, {3}]
        assert len(member.published[-1][2].changed_partitions) == PARTITIONS
        assert not image.failed
        assert not member.failures


async def test_an_image_that_was_given_up_within_a_batch_is_loaded_anew() -> None:
    member = member_with_partitions()
    async with running(member):
        steps = await own_half_applied(member)
        image = member.loader.image
        steps.close()
        assert image.failed
        assert member.loader.applied_end == 0
        member.commit()
        await until(lambda: member.loader.image is not image)
        await member.applied()
        assert leaders(member.loader.image) == {2}
        assert not member.failures


async def test_a_loader_that_stops_within_a_batch() -> None:
    member = member_with_partitions()
    async with running(member):
        member.commit()
        await member.applied()
        member.append(FENCING)
        member.commit()
        await soon(lambda: member.loader.image.is_within_batch)
    assert member.loader.image.failed
    assert member.loader.applied_end == 0


async def test_many_changed_partitions_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
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
        member.own([r.BrokerRegistrationChangeRecord(2, 2, fenced=1)])
        assert frozen == [member.end - 2, member.end - 1]
