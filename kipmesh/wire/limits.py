"""What all connections of a broker share: how many there are, and the memory of requests that are not answered yet.

`queued.max.request.bytes` bounds the frames that are being received or answered. One that finds no room waits, with all
that its client sends after it, until others are answered; one frame alone always has room. Those who wait are let in
one after the other, in the order in which they came.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable


class RequestMemory:
    """Bytes of requests in flight."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes_used = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_waking = False

    @property
    def waiting(self) -> int:
        """Connections that wait for room."""
        return len(self._waiting)

    def take(self, size: int) -> bool:
        """Whether there is room, which is taken then; never before those who wait."""
        if self._waiting and not self._is_waking:
            return False
        if self.bytes_used and self.bytes_used + size > self._bytes_max:
            return False
        self.bytes_used += size
        return True

    def wait(self, wake: Callable[[], None]) -> None:
        """Call `wake` once when some was given back; it may wait again then, and is the first to be called again."""
        self._waiting.append(wake)

    def give_back(self, size: int) -> None:
        """A request was answered, or given up."""
        self.bytes_used -= size
        if self._is_waking:
            return
        self._is_waking = True
        try:
            for _ in range(len(self._waiting)):
                wake = self._waiting.popleft()
                wake()
                if self._waiting and self._waiting[-1] == wake:  # still no room
                    self._waiting.rotate(1)
                    break
        finally:
            self._is_waking = False

    def forget(self, wake: Callable[[], None]) -> None:
        """Whoever waited is gone; the next one gets its turn."""
        if wake in self._waiting:
            self._waiting.remove(wake)
            self.give_back(0)


class ConnectionCounts:
    """How many connections there are, in all and by address."""

    def __init__(self, all_max: int, per_ip_max: int) -> None:
        self._all_max = all_max
        self._per_ip_max = per_ip_max
        self._by_ip: Counter[str] = Counter()
        self.total = 0

    def add(self, ip: str) -> str:
        """Count one; gives the name of the limit that refuses it, which is not counted then, or the empty text."""
        if self.total >= self._all_max:
            return "max.connections"
        if self._by_ip[ip] >= self._per_ip_max:
            return "max.connections.per.ip"
        self.total += 1
        self._by_ip[ip] += 1
        return ""

    def remove(self, ip: str) -> None:
        """One is gone."""
        self.total -= 1
        self._by_ip[ip] -= 1
        if not self._by_ip[ip]:
            del self._by_ip[ip]
