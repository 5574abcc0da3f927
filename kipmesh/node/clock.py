"""The two clocks of a node: records are stamped by the wall clock, durations are measured by one that never jumps."""

from __future__ import annotations

import time


def wall_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Milliseconds since some moment in the past."""
    return time.monotonic_ns() // 1_000_000
