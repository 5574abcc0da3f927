"""Offsets: JSON of checkpoints, and ranges that are split and limited without losing or repeating an offset."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh.spark.offsets import (
    OffsetRange,
    TopicPartition,
    group_ranges,
    limit_ranges,
    offsets_from_json,
    offsets_to_json,
    split_ranges,
)

ranges = st.lists(st.integers(0, 5_000), max_size=8).map(
    lambda sizes: [OffsetRange(TopicPartition("t", i), 10 * i, 10 * i + size) for i, size in enumerate(sizes)]
)


def covered(pieces: list[OffsetRange]) -> set[tuple[int, int]]:
    offsets = [(p.topic_partition.partition, offset) for p in pieces for offset in range(p.start, p.end)]
    assert len(offsets) == len(set(offsets))
    return set(offsets)


def test_offsets_json_is_sorted_and_round_trips() -> None:
    offsets = {TopicPartition("b", 10): 5, TopicPartition("b", 9): 4, TopicPartition("a", 0): 123}
    document = offsets_to_json(offsets)
    assert json.dumps(document, separators=(",", ":")) == '{"a":{"0":123},"b":{"9":4,"10":5}}'
    assert offsets_from_json(json.loads(json.dumps(document))) == offsets


@settings(deadline=None)
@given(ranges, st.integers(1, 12_000))
def test_limit_of_ranges_is_exact_and_keeps_starts(pending: list[OffsetRange], limit: int) -> None:
    limited = limit_ranges(pending, limit)
    assert sum(offset_range.size for offset_range in limited) == min(
        limit, sum(offset_range.size for offset_range in pending)
    )
    for before, after in zip(pending, limited, strict=True):
        assert before.start == after.start <= after.end <= before.end


def test_limit_of_ranges_starves_no_partition() -> None:
    pending = [OffsetRange(TopicPartition("t", 0), 0, 1000), OffsetRange(TopicPartition("t", 1), 0, 1)]
    for _ in range(1001):
        step = limit_ranges(pending, 1)
        pending = [OffsetRange(p.topic_partition, s.end, p.end) for p, s in zip(pending, step, strict=True)]
    assert all(offset_range.size == 0 for offset_range in pending)


@settings(deadline=None)
@given(ranges, st.none() | st.integers(1, 40), st.none() | st.integers(1, 3_000))
def test_split_ranges_cover_the_same_offsets(whole: list[OffsetRange], least: int | None, longest: int | None) -> None:
    pieces = split_ranges(whole, least, longest)
    assert covered(pieces) == covered(whole)
    assert all(piece.size > 0 for piece in pieces)
    if longest is not None:
        assert all(piece.size <= longest for piece in pieces)
    if least is not None:
        assert len(pieces) >= min(least, sum(offset_range.size for offset_range in whole))


@pytest.mark.parametrize(("least", "count"), [(None, 2), (1, 2), (10, 10)])
def test_ranges_are_split_only_up_to_min_partitions(least: int | None, count: int) -> None:
    whole = [OffsetRange(TopicPartition("t", p), 0, 1000) for p in range(2)]
    assert len(split_ranges(whole, least, None)) == count


@settings(deadline=None)
@given(ranges, st.none() | st.integers(1, 12), st.none() | st.integers(1, 40), st.lists(st.integers(1, 3), max_size=8))
def test_groups_cover_the_same_offsets_in_limited_tasks(
    whole: list[OffsetRange], most: int | None, least: int | None, leader_ids: list[int]
) -> None:
    pieces = split_ranges(whole, least, None)
    leaders = {TopicPartition("t", number): leader for number, leader in enumerate(leader_ids)}
    groups = group_ranges(pieces, most, leaders)
    assert covered([piece for group in groups for piece in group]) == covered(pieces)
    for group in groups:
        partitions = [piece.topic_partition for piece in group]
        assert len(partitions) == len(set(partitions)) > 0
    if most is None:
        assert groups == [(piece,) for piece in pieces]
        return
    assert len(groups) <= most
    if len(pieces) > most:
        total = sum(piece.size for piece in pieces)
        longest = max(piece.size for piece in pieces)
        assert max(sum(piece.size for piece in group) for group in groups) <= total / most + longest
        order = [leaders.get(piece.topic_partition, -1) for group in groups for piece in group]
        assert order == sorted(order), "partitions of one leader are adjacent"
