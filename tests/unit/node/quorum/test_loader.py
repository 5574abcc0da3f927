"""MetadataLoader: the image follows the high watermark, loads snapshots, and drops truncated records."""

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
    DIRECTORY,
    Member,
    apply_own,
    change,
    image_of,
    running,
    topic,
    topic_id,
    until,
    within_steps,
    write_snapshot,
)


async def test_loader_applies_and_publishes_only_committed_records_in_order() -> None:
    member = Member()
    member.append(topic(1))
    first_end = member.end
    member.append(topic(2))
    async with running(member):
        member.commit(first_end)
        await member.applied()
        assert (member.loader.applied_end, list(member.loader.image.topic_names)) == (first_end, ["t1"])
        await asyncio.sleep(0.02)
        assert member.loader.applied_end == first_end, "records above the high watermark are not applied"
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


async def test_loader_starts_from_latest_snapshot_and_replays_log_after_it() -> None:
    member = Member()
    member.append(topic(1))
    member.append(topic(2))
    write_snapshot(member.replica, image_of(topic(1), topic(2)))
    member.append(change(1, 3))
    member.replica.register_snapshot(SnapshotId(4, 1))
    fs = member.fs
    member.close()
    restarted = Member(fs)
    assert restarted.high_watermark == 4, "the records of a snapshot are committed"
    async with running(restarted):
        await restarted.applied()
        assert restarted.loader.applied_end == 4
        assert restarted.loader.image == image_of(topic(1), topic(2))
        _, image, delta = restarted.published[0]
        assert image is restarted.loader.image
        assert delta.changed_partitions == {(topic_id(1), 0), (topic_id(2), 0)}
        restarted.commit()
        await restarted.applied()
        assert restarted.loader.image.partition(topic_id(1), 0).leader == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("is_first", [True, False])
async def test_corrupt_batch_is_not_applied(is_first: bool) -> None:
    member = Member()
    member.append(topic(1))
    path = f"{DIRECTORY}/{0:020d}.log"
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


async def test_image_of_active_controller_is_ahead_of_high_watermark() -> None:
    member = Member()
    member.append(topic(1))
    async with running(member):
        member.commit()
        await member.applied()
        published = len(member.published)
        delta = member.append_and_apply(topic(2))
        assert delta.changed_partitions == {(topic_id(2), 0)}
        assert member.loader.applied_end == member.end > member.high_watermark
        member.commit()
        await asyncio.sleep(0.02)
        assert len(member.published) == published, "the caller already has the delta"
        member.append(topic(3), epoch=2)
        member.commit()
        await until(lambda: len(member.published) > published)
        assert member.published[-1][2].changed_partitions == {(topic_id(3), 0)}


async def test_image_drops_truncated_records_of_deposed_leader() -> None:
    member = Member()
    member.append(topic(1))
    async with running(member):
        member.commit()
        await member.applied()
        committed = member.end
        member.append_and_apply(topic(2))
        member.append_and_apply(change(1, 3))
        lost = member.loader.image
        member.truncate(committed)
        assert member.loader.applied_end == 0, "the image does not match the log"
        member.append(topic(4), epoch=2)
        member.append(change(4, 2), epoch=2)
        assert member.end == lost.offset + 1, "the log has the same length with different records"
        with pytest.raises(RuntimeError):
            member.append_and_apply(topic(5), epoch=2)
        member.commit()
        await member.applied()
        await until(lambda: member.loader.image is not lost)
        await member.applied()
        image = member.loader.image
        assert list(image.topic_names) == ["t1", "t4", "t5"]
        assert image.partition(topic_id(1), 0).leader == 1  # type: ignore[union-attr]
        delta = next(delta for _, image, delta in member.published if image is member.loader.image)
        assert [topic.name for topic in delta.deleted_topics] == ["t2"]
        assert (topic_id(1), 0) in delta.changed_partitions


async def test_truncation_above_applied_offset_keeps_image() -> None:
    member = Member()
    member.append(topic(1))
    async with running(member):
        member.commit()
        await member.applied()
        image, committed = member.loader.image, member.end
        member.append(topic(2))
        member.truncate(committed)
        assert member.loader.applied_end == committed
        member.append(topic(3), epoch=2)
        member.commit()
        await member.applied()
        assert member.loader.image is image


async def test_own_batches_must_start_at_applied_offset() -> None:
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
            member.append_and_apply(topic(4))
    assert not member.failures


async def test_installed_snapshot_replaces_image_and_publishes_difference() -> None:
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
        assert [topic.name for topic in delta.deleted_topics] == ["t2"]
        assert delta.changed_partitions == {(topic_id(1), 0), (topic_id(7), 0)}
        member.append(change(7, 2), epoch=4)
        member.commit()
        await member.applied()
        assert member.loader.image.partition(topic_id(7), 0).leader == 2  # type: ignore[union-attr]


