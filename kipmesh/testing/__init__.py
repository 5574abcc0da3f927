"""Fakes and helpers for tests of this project and of others: a cluster in memory (`fake_broker`), a cluster in a
container (`containers`), record batches by aiokafka's encoder, and waiting for a condition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from aiokafka.record.default_records import DefaultRecordBatchBuilder

TIMEOUT_S = 60.0
POLL_S = 0.005


async def until(condition: Callable[[], Any], what: str = "what was waited for", timeout_s: float = TIMEOUT_S) -> Any:
    """Wait until the condition holds; gives its value. AssertionError that says `what` did not come."""
    try:
        async with asyncio.timeout(timeout_s):
            while not (result := condition()):  # noqa: ASYNC110 - a condition over the state of several objects
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not in {timeout_s:g} s: {what}") from None
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
