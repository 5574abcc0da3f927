"""Offsets as values: the connector's JSON, ranges, and the split of ranges into tasks.

The JSON has the form of Spark's Kafka connector, `{"topic":{"0":123}}`, with sorted topics and partitions: Spark
compares offsets as text. -2 (earliest) and -1 (latest) are valid in options only, never in a checkpoint.

Invariants: a range is `start <= end`, end exclusive. Splitting and limiting neither lose nor repeat an offset.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

EARLIEST_OFFSET: Final = -2
LATEST_OFFSET: Final = -1
_MAX_LONG: Final = 2**63 - 1
_MAX_INT: Final = 2**31 - 1


class InvalidOptionError(ValueError):
    """An option is missing, unknown, malformed or not allowed. `option` is its name."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"option {option} {problem}")
        self.option = option


class OtherModeError(InvalidOptionError):
    """A batch query has an option for streaming queries, or vice versa."""


class DataLossError(RuntimeError):
    """Records of the query are no longer available, and failOnDataLoss is true."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"some data may have been lost: {problem}; retention deleted the records, or the topic was truncated or"
            " recreated; set the option failOnDataLoss to false to continue with the available records"
        )


class TopicPartition(NamedTuple):
    """A topic name and a partition number."""

    topic: str
    partition: int


Offsets = dict[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets of one partition from `start` (inclusive) to `end` (exclusive)."""

    topic_partition: TopicPartition
    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of offsets in the range. Compaction may have left fewer records."""
        return self.end - self.start


def offsets_to_json(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """Return `{topic: {partition as string: offset}}`, sorted, as in Spark's Kafka connector."""
    document: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        document.setdefault(topic, {})[str(partition)] = offset
    return document


def offsets_from_json(document: Mapping[str, Mapping[str, int]]) -> Offsets:
    """Convert a document from `offsets_to_json` back to offsets by partition."""
    return {
        TopicPartition(topic, int(partition)): int(offset)
        for topic, partitions in document.items()
        for partition, offset in partitions.items()
    }


def parse_partition_numbers(option: str, text: str, *, least: int) -> Offsets:
    """Parse the JSON text `{"topic":{"0":123}}` of an option: offsets or timestamps by topic and partition.

    Raises InvalidOptionError for text of another form, an empty object, or a number below `least`.
    """
    example = 'earliest, latest or {"topic":{"0":123}}' if least < 0 else '{"topic":{"0":1700000000000}}'
    document = _parse_json_object(option, text, example)
    numbers: Offsets = {}
    for topic, partitions in document.items():
        if not isinstance(partitions, dict):
            raise InvalidOptionError(option, f"must have an object of partitions for topic {topic!r}")
        for partition, number in partitions.items():
            if not (partition.isdigit() and int(partition) <= _MAX_INT):
                raise InvalidOptionError(option, f"must have partition numbers for topic {topic!r}, got {partition!r}")
            if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= _MAX_LONG:
                raise InvalidOptionError(option, f"must be at least {least} for {topic}-{partition}, got {number!r}")
            numbers[TopicPartition(topic, int(partition))] = number
    return numbers


def parse_assignment(option: str, text: str) -> tuple[TopicPartition, ...]:
    """Parse the JSON text `{"topic":[0,1]}` of an option; return the partitions, sorted. Raises InvalidOptionError."""
    document = _parse_json_object(option, text, '{"topic":[0,1]}')
    found: set[TopicPartition] = set()
    for topic, partitions in document.items():
        if not isinstance(partitions, list) or not partitions:
            raise InvalidOptionError(option, f"must have a list of partitions for topic {topic!r}")
        for partition in partitions:
            if isinstance(partition, bool) or not isinstance(partition, int) or not 0 <= partition <= _MAX_INT:
                raise InvalidOptionError(option, f"must have partition numbers for topic {topic!r}, got {partition!r}")
            found.add(TopicPartition(topic, partition))
    return tuple(sorted(found))


def _parse_json_object(option: str, text: str, example: str) -> dict[str, Any]:
    problem = f"must be {example}, got {text[:200]!r}"
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InvalidOptionError(option, f"{problem}: {error}") from None
    if not isinstance(document, dict) or not document:
        raise InvalidOptionError(option, problem)
    return document


def limit_ranges(ranges: Iterable[OffsetRange], limit: int) -> list[OffsetRange]:
    """Shorten ranges to at most `limit` offsets in total, each in proportion to its size.

    Rounding remainders go to the largest fractions, then to the largest ranges. The result has exactly `limit`
    offsets if there are enough. A range that gets no offsets becomes empty.
    """
    pending = list(ranges)
    total = sum(each.size for each in pending)
    if total <= limit:
        return pending
    shares = [each.size * limit // total for each in pending]
    remainders = sorted(range(len(pending)), key=lambda i: (-(pending[i].size * limit % total), -pending[i].size, i))
    for index in remainders[: limit - sum(shares)]:
        shares[index] += 1
    return [OffsetRange(r.topic_partition, r.start, r.start + share) for r, share in zip(pending, shares, strict=True)]


def split_ranges(
    ranges: Iterable[OffsetRange], min_partitions: int | None, max_records: int | None
) -> list[OffsetRange]:
    """Split ranges into pieces of at most `max_records` offsets (None: no limit). Empty ranges are dropped.

    If the result has fewer than `min_partitions` pieces, each piece is cut further, in proportion to its size. The
    result then has at least `min_partitions` pieces, or one per offset. Pieces of a range have similar sizes.
    """
    pieces = [each for each in ranges if each.size > 0]
    if max_records is not None:
        pieces = [piece for each in pieces for piece in _cut(each, -(-each.size // max_records))]
    if min_partitions is None or len(pieces) >= min_partitions or not pieces:
        return pieces
    total = sum(each.size for each in pieces)
    return [piece for each in pieces for piece in _cut(each, -(-each.size * min_partitions // total))]


def group_ranges(
    ranges: Iterable[OffsetRange], max_tasks: int | None, leaders: Mapping[TopicPartition, int]
) -> list[tuple[OffsetRange, ...]]:
    """Group ranges into at most `max_tasks` tasks of similar size. None means one task per range.

    `leaders` has the broker id of each partition's leader. Each task has ranges of few leaders. Within a task, adjacent
    ranges of a partition are joined.
    """
    pending = list(ranges)
    if max_tasks is None or len(pending) <= max_tasks:
        return [(each,) for each in pending]
    pending.sort(key=lambda each: (leaders.get(each.topic_partition, -1), each.topic_partition, each.start))
    total, before = sum(each.size for each in pending), 0
    groups: list[list[OffsetRange]] = [[] for _ in range(max_tasks)]
    for each in pending:
        group = groups[min(max_tasks - 1, (2 * before + each.size) * max_tasks // (2 * total))]
        before += each.size
        if group and group[-1].topic_partition == each.topic_partition and group[-1].end == each.start:
            group[-1] = OffsetRange(each.topic_partition, group[-1].start, each.end)
        else:
            group.append(each)
    return [tuple(group) for group in groups if group]


def _cut(whole: OffsetRange, parts: int) -> list[OffsetRange]:
    parts = max(1, min(parts, whole.size))
    edges = [whole.start + whole.size * index // parts for index in range(parts + 1)]
    return [OffsetRange(whole.topic_partition, low, high) for low, high in itertools.pairwise(edges) if low < high]
