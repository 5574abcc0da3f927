"""Planning against a cluster that is a table: bounds, data loss, new and lost partitions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pytest

from kipmesh.spark.offsets import DataLossError, InvalidOptionError, OffsetRange, Offsets, TopicPartition
from kipmesh.spark.options import Mode, SourceOptions, parse_options
from kipmesh.spark.planning import (
    DataLoss,
    count_new,
    plan_batch,
    plan_latest,
    plan_start,
    plan_stream,
    resolve_bound,
)

A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)


@dataclass
class TableCluster:
    """Answers out of two tables of offsets; times[p] says when each offset from the earliest on was written."""

    earliest: Offsets
    latest: Offsets
    times: dict[TopicPartition, list[int]] = field(default_factory=dict)

    def partitions(self) -> list[TopicPartition]:
        return sorted(self.latest)

    def earliest_offsets(self, partitions: Collection[TopicPartition]) -> Offsets:
        return {p: self.earliest[p] for p in partitions}

    def latest_offsets(self, partitions: Collection[TopicPartition]) -> Offsets:
        return {p: self.latest[p] for p in partitions}

    def offsets_for_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        return {
            p: next((self.earliest[p] + i for i, at in enumerate(self.times[p]) if at >= wanted), None)
            for p, wanted in times.items()
        }


def options(mode: Mode = Mode.BATCH, /, **given: str) -> SourceOptions:
    return parse_options({"kafka.bootstrap.servers": "h:1", "subscribe": "a", **given}, mode)


def cluster() -> TableCluster:
    return TableCluster({A0: 5, A1: 0}, {A0: 20, A1: 3}, {A0: list(range(100, 115)), A1: [50, 60, 70]})


def planned(**given: str) -> dict[TopicPartition, tuple[int, int]]:
    chosen = options(**given)
    loss = DataLoss(fail=chosen.fail_on_data_loss)
    return {r.topic_partition: (r.start, r.end) for r in plan_batch(chosen, cluster(), loss)}


def test_everything_by_default() -> None:
    assert planned() == {A0: (5, 20), A1: (0, 3)}


def test_given_offsets_and_the_two_special_ones() -> None:
    found = planned(startingOffsets='{"a":{"0":7,"1":-2}}', endingOffsets='{"a":{"0":-1,"1":2}}')
    assert found == {A0: (7, 20), A1: (0, 2)}


@pytest.mark.parametrize("given", ['{"a":{"0":7}}', '{"a":{"0":7,"1":0,"2":0}}', '{"b":{"0":7,"1":0}}'])
def test_offsets_must_name_the_partitions_that_are_read(given: str) -> None:
    with pytest.raises(InvalidOptionError, match="startingOffsets must name exactly"):
        planned(startingOffsets=given)


def test_timestamps() -> None:
    assert planned(startingTimestamp="60", endingTimestamp="105") == {A0: (5, 10), A1: (1, 3)}
    with pytest.raises(InvalidOptionError, match="startingTimestamp is 90 for a-1"):
        planned(startingTimestamp="90")
    late = planned(startingTimestamp="90", startingOffsetsByTimestampStrategy="latest")
    assert late == {A0: (5, 20), A1: (3, 3)}


def test_a_start_before_the_log_is_data_loss() -> None:
    given = {"startingOffsets": '{"a":{"0":2,"1":0}}'}
    with pytest.raises(DataLossError, match=r"a-0 now begins at offset 5, requested offset 2 .*startingOffsets"):
        planned(**given)
    assert planned(**given, failOnDataLoss="false")[A0] == (5, 20)


def test_an_end_after_the_log_is_data_loss() -> None:
    given = {"endingOffsets": '{"a":{"0":30,"1":3}}'}
    with pytest.raises(DataLossError, match="a-0 ends at offset 20, requested end 30"):
        planned(**given)
    assert planned(**given, failOnDataLoss="false")[A0] == (5, 20)


def test_a_start_after_the_end_is_refused() -> None:
    with pytest.raises(
        InvalidOptionError, match="startingOffsets must not exceed the end of the query, 8, for a-0, got 9"
    ):
        planned(startingOffsets='{"a":{"0":9,"1":0}}', endingOffsets='{"a":{"0":8,"1":3}}')


def test_streams_start_at_the_end_unless_told() -> None:
    chosen = options(Mode.STREAM)
    partitions = cluster().partitions()
    assert resolve_bound(chosen.starting, cluster(), partitions, later_than_any_is_latest=False) == {A0: 20, A1: 3}


@pytest.mark.parametrize(
    ("given", "found", "problem"),
    [
        ('{"a":{"0":21,"1":-1}}', {A0: 20, A1: 3}, "option startingOffsets is 21 for a-0, which ends at offset 20"),
        ('{"a":{"0":4,"1":-2}}', {A0: 5, A1: 0}, "option startingOffsets is 4 for a-0, which begins at offset 5"),
    ],
)
def test_a_stream_that_starts_where_nothing_is_loses_data(given: str, found: Offsets, problem: str) -> None:
    chosen = options(Mode.STREAM, startingOffsets=given)
    with pytest.raises(DataLossError, match=problem):
        plan_start(chosen, cluster(), DataLoss(fail=True))
    assert plan_start(chosen, cluster(), DataLoss(fail=False)) == found


def test_a_stream_starts_where_it_is_told() -> None:
    chosen = options(Mode.STREAM, startingOffsets='{"a":{"0":20,"1":-2}}')
    assert plan_start(chosen, cluster(), DataLoss(fail=True)) == {A0: 20, A1: 0}
    assert plan_start(options(Mode.STREAM), cluster(), DataLoss(fail=True)) == {A0: 20, A1: 3}


def test_new_offsets_are_counted() -> None:
    assert count_new({A0: 5}, {A0: 9}, {}) == 4
    assert count_new({A0: 5}, {A0: 5}, {}) == 0
    assert count_new({A0: 5}, {A0: 7, A1: 4}, {A1: 2}) == 4
    assert count_new({A0: 5}, {A0: 3, A1: 4}, {A1: 4}) == 0


def test_latest_goes_to_the_end_or_to_the_limit() -> None:
    loss = DataLoss(fail=True)
    assert plan_latest({A0: 5, A1: 0}, {A0: 25, A1: 5}, {}, None, loss) == {A0: 25, A1: 5}
    assert plan_latest({A0: 5, A1: 0}, {A0: 25, A1: 5}, {}, 10, loss) == {A0: 13, A1: 2}
    assert plan_latest({A0: 5}, {A0: 5}, {}, 10, loss) == {A0: 5}


def test_a_new_partition_is_read_from_its_beginning() -> None:
    loss = DataLoss(fail=True)
    assert plan_latest({A0: 5}, {A0: 5, A1: 4}, {A1: 0}, 3, loss) == {A0: 5, A1: 3}
    assert plan_stream({A0: 5}, {A0: 5, A1: 4}, {A1: 0}, loss) == [OffsetRange(A0, 5, 5), OffsetRange(A1, 0, 4)]
    with pytest.raises(DataLossError, match="new partition a-1 begins at offset 2"):
        plan_stream({A0: 5}, {A0: 5, A1: 4}, {A1: 2}, loss)


def test_lost_and_truncated_partitions_are_data_loss() -> None:
    with pytest.raises(DataLossError, match="deleted partitions: a-1"):
        plan_latest({A0: 5, A1: 0}, {A0: 5}, {}, None, DataLoss(fail=True))
    with pytest.raises(DataLossError, match="a-0 ends at offset 3, the query had reached 5"):
        plan_latest({A0: 5}, {A0: 3}, {}, None, DataLoss(fail=True))
    counted = DataLoss(fail=False)
    assert plan_latest({A0: 5, A1: 0}, {A0: 3}, {}, None, counted) == {A0: 3}
    assert (counted.events, counted.offsets_lost) == (2, 2)
