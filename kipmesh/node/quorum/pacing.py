"""Long work in short slices of the event loop, and garbage collection of large images.

A full collection over an image of 1,000,000 partitions takes most of a second, and so does freeing one. Therefore the
collector is disabled while an image is loaded, ignores the image afterwards, and images are freed in slices.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

from kipmesh.core.metadata.image import MetadataDelta, MetadataImage

SLICE_S = 0.004
"""Time after which long work yields to the event loop; a single step may exceed it by some ms."""
_KEYS_PER_STEP = 5_000
_TOPICS_PER_STEP = 200


class Pace:
    """Splits the work of one task into slices of `SLICE_S`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    async def give_way(self) -> None:
        """Yield to the event loop and start the next slice if the current one is used up; otherwise do nothing."""
        if time.perf_counter() - self._start >= SLICE_S:
            await asyncio.sleep(0)
            self._start = time.perf_counter()


class _Collector:
    """State of `collector_off`: the number of open contexts, and whether the collector was enabled before the first."""

    users = 0
    was_enabled = False


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Disable the garbage collector within the context. It stays disabled until all such contexts have exited.

    After it is enabled again, it ignores all objects that existed at that time.
    """
    if _Collector.users == 0:
        gc.collect(1)
        _Collector.was_enabled = gc.isenabled()
        gc.disable()
    _Collector.users += 1
    try:
        yield
    finally:
        _Collector.users -= 1
        if _Collector.users == 0 and _Collector.was_enabled:
            gc.freeze()  # without a collection, which would traverse all new objects
            gc.enable()


def freeze() -> None:
    """Make garbage collections ignore all existing objects. Takes about 1 ms."""
    if gc.isenabled():  # otherwise the youngest generation has everything since the collector was disabled
        gc.collect(0)
    gc.freeze()


async def free_image(images: list[MetadataImage]) -> None:
    """Remove the only image from the list and free it in slices. Objects that are referenced elsewhere survive."""
    image = images.pop()
    keys = [image.partitions_of_broker(broker_id) for broker_id in image.brokers]
    topics = list(image.topics.values())
    del image
    while keys:
        view = keys.pop()
        part = list(view)
        await asyncio.sleep(0)
        del view  # frees the dict; the keys are freed below
        await _drop(part, _KEYS_PER_STEP)
    await _drop(topics, _TOPICS_PER_STEP)


async def free_delta(deltas: list[MetadataDelta]) -> None:
    """Remove the only delta from the list and free it in slices."""
    delta = deltas.pop()
    partitions, topics = list(delta.changed_partitions), list(delta.deleted_topics)
    if len(partitions) > _KEYS_PER_STEP:
        await asyncio.sleep(0)
    del delta
    await _drop(partitions, _KEYS_PER_STEP)
    await _drop(topics, _TOPICS_PER_STEP)


async def _drop(parts: list[Any], count: int) -> None:
    pace = Pace()
    while parts:
        del parts[-count:]
        await pace.give_way()
