"""The driver's one timer: it wakes the machine when the machine wants to be woken, and not for an answer that is there.

A loop that stood still (a large image, a busy machine) finds its timer overdue and the answers of meanwhile unread. The
alarm then waits a moment more, once, so that a leader is not given up whose answer lies in the socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kipmesh.node.clock import monotonic_ms

STALL_MS = 50
GRACE_S = 0.01


class Alarm:
    """See the module."""

    def __init__(self, on_due: Callable[[], None]) -> None:
        """`on_due` is called at the time that was set, or a little later, and may set another."""
        self._on_due = on_due
        self._handle: asyncio.TimerHandle | None = None
        self._due_ms = 0

    def set(self, due_ms: int | None) -> None:
        """Be there at `due_ms` of the monotonic clock; one that is set for earlier stays, and is set again then."""
        if due_ms is None or (self._handle is not None and self._due_ms <= due_ms):
            return
        self.cancel()
        self._due_ms = due_ms
        wait_s = max(1, due_ms - monotonic_ms()) / 1000
        self._handle = asyncio.get_running_loop().call_later(wait_s, self._fire, True)

    def cancel(self) -> None:
        """Do not call."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self, gives_way: bool) -> None:
        self._handle = None
        if gives_way and monotonic_ms() - self._due_ms > STALL_MS:
            self._handle = asyncio.get_running_loop().call_later(GRACE_S, self._fire, False)
        else:
            self._on_due()
