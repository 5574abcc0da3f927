"""What is checked of a batch before it is appended, and told after it was: no record is decoded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.record_batch import HEADER_BYTES, BatchHeader, Buffer, check_crc, parse_header
from kipmesh.storage.log.compaction_records import filler, validate_keys

_COMPRESSION_MAX = 4


class AppendInfo(NamedTuple):
    """What was appended."""

    first_offset: int
    last_offset: int
    max_timestamp: int
    log_append_time_ms: int
    """-1 unless the topic's timestamps are the broker's."""
    size_bytes: int


def validate_produced(batch: bytes, config: TopicConfig, now_ms: int, *, is_internal: bool = False) -> BatchHeader:
    """The header of a batch that may be appended; KafkaError otherwise.

    `is_internal` is for batches that this node made itself: they may hold control records, any base offset and size.
    """
    header = parse_header(batch)
    if header.size_bytes > len(batch):
        raise CorruptRecordError(f"the batch is cut: {len(batch)} of {header.size_bytes} bytes")
    if header.size_bytes < len(batch):
        raise KafkaError(ErrorCode.INVALID_RECORD, "more than one batch for a partition")
    if not is_internal:
        if len(batch) > config.max_message_bytes:
            raise KafkaError(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"batch of {len(batch)} bytes, max.message.bytes is {config.max_message_bytes}",
            )
        if len(batch) > config.segment_bytes:
            raise KafkaError(
                ErrorCode.RECORD_LIST_TOO_LARGE, f"batch of {len(batch)} bytes, segment.bytes is {config.segment_bytes}"
            )
    check_crc(batch, 0, header)
    if header.record_count < 1 or header.last_offset_delta != header.record_count - 1:
        raise KafkaError(
            ErrorCode.INVALID_RECORD,
            f"{header.record_count} records with a last offset delta of {header.last_offset_delta}",
        )
    if not is_internal:
        _validate_from_client(header, config, now_ms)
        if config.is_compacted:
            validate_keys(batch, header)
    return header


def _validate_from_client(header: BatchHeader, config: TopicConfig, now_ms: int) -> None:
    if header.is_control:
        raise KafkaError(ErrorCode.INVALID_RECORD, "a client may not write control records")
    if header.base_offset != 0:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"base offset {header.base_offset} instead of 0")
    if header.compression > _COMPRESSION_MAX:
        raise KafkaError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"compression {header.compression}")
    if header.is_log_append_time:
        raise KafkaError(ErrorCode.INVALID_TIMESTAMP, "a client may not set the timestamp type to LogAppendTime")
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
    """The leader's batches for a log that ends at `log_end`: all, but that the first may have begun before.

    That is one without records, which compaction has put in the place of several on the leader and not here.
    CorruptRecordError when the first header is damaged.
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
    return b"".join((filler(log_end, header.last_offset, header.partition_leader_epoch), rest))


def validate_replicated(records: Buffer, batches: Iterable[tuple[int, BatchHeader]], log_end: int, epoch: int) -> None:
    """CorruptRecordError unless the batches are whole and continue a log that ends at `log_end` within `epoch`."""
    for position, header in batches:
        check_crc(records, position, header)
        if header.base_offset != log_end or header.last_offset_delta < 0:
            raise CorruptRecordError(
                f"offsets {header.base_offset}..{header.last_offset} to a log that ends at {log_end}"
            )
        if header.partition_leader_epoch < epoch:
            raise CorruptRecordError(f"leader epoch {header.partition_leader_epoch} after {epoch} at offset {log_end}")
        epoch, log_end = header.partition_leader_epoch, header.next_offset
