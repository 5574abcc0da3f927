"""Plans the offset ranges of batch and streaming queries from options and the state of the cluster.

The functions do no IO except through `Cluster`. Missing records are reported to `DataLoss`, which raises or counts,
depending on failOnDataLoss.
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
    """Partitions and offsets that planning needs from the cluster. Methods raise KafkaError.

    They raise InvalidOptionError for a topic that does not exist or was deleted.
    """

    def partitions(self) -> list[TopicPartition]:
        """Return the partitions that the options select, sorted. Raises InvalidOptionError if any is missing."""

    def earliest_offsets(self, partitions: Collection[TopicPartition]) -> Offsets:
        """Return the log start offset of each partition."""

    def latest_offsets(self, partitions: Collection[TopicPartition]) -> Offsets:
        """Return the high watermark of each partition."""

    def offsets_for_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """Return, by partition, the first offset with at least the given timestamp (ms); None if there is none."""


class DataLoss:
    """Receives reports of missing offsets. Raises DataLossError if `fail` is set; otherwise counts and logs them."""

    def __init__(self, *, fail: bool) -> None:
        self._fail = fail
        self.events = 0
        self.offsets_lost = 0

    def report(self, problem: str, lost: int) -> None:
        """Report `lost` missing offsets, described by `problem`. Raises DataLossError if `fail` is set."""
        if self._fail:
            raise DataLossError(problem)
        self.events += 1
        self.offsets_lost += lost
        logger.warning("data loss, continuing because failOnDataLoss is false problem=%s", problem)


def resolve_bound(
    bound: Bound, cluster: Cluster, partitions: Collection[TopicPartition], *, later_than_any_is_latest: bool
) -> Offsets:
    """Return the offset of each partition for a bound. Does not check that explicit offsets exist.

    As in Spark's Kafka connector, an end timestamp after the last record means the end of the partition. A start
    timestamp after the last record raises InvalidOptionError unless `later_than_any_is_latest` is set (option
    startingOffsetsByTimestampStrategy).

    Also raises InvalidOptionError if the bound does not name exactly `partitions` or a topic was deleted. Raises
    KafkaError.
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
            f"is {times[first]} for {_name(first)}, which has no record with this or a later timestamp; set"
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
    """Return the start offsets of a streaming query without a checkpoint.

    An explicit offset outside the log is reported to `loss` and replaced by the nearest offset. Raises
    InvalidOptionError, DataLossError, KafkaError.
    """
    partitions = cluster.partitions()
    starting = options.starting
    starts = resolve_bound(starting, cluster, partitions, later_than_any_is_latest=options.later_than_any_is_latest)
    if starting.kind is not BoundKind.OFFSETS:
        return starts
    earliest, latest = cluster.earliest_offsets(partitions), cluster.latest_offsets(partitions)
    for partition, start in sorted(starts.items()):
        nearest = min(max(start, earliest[partition]), latest[partition])
        if nearest != start:
            edge = "begins" if nearest > start else "ends"
            problem = f"option {starting.option} is {start} for {_name(partition)}, which {edge} at offset {nearest}"
            loss.report(problem, max(0, nearest - start))
        starts[partition] = nearest
    return starts


def plan_batch(options: SourceOptions, cluster: Cluster, loss: DataLoss) -> list[OffsetRange]:
    """Return one range per partition of a batch query; a range may be empty.

    Offsets outside the log are reported to `loss` and left out. Raises InvalidOptionError (also if a start exceeds its
    end), DataLossError, KafkaError.
    """
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
                options.starting.option,
                f"must not exceed the end of the query, {end}, for {_name(partition)}, got {start}",
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
        problem = f"{_name(partition)} now begins at offset {earliest}, requested offset {start} {named}"
        loss.report(problem, min(earliest, end) - start)
        start = min(earliest, end)
    if end > latest:
        problem = f"{_name(partition)} ends at offset {latest}, requested end {end} {named}"
        loss.report(problem, end - max(start, latest))
        end = max(start, latest)
    return start, end


def plan_latest(
    start: Offsets, latest: Offsets, earliest_of_new: Offsets, limit: int | None, loss: DataLoss
) -> Offsets:
    """Return the end of the next micro-batch: `latest`, or less to stay within `limit` offsets.

    A new partition starts at its earliest offset. Two cases are reported to `loss`, which may raise DataLossError. If
    a partition ends before the query's position (truncated or recreated), its end is `latest`. If a partition was
    deleted, the result does not contain it.
    """
    gone = sorted(start.keys() - latest.keys())
    if gone:
        loss.report(f"deleted partitions: {', '.join(map(_name, gone))}", 0)
    ranges = []
    for partition, end in sorted(latest.items()):
        begin = start.get(partition, earliest_of_new.get(partition, 0))
        if end < begin:
            loss.report(f"{_name(partition)} ends at offset {end}, the query had reached {begin}", begin - end)
            begin = end
        ranges.append(OffsetRange(partition, begin, end))
    if limit is not None:
        ranges = limit_ranges(ranges, limit)
    return {each.topic_partition: each.end for each in ranges}


def count_new(start: Offsets, end: Offsets, earliest_of_new: Offsets) -> int:
    """Return the total number of offsets from `start` to `end`. A new partition starts at its earliest offset."""
    begins = ((each, start.get(each, earliest_of_new.get(each, 0))) for each in end)
    return sum(max(0, end[each] - begin) for each, begin in begins)


def plan_stream(start: Offsets, end: Offsets, earliest_of_new: Offsets, loss: DataLoss) -> list[OffsetRange]:
    """Return one range per partition of a micro-batch; a range may be empty.

    Reports a new partition that does not begin at offset 0, and a partition that ends before the query's position, to
    `loss`, which may raise DataLossError.
    """
    ranges = []
    for partition, last in sorted(end.items()):
        first = start.get(partition)
        if first is None:
            first = earliest_of_new[partition]
            if first > 0:
                loss.report(f"new partition {_name(partition)} begins at offset {first} instead of 0", first)
        if first > last:
            loss.report(f"{_name(partition)} ends at offset {last}, the query had reached {first}", first - last)
            first = last
        ranges.append(OffsetRange(partition, first, last))
    return ranges


def new_partitions(start: Mapping[TopicPartition, int], end: Iterable[TopicPartition]) -> list[TopicPartition]:
    """Return the partitions of `end` that are not in `start`."""
    return [partition for partition in end if partition not in start]


def _name(partition: TopicPartition) -> str:
    return f"{partition.topic}-{partition.partition}"
