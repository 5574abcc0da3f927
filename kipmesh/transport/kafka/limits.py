"""What all connections of a broker share: how many there are, the memory of requests, and that of responses.

`queued.max.request.bytes` bounds the bytes of frames that are being received or answered. A frame is counted as its
bytes come. Where there is no room a connection waits, with all that its client sends: first those that are within a
frame go on, for only whole frames can be answered and free memory, then others may begin, each in the order in which
they came. So that not all wait within their frames for each other, one at a time gets the rest of its frame when there
is no room: the limit is passed by one frame at most.

`queued.max.response.bytes` is for responses that clients do not take; see `ResponseMemory`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from kipmesh.messages.kafka import ITEMS_MAX
from kipmesh.messages.schema import NEVER
from kipmesh.transport.kafka.framing import STAGING_BYTES
from kipmesh.transport.kafka.metrics import WireMetrics
from kipmesh.transport.pipeline import Pipeline

Wake = Callable[[], None]


class RequestMemory:
    """Bytes of requests in flight."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes_used = 0
        self._within: deque[Wake] = deque()
        self._waiting: deque[Wake] = deque()
        self._is_waking = False

    @property
    def waiting(self) -> int:
        """Connections that wait for room."""
        return len(self._within) + len(self._waiting)

    def take(self, size: int) -> bool:
        """Whether there is room for a frame's first bytes, which is taken then; never before those who wait."""
        if self.waiting and not self._is_waking:
            return False
        if self.bytes_used and self.bytes_used + size > self._bytes_max:
            return False
        self.bytes_used += size
        return True

    def go_on(self, step: int, rest: int) -> int:
        """More bytes of a frame that has `rest` to come: `step`, or all of them; 0 where it has to wait."""
        if self._within and not self._is_waking:
            return 0
        if self.bytes_used > self._bytes_max:
            return 0
        taken = step if self.bytes_used + step <= self._bytes_max else rest
        self.bytes_used += taken
        return taken

    def wait(self, wake: Wake, *, is_within_frame: bool = False) -> None:
        """Call `wake` once when some was given back; it may wait again then, and is the first to be called again."""
        (self._within if is_within_frame else self._waiting).append(wake)

    def give_back(self, size: int) -> None:
        """A request was answered, or given up."""
        self.bytes_used -= size
        if self._is_waking:
            return
        self._is_waking = True
        try:
            if _woken(self._within):
                _woken(self._waiting)
        finally:
            self._is_waking = False

    def forget(self, wake: Wake) -> None:
        """Whoever waited is gone; the next one gets its turn."""
        for those in (self._within, self._waiting):
            if wake in those:
                those.remove(wake)
        self.give_back(0)


def _woken(waiting: deque[Wake]) -> bool:
    """Wake them in order; whether all found room."""
    for _ in range(len(waiting)):
        wake = waiting.popleft()
        wake()
        if waiting and waiting[-1] == wake:  # still no room
            waiting.rotate(1)
            return False
    return not waiting


class ResponseMemory:
    """Bytes of responses that wait for clients to take them.

    A fetch is given what is left of `bytes_max`, and one batch at least: the fewer the more others leave unread.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes_used = 0

    @property
    def left(self) -> int:
        """Bytes that one more response should have at most; not below 0."""
        return max(0, self._bytes_max - self.bytes_used)

    @property
    def is_short(self) -> bool:
        """Whether less than half is left."""
        return self.bytes_used > self._bytes_max // 2


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


class Limits(NamedTuple):
    """The broker's, as it is configured; docs/wire.md says what each is."""

    request_bytes_max: int
    queued_bytes_max: int
    connections_max: int
    connections_per_ip_max: int
    idle_ms_max: int
    other_request_bytes_max: int = 16 << 20
    items_max: int = ITEMS_MAX
    pending_max: int = 16
    unsent_bytes_max: int = 256 << 20
    unsent_bytes_per_connection_max: int = 256 << 10
    stall_ms_max: int = 30_000
    handshake_ms_max: int = 10_000
    sasl_request_bytes_max: int = 64 << 10
    backlog: int = 1024


class Shared:
    """What the connections of one broker share; belongs to the event loop."""

    def __init__(self, pipeline: Pipeline, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.pipeline = pipeline
        self.apis = {api.key: api for api in pipeline.handlers if api.key is not None and api.versions != NEVER}
        self.limits = limits
        self.clock = clock
        self.staging = bytearray(STAGING_BYTES)
        self.memory = RequestMemory(limits.queued_bytes_max)
        self.unsent = ResponseMemory(limits.unsent_bytes_max)
        self.counts = ConnectionCounts(limits.connections_max, limits.connections_per_ip_max)
        self.metrics = WireMetrics(lambda: self.memory.bytes_used, lambda: self.unsent.bytes_used)

    def is_flexible(self, key: int, version: int) -> bool:
        """Whether the request's header has tagged fields."""
        api = self.apis.get(key)
        return api is not None and api.flexible_since <= version <= api.versions.last

    def request_bytes_max(self, key: int) -> int:
        """Largest request of an API."""
        limit, other = self.limits.request_bytes_max, self.limits.other_request_bytes_max
        api = self.apis.get(key)
        if api is not None and api.has_records:
            return limit
        return min(limit, other, other if api is None or api.request_bytes_max is None else api.request_bytes_max)

    @property
    def is_short(self) -> bool:
        """Whether connections wait for memory that others hold."""
        return bool(self.memory.waiting) or self.unsent.is_short
