"""Record batches as a producer makes them, by aiokafka's encoder, which is not ours."""

from __future__ import annotations

from collections.abc import Sequence

from aiokafka.record.default_records import DefaultRecordBatchBuilder


def produced_batch(
    values: Sequence[bytes | None],
    *,
    timestamp_ms: int = 1_700_000_000_000,
    compression: int = 0,
    key: bytes | None = None,
    headers: Sequence[tuple[str, bytes | None]] = (),
    producer: tuple[int, int, int] = (-1, -1, -1),
) -> bytes:
    """A batch of one record a value, a millisecond apart, at base offset 0; `producer` is id, epoch and sequence."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=compression,
        is_transactional=0,
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=producer[2],
        batch_size=1 << 30,
    )
    for offset, value in enumerate(values):
        builder.append(offset, timestamp_ms + offset, key, value, headers=list(headers))
    return bytes(builder.build())
