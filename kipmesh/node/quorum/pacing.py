"""Long work on the event loop in short slices, and what a large image asks of Python's memory management.

A full collection over an image of 1,000,000 partitions takes most of a second, and so does letting go of one. So the
collector is off while an image is loaded and does not look at it afterwards, and an image goes in slices as well.
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
"""Work for that long, then let others have the loop; one step of it may take some ms more."""
_KEYS_A_STEP = 5_000
_TOPICS_A_STEP = 200


class Pace:
    """Belongs to one task."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    async def give_way(self) -> None:
        """Let others run if the slice is used up."""
        if time.perf_counter() - self._begin >= SLICE_S:
            await asyncio.sleep(0)
            self._begin = time.perf_counter()


class _Collector:
    """How many are loading, in this process."""

    users = 0
    was_enabled = False


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No collections until the last that is within has left; what is there then is looked at no more."""
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
            gc.freeze()  # without a collection, which would look at all that is new
            gc.enable()


def freeze() -> None:
    """Nothing that is there now is looked at by collections again; takes no time."""
    if gc.isenabled():  # or the youngest is all that came since it was turned off
        gc.collect(0)
    gc.freeze()


async def let_go(images: list[MetadataImage]) -> None:
    """Empty the list, whose image nobody else needs, in slices; others may keep parts of it, or all."""
    image = images.pop()
    keys = [image.partitions_of_broker(broker_id) for broker_id in image.brokers]
    topics = list(image.topics.values())
    del image
    while keys:
        view = keys.pop()
        part = list(view)
        await asyncio.sleep(0)
        del view  # its dict goes, the keys themselves below
        await _drop(part, _KEYS_A_STEP)
    await _drop(topics, _TOPICS_A_STEP)


async def let_go_of_delta(deltas: list[MetadataDelta]) -> None:
    """The same with a delta."""
    delta = deltas.pop()
    partitions, topics = list(delta.changed_partitions), list(delta.deleted_topics)
    if len(partitions) > _KEYS_A_STEP:
        await asyncio.sleep(0)
    del delta
    await _drop(partitions, _KEYS_A_STEP)
    await _drop(topics, _TOPICS_A_STEP)


async def _drop(parts: list[Any], count: int) -> None:
    pace = Pace()
    while parts:
        del parts[-count:]
        await pace.give_way()
