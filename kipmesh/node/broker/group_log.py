"""A partition of `__consumer_offsets` as its leader reads and writes it.

Reading goes in chunks, decoded off the event loop. What is not a record of groups (foreign or of Kafka's newer group
protocols) is skipped with a warning: it must not keep a broker from serving the groups beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.group.records import Record, decode_record, encode_record
from kipmesh.core.group.table import GroupTable
from kipmesh.node.broker.replica import Replica
from kipmesh.storage.decompress import decompress

log = structlog.get_logger(__name__)

CHUNK_BYTES = 1 << 20
RECORDS_OF_A_BATCH_BYTES_MAX = 64 << 20


def batch_of(records: Sequence[Record], now_ms: int) -> bytes:
    """The records as one batch to append; raises ValueError for what they cannot say."""
    pairs = [encode_record(record) for record in records]
    return record_batch.build(pairs, base_offset=0, leader_epoch=-1, timestamp_ms=now_ms)


async def read_table(replica: Replica, end: int) -> GroupTable:
    """What the records below `end` say; raises KafkaError when the log cannot be read."""
    table = GroupTable()
    offset = replica.log.log_start_offset
    while offset < end:
        data = replica.log.read(offset, CHUNK_BYTES, end, True)
        if not data:
            break
        offset = await asyncio.to_thread(_replay, table, data, offset, f"{replica.topic}-{replica.partition}")
    return table


def _replay(table: GroupTable, data: bytes, offset: int, where: str) -> int:
    """Follow whole batches; returns the offset after them. `table` is nobody else's meanwhile."""
    for position, header in record_batch.iterate(data, allow_partial=True):
        if not header.is_control:
            _replay_batch(table, data, position, header, where)
        offset = header.next_offset
    return offset


def _replay_batch(table: GroupTable, data: bytes, position: int, header: record_batch.BatchHeader, where: str) -> None:
    try:
        if header.compression:
            body = data[position + record_batch.HEADER_BYTES : position + header.size_bytes]
            plain = decompress(body, header.compression, RECORDS_OF_A_BATCH_BYTES_MAX)
            header = header.with_records(len(plain), 0)
            data, position = record_batch.pack_header(header) + plain, 0
        for record in record_batch.read_records(data, position, header):
            try:
                known = decode_record(record.key, record.value)
            except CorruptRecordError as error:
                log.warning("record of no group skipped", log=where, offset=record.offset, error=str(error))
                continue
            if known is not None:
                table.replay(known)
    except CorruptRecordError as error:
        log.warning("batch of no groups skipped", log=where, offset=header.base_offset, error=str(error))
