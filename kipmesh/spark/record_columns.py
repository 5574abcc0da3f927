"""The records of batches v2 as columns of numbers, without a Python object for each record.

A record says where the next one begins and nothing else does, so finding their starts is the one step by step part; all
else (varints, lengths, headers) is done for the records of many batches at once by numpy. Keys, values and headers stay
where they are: what comes out are their bounds in the buffer.

Invariants: every bound lies within its record and bounds of one record do not decrease; bytes that are no records raise
`CorruptRecordError` or, where they go on beyond the buffer, IndexError. The work is O(bytes), whatever they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from kipmesh.core.errors import CorruptRecordError

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Octets: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_MORE: Final = 0x80
_SEVEN: Final = 0x7F
_INT32_OCTETS: Final = 5
_INT64_OCTETS: Final = 10
# Records of one size are guessed at; where they are not, so many are walked before the next guess, twice as many each
# time.
_WALK_MIN: Final = 8
_WALK_MAX: Final = 4096


class Spans(NamedTuple):
    """Bounds of one field in the buffer; where it is null both are the same."""

    starts: Numbers
    ends: Numbers
    is_null: np.ndarray[Any, np.dtype[np.bool_]]


class RecordHeaders(NamedTuple):
    """Headers of all records in order: how many each record has, and where their keys and values are."""

    counts: Numbers
    keys: Spans
    values: Spans


class RecordColumns(NamedTuple):
    """Of each record what it says; deltas are to its batch."""

    timestamp_deltas: Numbers
    offset_deltas: Numbers
    keys: Spans
    values: Spans
    headers: RecordHeaders | None
    """None when no record has headers."""


def record_starts(data: bytes, octets: Octets, begins: Sequence[int], ends: Sequence[int]) -> list[Numbers]:
    """Where the records of each batch, data[begin:end], begin. `octets` is `data` as an array."""
    found: list[Numbers] = []
    budget = _WALK_MIN
    for begin, end in zip(begins, ends, strict=True):
        parts: list[Numbers] = []
        position = begin
        while position < end:
            if budget > _WALK_MIN:  # there was no run; after a while one is looked for again
                position = _walk(data, position, end, budget, parts)
                if position >= end:
                    break
            size = _following(data, position) - position
            run = _run_of_one_size(octets, position, size, end)
            parts.append(np.arange(position, position + run * size, size, dtype=np.int64))
            position += run * size
            budget = _WALK_MIN if run >= _WALK_MIN else min(2 * budget, _WALK_MAX)
        if position != end:
            raise CorruptRecordError("a record reaches beyond its batch")
        found.append(np.concatenate(parts) if len(parts) > 1 else parts[0])
        if len(parts) == 1:  # the batch was over before a run was looked for
            budget = max(_WALK_MIN, budget // 2)
    return found


def _walk(data: bytes, position: int, end: int, count: int, parts: list[Numbers]) -> int:
    """The next `count` starts, one by one; the position after them."""
    starts: list[int] = []
    append = starts.append
    for _ in range(count):
        if position >= end:
            break
        append(position)
        first = data[position]
        if first < _MORE:
            position += (first >> 1) + 1
            continue
        second = data[position + 1]
        if second < _MORE:
            position += ((first & _SEVEN | second << 7) >> 1) + 2
        else:
            position = _following(data, position)
    parts.append(np.array(starts, dtype=np.int64))
    return position


def _following(data: bytes, position: int) -> int:
    """Where the record after the one at `position` begins."""
    value = 0
    for index in range(_INT32_OCTETS):
        octet = data[position + index]
        value |= (octet & _SEVEN) << 7 * index
        if octet < _MORE:
            return position + index + 1 + (value >> 1)
    raise CorruptRecordError("the length of a record is longer than five bytes")


def _run_of_one_size(octets: Octets, position: int, size: int, end: int) -> int:
    """How many records from `position` on surely have that size: each begins as the first one does."""
    count = (end - position) // size
    if count < 2:
        return 1
    width = 1 + int(octets[position] >= _MORE)
    if octets[position + width - 1] >= _MORE:
        return 1
    table = octets[position : position + count * size].reshape(count, size)
    same = table[:, 0] == table[0, 0]
    if width > 1:
        same &= table[:, 1] == table[0, 1]
    different = int(same.argmin())
    return count if same[different] else different


def parse_records(octets: Octets, starts: Numbers, ends: Numbers) -> RecordColumns:
    """The fields of the records from `starts` to `ends`. IndexError where they go on after `octets`."""
    lengths, at = _varints(octets, starts, _INT32_OCTETS)
    if not np.array_equal(at + lengths, ends):
        raise CorruptRecordError("a record is not as long as it says")
    timestamps, at = _varints(octets, at + 1, _INT64_OCTETS)
    _check_within(at, ends)
    offsets, at = _varints(octets, at, _INT32_OCTETS)
    _check_within(at, ends)
    keys = _spans(octets, at, ends)
    values = _spans(octets, keys.ends, ends)
    counts, at = _varints(octets, values.ends, _INT32_OCTETS)
    _check_within(at, ends)
    return RecordColumns(timestamps, offsets, keys, values, _headers(octets, at, ends, counts))


def _headers(octets: Octets, at: Numbers, ends: Numbers, counts: Numbers) -> RecordHeaders | None:
    """All first headers, then all second ones, ..."""
    if (counts < 0).any() or (2 * counts > ends - at).any():
        raise CorruptRecordError("a record cannot have as many headers as it says")
    total = int(counts.sum())
    found = None
    if total:
        slots = np.cumsum(counts) - counts
        key_bounds, value_bounds = np.empty((2, total), np.int64), np.empty((2, total), np.int64)
        key_nulls, value_nulls = np.empty(total, np.bool_), np.empty(total, np.bool_)
        at = at.copy()
        rows, number = np.flatnonzero(counts), 0
        while rows.size:
            key = _spans(octets, at[rows], ends[rows])
            value = _spans(octets, key.ends, ends[rows])
            own = slots[rows] + number
            key_bounds[0, own], key_bounds[1, own], key_nulls[own] = key
            value_bounds[0, own], value_bounds[1, own], value_nulls[own] = value
            at[rows] = value.ends
            number += 1
            rows = rows[counts[rows] > number]
        if key_nulls.any():
            raise CorruptRecordError("a header has no key")
        found = RecordHeaders(
            counts, Spans(key_bounds[0], key_bounds[1], key_nulls), Spans(value_bounds[0], value_bounds[1], value_nulls)
        )
    if not np.array_equal(at, ends):
        raise CorruptRecordError("a record is not as long as it says")
    return found


def _spans(octets: Octets, at: Numbers, ends: Numbers) -> Spans:
    """A length and so many bytes; -1 is null."""
    lengths, starts = _varints(octets, at, _INT32_OCTETS)
    nulls = lengths < 0
    if nulls.any():
        if (lengths < -1).any():
            raise CorruptRecordError("a negative length")
        lengths[nulls] = 0
    stops = starts + lengths
    _check_within(stops, ends)
    return Spans(starts, stops, nulls)


def _check_within(at: Numbers, ends: Numbers) -> None:
    if (at > ends).any():
        raise CorruptRecordError("a field reaches beyond its record")


def _varints(octets: Octets, at: Numbers, octets_max: int) -> tuple[Numbers, Numbers]:
    """Zigzag varints at these positions, and the positions after them."""
    octet = octets[at]
    values = (octet & _SEVEN).astype(np.uint64)
    after = at + 1
    rows = np.flatnonzero(octet >= _MORE)
    shift = 7
    while rows.size:
        if shift >= 7 * octets_max:
            raise CorruptRecordError(f"a varint is longer than {octets_max} bytes")
        octet = octets[after[rows]]
        values[rows] |= (octet & _SEVEN).astype(np.uint64) << np.uint64(shift)
        after[rows] += 1
        rows = rows[octet >= _MORE]
        shift += 7
    return (values >> np.uint64(1)).view(np.int64) ^ -(values & np.uint64(1)).view(np.int64), after
