"""What a query reads: from options and the cluster's answers to ranges of offsets, for batch and for streaming.

The functions here decide and do no IO; `Cluster` is what they ask. Whatever is no longer there is handed to
`DataLoss`, which raises or counts, as failOnDataLoss says.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from kipmesh.spark.offsets import (
    EARLIEST_OFFSET,
    LATEST_OFFSET,
    DataLossError,
    InvalidOptionError,
    OffsetRange,
    Offsets,
    TopicPartition,
    limit_ranges,
)
from kipmesh.spark.options import Bound, BoundKind, SourceOptions

logger = logging.getLogger(__name__)


class Cluster(Protocol):
    """The questions that planning asks a cluster."""

    def partitions(self) -> list[TopicPartition]:
        """The partitions that the options name, in order; `InvalidOptionError` when one does not exist."""

    def earliest_offsets(self, partitions: Collection[TopicPartition]) -> Offsets:
        """The first offset of each partition."""

    def latest_offsets(self, partitions: Collection[TopicPartition]) -> Offsets:
        """The offset after the last readable record of each partition."""

    def offsets_for_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """The first offset whose time is at least the one given; None where all records are older."""


class DataLoss:
    """Raises for records that are gone, or warns and counts them."""

    def __init__(self, *, fail: bool) -> None:
        self._fail = fail
        self.events = 0
        self.offsets_lost = 0

    def report(self, problem: str, lost: int) -> None:
        """`lost` offsets of a query are gone; `problem` says which."""
        if self._fail:
            raise DataLossError(problem)
        self.events += 1
        self.offsets_lost += lost
        logger.warning("data loss: %s; going on, because failOnDataLoss is false", problem)


def resolve_bound(
    bound: Bound, cluster: Cluster, partitions: Collection[TopicPartition], *, later_than_any_is_latest: bool
) -> Offsets:
    """The offset of each partition that `bound` stands for.

    As in the connector, an end by timestamp that lies after the last record is the end of the partition, and a start
    there is an error unless startingOffsetsByTimestampStrategy is latest.
    """
    match bound.kind:
        case BoundKind.EARLIEST:
            return cluster.earliest_offsets(partitions)
        case BoundKind.LATEST:
            return cluster.latest_offsets(partitions)
        case BoundKind.OFFSETS:
            return _resolve_offsets(bound, cluster, partitions)
        case BoundKind.TIMESTAMP:
            times = dict.fromkeys(partitions, bound.timestamp_ms)
        case BoundKind.TIMESTAMPS:
            _check_same_partitions(bound, partitions)
            times = bound.positions
    found = cluster.offsets_for_times(times)
    late = [partition for partition in times if found.get(partition) is None]
    if late and not later_than_any_is_latest:
        first = min(late)
        raise InvalidOptionError(
            bound.option,
            f"is {times[first]} for {_name(first)}, which has no record that late; set"
            " startingOffsetsByTimestampStrategy to latest to start at its end",
        )
    latest = cluster.latest_offsets(late) if late else {}
    return {partition: latest[partition] if (o := found.get(partition)) is None else o for partition in times}


def _resolve_offsets(bound: Bound, cluster: Cluster, partitions: Collection[TopicPartition]) -> Offsets:
    _check_same_partitions(bound, partitions)
    earliest = cluster.earliest_offsets([p for p, offset in bound.positions.items() if offset == EARLIEST_OFFSET])
    latest = cluster.latest_offsets([p for p, offset in bound.positions.items() if offset == LATEST_OFFSET])
    return {**bound.positions, **earliest, **latest}


def _check_same_partitions(bound: Bound, partitions: Collection[TopicPartition]) -> None:
    wanted, given = set(partitions), set(bound.positions)
    if wanted != given:
        missing = ", ".join(map(_name, sorted(wanted - given))) or "none"
        extra = ", ".join(map(_name, sorted(given - wanted))) or "none"
        raise InvalidOptionError(
            bound.option, f"must name exactly the partitions that are read (missing: {missing}; unknown: {extra})"
        )


def plan_start(options: SourceOptions, cluster: Cluster, loss: DataLoss) -> Offsets:
    """Where a streaming query without a checkpoint begins. Offsets given that are not there are data loss."""
    partitions = cluster.partitions()
    starting = options.starting
    starts = resolve_bound(starting, cluster, partitions, later_than_any_is_latest=options.later_than_any_is_latest)
    if starting.kind is not BoundKind.OFFSETS:
        return starts
    earliest, latest = cluster.earliest_offsets(partitions), cluster.latest_offsets(partitions)
    for partition, start in sorted(starts.items()):
        nearest = min(max(start, earliest[partition]), latest[partition])
        if nearest != start:
            what = "begins" if nearest > start else "ends"
            problem = f"option {starting.option} is {start} for {_name(partition)}, which {what} at offset {nearest}"
            loss.report(problem, max(0, nearest - start))
        starts[partition] = nearest
    return starts


def plan_batch(options: SourceOptions, cluster: Cluster, loss: DataLoss) -> list[OffsetRange]:
    """The ranges of a batch query. Offsets given that are not (or no longer) there are data loss."""
    partitions = cluster.partitions()
    starts = resolve_bound(
        options.starting, cluster, partitions, later_than_any_is_latest=options.later_than_any_is_latest
    )
    ends = resolve_bound(options.ending, cluster, partitions, later_than_any_is_latest=True)
    if options.starting.kind is BoundKind.OFFSETS or options.ending.kind is BoundKind.OFFSETS:
        latest = cluster.latest_offsets(partitions)
        earliest = cluster.earliest_offsets(partitions)
    else:
        latest, earliest = ends, starts
    ranges = []
    for partition in partitions:
        start, end = starts[partition], ends[partition]
        if start > end:
            raise InvalidOptionError(
                options.starting.option, f"is {start} for {_name(partition)}, after the end of the query, {end}"
            )
        named = f"(options {options.starting.option}, {options.ending.option})"
        start, end = _clip(partition, (start, end), (earliest[partition], latest[partition]), loss, named)
        ranges.append(OffsetRange(partition, start, end))
    return ranges


def _clip(
    partition: TopicPartition, wanted: tuple[int, int], there: tuple[int, int], loss: DataLoss, named: str
) -> tuple[int, int]:
    (start, end), (earliest, latest) = wanted, there
    if start < earliest < end or start < end <= earliest:
        problem = f"{_name(partition)} begins at offset {earliest} now and {start} was to be read {named}"
        loss.report(problem, min(earliest, end) - start)
        start = min(earliest, end)
    if end > latest:
        problem = f"{_name(partition)} ends at offset {latest} and {end} was to be read {named}"
        loss.report(problem, end - max(start, latest))
        end = max(start, latest)
    return start, end


def plan_latest(
    start: Offsets, latest: Offsets, earliest_of_new: Offsets, limit: int | None, loss: DataLoss
) -> Offsets:
    """Where the next micro-batch ends: at `latest`, or nearer when `limit` offsets are allowed.

    A partition that is new since `start` begins at its earliest offset. A partition that ends before the query's own
    position was truncated or recreated: data loss, after which it starts again from what is there. Partitions that
    are gone are data loss too, and leave the offsets.
    """
    gone = sorted(start.keys() - latest.keys())
    if gone:
        loss.report(f"partitions are gone: {', '.join(map(_name, gone))}", 0)
    ranges = []
    for partition, end in sorted(latest.items()):
        begin = start.get(partition, earliest_of_new.get(partition, 0))
        if end < begin:
            loss.report(f"{_name(partition)} ends at offset {end}, and {begin} had been reached", begin - end)
            begin = end
        ranges.append(OffsetRange(partition, begin, end))
    if limit is not None:
        ranges = limit_ranges(ranges, limit)
    return {each.topic_partition: each.end for each in ranges}


def count_new(start: Offsets, end: Offsets, earliest_of_new: Offsets) -> int:
    """How many offsets there are from `start` to `end`; a partition that is new begins at its earliest."""
    begins = ((each, start.get(each, earliest_of_new.get(each, 0))) for each in end)
    return sum(max(0, end[each] - begin) for each, begin in begins)


def plan_stream(start: Offsets, end: Offsets, earliest_of_new: Offsets, loss: DataLoss) -> list[OffsetRange]:
    """The ranges of one micro-batch. New partitions are read from their first offset, which should be 0."""
    ranges = []
    for partition, last in sorted(end.items()):
        first = start.get(partition)
        if first is None:
            first = earliest_of_new[partition]
            if first > 0:
                loss.report(f"new partition {_name(partition)} begins at offset {first} and not at 0", first)
        if first > last:
            loss.report(f"{_name(partition)} ends at offset {last}, and {first} had been reached", first - last)
            first = last
        ranges.append(OffsetRange(partition, first, last))
    return ranges


def new_partitions(start: Mapping[TopicPartition, int], end: Iterable[TopicPartition]) -> list[TopicPartition]:
    """The partitions of `end` that `start` does not know."""
    return [partition for partition in end if partition not in start]


def _name(partition: TopicPartition) -> str:
    return f"{partition.topic}-{partition.partition}"
