"""Offsets as values: the connector's JSON, ranges of them, and how a range becomes tasks.

The JSON is the connector's own, ``{"topic":{"0":123}}``, with topics and partitions in order, so that equal offsets
are equal text (Spark compares the text) and a person can read a checkpoint. -2 stands for earliest and -1 for latest
where an option allows it; neither ever reaches a checkpoint.

Invariants: a range is ``start <= end``, end exclusive; splitting and limiting neither lose nor repeat an offset.
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
    """An option of the source is unknown, malformed or not allowed here."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"option {option} {problem}")
        self.option = option


class OtherModeError(InvalidOptionError):
    """An option that only the other one of batch and streaming queries has."""


class DataLossError(RuntimeError):
    """Records that the query was to read are no longer there, and failOnDataLoss is true."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"Some data may have been lost: {problem}. It was deleted by retention, or the topic was truncated or"
            " recreated. Set the option failOnDataLoss to false to go on with what is there."
        )


class TopicPartition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


Offsets = dict[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The records of one partition from `start` up to and without `end`."""

    topic_partition: TopicPartition
    start: int
    end: int

    @property
    def size(self) -> int:
        """How many offsets the range covers; compaction may have left fewer records."""
        return self.end - self.start


def offsets_to_json(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """The connector's form, in order."""
    document: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        document.setdefault(topic, {})[str(partition)] = offset
    return document


def offsets_from_json(document: Mapping[str, Mapping[str, int]]) -> Offsets:
    """What `offsets_to_json` wrote, as it comes back from a checkpoint."""
    return {
        TopicPartition(topic, int(partition)): int(offset)
        for topic, partitions in document.items()
        for partition, offset in partitions.items()
    }


def parse_partition_numbers(option: str, text: str, *, least: int) -> Offsets:
    """``{"topic":{"0":123}}`` to numbers of at least `least`. Raises `InvalidOptionError`, which names `option`."""
    example = 'earliest, latest or {"topic":{"0":123}}' if least < 0 else '{"topic":{"0":1700000000000}}'
    document = _parse_json_object(option, text, example)
    numbers: Offsets = {}
    for topic, partitions in document.items():
        if not isinstance(partitions, dict):
            raise InvalidOptionError(option, f"wants an object of partitions for topic {topic!r}")
        for partition, number in partitions.items():
            if not (partition.isdigit() and int(partition) <= _MAX_INT):
                raise InvalidOptionError(option, f"has {partition!r} where topic {topic!r} has a partition number")
            if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= _MAX_LONG:
                raise InvalidOptionError(option, f"has {number!r} for {topic}-{partition}; {least} or more is allowed")
            numbers[TopicPartition(topic, int(partition))] = number
    return numbers


def parse_assignment(option: str, text: str) -> tuple[TopicPartition, ...]:
    """``{"topic":[0,1]}`` to partitions, in order."""
    document = _parse_json_object(option, text, '{"topic":[0,1]}')
    found: set[TopicPartition] = set()
    for topic, partitions in document.items():
        if not isinstance(partitions, list) or not partitions:
            raise InvalidOptionError(option, f"wants a list of partitions for topic {topic!r}")
        for partition in partitions:
            if isinstance(partition, bool) or not isinstance(partition, int) or not 0 <= partition <= _MAX_INT:
                raise InvalidOptionError(option, f"has {partition!r} where topic {topic!r} has a partition number")
            found.add(TopicPartition(topic, partition))
    return tuple(sorted(found))


def _parse_json_object(option: str, text: str, example: str) -> dict[str, Any]:
    wants = f"wants {example}"
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InvalidOptionError(option, f"{wants} and not {text[:200]!r}: {error}") from None
    if not isinstance(document, dict) or not document:
        raise InvalidOptionError(option, f"{wants} and not {text[:200]!r}")
    return document


def limit_ranges(ranges: Iterable[OffsetRange], limit: int) -> list[OffsetRange]:
    """Cut `ranges` such that together they cover at most `limit` offsets, each in proportion to its backlog.

    What rounding leaves over goes to the largest remainders, so exactly `limit` is covered where there is as much, and
    a small partition has its turn when the others have shrunk.
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
    """Cut ranges into tasks: none longer than `max_records`, and about `min_partitions` of them at least.

    Without either, a range is a task. Empty ranges vanish. The large ranges are cut, into pieces of even size.
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
    """The ranges as at most `max_tasks` tasks of about even size; without it each is a task of its own.

    Those of one leader are side by side, so that a task asks few brokers; each partition is at most once in a task.
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
