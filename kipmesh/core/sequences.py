"""Sequence numbers of idempotent producers: 0 to INT_MAX, after which comes 0 again, one a record.

A batch has the sequence of its first record in its header; the others follow from the count. A producer id and an
epoch have sequences of their own in every partition.
"""

from __future__ import annotations

from kipmesh.messages.limits import MAX_INT32

NO_SEQUENCE = -1
NO_PRODUCER_ID = -1
NO_PRODUCER_EPOCH = -1
PRODUCER_EPOCH_MAX = 2**15 - 1
UNRESOLVED_MAX = 5
"""Batches of a producer and a partition that may be under way; a broker knows as many."""

_COUNT = MAX_INT32 + 1


def sequence_after(sequence: int, records: int) -> int:
    """The sequence that comes `records` after `sequence`."""
    return (sequence + records) % _COUNT


def sequence_before(sequence: int, records: int) -> int:
    """The sequence that comes `records` before `sequence`."""
    return (sequence - records) % _COUNT


def follows(last_sequence: int, next_sequence: int) -> bool:
    """Whether nothing is missing between the two; after NO_SEQUENCE comes 0."""
    return next_sequence == (last_sequence + 1) % _COUNT
