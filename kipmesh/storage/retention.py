"""Which segments a log may drop: by time, by size and below the log start, as Kafka decides."""

from __future__ import annotations

from collections.abc import Sequence

from kipmesh.core.config import TopicConfig
from kipmesh.storage.segment import Segment


def expired(
    segments: Sequence[Segment],
    config: TopicConfig,
    now_ms: int,
    *,
    log_start_offset: int,
    log_end_offset: int,
    high_watermark: int,
) -> int:
    """How many segments, from the oldest on, may go; the active one is among them only if all may.

    Nothing at or above the high watermark goes. By time a segment goes when its largest timestamp is older than
    `retention.ms`; by size when what remains still has `retention.bytes`.
    """
    total = sum(segment.size_bytes for segment in segments)
    excess = total - config.retention_bytes if config.retention_bytes >= 0 else -1
    for number, segment in enumerate(segments):
        is_active = number + 1 == len(segments)
        end = log_end_offset if is_active else segments[number + 1].base_offset
        if end > high_watermark or (is_active and not segment.size_bytes):
            return number
        excess -= segment.size_bytes
        age_ms = now_ms - segment.largest_timestamp(segment.created_ms)
        is_old = 0 <= config.retention_ms < age_ms
        is_below_start = not is_active and end <= log_start_offset
        if not (is_old or is_below_start or excess >= 0):
            return number
    return len(segments)
