"""A fetch session on the server: partitions as last requested, values last sent, and pending changes (227-10).

A partition of a session is one row of bytes with a fixed layout: 96 bytes of state that the garbage collector does not
traverse. The last field of a row is the mark: the session epoch of the response in which the change is due, or 0 if the
partition is clean.

Invariant: a dirty partition is in the queue, in the results of the running fetch, or among the changes during that
fetch (possibly in both of the latter). A clean partition is in none, except for queue entries that `take` drops
because the partition was forgotten or cleaned. So a fetch never reads a clean partition, and a byte limit only decides
how much of the queue is served. Partitions that returned records move to its end (227-11).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, NamedTuple, Protocol

from kipmesh.core.fetch_session.subscriptions import Key, Subscriptions, name_of, partition_of, topic_of
from kipmesh.core.fetch_session.types import (
    HIGH_WATERMARK,
    INITIAL_EPOCH,
    LEADERSHIP,
    LOG_END,
    LOG_START,
    FetchSessionDescription,
    next_epoch,
)
from kipmesh.messages import FetchPartition, PartitionData

# Requested fetch offset and log start; sent high watermark, last stable offset and log start; requested leader epoch,
# last fetched epoch and maximum bytes; mark.
_ROW: Final = Struct("<qq24siii4s")
_ASKED: Final = Struct("<qq24xiii")
_SENT_HIGH_WATERMARK: Final = Struct("<16xq")
_SENT: Final = Struct("<qqq")
_SENT_AT: Final = 16
_SENT_END: Final = _SENT_AT + _SENT.size
_CLEAN: Final = bytes(4)
NEVER_SENT: Final = -(1 << 63)
"""Sent value of a partition that was never sent, or last sent with an error."""
_NOTHING_SENT: Final = _SENT.pack(NEVER_SENT, NEVER_SENT, NEVER_SENT)

_OUTDATED_MIN: Final = 32


class RunningFetch(Protocol):
    """The fetch that is using a session: an `IncrementalFetch`."""

    def on_change(self, key: Key, was_clean: bool, wakes: bool) -> bool:
        """Notify the fetch that a partition changed.

        `wakes`: the change completes a wait. Returns True if the fetch will read the partition; otherwise it belongs in
        the queue.
        """
        ...

    def on_session_end(self) -> None:
        """End the fetch because its session was closed or is used by a later request. Requeues its partitions."""
        ...


class Owner(NamedTuple):
    """Client that a session belongs to, and how it names topics (227-02)."""

    client_id: str
    replica_id: int
    """Broker id of a follower, below 0 for clients."""
    uses_topic_ids: bool
    wakes_on_high_watermark: bool
    """Whether a new high watermark completes a waiting fetch of a follower (392-02)."""

    @property
    def key(self) -> str | int:
        """Broker id of a follower, client id of any other client."""
        return self.replica_id if self.privileged else self.client_id

    @property
    def privileged(self) -> bool:
        """Whether the owner is a follower."""
        return self.replica_id >= 0

    @property
    def interests(self) -> tuple[int, int]:
        """Change flags that make a partition dirty, and those of them that complete a waiting fetch (227-21)."""
        if not self.privileged:
            return HIGH_WATERMARK | LOG_START | LEADERSHIP, HIGH_WATERMARK | LEADERSHIP
        wakes = LOG_END | LEADERSHIP | (HIGH_WATERMARK if self.wakes_on_high_watermark else 0)
        return LOG_END | HIGH_WATERMARK | LOG_START | LEADERSHIP, wakes


@dataclass(slots=True, eq=False, repr=False)
class Session:
    """One fetch session. It has id 0 until the cache has admitted it."""

    owner: Owner
    _subscriptions: Subscriptions
    created_ms: int
    last_used_ms: int = field(init=False)
    session_id: int = 0
    epoch: int = next_epoch(INITIAL_EPOCH)
    """Session epoch of the next request (227-03)."""
    fetch: RunningFetch | None = None
    read_options: tuple[int, str, int] = (0, "", -1)
    """Isolation level, rack and broker epoch of the last request. A change makes all partitions dirty."""
    queue: deque[Key] = field(default_factory=deque)
    """Dirty partitions in order of service, with outdated entries that `take` drops."""
    _rows: dict[Key, bytes] = field(default_factory=dict)
    _outdated: int = 0
    _mark: bytes = field(init=False)
    _dirty_changes: int = field(init=False)
    _wake_changes: int = field(init=False)

    def __post_init__(self) -> None:
        self.last_used_ms = self.created_ms
        self._mark = self.epoch.to_bytes(4, "little")
        self._dirty_changes, self._wake_changes = self.owner.interests

    # -- properties

    @property
    def size(self) -> int:
        """Number of partitions."""
        return len(self._rows)

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def info(self, now_ms: int) -> FetchSessionDescription:
        """Describe the session for the listing; `dirty_partitions` costs O(partitions)."""
        owner = self.owner
        return FetchSessionDescription(
            self.session_id,
            owner.client_id,
            owner.replica_id,
            owner.privileged,
            len(self._rows),
            sum(not row.endswith(_CLEAN) for row in self._rows.values()),
            self.epoch,
            now_ms - self.created_ms,
            now_ms - self.last_used_ms,
            self.fetch is not None,
        )

    @property
    def keys(self) -> Iterable[Key]:
        """Keys of all partitions."""
        return self._rows.keys()

    def topic_of(self, key: Key) -> tuple[str, bytes]:
        """Return the topic as requests of this session name it: (name, b"") or ("", id)."""
        return ("", topic_of(key)) if self.owner.uses_topic_ids else (name_of(key), b"")

    def requested(self, key: Key) -> FetchPartition:
        """Return the partition as the client last requested it."""
        offset, log_start, leader_epoch, fetched_epoch, max_bytes = _ASKED.unpack_from(self._rows[key])
        return FetchPartition(partition_of(key), leader_epoch, offset, fetched_epoch, log_start, max_bytes)

    def is_dirty(self, key: Key) -> bool:
        """Whether the next fetch reads the partition."""
        return not self._rows[key].endswith(_CLEAN)

    def sent_high_watermark(self, key: Key) -> int:
        """Return the high watermark last sent, or NEVER_SENT if the partition was never sent or last sent with an
        error."""
        sent: int = _SENT_HIGH_WATERMARK.unpack_from(self._rows[key])[0]
        return sent

    def sent(self, key: Key) -> tuple[int, int, int]:
        """Return (high watermark, last stable offset, log start offset) as last sent.

        All are NEVER_SENT if the partition was never sent, or last sent with an error.
        """
        high_watermark, last_stable, log_start = _SENT.unpack_from(self._rows[key], _SENT_AT)
        return high_watermark, last_stable, log_start

    # -- requests

    def advance(self) -> None:
        """Advance the session epoch after accepting a request (227-03)."""
        self.epoch = next_epoch(self.epoch)
        self._mark = self.epoch.to_bytes(4, "little")

    def put(self, key: Key, requested: FetchPartition) -> None:
        """Add or update a partition that a request names, and mark it dirty."""
        row = self._rows.get(key)
        if row is None:
            sent, dirty = _NOTHING_SENT, False
            self._subscriptions.subscribe(key, self, self.owner.uses_topic_ids)
        else:
            sent, dirty = row[_SENT_AT:_SENT_END], not row.endswith(_CLEAN)
        self._rows[key] = _ROW.pack(
            requested.fetch_offset,
            requested.log_start_offset,
            sent,
            requested.current_leader_epoch,
            requested.last_fetched_epoch,
            requested.partition_max_bytes,
            self._mark,
        )
        if not dirty:
            self.queue.append(key)

    def forget(self, key: Key) -> None:
        """Remove a partition that a request forgets. Ignored if it is not in the session."""
        row = self._rows.pop(key, None)
        if row is None:
            return
        self._subscriptions.unsubscribe(key, self, self.owner.uses_topic_ids)
        if not row.endswith(_CLEAN):
            self.count_outdated()

    def mark_all(self) -> None:
        """Mark all partitions dirty. O(partitions)."""
        for key, row in self._rows.items():
            if row.endswith(_CLEAN):
                self._rows[key] = row[:-4] + self._mark
                self.queue.append(key)

    # -- changes

    def mark(self, key: Key, change: int) -> None:
        """Mark a partition dirty if the owner is interested in the change, and notify the running fetch."""
        if not change & self._dirty_changes:
            return
        row = self._rows[key]
        was_clean = row.endswith(_CLEAN)
        if was_clean:
            self._rows[key] = row[:-4] + self._mark
        if self.fetch is not None and self.fetch.on_change(key, was_clean, bool(change & self._wake_changes)):
            return
        if was_clean:
            self.queue.append(key)

    # -- the queue

    def take(self) -> Key | None:
        """Remove the next dirty partition from the queue and return it; None if there is none.

        The caller must put it back into the queue if it stays dirty.
        """
        rows, queue = self._rows, self.queue
        while queue:
            key = queue.popleft()
            row = rows.get(key)
            if row is not None and not row.endswith(_CLEAN):
                return key
        self._outdated = 0
        return None

    def count_outdated(self) -> None:
        """Count a queue entry whose partition was forgotten or cleaned. Rebuilds the queue if too many are outdated."""
        self._outdated += 1
        if self._outdated > _OUTDATED_MIN and self._outdated * 2 > len(self.queue):
            rows = self._rows
            self.queue = deque(
                [key for key in dict.fromkeys(self.queue) if key in rows and not rows[key].endswith(_CLEAN)]
            )
            self._outdated = 0

    def record_sent(self, key: Key, data: PartitionData, is_clean: bool) -> bool:
        """Record a partition's data as sent; return whether an incremental response must contain it (227-08).

        It must if the offsets differ from those last sent, or if the data has records or `requires_action`. `is_clean`:
        mark the partition clean; its data then has neither records nor a required action.
        """
        row = self._rows[key]
        if data.error_code:
            sent = _NOTHING_SENT
        else:
            sent = _SENT.pack(data.high_watermark, data.last_stable_offset, data.log_start_offset)
        is_sent = row[_SENT_AT:_SENT_END] == sent
        if is_clean:
            self._rows[key] = row[:-4] + _CLEAN if is_sent else row[:_SENT_AT] + sent + row[_SENT_END:-4] + _CLEAN
            return not is_sent
        if not is_sent:
            self._rows[key] = row[:_SENT_AT] + sent + row[_SENT_END:]
            return True
        return bool(data.records) or requires_action(data)

    def close(self) -> None:
        """Unsubscribe from all partitions and end the running fetch."""
        for key in self._rows:
            self._subscriptions.unsubscribe(key, self, self.owner.uses_topic_ids)
        fetch, self.fetch = self.fetch, None
        if fetch is not None:
            fetch.on_session_end()
        self._rows = {}
        self.queue.clear()


def requires_action(data: PartitionData) -> bool:
    """Whether the client must act on the data apart from reading records: error, divergence, snapshot or redirect."""
    return bool(
        data.error_code
        or data.diverging_epoch is not None
        or data.snapshot_id is not None
        or data.preferred_read_replica >= 0
    )
