"""Kafka's default partitioner."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from murmurhash2 import murmurhash2

from kipmesh.client.producer.accumulator import StickyPartitioner, partition_of_key


# Values of Apache Kafka's UtilsTest.testMurmur2.
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_matches_kafka(key: bytes, expected: int) -> None:
    assert murmurhash2(key, 0x9747B28C) == expected & 0xFFFFFFFF
    for count in (1, 6, 7, 100):
        assert partition_of_key(key, count) == (expected & 0x7FFFFFFF) % count


def test_sticky_partitioner_keeps_partition_for_batch_size() -> None:
    sticky = StickyPartitioner(1000, random.Random(1))
    first = sticky.next((0, 1, 2))
    sticky.batch_closed(first, 400)
    assert sticky.next((0, 1, 2)) == first
    sticky.batch_closed((first + 1) % 3, 5000)
    assert sticky.next((0, 1, 2)) == first
    sticky.batch_closed(first, 700)
    assert sticky.next((0, 1, 2)) != first


def test_sticky_partitioner_spreads_evenly_over_available_partitions() -> None:
    sticky = StickyPartitioner(100, random.Random(1))
    seen: Counter[int] = Counter()
    for _ in range(3000):
        partition = sticky.next((0, 2, 3))
        seen[partition] += 1
        sticky.batch_closed(partition, 100)
    assert set(seen) == {0, 2, 3}
    assert min(seen.values()) > 800
    assert sticky.next((1,)) == 1
