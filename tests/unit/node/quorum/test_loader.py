"""The image follows the high watermark, is loaded from snapshots, and forgets what never happened."""

from __future__ import annotations

import asyncio
import gc

import pytest

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.messages import SnapshotId
from kipmesh.node.quorum import loader as loader_module
from kipmesh.node.quorum import pacing
from tests.unit.node.quorum.loader_support import (
    ALWAYS,
    FOLDER,
    Member,
    apply_own,
    change,
    image_of,
    running,
    soon,
    topic,
    topic_id,
    until,
    write_snapshot,
)


async def test_what_is_committed_is_applied_and_published_in_order_and_nothing_else() -> None:
    member = Member()
    member.append(topic(1))
    first_end = member.end
    member.append(topic(2))
    async with running(member):
        member.commit(first_end)
        await member.applied()
        assert (member.loader.applied_end, list(member.loader.image.topic_names)) == (first_end, ["t1"])
        await asyncio.sleep(0.02)
        assert member.loader.applied_end == first_end, "what is above the high watermark waits"
        member.commit()
        await member.applied()
        member.append(change(1, 2))
        member.commit()
        await until(lambda: member.loader.applied_end == member.end)
        await until(lambda: member.published[-1][0] == member.end - 1)
    changed = set().union(*(delta.changed_partitions for _, _, delta in member.published))
    assert changed == {(topic_id(1), 0), (topic_id(2), 0)}
    offsets = [offset for offset, _, _ in member.published]
    assert offsets == sorted(set(offsets))
    assert member.loader.image.partition(topic_id(1), 0).leader == 2  # type: ignore[union-attr]
    assert not member.failures


async def test_a_start_loads_the_newest_snapshot_and_replays_the_log_after_it() -> None:
    member = Member()
    member.append(topic(1))
    member.append(topic(2))
    write_snapshot(member.replica, image_of(topic(1), topic(2)))
    member.append(change(1, 3))
    member.replica.register_snapshot(SnapshotId(4, 1))
    fs = member.fs
    member.close()
    again = Member(fs)
    assert again.high_watermark == 4, "a snapshot is committed"
    async with running(again):
        await again.applied()
        assert again.loader.applied_end == 4
        assert again.loader.image == image_of(topic(1), topic(2))
        _, image, delta = again.published[0]
        assert image is again.loader.image
        assert delta.changed_partitions == {(topic_id(1), 0), (topic_id(2), 0)}
        again.commit()
        await again.applied()
        assert again.loader.image.partition(topic_id(1), 0).leader == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_batch_that_the_disk_changed_is_not_applied(is_first: bool) -> None:
    member = Member()
    member.append(topic(1))
    path = f"{FOLDER}/{0:020d}.log"
    async with running(member):
        if not is_first:
            member.commit()
            await member.applied()
        at = member.fs.open(path).size()
        member.append(topic(2))
        file = member.fs.open(path)
        position = file.size() - 1 if not is_first else at - 1
        file.write_at(bytes([file.read_at(1, position)[0] ^ 1]), position)
        file.close()
        member.commit()
        await until(lambda: member.failures)
        assert isinstance(member.failures[0], CorruptRecordError)
        assert "wrong CRC of the batch" in str(member.failures[0])
        assert member.loader.applied_end == 0
        assert list(member.loader.image.topic_names) == ([] if is_first else ["t1"])


async def test_an_active_controllers_image_is_ahead_of_the_high_watermark() -> None:
    member = Member()
    member.append(topic(1))
    async with running(member):
        member.commit()
        await member.applied()
        published = len(member.published)
        delta = member.own(topic(2))
        assert delta.changed_partitions == {(topic_id(2), 0)}
        assert member.loader.applied_end == member.end > member.high_watermark
        member.commit()
        await asyncio.sleep(0.02)
        assert len(member.published) == published, "its caller has the delta already"
        member.append(topic(3), epoch=2)
        member.commit()
        await until(lambda: len(member.published) > published)
        assert member.published[-1][2].changed_partitions == {(topic_id(3), 0)}


