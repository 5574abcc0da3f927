"""Pacing of long work: the loader yields, and the garbage collector skips images, which are freed in slices."""

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
    """A list that supports weak references."""


def test_collector_is_off_during_nested_loads_and_freezes_loaded_objects() -> None:
    gc.unfreeze()
    with pacing.collector_off():
        with pacing.collector_off():
            assert not gc.isenabled()
        assert not gc.isenabled()
        loaded = _Watched()
    assert gc.isenabled()
    assert not any(tracked is loaded for tracked in gc.get_objects())


def test_collector_that_was_disabled_before_load_stays_disabled() -> None:
    gc.disable()
    try:
        with pacing.collector_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


async def test_freeing_image_and_delta_yields_to_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "SLICE_S", 0.0)
    monkeypatch.setattr(pacing, "_KEYS_PER_STEP", 10)
    monkeypatch.setattr(pacing, "_TOPICS_PER_STEP", 1)
    runs = 0

    async def count() -> None:
        nonlocal runs
        while True:
            runs += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    images, deltas = [image_of(*[topic(number, 10) for number in range(10)])], [MetadataDelta()]
    deltas[0] = difference(MetadataImage(), images[0])
    await pacing.free_image(images)
    image_runs = runs
    await pacing.free_delta(deltas)
    counting.cancel()
    assert (images, deltas) == ([], [])
    assert image_runs >= 10
    assert runs - image_runs >= 10


async def test_failed_replay_publishes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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
        member.loader._fail(ValueError("a bug of the snapshot maker"))
        await asyncio.sleep(0.02)
        assert len(member.published) == published
        assert len(member.failures) == 1


async def test_log_start_above_all_snapshots_is_reported() -> None:
    """This violates 630-06: no image can be built."""
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
