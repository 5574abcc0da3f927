"""Which records a stream left out because the watermark had passed them: named one by one, from its checkpoint.

Spark drops a late row within its aggregation and keeps a number only. But the checkpoint says, in plain text, where
each micro-batch ended in each partition and which watermark it had, and a row is late by these alone: it is dropped in
batch n when the end of its window (or of its own session) is not after the watermark of batch n - 1. (Spark drops by
the watermark of the batch before, so that several aggregations of a query agree on what is late.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class BatchEnd(NamedTuple):
    """A micro-batch: its watermark, 0 without one, and the offsets after its last records by partition."""

    number: int
    watermark_ms: int
    ends: Mapping[int, int]


class Span(NamedTuple):
    """Offsets that one micro-batch read of a partition, and the watermark that rows were late by."""

    partition: int
    begin: int
    end: int
    batch: int
    watermark_ms: int


def read_batches(checkpoint: Path, topic: str) -> list[BatchEnd]:
    """The micro-batches in order. Raises ValueError for what is no checkpoint of a query of this topic."""
    batches = []
    for path in sorted((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name)):
        version, *lines = path.read_text().splitlines()
        if version != "v1" or not lines:
            raise ValueError(f"{path}: not an offset log of version 1")
        told = [json.loads(line) for line in lines if line.startswith("{")]
        ends: dict[str, int] = next((one[topic] for one in told[1:] if isinstance(one.get(topic), dict)), {})
        watermark_ms = int(told[0].get("batchWatermarkMs", 0))
        batches.append(BatchEnd(int(path.name), watermark_ms, {int(part): int(end) for part, end in ends.items()}))
    return batches


def spans(batches: Sequence[BatchEnd]) -> list[Span]:
    """The offsets of each batch that had any, with the watermark of the batch before."""
    found: list[Span] = []
    reached: dict[int, int] = {}
    watermark_ms = 0
    for batch in batches:
        for partition, end in sorted(batch.ends.items()):
            begin = reached.get(partition, 0)
            if end > begin:
                found.append(Span(partition, begin, end, batch.number, watermark_ms))
            reached[partition] = max(begin, end)
        watermark_ms = batch.watermark_ms
    return found
