"""Compression and decompression of record batches with Kafka's codecs.

Invariant: decompression never allocates more than its limit. A batch that would exceed it raises CorruptRecordError.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import cramjam
from aiokafka.codec import snappy_encode

from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.record_batch import HEADER_BYTES, BatchHeader, pack_header

COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
"""Names of Kafka's compression types, indexed by number."""

RECORDS_BYTES_MAX = 256 << 20
"""Maximum decompressed size of the records of one batch (LIM-01)."""

_LZ4_DEFAULT_LEVEL = 9
_LZ4_FAST = 1
_SNAPPY = 2
_OUTPUT_BYTES_MIN = 16 << 10
_OUTPUT_RATIO = 8
_FULL = ("failed to write whole buffer", "Destination buffer is too small")
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16


class Compression(NamedTuple):
    """A compression type and level; the level is ignored for none and snappy."""

    number: int
    level: int = -1


def _lz4(data: memoryview, level: int) -> bytes:
    # As in Apache Kafka, the default level selects the fast compressor and other levels the high-compression one
    # (level 9 of liblz4 is 16 times slower than level 1). Kafka only reads frames of independent blocks (KIP-57).
    used = _LZ4_FAST if level == _LZ4_DEFAULT_LEVEL else level
    compressor = cramjam.lz4.Compressor(level=used, content_checksum=False, block_linked=False)
    compressor.compress(bytes(data))
    return bytes(compressor.finish())


_COMPRESS: tuple[Callable[[memoryview, int], bytes], ...] = (
    lambda data, _level: bytes(data),
    lambda data, level: gzip.compress(data, compresslevel=level, mtime=0),
    lambda data, _level: bytes(snappy_encode(data)),
    _lz4,
    lambda data, level: bytes(cramjam.zstd.compress(data, level=level)),
)


def compress(data: memoryview, compression: Compression) -> bytes:
    """Return `data` compressed with the given type and level; a copy for type none."""
    return _COMPRESS[compression.number](data, compression.level)


def default_compression(name: str) -> Compression:
    """Return the compression of that name (none, gzip, ...) at Kafka's default level. Raises ValueError if unknown."""
    return Compression(COMPRESSIONS.index(name), {"gzip": -1, "lz4": _LZ4_DEFAULT_LEVEL, "zstd": 3}.get(name, 0))


def decompressed(batch: memoryview, header: BatchHeader, limit_bytes: int = RECORDS_BYTES_MAX) -> memoryview:
    """Return the batch with decompressed records and a matching header, or unchanged if it is not compressed.

    The CRC of the result is not valid. Raises CorruptRecordError if the records cannot be decompressed or exceed
    `limit_bytes`, and KafkaError(UNSUPPORTED_COMPRESSION_TYPE).
    """
    if not header.compression:
        return batch
    if header.compression >= len(COMPRESSIONS):
        raise KafkaError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"unknown compression type {header.compression}")
    body = batch[HEADER_BYTES:]
    try:
        if header.compression == _SNAPPY:
            output, size = _decompress_snappy(bytes(body), limit_bytes)
        else:
            output, size = _decompress_stream(_STREAMS[header.compression], body, limit_bytes)
    except (cramjam.DecompressionError, struct.error) as error:
        raise CorruptRecordError(f"batch at offset {header.base_offset} cannot be decompressed: {error}") from None
    output[:HEADER_BYTES] = pack_header(header.with_records(size, 0))
    return memoryview(output)[: HEADER_BYTES + size]


_STREAMS: MappingProxyType[int, Callable[[memoryview, memoryview], int]] = MappingProxyType(
    {1: cramjam.gzip.decompress_into, 3: cramjam.lz4.decompress_into, 4: cramjam.zstd.decompress_into}
)


def _decompress_stream(
    decompress_into: Callable[[memoryview, memoryview], int], body: memoryview, limit_bytes: int
) -> tuple[bytearray, int]:
    """Return a buffer with space for the header followed by the decompressed body, and the size of the body.

    The formats do not state the decompressed size, so the buffer grows until the body fits.
    """
    room = max(_OUTPUT_RATIO * len(body), _OUTPUT_BYTES_MIN)
    while True:
        room = min(room, limit_bytes)
        output = bytearray(HEADER_BYTES + room)
        try:
            return output, decompress_into(body, memoryview(output)[HEADER_BYTES:])
        except cramjam.DecompressionError as error:
            if not any(text in str(error) for text in _FULL):
                raise
        if room == limit_bytes:
            raise _limit_exceeded(limit_bytes)
        room *= _OUTPUT_RATIO


def _decompress_snappy(body: bytes, limit_bytes: int) -> tuple[bytearray, int]:
    """Decompress a raw snappy block, or several blocks in the framing of the Java library (xerial).

    Returns a buffer with space for the header followed by the decompressed body, and the size of the body.
    """
    blocks = [body]
    if body.startswith(_XERIAL_MAGIC):
        blocks, position = [], _XERIAL_HEADER_BYTES
        while position < len(body):
            (size,) = struct.unpack_from(">I", body, position)
            blocks.append(body[position + 4 : position + 4 + size])
            position += 4 + size
    total = sum(cramjam.snappy.decompress_raw_len(block) for block in blocks)
    if total > limit_bytes:
        raise _limit_exceeded(limit_bytes)
    output = bytearray(HEADER_BYTES + total)
    written = 0
    for block in blocks:
        part = memoryview(output)[HEADER_BYTES + written :]
        written += cramjam.snappy.decompress_raw_into(block, part)
    return output, written


def _limit_exceeded(limit_bytes: int) -> CorruptRecordError:
    return CorruptRecordError(f"decompressed records of a batch exceed the limit of {limit_bytes} bytes")
