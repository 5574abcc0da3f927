"""Filters as bounds of offset ranges, compared with an oracle that checks each record."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)

from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from kipmesh.spark.offsets import OffsetRange, TopicPartition
from kipmesh.spark.options import Mode, parse_options
from kipmesh.spark.pushdown import Pushdown
from kipmesh.spark.readers import KipmeshReader

Record = tuple[str, int, int, int]  # topic, partition, offset, time in ms
COLUMNS = {"topic": 0, "partition": 1, "offset": 2, "timestamp": 3}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Log:
    """Partitions with records of arbitrary timestamps, and ListOffsets by its definition."""

    def __init__(self, partitions: Mapping[TopicPartition, list[int]]) -> None:
        self.partitions = partitions
        self.requests: list[Mapping[TopicPartition, int]] = []

    def offsets_for_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        self.requests.append(times)
        return {
            topic_partition: next(
                (offset for offset, at in enumerate(self.partitions[topic_partition]) if at >= time), None
            )
            for topic_partition, time in times.items()
        }

    def ranges(self) -> list[OffsetRange]:
        return [OffsetRange(topic_partition, 0, len(times)) for topic_partition, times in self.partitions.items()]

    def records(self, ranges: list[OffsetRange]) -> set[Record]:
        return {
            (*offset_range.topic_partition, offset, self.partitions[offset_range.topic_partition][offset])
            for offset_range in ranges
            for offset in range(offset_range.start, offset_range.end)
        }


def time(milliseconds: float) -> datetime:
    return EPOCH + timedelta(milliseconds=milliseconds)


def holds(record: Record, given: Filter) -> bool:
    """Return whether a record matches a filter, like Spark."""
    match given:
        case Not(child):
            return not holds(record, child)
        case IsNull():
            return False
        case IsNotNull():
            return True
    actual: Any = record[COLUMNS[given.attribute[0]]]  # type: ignore[attr-defined]
    if given.attribute[0] == "timestamp":  # type: ignore[attr-defined]
        actual = time(actual)
    value = given.value  # type: ignore[attr-defined]
    match given:
        case EqualTo() | EqualNullSafe():
            return bool(actual == value)
        case GreaterThan():
            return bool(actual > value)
        case GreaterThanOrEqual():
            return bool(actual >= value)
        case LessThan():
            return bool(actual < value)
        case LessThanOrEqual():
            return bool(actual <= value)
        case In():
            return actual in value
        case StringStartsWith():
            return str(actual).startswith(value)
        case StringEndsWith():
            return str(actual).endswith(value)
        case StringContains():
            return value in actual
    raise AssertionError(given)


def filters() -> st.SearchStrategy[Filter]:
    def of(column: str, values: st.SearchStrategy[Any], *more: Any) -> st.SearchStrategy[Filter]:
        filter_types = (EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual, *more)
        compared = st.builds(lambda kind, value: kind((column,), value), st.sampled_from(filter_types), values)
        listed = st.lists(values, min_size=1, max_size=3).map(lambda some: In((column,), tuple(some)))
        nulls = st.sampled_from([IsNull((column,)), IsNotNull((column,))])
        return compared | listed | nulls

    names = st.sampled_from(["a", "ab", "b", ""])
    milliseconds = st.integers(-4, 40).map(lambda quarter: time(quarter / 4))
    zoned = milliseconds.map(lambda at: at.astimezone(timezone(timedelta(hours=5))))
    any_of = (
        of("topic", names, StringStartsWith, StringEndsWith, StringContains)
        | of("partition", st.integers(-1, 3))
        | of("offset", st.integers(-2, 12))
        | of("timestamp", zoned)
    )
    return any_of | any_of.map(Not)


LOGS = st.dictionaries(
    st.builds(TopicPartition, st.sampled_from(["a", "ab", "b"]), st.integers(0, 2)),
    st.lists(st.integers(-1, 9), max_size=10),
    max_size=5,
).map(Log)


@settings(deadline=None)
@given(LOGS, st.lists(filters(), max_size=4))
def test_pushdown_keeps_each_matching_record_and_decides_taken_filters(log: Log, chosen: list[Filter]) -> None:
    pushdown = Pushdown()
    remaining = pushdown.take(chosen)
    assert all(any(kept is original for original in chosen) for kept in remaining), (
        "Spark accepts only its own filter objects"
    )
    narrowed = log.records(pushdown.narrow(log.ranges(), log))
    all_records = log.records(log.ranges())
    wanted = {record for record in all_records if all(holds(record, taken) for taken in chosen)}
    assert wanted <= narrowed
    assert wanted == {record for record in narrowed if all(holds(record, kept) for kept in remaining)}


def make_log(*times: int) -> Log:
    return Log({TopicPartition("a", 0): list(times), TopicPartition("b", 1): list(times)})


def planned_ranges(log: Log, *chosen: Filter) -> list[tuple[str, int, int, int]]:
    pushdown = Pushdown()
    pushdown.take(chosen)
    return [
        (*offset_range.topic_partition, offset_range.start, offset_range.end)
        for offset_range in pushdown.narrow(log.ranges(), log)
    ]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([EqualTo(("topic",), "a"), GreaterThan(("offset",), 1), LessThanOrEqual(("offset",), 3)], [("a", 0, 2, 4)]),
        ([Not(In(("partition",), (0, 7)))], [("b", 1, 0, 5)]),
        ([GreaterThanOrEqual(("timestamp",), time(20))], [("a", 0, 2, 5), ("b", 1, 2, 5)]),
        ([GreaterThan(("timestamp",), time(29.5)), EqualTo(("partition",), 0)], [("a", 0, 2, 5)]),
        ([GreaterThan(("timestamp",), time(30))], []),
        ([LessThan(("timestamp",), time(1))], [("a", 0, 0, 5), ("b", 1, 0, 5)]),
        ([In(("offset",), (1, 3)), StringStartsWith(("topic",), "b")], [("b", 1, 1, 4)]),
    ],
)
def test_filters_narrow_planned_ranges(chosen: list[Filter], expected: list[tuple[str, int, int, int]]) -> None:
    assert planned_ranges(make_log(10, 15, 30, 12, 20), *chosen) == expected


def test_unsupported_filters_are_left_to_spark() -> None:
    unsupported: list[Filter] = [
        EqualTo(("offset",), 1.5),
        EqualTo(("partition",), True),
        EqualTo(("topic",), None),
        In(("topic",), ("a", None)),
        GreaterThan(("timestamp",), datetime(2024, 1, 1)),  # without time zone
        EqualTo(("value",), b"x"),
        EqualTo(("headers", "key"), "x"),
        IsNull(("offset",)),
        In(("offset",), (1, 3)),
        Not(EqualTo(("offset",), 1)),
        Not(LessThan(("timestamp",), time(1))),
        IsNotNull(("key",)),
    ]
    pushdown = Pushdown()
    assert pushdown.take(unsupported) == unsupported
    assert (pushdown.tests, pushdown.first_time_ms, pushdown.end_offset) == ([], None, 4)


def test_timestamps_are_requested_only_for_planned_partitions_with_time_filters() -> None:
    log = make_log(1, 2)
    planned_ranges(log, EqualTo(("partition",), 0))
    planned_ranges(log, EqualTo(("partition",), 5), GreaterThan(("timestamp",), time(1)))
    assert log.requests == []
    planned_ranges(log, EqualTo(("partition",), 1), GreaterThan(("timestamp",), time(1)))
    assert log.requests == [{TopicPartition("b", 1): 2}]


def test_reader_with_pushdown_inherits_default_for_spark_and_pickles() -> None:
    given = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "a", "pushFilters": "true"}
    reader = KipmeshReader(parse_options(given, Mode.BATCH))
    assert reader.pushFilters.__func__ is DataSourceReader.pushFilters
    chosen: list[Filter] = [EqualTo(("topic",), "a"), LessThan(("timestamp",), time(1))]
    assert reader.pushFilters(chosen) == chosen[1:]
    unpickled = pickle.loads(pickle.dumps(reader))
    assert [test(TopicPartition("b", 0)) for test in unpickled.pushdown.tests] == [False]


def test_filters_are_pushed_down_only_if_the_option_enables_it() -> None:
    given = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "a"}
    reader = KipmeshReader(parse_options(given, Mode.BATCH))
    chosen: list[Filter] = [EqualTo(("topic",), "a"), LessThan(("timestamp",), time(1))]
    assert reader.pushFilters(chosen) == chosen
    assert reader.pushdown == Pushdown()