async def test_what_a_deposed_leader_lost_is_forgotten() -> None:
    member = Member()
    member.append(topic(1))
    async with running(member):
        member.commit()
        await member.applied()
        committed = member.end
        member.own(topic(2))
        member.own(change(1, 3))
        lost = member.loader.image
        member.cut(committed)
        assert member.loader.applied_end == 0, "nobody may take it for the log's image"
        member.append(topic(4), epoch=2)
        member.append(change(4, 2), epoch=2)
        assert member.end == lost.offset + 1, "the log is as long again, with other records"
        with pytest.raises(RuntimeError):
            member.own(topic(5), epoch=2)
        member.commit()
        await member.applied()
        await until(lambda: member.loader.image is not lost)
        await member.applied()
        image = member.loader.image
        assert list(image.topic_names) == ["t1", "t4", "t5"]
        assert image.partition(topic_id(1), 0).leader == 1  # type: ignore[union-attr]
        delta = next(delta for _, image, delta in member.published if image is member.loader.image)
        assert [gone.name for gone in delta.deleted_topics] == ["t2"]
        assert (topic_id(1), 0) in delta.changed_partitions


async def test_a_cut_of_what_was_not_applied_changes_nothing() -> None:
    member = Member()
    member.append(topic(1))
    async with running(member):
        member.commit()
        await member.applied()
        image, committed = member.loader.image, member.end
        member.append(topic(2))
        member.cut(committed)
        assert member.loader.applied_end == committed
        member.append(topic(3), epoch=2)
        member.commit()
        await member.applied()
        assert member.loader.image is image


async def test_own_batches_must_follow_the_image() -> None:
    member = Member()
    member.append(topic(1))
    batch = member.batch(topic(2))
    async with running(member):
        with pytest.raises(RuntimeError):
            apply_own(member.loader, batch)
        member.commit()
        await member.applied()
        member.append(topic(3))
        with pytest.raises(RuntimeError):
            member.own(topic(4))
    assert not member.failures


async def test_an_installed_snapshot_gives_another_image_and_the_difference() -> None:
    member = Member()
    member.append(topic(1))
    member.append(topic(2))
    async with running(member):
        member.commit()
        await member.applied()
        before = member.loader.image
        wanted = image_of(topic(1, leader=3), topic(7), epoch=4, offset=100)
        member.install(wanted)
        await until(lambda: member.loader.image is not before)
        assert member.loader.image == wanted
        assert member.loader.applied_end == wanted.offset + 1
        await member.applied()
        delta = member.published[-1][2]
        assert [gone.name for gone in delta.deleted_topics] == ["t2"]
        assert delta.changed_partitions == {(topic_id(1), 0), (topic_id(7), 0)}
        member.append(change(7, 2), epoch=4)
        member.commit()
        await member.applied()
        assert member.loader.image.partition(topic_id(7), 0).leader == 2  # type: ignore[union-attr]


async def test_a_snapshot_below_what_is_applied_and_not_committed_is_loaded() -> None:
    """The deposed leader's log went with the snapshot's arrival: no cut tells of what was lost."""
    member = Member()
    member.append(topic(1))
    async with running(member):
        member.commit()
        await member.applied()
        before = member.loader.image
        for number in range(10, 20):
            member.own(topic(number))
        wanted = image_of(topic(1), topic(2), epoch=3)
        assert wanted.offset < before.offset
        member.install(wanted)
        assert member.loader.applied_end == 0
        await until(lambda: member.loader.image is not before)
        assert member.loader.image == wanted


@pytest.mark.parametrize("while_loading", ["snapshot", "replay"])
async def test_a_snapshot_that_comes_while_another_is_loaded(
    while_loading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "SLICE_S", 0.0)
    monkeypatch.setattr(loader_module, "APPLY_BYTES", 1)
    member = Member()
    many = [topic(number, 100) for number in range(50)]
    old = image_of(*many)
    for records in many:
        member.append(records)
    write_snapshot(member.replica, old)
    member.replica.register_snapshot(SnapshotId(old.offset + 1, 1))
    for _ in range(200):
        member.append(change(1, 2))
    member.high_watermark = member.end
    async with running(member):
        steps = 3 if while_loading == "snapshot" else 30
        for _ in range(steps):
            await asyncio.sleep(0)
        assert not member.loader.is_loaded
        wanted = image_of(topic(1), topic(90), epoch=5, offset=10_000)
        member.install(wanted)
        await member.applied()
        assert member.loader.image == wanted
        assert [image is member.loader.image for _, image, _ in member.published] == [True], "published once"
    assert not member.failures


