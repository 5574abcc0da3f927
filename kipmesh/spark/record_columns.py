"""Parses the records of v2 batches into numpy columns, without a Python object per record.

Finding the record starts is sequential, because each record holds only its length. Everything else (varints, lengths,
headers) is vectorised over many batches. Keys, values and headers are not copied: the result has their bounds in the
buffer.

Invariants: every bound lies within its record, and bounds of one record do not decrease. Invalid bytes raise
CorruptRecordError, or IndexError beyond the end of the buffer. The work is O(bytes) for any input.
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
# A run of records of equal size is found in one step. Without a run, this many records are walked before the next
# attempt, doubling each time.
_WALK_MIN: Final = 8
_WALK_MAX: Final = 4096


class Spans(NamedTuple):
    """Start and end positions of fields in the buffer, one pair per field. A null field has equal bounds."""

    starts: Numbers
    ends: Numbers
    is_null: np.ndarray[Any, np.dtype[np.bool_]]


class RecordHeaders(NamedTuple):
    """Headers of all records in order: the number per record, and the bounds of the keys and values."""

    counts: Numbers
    keys: Spans
    values: Spans


class RecordColumns(NamedTuple):
    """Fields of the records, one array element per record. Deltas (ms, offsets) are relative to the batch's base."""

    timestamp_deltas: Numbers
    offset_deltas: Numbers
    keys: Spans
    values: Spans
    headers: RecordHeaders | None
    """None if no record has headers."""


def record_starts(data: bytes, octets: Octets, begins: Sequence[int], ends: Sequence[int]) -> list[Numbers]:
    """Return, for each batch data[begin:end], the positions in `data` at which its records start.

    `octets` is `data` as an array. Raises CorruptRecordError if a record extends beyond its batch or has an invalid
    length field, IndexError if it extends beyond `data`.
    """
    found: list[Numbers] = []
    budget = _WALK_MIN
    for begin, end in zip(begins, ends, strict=True):
        parts: list[Numbers] = []
        position = begin
        while position < end:
            if budget > _WALK_MIN:  # the last attempt found no run
                position = _walk(data, position, end, budget, parts)
                if position >= end:
                    break
            size = _next_record(data, position) - position
            run = _run_of_one_size(octets, position, size, end)
            parts.append(np.arange(position, position + run * size, size, dtype=np.int64))
            position += run * size
            budget = _WALK_MIN if run >= _WALK_MIN else min(2 * budget, _WALK_MAX)
        if position != end:
            raise CorruptRecordError("a record extends beyond its batch")
        found.append(np.concatenate(parts) if len(parts) > 1 else parts[0])
        if len(parts) == 1:  # the batch ended before the next attempt
            budget = max(_WALK_MIN, budget // 2)
    return found


def _walk(data: bytes, position: int, end: int, count: int, parts: list[Numbers]) -> int:
    """Append the starts of at most `count` records before `end` to `parts`; return the position after them."""
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
            position = _next_record(data, position)
    parts.append(np.array(starts, dtype=np.int64))
    return position


def _next_record(data: bytes, position: int) -> int:
    """Return the start of the record after the one at `position`."""
    value = 0
    for index in range(_INT32_OCTETS):
        octet = data[position + index]
        value |= (octet & _SEVEN) << 7 * index
        if octet < _MORE:
            return position + index + 1 + (value >> 1)
    raise CorruptRecordError(f"the length of a record has more than {_INT32_OCTETS} bytes")


def _run_of_one_size(octets: Octets, position: int, size: int, end: int) -> int:
    """Return how many records from `position` on have the same length field as the first one; at least 1."""
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
    """Parse the records that begin at `starts` and end at `ends`.

    Raises CorruptRecordError for invalid bytes, IndexError for a field beyond the buffer.
    """
    lengths, at = _varints(octets, starts, _INT32_OCTETS)
    if not np.array_equal(at + lengths, ends):
        raise CorruptRecordError("the length of a record is wrong")
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
    """Parse all headers from positions `at`; return None if there are none. Raises CorruptRecordError, IndexError."""
    if (counts < 0).any() or (2 * counts > ends - at).any():
        raise CorruptRecordError("the header count of a record is invalid")
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
        raise CorruptRecordError("the length of a record is wrong")
    return found


def _spans(octets: Octets, at: Numbers, ends: Numbers) -> Spans:
    """Parse a length-prefixed field of each record; length -1 is null. Raises CorruptRecordError for other bounds."""
    lengths, starts = _varints(octets, at, _INT32_OCTETS)
    nulls = lengths < 0
    if nulls.any():
        if (lengths < -1).any():
            raise CorruptRecordError("the length of a field is less than -1")
        lengths[nulls] = 0
    stops = starts + lengths
    _check_within(stops, ends)
    return Spans(starts, stops, nulls)


def _check_within(at: Numbers, ends: Numbers) -> None:
    if (at > ends).any():
        raise CorruptRecordError("a field extends beyond its record")


def _varints(octets: Octets, at: Numbers, octets_max: int) -> tuple[Numbers, Numbers]:
    """Decode the zigzag varints at these positions; return the values and the positions after them.

    Raises CorruptRecordError for a varint of more than `octets_max` bytes, IndexError beyond the buffer.
    """
    octet = octets[at]
    values = (octet & _SEVEN).astype(np.uint64)
    after = at + 1
    rows = np.flatnonzero(octet >= _MORE)
    shift = 7
    while rows.size:
        if shift >= 7 * octets_max:
            raise CorruptRecordError(f"a varint has more than {octets_max} bytes")
        octet = octets[after[rows]]
        values[rows] |= (octet & _SEVEN).astype(np.uint64) << np.uint64(shift)
        after[rows] += 1
        rows = rows[octet >= _MORE]
        shift += 7
    return (values >> np.uint64(1)).view(np.int64) ^ -(values & np.uint64(1)).view(np.int64), after
