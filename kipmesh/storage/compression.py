"""The codecs of record batches: gzip, snappy (raw, or framed as by the Java library), LZ4 frames and Zstandard.

Decompression is limited, because a small batch may expand to any size. The output buffer has the size of the limit.
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
    """Return the decompressed records of a batch. Codec 0 returns `data` itself, without checks.

    `compression` is the codec number in the batch's attributes: 0 none, 1 gzip, 2 snappy, 3 LZ4, 4 Zstandard. Raises
    CorruptRecordError for invalid data, an unknown codec, or more than `limit_bytes` of output.
    """
    if not compression:
        return data
    output = bytearray(limit_bytes)
    view = memoryview(output)
    try:
        size = _snappy(data, view) if compression == _SNAPPY else _STREAMED[compression].decompress_into(data, output)
    except KeyError:
        raise CorruptRecordError(f"compression must be 0 to {_ZSTD}, got {compression}") from None
    except (cramjam.DecompressionError, struct.error) as error:
        raise CorruptRecordError(f"cannot decompress the records into {limit_bytes} bytes: {error}") from None
    return bytes(view[:size])


def _snappy(data: bytes, output: memoryview) -> int:
    blocks = _xerial_blocks(data) if data.startswith(_XERIAL_MAGIC) else [data]
    size = 0
    for block in blocks:
        if cramjam.snappy.decompress_raw_len(block) > len(output) - size:
            raise CorruptRecordError(f"the records exceed {len(output)} bytes")
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
    """Return the compressed records of a batch, in the format that Kafka's clients read.

    `compression` is a codec number, as in `decompress`. Codec 0 and unknown codecs return `records` unchanged.
    """
    if compression == _GZIP:
        return gzip.compress(records, mtime=0)
    if compression == _SNAPPY:
        parts = [_XERIAL_HEADER]
        for start in range(0, len(records), _XERIAL_BLOCK_BYTES):
            block = bytes(cramjam.snappy.compress_raw(records[start : start + _XERIAL_BLOCK_BYTES]))
            parts += [len(block).to_bytes(4, "big"), block]
        return b"".join(parts)
    if compression == _LZ4:  # Kafka reads only frames of independent blocks (KIP-57)
        # Level 1 is the fast compressor, as Apache Kafka's default level.
        compressor = cramjam.lz4.Compressor(level=1, content_checksum=False, block_linked=False)
        compressor.compress(records)
        return bytes(compressor.finish())
    if compression == _ZSTD:
        return bytes(cramjam.zstd.compress(records))
    return records
