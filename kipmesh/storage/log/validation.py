"""Validation of batches before an append, without decoding records (except keys for compacted topics)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.record_batch import HEADER_BYTES, BatchHeader, Buffer, check_crc, parse_header
from kipmesh.storage.log.compaction_records import filler_batch, validate_keys

_COMPRESSION_MAX = 4


class AppendInfo(NamedTuple):
    """Result of an append: first and last offset, timestamps (ms) and size. `size_bytes` is 0 for a duplicate."""

    first_offset: int
    last_offset: int
    max_timestamp: int
    log_append_time_ms: int
    """The broker's time for topics with LogAppendTime, else -1."""
    size_bytes: int


def validate_produced(batch: bytes, config: TopicConfig, now_ms: int, *, is_internal: bool = False) -> BatchHeader:
    """Check a produced batch and return its header. `now_ms` is wall-clock time.

    `is_internal`: the batch is from this node, so control records, any base offset and any size are allowed.

    Raises KafkaError: CORRUPT_MESSAGE (incomplete, invalid header or wrong CRC); INVALID_RECORD (several batches, wrong
    record count, control records, a base offset other than 0, or records without a key for a compacted topic);
    MESSAGE_TOO_LARGE (above `max.message.bytes`); RECORD_LIST_TOO_LARGE (above `segment.bytes`); INVALID_TIMESTAMP (too
    far from `now_ms`, or of type LogAppendTime); UNSUPPORTED_COMPRESSION_TYPE.
    """
    header = parse_header(batch)
    if header.size_bytes > len(batch):
        raise CorruptRecordError(f"the batch is incomplete: {len(batch)} of {header.size_bytes} bytes")
    if header.size_bytes < len(batch):
        raise KafkaError(ErrorCode.INVALID_RECORD, "a request must have one batch per partition, got several")
    if not is_internal:
        if len(batch) > config.max_message_bytes:
            raise KafkaError(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"batch size must be at most max.message.bytes={config.max_message_bytes}, got {len(batch)}",
            )
        if len(batch) > config.segment_bytes:
            raise KafkaError(
                ErrorCode.RECORD_LIST_TOO_LARGE,
                f"batch size must be at most segment.bytes={config.segment_bytes}, got {len(batch)}",
            )
    check_crc(batch, 0, header)
    if header.record_count < 1 or header.last_offset_delta != header.record_count - 1:
        raise KafkaError(
            ErrorCode.INVALID_RECORD,
            f"last offset delta must be record count - 1, got {header.last_offset_delta} with {header.record_count}",
        )
    if not is_internal:
        _validate_from_client(header, config, now_ms)
        if config.is_compacted:
            validate_keys(batch, header)
    return header


def _validate_from_client(header: BatchHeader, config: TopicConfig, now_ms: int) -> None:
    if header.is_control:
        raise KafkaError(ErrorCode.INVALID_RECORD, "clients must not write control records")
    if header.base_offset != 0:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"base offset must be 0, got {header.base_offset}")
    if header.compression > _COMPRESSION_MAX:
        raise KafkaError(
            ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
            f"compression type must be 0 (none) to {_COMPRESSION_MAX} (zstd), got {header.compression}",
        )
    if header.is_log_append_time:
        raise KafkaError(ErrorCode.INVALID_TIMESTAMP, "clients must not set the timestamp type to LogAppendTime")
    if config.message_timestamp_type == "CreateTime":
        if header.max_timestamp - now_ms > config.message_timestamp_after_max_ms:
            raise KafkaError(
                ErrorCode.INVALID_TIMESTAMP,
                f"timestamp {header.max_timestamp} is more than {config.message_timestamp_after_max_ms} ms ahead",
            )
        if header.base_timestamp != -1 and now_ms - header.base_timestamp > config.message_timestamp_before_max_ms:
            raise KafkaError(
                ErrorCode.INVALID_TIMESTAMP,
                f"timestamp {header.base_timestamp} is more than {config.message_timestamp_before_max_ms} ms ago",
            )


def continuing(records: bytes, log_end: int) -> bytes:
    """Return the leader's batches from `log_end`, shortening a leading batch without records that starts before it.

    On the leader, compaction replaced several batches with such a batch, whose first part the follower already has. Any
    other input is returned unchanged. Raises CorruptRecordError if the first header, or the CRC of such a batch, is
    wrong.
    """
    if len(records) < HEADER_BYTES:
        return records
    header = parse_header(records)
    if header.record_count or header.is_control or header.producer_id >= 0 or header.size_bytes > len(records):
        return records
    if not header.base_offset < log_end <= header.last_offset:
        return records
    check_crc(records, 0, header)
    rest = memoryview(records)[header.size_bytes :]
    return b"".join((filler_batch(log_end, header.last_offset, header.partition_leader_epoch), rest))


def validate_replicated(records: Buffer, batches: Iterable[tuple[int, BatchHeader]], log_end: int, epoch: int) -> None:
    """Raise CorruptRecordError unless the batches are valid and continue a log that ends at `log_end`.

    `batches`: position and header of each batch in `records`. `epoch`: the log's latest leader epoch; no batch may have
    a lower one.
    """
    for position, header in batches:
        check_crc(records, position, header)
        if header.base_offset != log_end or header.last_offset_delta < 0:
            raise CorruptRecordError(
                f"offsets {header.base_offset}..{header.last_offset} do not continue a log that ends at {log_end}"
            )
        if header.partition_leader_epoch < epoch:
            raise CorruptRecordError(
                f"leader epoch {header.partition_leader_epoch} at offset {log_end} is older than the previous {epoch}"
            )
        epoch, log_end = header.partition_leader_epoch, header.next_offset
