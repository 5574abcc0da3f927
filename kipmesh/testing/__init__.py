"""Test helpers: an in-memory cluster (`fake_broker`), a cluster in a container (`containers`), encoded record batches,
and waiting for a condition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from aiokafka.record.default_records import DefaultRecordBatchBuilder

TIMEOUT_S = 60.0
POLL_S = 0.005


async def until(condition: Callable[[], Any], what: str = "condition", timeout_s: float = TIMEOUT_S) -> Any:
    """Poll `condition` until its result is true (not empty, not None) and return that result.

    Raises AssertionError after `timeout_s` seconds; `what` names the condition in the message.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not (result := condition()):  # noqa: ASYNC110 - a condition over the state of several objects
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"timed out after {timeout_s:g} s: {what}") from None
    return result


def produced_batch(
    values: Sequence[bytes | None],
    *,
    timestamp_ms: int = 1_700_000_000_000,
    compression: int = 0,
    key: bytes | None = None,
    headers: Sequence[tuple[str, bytes | None]] = (),
    producer: tuple[int, int, int] = (-1, -1, -1),
) -> bytes:
    """Encode a record batch (magic 2, base offset 0) with one record per value, using aiokafka's encoder.

    Args:
        timestamp_ms: timestamp of the first record; the others follow 1 ms apart.
        compression: codec number of the batch attributes (0: none, 1: gzip, 2: snappy, 3: lz4, 4: zstd).
        key: key of every record.
        headers: headers of every record.
        producer: id, epoch and base sequence, each -1 if the producer is not idempotent.
    """
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
