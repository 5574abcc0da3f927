"""Parses the bytes of a segment into batches and damage.

After damage, parsing continues at the next complete batch with a correct CRC. Every byte belongs to exactly one
`Found`, in order, for any content. An incomplete batch or zeros at the end of a log's last segment count as torn, not
as damage: an unclean stop leaves them.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Final, NamedTuple

from aiokafka.record.default_records import DefaultRecordBatch

from kipmesh.client.compression import decompressed
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.record_batch import HEADER_BYTES, MAGIC, BatchHeader, check_crc, parse_header

DIGEST_BYTES: Final = 16
_MAGIC_POSITION: Final = 16
_ZEROS_BYTES: Final = 1 << 16

WRONG_CRC: Final = "crc"
GARBAGE: Final = "garbage"
CUT: Final = "cut"
TORN: Final = "torn"
UNREADABLE: Final = "unreadable"
VANISHED: Final = "vanished"


class Found(NamedTuple):
    """A valid batch, or a range of damaged bytes of a segment.

    `damage` is "" for a valid batch, otherwise the kind of damage, which `text` describes. Only valid batches and those
    with a wrong CRC have a header and a digest.
    """

    position: int
    size_bytes: int
    header: BatchHeader | None
    digest: bytes
    damage: str
    text: str


def digest_of(data: bytes | memoryview) -> bytes:
    """Return a BLAKE2b digest (16 bytes) of the data."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def scan(data: bytes, *, is_last: bool) -> Iterator[Found]:
    """Yield all batches and damaged ranges of a segment's bytes, in order and without gaps. Never raises for invalid
    bytes.

    `is_last` says whether this is the log's last segment, whose incomplete end counts as torn.
    """
    position, end = 0, len(data)
    with memoryview(data) as view:
        while position < end:
            found = _batch(data, view, position, end)
            if found is None:
                found = _damage(data, view, position, end, is_last)
            yield found
            position += found.size_bytes


def _batch(data: bytes, view: memoryview, position: int, end: int) -> Found | None:
    """Return the batch at a position, possibly with a wrong CRC. Returns None if there is no complete batch or its
    length is provably wrong.
    """
    try:
        header = parse_header(view[:end], position)
    except CorruptRecordError:
        return None
    following = position + header.size_bytes
    if following > end:
        return None
    try:
        check_crc(view[:end], position, header)
    except CorruptRecordError as error:
        if following != end and not _is_header(view, following, end):
            return None
        if _next_batch(data, view, position + 1, following) < following:  # the length is wrong and spans other batches
            return None
        return Found(position, header.size_bytes, header, _digest(view, position, following), WRONG_CRC, error.message)
    return Found(position, header.size_bytes, header, _digest(view, position, following), "", "")


def _digest(view: memoryview, position: int, end: int) -> bytes:
    with view[position:end] as batch:
        return digest_of(batch)


def _is_header(view: memoryview, position: int, end: int) -> bool:
    try:
        header = parse_header(view[:end], position)
    except CorruptRecordError:
        return False
    return position + header.size_bytes <= end


def _damage(data: bytes, view: memoryview, position: int, end: int, is_last: bool) -> Found:
    """Return the damaged bytes from a position up to the next valid batch, or to the end."""
    following = _next_batch(data, view, position + 1, end)
    left = end - position
    if following < end:
        text = _why(view, position, end)
        return Found(position, following - position, None, b"", GARBAGE, f"{following - position} bytes: {text}")
    if left >= HEADER_BYTES and _is_zeros(view, position, end):
        text = f"{left} zero bytes at the end"
        return Found(position, left, None, b"", TORN if is_last else GARBAGE, text)
    try:
        header: BatchHeader | None = parse_header(view[:end], position)
    except CorruptRecordError as error:
        header = None
        if left >= HEADER_BYTES:
            return Found(position, left, None, b"", GARBAGE, f"{left} bytes: {error.message}")
    text = f"{left} bytes of an incomplete batch" + (f" ({header.size_bytes} bytes)" if header else "")
    return Found(position, left, None, b"", TORN if is_last else CUT, text)


def _why(view: memoryview, position: int, end: int) -> str:
    try:
        header = parse_header(view[:end], position)
    except CorruptRecordError as error:
        return error.message
    return f"the header is that of a batch of {header.size_bytes} bytes, but the CRC and the following bytes are wrong"


def _next_batch(data: bytes, view: memoryview, position: int, end: int) -> int:
    """Return the position of the next complete batch with a correct CRC, or `end`."""
    at = position
    while (place := data.find(bytes([MAGIC]), at + _MAGIC_POSITION, end)) >= 0:
        at = place - _MAGIC_POSITION
        try:
            header = parse_header(view[:end], at)
            check_crc(view[:end], at, header)
        except CorruptRecordError:
            at += 1
            continue
        return at
    return end


def _is_zeros(view: memoryview, position: int, end: int) -> bool:
    zeros = bytes(_ZEROS_BYTES)
    for at in range(position, end, _ZEROS_BYTES):
        until = min(at + _ZEROS_BYTES, end)
        if view[at:until] != zeros[: until - at]:
            return False
    return True


class RecordDigest(NamedTuple):
    """Offset and timestamp of a record, and a digest of its timestamp, key, value and headers."""

    offset: int
    timestamp: int
    digest: bytes


def record_digests(batch: memoryview, header: BatchHeader) -> list[RecordDigest]:
    """Return a digest for each record of a valid batch. Raises CorruptRecordError if the records cannot be decompressed
    or parsed.
    """
    try:
        return [
            RecordDigest(
                record.offset,
                record.timestamp,
                digest_of(repr((record.timestamp, record.key, record.value, list(record.headers))).encode()),
            )
            for record in DefaultRecordBatch(decompressed(batch, header))
        ]
    except Exception as error:
        # The decoder and each codec have their own exceptions for invalid bytes.
        raise CorruptRecordError(f"the records of offset {header.base_offset} cannot be read: {error}") from error
