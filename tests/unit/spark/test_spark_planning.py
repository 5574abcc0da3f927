"""Planning against tables of offsets: bounds, data loss, new and deleted partitions."""

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
    """Offsets from two tables. `times[p]` has the timestamp of each record from the earliest offset."""

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


def plan(**given: str) -> dict[TopicPartition, tuple[int, int]]:
    source_options = options(**given)
    loss = DataLoss(fail=source_options.fail_on_data_loss)
    return {r.topic_partition: (r.start, r.end) for r in plan_batch(source_options, cluster(), loss)}


def test_batch_reads_all_offsets_by_default() -> None:
    assert plan() == {A0: (5, 20), A1: (0, 3)}


def test_given_offsets_may_be_earliest_and_latest() -> None:
    result = plan(startingOffsets='{"a":{"0":7,"1":-2}}', endingOffsets='{"a":{"0":-1,"1":2}}')
    assert result == {A0: (7, 20), A1: (0, 2)}


@pytest.mark.parametrize("given", ['{"a":{"0":7}}', '{"a":{"0":7,"1":0,"2":0}}', '{"b":{"0":7,"1":0}}'])
def test_offsets_must_name_exactly_the_selected_partitions(given: str) -> None:
    with pytest.raises(InvalidOptionError, match="startingOffsets must name exactly"):
        plan(startingOffsets=given)


def test_timestamps_resolve_to_offsets_by_strategy() -> None:
    assert plan(startingTimestamp="60", endingTimestamp="105") == {A0: (5, 10), A1: (1, 3)}
    with pytest.raises(InvalidOptionError, match="startingTimestamp is 90 for a-1"):
        plan(startingTimestamp="90")
    latest_plan = plan(startingTimestamp="90", startingOffsetsByTimestampStrategy="latest")
    assert latest_plan == {A0: (5, 20), A1: (3, 3)}


def test_start_before_log_start_is_data_loss() -> None:
    given = {"startingOffsets": '{"a":{"0":2,"1":0}}'}
    with pytest.raises(DataLossError, match=r"a-0 now begins at offset 5, requested offset 2 .*startingOffsets"):
        plan(**given)
    assert plan(**given, failOnDataLoss="false")[A0] == (5, 20)


def test_end_after_log_end_is_data_loss() -> None:
    given = {"endingOffsets": '{"a":{"0":30,"1":3}}'}
    with pytest.raises(DataLossError, match="a-0 ends at offset 20, requested end 30"):
        plan(**given)
    assert plan(**given, failOnDataLoss="false")[A0] == (5, 20)


def test_start_after_end_is_rejected() -> None:
    with pytest.raises(
        InvalidOptionError, match="startingOffsets must not exceed the end of the query, 8, for a-0, got 9"
    ):
        plan(startingOffsets='{"a":{"0":9,"1":0}}', endingOffsets='{"a":{"0":8,"1":3}}')


def test_stream_starts_at_log_end_by_default() -> None:
    source_options = options(Mode.STREAM)
    partitions = cluster().partitions()
    assert resolve_bound(source_options.starting, cluster(), partitions, later_than_any_is_latest=False) == {
        A0: 20,
        A1: 3,
    }


@pytest.mark.parametrize(
    ("given", "expected", "problem"),
    [
        ('{"a":{"0":21,"1":-1}}', {A0: 20, A1: 3}, "option startingOffsets is 21 for a-0, which ends at offset 20"),
        ('{"a":{"0":4,"1":-2}}', {A0: 5, A1: 0}, "option startingOffsets is 4 for a-0, which begins at offset 5"),
    ],
)
def test_stream_start_outside_of_log_is_data_loss(given: str, expected: Offsets, problem: str) -> None:
    source_options = options(Mode.STREAM, startingOffsets=given)
    with pytest.raises(DataLossError, match=problem):
        plan_start(source_options, cluster(), DataLoss(fail=True))
    assert plan_start(source_options, cluster(), DataLoss(fail=False)) == expected


def test_stream_starts_at_given_offsets() -> None:
    source_options = options(Mode.STREAM, startingOffsets='{"a":{"0":20,"1":-2}}')
    assert plan_start(source_options, cluster(), DataLoss(fail=True)) == {A0: 20, A1: 0}
    assert plan_start(options(Mode.STREAM), cluster(), DataLoss(fail=True)) == {A0: 20, A1: 3}


def test_count_new_sums_offsets_since_start() -> None:
    assert count_new({A0: 5}, {A0: 9}, {}) == 4
    assert count_new({A0: 5}, {A0: 5}, {}) == 0
    assert count_new({A0: 5}, {A0: 7, A1: 4}, {A1: 2}) == 4
    assert count_new({A0: 5}, {A0: 3, A1: 4}, {A1: 4}) == 0


def test_latest_plan_ends_at_log_end_or_limit() -> None:
    loss = DataLoss(fail=True)
    assert plan_latest({A0: 5, A1: 0}, {A0: 25, A1: 5}, {}, None, loss) == {A0: 25, A1: 5}
    assert plan_latest({A0: 5, A1: 0}, {A0: 25, A1: 5}, {}, 10, loss) == {A0: 13, A1: 2}
    assert plan_latest({A0: 5}, {A0: 5}, {}, 10, loss) == {A0: 5}


def test_new_partition_is_read_from_its_first_offset() -> None:
    loss = DataLoss(fail=True)
    assert plan_latest({A0: 5}, {A0: 5, A1: 4}, {A1: 0}, 3, loss) == {A0: 5, A1: 3}
    assert plan_stream({A0: 5}, {A0: 5, A1: 4}, {A1: 0}, loss) == [OffsetRange(A0, 5, 5), OffsetRange(A1, 0, 4)]
    with pytest.raises(DataLossError, match="new partition a-1 begins at offset 2"):
        plan_stream({A0: 5}, {A0: 5, A1: 4}, {A1: 2}, loss)


def test_deleted_and_truncated_partitions_are_data_loss() -> None:
    with pytest.raises(DataLossError, match="deleted partitions: a-1"):
        plan_latest({A0: 5, A1: 0}, {A0: 5}, {}, None, DataLoss(fail=True))
    with pytest.raises(DataLossError, match="a-0 ends at offset 3, the query had reached 5"):
        plan_latest({A0: 5}, {A0: 3}, {}, None, DataLoss(fail=True))
    loss = DataLoss(fail=False)
    assert plan_latest({A0: 5, A1: 0}, {A0: 3}, {}, None, loss) == {A0: 3}
    assert (loss.events, loss.offsets_lost) == (2, 2)
