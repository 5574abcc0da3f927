"""What this service has delivered, a partition: the basis of its lag.

Lag here is the end offset minus the offset after the last record that any stream of this service delivered; a group's
lag, by what is committed, is its coordinator's business (`kafka_consumergroup_lag`). Only so many partitions are
remembered; the one used longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class Delivered(NamedTuple):
    """The offset after the furthest record that was delivered."""

    topic: str
    partition: int
    position: int


class DeliveredPositions:
    """Positions by topic and partition, at most `partitions_max` of them."""

    def __init__(self, partitions_max: int) -> None:
        self._partitions_max = partitions_max
        self._positions: OrderedDict[tuple[str, int], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._positions)

    def deliver(self, topic: str, partition: int, next_offset: int) -> None:
        """Note that everything of a stream below `next_offset` was delivered."""
        key = (topic, partition)
        self._positions[key] = max(next_offset, self._positions.get(key, 0))
        self._positions.move_to_end(key)
        while len(self._positions) > self._partitions_max:
            self._positions.popitem(last=False)

    def forget(self, topic: str, partition: int) -> None:
        """The partition is gone, or began anew."""
        self._positions.pop((topic, partition), None)

    def of(self, topic: str | None) -> list[Delivered]:
        """All positions, or those of one topic, in order."""
        return [Delivered(*key, at) for key, at in sorted(self._positions.items()) if topic in (None, key[0])]