async def test_snapshot_below_applied_uncommitted_offset_is_loaded() -> None:
    """The snapshot replaces the log of the deposed leader, without a truncation event for the lost records."""
    member = Member()
    member.append(topic(1))
    async with running(member):
        member.commit()
        await member.applied()
        before = member.loader.image
        for number in range(10, 20):
            member.append_and_apply(topic(number))
        wanted = image_of(topic(1), topic(2), epoch=3)
        assert wanted.offset < before.offset
        member.install(wanted)
        assert member.loader.applied_end == 0
        await until(lambda: member.loader.image is not before)
        assert member.loader.image == wanted


@pytest.mark.parametrize("while_loading", ["snapshot", "replay"])
async def test_snapshot_installed_during_load_replaces_it(while_loading: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_invalid_record_stops_loader_without_snapshot() -> None:
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


async def test_invalid_own_record_stops_loader_without_snapshot() -> None:
    member = Member(snapshots=ALWAYS)
    async with running(member):
        await member.applied()
        with pytest.raises(CorruptRecordError):
            member.append_and_apply(change(33, 1))
        assert len(member.failures) == 1
        with pytest.raises(RuntimeError):
            member.append_and_apply(topic(1))
        member.commit()
        await asyncio.sleep(0.02)
    assert member.replica.store.snapshot_ids() == []


async def test_failed_publish_is_reported() -> None:
    member = Member()

    async def publish(image: MetadataImage, delta: MetadataDelta) -> None:
        raise OSError("publish")

    member.loader.publish = publish
    member.append(topic(1))
    async with running(member):
        member.commit()
        await until(lambda: member.failures)
    assert isinstance(member.failures[0], OSError)


async def test_changes_during_publish_are_merged_into_one_delta() -> None:
    member = Member()
    released = asyncio.Event()
    seen: list[MetadataDelta] = []

    async def publish(image: MetadataImage, delta: MetadataDelta) -> None:
        seen.append(delta)
        await released.wait()

    member.loader.publish = publish
    async with running(member):
        await until(lambda: seen)
        for number in range(3):
            member.append(topic(number))
            member.commit()
        await asyncio.sleep(0.01)
        assert len(seen) == 1
        released.set()
        await until(lambda: len(seen) == 2)
        assert len(seen[1].changed_partitions) == 3


async def test_loader_calls_idle_periodically(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "IDLE_S", 0.01)
    member = Member()
    async with running(member):
        await until(lambda: member.idle_calls >= 3)


async def test_stop_during_load_is_quick_and_restores_collector() -> None:
    member = Member()
    image = image_of(*[topic(number, 1000) for number in range(100)])
    write_snapshot(member.replica, image)
    member.replica.install(SnapshotId(image.offset + 1, 1))
    member.loader.start()
    await within_steps(lambda: not gc.isenabled())
    assert not member.loader.is_loaded
    stopping = asyncio.create_task(member.loader.stop())
    for _ in range(20):  # iterations of the loop; a load takes hundreds
        await asyncio.sleep(0)
    assert stopping.done()
    assert gc.isenabled()
    assert not member.loader.is_loaded
    await member.loader.stop()
    member.close()


async def test_corrupt_snapshot_is_counted_and_reported_on_load() -> None:
    member = Member()
    snapshot_id = write_snapshot(member.replica, image_of(topic(1)))
    member.replica.install(snapshot_id)
    (name,) = [name for name in member.fs.list_dir(DIRECTORY) if name.endswith(".checkpoint")]
    file = member.fs.open(f"{DIRECTORY}/{name}")
    file.truncate(file.size() - 3)
    file.close()
    async with running(member):
        await until(lambda: member.failures)
        assert member.metrics.corrupt_on_load == 1
    assert isinstance(member.failures[0], CorruptRecordError)


async def test_reload_keeps_features_and_brokers() -> None:
    member = Member()
    end_points = (r.BrokerEndpoint("MESH", "h", 1),)
    member.append([r.FeatureLevelRecord(r.METADATA_VERSION, r.METADATA_VERSION_LEVEL)])
    member.append([r.RegisterBrokerRecord(1, False, topic_id(1), 1, end_points, fenced=False)])
    async with running(member):
        member.commit()
        await member.applied()
        before = member.loader.image
        member.append_and_apply(topic(1))
        member.truncate(2)
        await until(lambda: member.loader.image is not before and member.loader.is_loaded)
        assert list(member.loader.image.brokers) == [1]
        delta = next(delta for _, image, delta in member.published if image is member.loader.image)
        assert (delta.changed_brokers, [topic.name for topic in delta.deleted_topics]) == (set(), ["t1"])
