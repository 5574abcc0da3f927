"""Digests of the records of a batch, for logs that were compacted: batches differ there, records that stay do not."""

from __future__ import annotations

from typing import NamedTuple

from aiokafka.record.default_records import DefaultRecordBatch

from kipmesh.client.compression import decompressed
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.record_batch import BatchHeader
from kipmesh.spark.jobs.audit.scan import digest_of


class RecordDigest(NamedTuple):
    """A record's place and a digest of its timestamp, key, value and headers."""

    offset: int
    timestamp: int
    digest: bytes


def record_digests(batch: memoryview, header: BatchHeader) -> list[RecordDigest]:
    """Of a batch whose CRC is right. Raises `CorruptRecordError` when its records cannot be read all the same."""
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
        # The decoder and five decompressors have an exception each for bytes that they cannot read.
        raise CorruptRecordError(f"the records of offset {header.base_offset} cannot be read: {error}") from error
