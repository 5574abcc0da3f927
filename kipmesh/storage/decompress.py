"""Decompression of what a producer wrote, to a limit: a small batch may hold any number of bytes.

The codecs are Kafka's: gzip, snappy (raw blocks, or the framing of the Java library), LZ4 frames, Zstandard. The
output buffer has the limit's size, so nothing grows beyond it.
"""

from __future__ import annotations

import struct

import cramjam

from kipmesh.core.errors import CorruptRecordError

_STREAMED = {1: cramjam.gzip, 3: cramjam.lz4, 4: cramjam.zstd}
_SNAPPY = 2
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16


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
    blocks, position = [], _XERIAL_HEADER_BYTES
    while position < len(data):
        (size,) = struct.unpack_from(">I", data, position)
        blocks.append(data[position + 4 : position + 4 + size])
        position += 4 + size
    return blocks
