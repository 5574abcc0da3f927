"""Which partition a record goes to, as Kafka's default partitioner has it.

A key decides by murmur2; records without a key stick to one partition until about `batch.size` bytes went to it
(KIP-794), which makes full batches and still spreads bytes evenly.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from murmurhash2 import murmurhash2

_MURMUR2_SEED = 0x9747B28C


def partition_of_key(key: bytes, partition_count: int) -> int:
    """The partition of `key`: Kafka's positive murmur2, modulo the number of partitions."""
    return int((murmurhash2(key, _MURMUR2_SEED) & 0x7FFFFFFF) % partition_count)


class StickyPartitioner:
    """One topic's partition for records without a key; the caller reports each batch's bytes as it is closed."""

    __slots__ = ("_bytes", "_bytes_max", "_random", "partition")

    def __init__(self, bytes_max: int, source: random.Random) -> None:
        self.partition = -1
        self._bytes = 0
        self._bytes_max = bytes_max
        self._random = source

    def closed(self, partition: int, size_bytes: int) -> None:
        """A batch of `partition` takes no more records."""
        if partition == self.partition:
            self._bytes += size_bytes

    def next(self, available: Sequence[int]) -> int:
        """The partition for a new batch: the current one until its share is used up, then any of `available`."""
        if self._bytes >= self._bytes_max or self.partition not in available:
            others = [each for each in available if each != self.partition] or available
            self.partition = self._random.choice(others)
            self._bytes = 0
        return self.partition
