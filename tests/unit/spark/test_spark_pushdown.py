"""Filters as bounds: beside an oracle that looks at every record, no record that fulfils all of them is left out."""

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
    """Partitions whose records have any times, and ListOffsets as it is defined."""

    def __init__(self, partitions: Mapping[TopicPartition, list[int]]) -> None:
        self.partitions = partitions
        self.asked: list[Mapping[TopicPartition, int]] = []

    def offsets_for_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        self.asked.append(times)
        return {
            where: next((offset for offset, at in enumerate(self.partitions[where]) if at >= time), None)
            for where, time in times.items()
        }

    def ranges(self) -> list[OffsetRange]:
        return [OffsetRange(where, 0, len(times)) for where, times in self.partitions.items()]

    def records(self, ranges: list[OffsetRange]) -> set[Record]:
        return {
            (*each.topic_partition, offset, self.partitions[each.topic_partition][offset])
            for each in ranges
            for offset in range(each.start, each.end)
        }


def time(milliseconds: float) -> datetime:
    return EPOCH + timedelta(milliseconds=milliseconds)


def holds(record: Record, given: Filter) -> bool:
    """What Spark finds: the dumb way."""
    match given:
        case Not(child):
            return not holds(record, child)
        case IsNull():
            return False
        case IsNotNull():
            return True
    own: Any = record[COLUMNS[given.attribute[0]]]  # type: ignore[attr-defined]
    if given.attribute[0] == "timestamp":  # type: ignore[attr-defined]
        own = time(own)
    value = given.value  # type: ignore[attr-defined]
    match given:
        case EqualTo() | EqualNullSafe():
            return bool(own == value)
        case GreaterThan():
            return bool(own > value)
        case GreaterThanOrEqual():
            return bool(own >= value)
        case LessThan():
            return bool(own < value)
        case LessThanOrEqual():
            return bool(own <= value)
        case In():
            return own in value
        case StringStartsWith():
            return str(own).startswith(value)
        case StringEndsWith():
            return str(own).endswith(value)
        case StringContains():
            return value in own
    raise AssertionError(given)


def filters() -> st.SearchStrategy[Filter]:
    def of(column: str, values: st.SearchStrategy[Any], *more: Any) -> st.SearchStrategy[Filter]:
        one = (EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual, *more)
        compared = st.builds(lambda kind, value: kind((column,), value), st.sampled_from(one), values)
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
def test_no_record_is_left_out_and_what_is_decided_is(log: Log, chosen: list[Filter]) -> None:
    pushdown = Pushdown()
    left = pushdown.take(chosen)
    assert all(any(one is each for each in chosen) for one in left), "Spark takes its own filters back only"
    planned = log.records(pushdown.narrow(log.ranges(), log))
    everything = log.records(log.ranges())
    wanted = {record for record in everything if all(holds(record, each) for each in chosen)}
    assert wanted <= planned
    assert wanted == {record for record in planned if all(holds(record, each) for each in left)}


def log_of(*times: int) -> Log:
    return Log({TopicPartition("a", 0): list(times), TopicPartition("b", 1): list(times)})


def planned(log: Log, *chosen: Filter) -> list[tuple[str, int, int, int]]:
    pushdown = Pushdown()
    pushdown.take(chosen)
    return [(*each.topic_partition, each.start, each.end) for each in pushdown.narrow(log.ranges(), log)]


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
def test_what_is_planned(chosen: list[Filter], expected: list[tuple[str, int, int, int]]) -> None:
    assert planned(log_of(10, 15, 30, 12, 20), *chosen) == expected


def test_what_is_not_understood_is_sparks() -> None:
    strange: list[Filter] = [
        EqualTo(("offset",), 1.5),
        EqualTo(("partition",), True),
        EqualTo(("topic",), None),
        In(("topic",), ("a", None)),
        GreaterThan(("timestamp",), datetime(2024, 1, 1)),  # of no zone
        EqualTo(("value",), b"x"),
        EqualTo(("headers", "key"), "x"),
        IsNull(("offset",)),
        In(("offset",), (1, 3)),
        Not(EqualTo(("offset",), 1)),
        Not(LessThan(("timestamp",), time(1))),
        IsNotNull(("key",)),
    ]
    pushdown = Pushdown()
    assert pushdown.take(strange) == strange
    assert (pushdown.tests, pushdown.first_time_ms, pushdown.end_offset) == ([], None, 4)


def test_nobody_asks_for_times_that_no_filter_names() -> None:
    log = log_of(1, 2)
    planned(log, EqualTo(("partition",), 0))
    planned(log, EqualTo(("partition",), 5), GreaterThan(("timestamp",), time(1)))
    assert log.asked == []
    planned(log, EqualTo(("partition",), 1), GreaterThan(("timestamp",), time(1)))
    assert log.asked == [{TopicPartition("b", 1): 2}]


def test_a_reader_with_filters_is_as_one_without_to_a_spark_that_hands_none_down() -> None:
    given = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "a", "pushFilters": "true"}
    reader = KipmeshReader(parse_options(given, Mode.BATCH))
    assert reader.pushFilters.__func__ is DataSourceReader.pushFilters
    chosen: list[Filter] = [EqualTo(("topic",), "a"), LessThan(("timestamp",), time(1))]
    assert reader.pushFilters(chosen) == chosen[1:]
    travelled = pickle.loads(pickle.dumps(reader))
    assert [test(TopicPartition("b", 0)) for test in travelled.pushdown.tests] == [False]


def test_filters_are_used_only_where_the_option_says_so() -> None:
    given = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "a"}
    reader = KipmeshReader(parse_options(given, Mode.BATCH))
    chosen: list[Filter] = [EqualTo(("topic",), "a"), LessThan(("timestamp",), time(1))]
    assert reader.pushFilters(chosen) == chosen
    assert reader.pushdown == Pushdown()
