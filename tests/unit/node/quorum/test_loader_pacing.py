"""Long work gives way; the garbage collector does not look at images, and they are freed in slices."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from kipmesh.core.metadata.image import MetadataDelta, MetadataImage, difference
from kipmesh.node.quorum import loader as loader_module
from kipmesh.node.quorum import pacing
from kipmesh.storage.fs import StorageError
from tests.unit.node.quorum.loader_support import Member, change, image_of, running, topic, until, write_snapshot


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


class _Watched(list[int]):
    """Can be referred to weakly."""


def test_the_collector_is_off_until_the_last_has_loaded_and_what_came_is_frozen() -> None:
    gc.unfreeze()
    with pacing.collector_off():
        with pacing.collector_off():
            assert not gc.isenabled()
        assert not gc.isenabled()
        loaded = _Watched()
    assert gc.isenabled()
    assert not any(one is loaded for one in gc.get_objects())


def test_a_collector_that_somebody_turned_off_stays_off() -> None:
    gc.disable()
    try:
        with pacing.collector_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


async def test_an_image_and_a_delta_go_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "SLICE_S", 0.0)
    monkeypatch.setattr(pacing, "_KEYS_PER_STEP", 10)
    monkeypatch.setattr(pacing, "_TOPICS_PER_STEP", 1)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    images, deltas = [image_of(*[topic(number, 10) for number in range(10)])], [MetadataDelta()]
    deltas[0] = difference(MetadataImage(), images[0])
    await pacing.free_image(images)
    image_turns = turns
    await pacing.free_delta(deltas)
    counting.cancel()
    assert (images, deltas) == ([], [])
    assert image_turns >= 10
    assert turns - image_turns >= 10


async def test_nothing_is_published_of_a_replay_that_a_failure_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "SLICE_S", 0.0)
    monkeypatch.setattr(loader_module, "APPLY_BYTES", 1)
    member = Member()
    member.append(topic(1))
    for number in range(100):
        member.append(change(1, number % 3 + 1))
    async with running(member):
        await member.applied()
        published = len(member.published)
        member.commit()
        await until(lambda: member.loader.applied_end > 2)
        member.loader._fail(ValueError("a defect of the snapshot maker"))
        await asyncio.sleep(0.02)
        assert len(member.published) == published
        assert len(member.failures) == 1


async def test_a_log_that_starts_after_all_snapshots_is_told() -> None:
    """630-06 is broken: no state can be made of this."""
    member = Member()
    member.append(topic(1))
    write_snapshot(member.replica, image_of(topic(1)))
    member.post(member.replica.register_snapshot(member.replica.store.snapshot_ids()[0]))
    member.append(topic(2))
    member.replica.log.increment_log_start_offset(4)
    async with running(member):
        await until(lambda: member.failures)
    assert isinstance(member.failures[0], StorageError)
    assert "starts at offset 4" in str(member.failures[0])
