"""Limits of the Kafka listener (LIM-01), and the state that all its connections share.

The size of a request is limited by `SharedState.request_bytes_max`, from the API's row in `kipmesh.messages.table`. The
gRPC server applies the same rows in `kipmesh.transport.grpc.server`. `items_max` limits the number of list items; it is
applied in `kipmesh.messages.kafka.take_items`.

`queued.max.request.bytes` bounds the memory of frames that are received or processed. A connection without free memory
stops reading. Connections within a frame continue first, because only complete frames release memory. One connection at
a time may exceed the limit by the rest of its frame, which avoids a deadlock. `queued.max.response.bytes` bounds
responses that clients have not read.
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
    """Memory of requests in progress, at most `bytes_max` plus the rest of one frame."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes_used = 0
        self._within: deque[Wake] = deque()
        """Callbacks of connections that have received part of a frame."""
        self._waiting: deque[Wake] = deque()
        self._is_waking = False

    @property
    def waiting(self) -> int:
        """Number of connections that wait for memory."""
        return len(self._within) + len(self._waiting)

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes for the start of a frame. Returns False if memory is full or other connections wait."""
        if self.waiting and not self._is_waking:
            return False
        if self.bytes_used and self.bytes_used + size > self._bytes_max:
            return False
        self.bytes_used += size
        return True

    def extend(self, step: int, rest: int) -> int:
        """Reserve more memory for an incomplete frame with `rest` missing bytes.

        Returns the reserved bytes: `step`; `rest` if this frame may exceed the limit; 0 if the connection must wait.
        """
        if self._within and not self._is_waking:
            return 0
        if self.bytes_used > self._bytes_max:
            return 0
        reserved = step if self.bytes_used + step <= self._bytes_max else rest
        self.bytes_used += reserved
        return reserved

    def wait(self, wake: Wake, *, is_within_frame: bool = False) -> None:
        """Call `wake` once when memory is released.

        If `wake` calls `wait` again, it keeps its place in the queue. Connections within a frame are called first.
        """
        (self._within if is_within_frame else self._waiting).append(wake)

    def release(self, size: int) -> None:
        """Release `size` bytes of a request that was completed or abandoned, and wake waiting connections."""
        self.bytes_used -= size
        if self._is_waking:
            return
        self._is_waking = True
        try:
            if _wake_all(self._within):
                _wake_all(self._waiting)
        finally:
            self._is_waking = False

    def cancel_wait(self, wake: Wake) -> None:
        """Remove the callback of a closed connection, and wake the others."""
        for queue in (self._within, self._waiting):
            if wake in queue:
                queue.remove(wake)
        self.release(0)


def _wake_all(waiting: deque[Wake]) -> bool:
    """Call the callbacks in order until one waits again. Returns whether none is left."""
    for _ in range(len(waiting)):
        wake = waiting.popleft()
        wake()
        if waiting and waiting[-1] == wake:  # it waits again: move it back to the front
            waiting.rotate(1)
            return False
    return not waiting


class ResponseMemory:
    """Bytes of responses that clients have not read.

    The rest of `bytes_max` limits the size of the next Fetch response, which has at least one batch.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes_used = 0

    @property
    def left(self) -> int:
        """Remaining bytes, at least 0: the maximum size of the next Fetch response."""
        return max(0, self._bytes_max - self.bytes_used)

    @property
    def is_short(self) -> bool:
        """Whether more than half of the memory is used."""
        return self.bytes_used > self._bytes_max // 2


class ConnectionCounts:
    """Number of connections, in total and by IP address."""

    def __init__(self, all_max: int, per_ip_max: int) -> None:
        self._all_max = all_max
        self._per_ip_max = per_ip_max
        self._by_ip: Counter[str] = Counter()
        self.total = 0

    def add(self, ip: str) -> str:
        """Count a connection and return "". If a limit refuses it, return the limit's name without counting it."""
        if self.total >= self._all_max:
            return "max.connections"
        if self._by_ip[ip] >= self._per_ip_max:
            return "max.connections.per.ip"
        self.total += 1
        self._by_ip[ip] += 1
        return ""

    def remove(self, ip: str) -> None:
        """Remove a counted connection."""
        self.total -= 1
        self._by_ip[ip] -= 1
        if not self._by_ip[ip]:
            del self._by_ip[ip]


class Limits(NamedTuple):
    """Limits of a broker's Kafka listeners. See docs/wire.md for the settings."""

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


class SharedState:
    """State shared by the Kafka connections of one broker, within one event loop."""

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
        """Return whether the header of a request has tagged fields. False for an unknown API key or version."""
        api = self.apis.get(key)
        return api is not None and api.flexible_since <= version <= api.versions.last

    def request_bytes_max(self, key: int) -> int:
        """Return the maximum size in bytes of a request with this API key, known or unknown."""
        limit, other = self.limits.request_bytes_max, self.limits.other_request_bytes_max
        api = self.apis.get(key)
        if api is not None and api.has_records:
            return limit
        return min(limit, other, other if api is None or api.request_bytes_max is None else api.request_bytes_max)

    @property
    def is_short(self) -> bool:
        """Whether other connections need the memory that a slow connection holds."""
        return bool(self.memory.waiting) or self.unsent.is_short