async def test_a_record_that_cannot_be_applied_ends_it_without_a_snapshot() -> None:
    """630-15."""
    member = Member(snapshots=ALWAYS)
    member.append(topic(1))
    member.append(change(33, 1))
    member.append(topic(2))
    async with running(member):
        member.commit()
        await until(lambda: member.failures)
        assert isinstance(member.failures[0], CorruptRecordError)
        assert member.loader.applied_end == 0
        member.commit()
        await asyncio.sleep(0.02)
        assert len(member.failures) == 1
    assert member.replica.store.snapshot_ids() == []


async def test_an_own_record_that_cannot_be_applied_ends_it_too() -> None:
    member = Member(snapshots=ALWAYS)
    async with running(member):
        await member.applied()
        with pytest.raises(CorruptRecordError):
            member.own(change(33, 1))
        assert len(member.failures) == 1
        with pytest.raises(RuntimeError):
            member.own(topic(1))
        member.commit()
        await asyncio.sleep(0.02)
    assert member.replica.store.snapshot_ids() == []


async def test_a_failing_publish_is_told() -> None:
    member = Member()

    async def publish(image: MetadataImage, delta: MetadataDelta) -> None:
        raise OSError("publish")

    member.loader.publish = publish
    member.append(topic(1))
    async with running(member):
        member.commit()
        await until(lambda: member.failures)
    assert isinstance(member.failures[0], OSError)


async def test_publishing_takes_its_time_and_what_comes_meanwhile_is_one_delta() -> None:
    member = Member()
    gate = asyncio.Event()
    seen: list[MetadataDelta] = []

    async def publish(image: MetadataImage, delta: MetadataDelta) -> None:
        seen.append(delta)
        await gate.wait()

    member.loader.publish = publish
    async with running(member):
        await until(lambda: seen)
        for number in range(3):
            member.append(topic(number))
            member.commit()
        await asyncio.sleep(0.01)
        assert len(seen) == 1
        gate.set()
        await until(lambda: len(seen) == 2)
        assert len(seen[1].changed_partitions) == 3


async def test_idle_is_called_after_each_round_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "IDLE_S", 0.01)
    member = Member()
    async with running(member):
        await until(lambda: member.idle_calls >= 3)


async def test_a_stop_while_loading_is_quick_and_leaves_the_collector_as_it_was() -> None:
    member = Member()
    image = image_of(*[topic(number, 1000) for number in range(100)])
    write_snapshot(member.replica, image)
    member.replica.install(SnapshotId(image.offset + 1, 1))
    member.loader.start()
    await soon(lambda: not gc.isenabled())
    assert not member.loader.is_loaded
    stopping = asyncio.create_task(member.loader.stop())
    for _ in range(20):  # turns of the loop, of which a load takes hundreds
        await asyncio.sleep(0)
    assert stopping.done()
    assert gc.isenabled()
    assert not member.loader.is_loaded
    await member.loader.stop()
    member.close()


async def test_a_snapshot_that_is_corrupt_when_it_is_loaded_is_counted_and_told() -> None:
    member = Member()
    snapshot_id = write_snapshot(member.replica, image_of(topic(1)))
    member.replica.install(snapshot_id)
    (name,) = [name for name in member.fs.list_dir(FOLDER) if name.endswith(".checkpoint")]
    file = member.fs.open(f"{FOLDER}/{name}")
    file.truncate(file.size() - 3)
    file.close()
    async with running(member):
        await until(lambda: member.failures)
        assert member.metrics.corrupt_on_load == 1
    assert isinstance(member.failures[0], CorruptRecordError)


async def test_features_and_brokers_survive_a_reload() -> None:
    member = Member()
    end_points = (r.BrokerEndpoint("MESH", "h", 1),)
    member.append([r.FeatureLevelRecord(r.METADATA_VERSION, r.METADATA_VERSION_LEVEL)])
    member.append([r.RegisterBrokerRecord(1, False, topic_id(1), 1, end_points, fenced=False)])
    async with running(member):
        member.commit()
        await member.applied()
        before = member.loader.image
        member.own(topic(1))
        member.cut(2)
        await until(lambda: member.loader.image is not before and member.loader.is_loaded)
        assert list(member.loader.image.brokers) == [1]
        delta = next(delta for _, image, delta in member.published if image is member.loader.image)
        assert (delta.changed_brokers, [gone.name for gone in delta.deleted_topics]) == (set(), ["t1"])
