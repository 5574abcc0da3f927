"""How many bytes replicas that are being added may fetch: a token bucket (KIP-73's throttle, by KIP-455's replicas).

The bucket fills with `rate` bytes a second, up to what comes in one second. Who wants to fetch may begin while there is
something in it, and what comes is taken out of it, even below zero: a batch cannot be split. So over any time the bytes
are at most the rate times that time, one second's worth, and the last answers that were under way.

Pure: times come in, in ms of a clock that never jumps.
"""

from __future__ import annotations

BURST_MS = 1000


class Throttle:
    """One limit, shared by whoever it is for."""

    __slots__ = ("_bytes", "_filled_ms", "_rate")

    def __init__(self, now_ms: int) -> None:
        """Without a limit at first."""
        self._rate: int | None = None
        self._bytes = 0.0
        self._filled_ms = now_ms

    @property
    def rate(self) -> int | None:
        """Bytes a second; None for no limit."""
        return self._rate

    def limit(self, rate: int | None, now_ms: int) -> None:
        """Let through `rate` (above 0) bytes a second from now on; what was let through too much is owed no more."""
        if rate != self._rate:
            self._rate = rate
            self._filled_ms = now_ms
            self._bytes = 0.0 if rate is None else rate * BURST_MS / 1000

    def available(self, now_ms: int) -> float:
        """Bytes that may be asked for now: infinitely many without a limit, and none while it is not above 0."""
        if self._rate is None:
            return float("inf")
        self._fill(self._rate, now_ms)
        return self._bytes

    def took(self, size_bytes: int, now_ms: int) -> None:
        """So many bytes came."""
        if self._rate is not None:
            self._fill(self._rate, now_ms)
            self._bytes -= size_bytes

    def wait_ms(self, now_ms: int) -> int:
        """How long until something is available."""
        if self._rate is None:
            return 0
        self._fill(self._rate, now_ms)
        return 0 if self._bytes > 0 else int(-self._bytes * 1000 / self._rate) + 1

    def _fill(self, rate: int, now_ms: int) -> None:
        passed_ms = max(now_ms - self._filled_ms, 0)
        self._filled_ms = max(now_ms, self._filled_ms)
        self._bytes = min(self._bytes + rate * passed_ms / 1000, rate * BURST_MS / 1000)
