"""Turns filters that Spark pushes down into bounds of a batch query: topics, partitions, offsets, times.

Planning fully decides filters on topics, partitions and offsets, so Spark need not apply them. Producer timestamps are
not monotonic in a partition. ListOffsets by time finds the first record of at least that time, so a lower bound moves
the start and an upper bound has no effect. Spark applies both again.

Invariant: no record that satisfies all filters is left out, and Spark applies every filter that planning does not
decide.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from kipmesh.spark.offsets import OffsetRange, TopicPartition

Test = Callable[[Any, Any], bool]

_COMPARISONS: Final[Mapping[type[Filter], Test]] = {
    EqualTo: operator.eq,
    EqualNullSafe: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
    In: lambda own, values: own in values,
}
_OF_TEXT: Final[Mapping[type[Filter], Test]] = {
    StringStartsWith: str.startswith,
    StringEndsWith: str.endswith,
    StringContains: lambda own, value: value in own,
}
_NEVER_NULL: Final = ("topic", "partition", "offset", "timestamp", "timestampType")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


class Times(Protocol):
    """The part of `ClusterConnection` that finds offsets by time."""

    def offsets_for_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """Return, by partition, the first offset with at least the given timestamp (ms); None if there is none."""


@dataclass
class Pushdown:
    """Combined bounds of the filters of one query. `tests` must all accept a partition; `end_offset` is exclusive."""

    tests: list[Callable[[TopicPartition], bool]] = field(default_factory=list)
    first_offset: int = 0
    end_offset: int | None = None
    first_time_ms: int | None = None

    def take(self, filters: Iterable[Filter]) -> list[Filter]:
        """Add filters to the bounds. Return those that the bounds do not fully decide: Spark must apply them."""
        return [each for each in filters if not self._decides(each)]

    def _decides(self, filter_: Filter) -> bool:
        """Add a filter to the bounds if possible; return whether the bounds fully decide it."""
        inner, wanted = (filter_.child, False) if isinstance(filter_, Not) else (filter_, True)
        attribute: tuple[str, ...] = getattr(inner, "attribute", ())
        column = attribute[0] if len(attribute) == 1 else None
        if isinstance(inner, IsNotNull):
            return wanted and column in _NEVER_NULL
        if column == "topic" or column == "partition":
            return self._decides_partition(inner, column, wanted)
        if not wanted:
            return False
        if column == "offset":
            return self._decides_offset(inner)
        if column == "timestamp":
            self._use_time(inner)
        return False

    def _decides_partition(self, filter_: Filter, column: str, wanted: bool) -> bool:
        kind, own = (str, 0) if column == "topic" else (int, 1)
        test = {**_COMPARISONS, **(_OF_TEXT if kind is str else {})}.get(type(filter_))
        value: Any = getattr(filter_, "value", None)
        if test is None or not _is_of(kind, filter_, value):
            return False
        self.tests.append(_Test(test, own, value, wanted))
        return True

    def _decides_offset(self, filter_: Filter) -> bool:
        value: Any = getattr(filter_, "value", None)
        if not _is_of(int, filter_, value):
            return False
        match filter_:
            case EqualTo() | EqualNullSafe():
                self._narrow(value, value + 1)
            case GreaterThan():
                self._narrow(value + 1, None)
            case GreaterThanOrEqual():
                self._narrow(value, None)
            case LessThan():
                self._narrow(0, value)
            case LessThanOrEqual():
                self._narrow(0, value + 1)
            case In():
                least, most = min(value), max(value)
                self._narrow(least, most + 1)
                return bool(len(set(value)) == most - least + 1)
            case _:
                return False
        return True

    def _narrow(self, first: int, end: int | None) -> None:
        self.first_offset = max(self.first_offset, first)
        if end is not None:
            self.end_offset = end if self.end_offset is None else min(self.end_offset, end)

    def _use_time(self, filter_: Filter) -> None:
        value: Any = getattr(filter_, "value", None)
        if not _is_of(datetime, filter_, value):
            return
        match filter_:
            case EqualTo() | EqualNullSafe() | GreaterThanOrEqual():
                least = _ceil_ms(value)
            case GreaterThan():
                least = _floor_ms(value) + 1
            case In():
                least = min(map(_ceil_ms, value))
            case _:
                return
        self.first_time_ms = least if self.first_time_ms is None else max(self.first_time_ms, least)

    def narrow(self, ranges: Iterable[OffsetRange], cluster: Times) -> list[OffsetRange]:
        """Return the parts of the ranges that lie within the bounds, without empty ranges.

        Queries `cluster` only if there is a lower time bound, and then raises the errors of `offsets_for_times`.
        """
        left = []
        for each in ranges:
            if not all(test(each.topic_partition) for test in self.tests):
                continue
            start = max(each.start, self.first_offset)
            end = each.end if self.end_offset is None else min(each.end, self.end_offset)
            if start < end:
                left.append(OffsetRange(each.topic_partition, start, end))
        if self.first_time_ms is None or self.first_time_ms <= 0 or not left:
            return left
        found = cluster.offsets_for_times({each.topic_partition: self.first_time_ms for each in left})
        later = []
        for each in left:
            first = found.get(each.topic_partition)
            start = each.end if first is None else max(each.start, first)
            if start < each.end:
                later.append(OffsetRange(each.topic_partition, start, each.end))
        return later


@dataclass(frozen=True)
class _Test:
    """A filter on the topic (`own` 0) or the partition number (`own` 1). `wanted` is False for a negated filter."""

    test: Test
    own: int
    value: Any
    wanted: bool

    def __call__(self, partition: TopicPartition) -> bool:
        return self.test(partition[self.own], self.value) is self.wanted


def _is_of(kind: type, filter_: Filter, value: Any) -> bool:
    """Whether `value`, or each value of an `In` filter, has this type. False for null and naive datetimes."""
    if isinstance(filter_, In):
        values = list(value)
        return bool(values) and all(_is_one(kind, each) for each in values)
    return _is_one(kind, value)


def _is_one(kind: type, value: Any) -> bool:
    if kind is datetime:
        return isinstance(value, datetime) and value.tzinfo is not None
    return isinstance(value, kind) and not isinstance(value, bool)


def _floor_ms(value: datetime) -> int:
    return (value - _EPOCH) // _MILLISECOND


def _ceil_ms(value: datetime) -> int:
    return -((_EPOCH - value) // _MILLISECOND)
