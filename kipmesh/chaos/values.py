"""Records of the workload: a value is the operation's number and a filling that follows from it.

So a record tells whose it is, and a byte that changed on the way makes it nobody's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from kipmesh.client.records import read_batch
from kipmesh.core import record_batch
from kipmesh.core.record_batch import BatchHeader


def encode(operation: int, size_bytes: int) -> bytes:
    """The value of an operation's record."""
    head = b"%d " % operation
    filling = hashlib.shake_128(head).digest(max(size_bytes - len(head), 0) // 2).hex().encode()
    return (head + filling).ljust(size_bytes, b".")


def decode(value: bytes | None) -> str:
    """The operation's number as the history has it; of what `encode` did not make, a text that says so."""
    if value is None:
        return "null"
    number = value.partition(b" ")[0]
    if number.isdigit() and len(number) < 19 and encode(int(number), len(value)) == value:
        return number.decode()
    return f"not ours: {value[:40]!r}"


def batches(data: bytes, *, allow_partial: bool = False) -> Iterator[tuple[BatchHeader, list[tuple[int, str]]]]:
    """Batches of the log format with their records as (offset, value); raises KafkaError at what is none."""
    for position, header in record_batch.iterate(data, allow_partial=allow_partial):
        record_batch.check_crc(data, position, header)
        yield header, [(one.offset, decode(one.value)) for one in read_batch(data, position, header)]
