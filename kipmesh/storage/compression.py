"""The codecs of record batches. Decompression is limited, because a small batch may hold any number of bytes.

The codecs are Kafka's: gzip, snappy (raw blocks, or the framing of the Java library), LZ4 frames, Zstandard. The
output buffer has the limit's size, so nothing grows beyond it.
"""

from __future__ import annotations

import gzip
import struct

import cramjam

from kipmesh.core.errors import CorruptRecordError

_GZIP, _SNAPPY, _LZ4, _ZSTD = 1, 2, 3, 4
_STREAMED = {_GZIP: cramjam.gzip, _LZ4: cramjam.lz4, _ZSTD: cramjam.zstd}
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + b"\x00\x00\x00\x01\x00\x00\x00\x01"
_XERIAL_BLOCK_BYTES = 32 << 10


def decompress(data: bytes, compression: int, limit_bytes: int) -> bytes:
    """The records of a batch, compressed by the codec of that number; CorruptRecordError beyond `limit_bytes`."""
    if not compression:
        return data
    output = bytearray(limit_bytes)
    view = memoryview(output)
    try:
        size = _snappy(data, view) if compression == _SNAPPY else _STREAMED[compression].decompress_into(data, output)
    except KeyError:
        raise CorruptRecordError(f"compression {compression} is not known") from None
    except (cramjam.DecompressionError, struct.error) as error:
        raise CorruptRecordError(f"not to be decompressed within {limit_bytes} bytes: {error}") from None
    return bytes(view[:size])


def _snappy(data: bytes, output: memoryview) -> int:
    blocks = _xerial_blocks(data) if data.startswith(_XERIAL_MAGIC) else [data]
    size = 0
    for block in blocks:
        if cramjam.snappy.decompress_raw_len(block) > len(output) - size:
            raise CorruptRecordError(f"more than {len(output)} bytes")
        part = bytes(cramjam.snappy.decompress_raw(block))
        output[size : size + len(part)] = part
        size += len(part)
    return size


def _xerial_blocks(data: bytes) -> list[bytes]:
    blocks, position = [], len(_XERIAL_HEADER)
    while position < len(data):
        (size,) = struct.unpack_from(">I", data, position)
        blocks.append(data[position + 4 : position + 4 + size])
        position += 4 + size
    return blocks


def compress(records: bytes, compression: int) -> bytes:
    """The records of a batch in the codec of that number, as Kafka's clients read it."""
    if compression == _GZIP:
        return gzip.compress(records, mtime=0)
    if compression == _SNAPPY:
        parts = [_XERIAL_HEADER]
        for start in range(0, len(records), _XERIAL_BLOCK_BYTES):
            block = bytes(cramjam.snappy.compress_raw(records[start : start + _XERIAL_BLOCK_BYTES]))
            parts += [len(block).to_bytes(4, "big"), block]
        return b"".join(parts)
    if compression == _LZ4:  # frames of independent blocks, the only ones that Kafka reads (KIP-57)
        # Level 1: the fast compressor, which is what Apache Kafka's default level means.
        compressor = cramjam.lz4.Compressor(level=1, content_checksum=False, block_linked=False)
        compressor.compress(records)
        return bytes(compressor.finish())
    if compression == _ZSTD:
        return bytes(cramjam.zstd.compress(records))
    return records
