"""Kafka's compressions: both ways, and back to a limit, since a small batch may hold any number of bytes.

Invariant: nothing is decompressed into more than the limit; what would be more raises CorruptRecordError.
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
"""Names of Kafka's compressions by their numbers."""

RECORDS_BYTES_MAX = 256 << 20
"""Bytes that the records of one batch may have when they are decompressed."""

_LZ4_DEFAULT_LEVEL = 9
_LZ4_FAST = 1
_SNAPPY = 2
_OUTPUT_BYTES_MIN = 16 << 10
_OUTPUT_RATIO = 8
_FULL = ("failed to write whole buffer", "Destination buffer is too small")
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16


class Compression(NamedTuple):
    """A compression and its level (which snappy has not)."""

    number: int
    level: int = -1


def _gzip(data: memoryview, level: int) -> bytes:
    return gzip.compress(data, compresslevel=level, mtime=0)


def _snappy(data: memoryview, _level: int) -> bytes:
    return bytes(snappy_encode(data))


def _lz4(data: memoryview, level: int) -> bytes:
    # As in Apache Kafka the default level means the fast compressor, and others the high one (liblz4's 9 is 16 times
    # slower than its 1). It reads frames of independent blocks only (KIP-57).
    used = _LZ4_FAST if level == _LZ4_DEFAULT_LEVEL else level
    compressor = cramjam.lz4.Compressor(level=used, content_checksum=False, block_linked=False)
    compressor.compress(bytes(data))
    return bytes(compressor.finish())


def _zstd(data: memoryview, level: int) -> bytes:
    return bytes(cramjam.zstd.compress(data, level=level))


_COMPRESS: tuple[Callable[[memoryview, int], bytes], ...] = (
    lambda data, _level: bytes(data),
    _gzip,
    _snappy,
    _lz4,
    _zstd,
)


def compress(data: memoryview, compression: Compression) -> bytes:
    """The compressed data."""
    return _COMPRESS[compression.number](data, compression.level)


def default_compression(name: str) -> Compression:
    """A compression at Kafka's default level."""
    return Compression(COMPRESSIONS.index(name), {"gzip": -1, "lz4": _LZ4_DEFAULT_LEVEL, "zstd": 3}.get(name, 0))


def decompressed(batch: memoryview, header: BatchHeader, limit_bytes: int = RECORDS_BYTES_MAX) -> memoryview:
    """The whole batch with its records decompressed (its CRC is not right then); itself when they are not compressed.

    CorruptRecordError when they cannot be, or would be more than `limit_bytes`; UNSUPPORTED_COMPRESSION_TYPE.
    """
    if not header.compression:
        return batch
    if header.compression >= len(COMPRESSIONS):
        raise KafkaError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"compression {header.compression} is not known")
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
    """Into a buffer after room for the header; the streams do not say how much they hold, so it may take a few."""
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
            raise _too_much(limit_bytes)
        room *= _OUTPUT_RATIO


def _decompress_snappy(body: bytes, limit_bytes: int) -> tuple[bytearray, int]:
    """Snappy's blocks say how much they hold: one, or several in the framing of the Java library."""
    blocks = [body]
    if body.startswith(_XERIAL_MAGIC):
        blocks, position = [], _XERIAL_HEADER_BYTES
        while position < len(body):
            (size,) = struct.unpack_from(">I", body, position)
            blocks.append(body[position + 4 : position + 4 + size])
            position += 4 + size
    total = sum(cramjam.snappy.decompress_raw_len(block) for block in blocks)
    if total > limit_bytes:
        raise _too_much(limit_bytes)
    output = bytearray(HEADER_BYTES + total)
    written = 0
    for block in blocks:
        part = memoryview(output)[HEADER_BYTES + written :]
        written += cramjam.snappy.decompress_raw_into(block, part)
    return output, written


def _too_much(limit_bytes: int) -> CorruptRecordError:
    return CorruptRecordError(f"the records of a batch are more than {limit_bytes} bytes when they are decompressed")
