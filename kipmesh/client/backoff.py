"""Waiting between retries: exponential with jitter, so that clients do not come back all at once."""

from __future__ import annotations

import random
from typing import NamedTuple

_JITTER = 0.2
_RANDOM = random.SystemRandom()  # has no state that programs or tests could share with it
_DOUBLINGS_MAX = 30


class Backoff(NamedTuple):
    """`retry.backoff.ms` doubled with each attempt up to `retry.backoff.max.ms`, plus or minus a fifth."""

    base_ms: int
    max_ms: int

    def delay_s(self, attempts: int) -> float:
        """Seconds to wait after `attempts` failed ones (1 = the first)."""
        delay_ms: float = min(
            self.base_ms * 2.0 ** min(max(attempts - 1, 0), _DOUBLINGS_MAX), max(self.max_ms, self.base_ms)
        )
        return delay_ms * _RANDOM.uniform(1 - _JITTER, 1 + _JITTER) / 1000
