"""A session as the server keeps it: what the client asked for, what it was told, and what has changed since (227-10).

A partition of a session is one row, a bytes object of fixed layout: all of a partition's state in 96 bytes that the
garbage collector never looks at. The row's last field is the mark: the epoch of the response that the change is for, 0
while the partition is clean.

Invariant: a dirty partition is in exactly one place: the queue, the results of the fetch that runs, or what changed
under that fetch (it may be in both of the latter). A clean one is in none, but for keys that the queue drops when it
meets them, as their partitions were forgotten or cleaned meanwhile. Hence a fetch never looks at a clean partition,
and a byte limit only decides how far the queue is served: who got records goes to its end (227-11).
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

# fetch offset, log start, sent high watermark, last stable offset and log start; leader epoch, last fetched epoch,
# maximum bytes; the mark
_ROW: Final = Struct("<qq24siii4s")
_ASKED: Final = Struct("<qq24xiii")
_SENT_HIGH_WATERMARK: Final = Struct("<16xq")
_SENT: Final = Struct("<qqq")
_SENT_AT: Final = 16
_SENT_END: Final = _SENT_AT + _SENT.size
_CLEAN: Final = bytes(4)
NEVER_SENT: Final = -(1 << 63)
"""No offset: what was never told, or an error that may end."""
_NOTHING_SENT: Final = _SENT.pack(NEVER_SENT, NEVER_SENT, NEVER_SENT)

_STALE_MIN: Final = 32


class RunningFetch(Protocol):
    """The fetch that a session is working on."""

    def marked(self, key: Key, was_clean: bool, wakes: bool) -> bool:
        """A partition changed. True if the fetch takes care of it; else it goes to the queue, or is there."""
        ...

    def ended(self) -> None:
        """The session was closed, or a later request overtook this one: give everything back, and wake."""
        ...


class Owner(NamedTuple):
    """Who a session is for (227-02)."""

    client_id: str
    replica_id: int
    """A broker's id for its followers, below 0 for clients."""
    uses_topic_ids: bool
    answers_stale_high_watermark: bool
    """Whether a follower that waits is told a new high watermark at once (392-02)."""

    @property
    def privileged(self) -> bool:
        """Whether it is a follower."""
        return self.replica_id >= 0

    @property
    def interests(self) -> tuple[int, int]:
        """Flags of the changes that it is told, and of those that a fetch of it does not wait through (227-21)."""
        if not self.privileged:
            return HIGH_WATERMARK | LOG_START | LEADERSHIP, HIGH_WATERMARK | LEADERSHIP
        wakes = LOG_END | LEADERSHIP | (HIGH_WATERMARK if self.answers_stale_high_watermark else 0)
        return LOG_END | HIGH_WATERMARK | LOG_START | LEADERSHIP, wakes


@dataclass(slots=True, eq=False, repr=False)
class Session:
    """One session. It is made for a full fetch, and has no id until the cache has admitted it."""

    owner: Owner
    _subscriptions: Subscriptions
    created_ms: int
    last_used_ms: int = field(init=False)
    session_id: int = 0
    epoch: int = next_epoch(INITIAL_EPOCH)
    """Of the next request (227-03)."""
    fetch: RunningFetch | None = None
    terms: tuple[int, str, int] = (0, "", -1)
    """Isolation level, rack and broker epoch of the last request: what a read depends on beside the partition."""
    queue: deque[Key] = field(default_factory=deque)
    """Dirty partitions in the order of service, with keys that `take` drops."""
    _rows: dict[Key, bytes] = field(default_factory=dict)
    _stale: int = 0
    _mark: bytes = field(init=False)
    _hears: int = field(init=False)
    _wakes: int = field(init=False)

    def __post_init__(self) -> None:
        self.last_used_ms = self.created_ms
        self._mark = self.epoch.to_bytes(4, "little")
        self._hears, self._wakes = self.owner.interests

    # -- what it is

    @property
    def size(self) -> int:
        """Partitions in it."""
        return len(self._rows)

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def info(self, now_ms: int) -> FetchSessionDescription:
        """For the listing."""
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
        """All its partitions."""
        return self._rows.keys()

    def topic_of(self, key: Key) -> tuple[str, bytes]:
        """How a request of this session names the topic: (name, b"") or ("", id)."""
        return ("", topic_of(key)) if self.owner.uses_topic_ids else (name_of(key), b"")

    def asked(self, key: Key) -> FetchPartition:
        """What the client last asked of the partition."""
        offset, log_start, leader_epoch, fetched_epoch, max_bytes = _ASKED.unpack_from(self._rows[key])
        return FetchPartition(partition_of(key), leader_epoch, offset, fetched_epoch, log_start, max_bytes)

    def is_dirty(self, key: Key) -> bool:
        """Whether the next fetch looks at it."""
        return not self._rows[key].endswith(_CLEAN)

    def sent_high_watermark(self, key: Key) -> int:
        """The first of `sent`."""
        sent: int = _SENT_HIGH_WATERMARK.unpack_from(self._rows[key])[0]
        return sent

    def sent(self, key: Key) -> tuple[int, int, int]:
        """High watermark, last stable offset and log start as the session was last told, NEVER_SENT if it was not."""
        high_watermark, last_stable, log_start = _SENT.unpack_from(self._rows[key], _SENT_AT)
        return high_watermark, last_stable, log_start

    # -- requests

    def advance(self) -> None:
        """A request was taken; the next one has the next epoch (227-03)."""
        self.epoch = next_epoch(self.epoch)
        self._mark = self.epoch.to_bytes(4, "little")

    def put(self, key: Key, asked: FetchPartition) -> None:
        """A request names the partition: it is new, or something about it is; so it is dirty."""
        row = self._rows.get(key)
        if row is None:
            sent, dirty = _NOTHING_SENT, False
            self._subscriptions.subscribe(key, self, self.owner.uses_topic_ids)
        else:
            sent, dirty = row[_SENT_AT:_SENT_END], not row.endswith(_CLEAN)
        self._rows[key] = _ROW.pack(
            asked.fetch_offset,
            asked.log_start_offset,
            sent,
            asked.current_leader_epoch,
            asked.last_fetched_epoch,
            asked.partition_max_bytes,
            self._mark,
        )
        if not dirty:
            self.queue.append(key)

    def forget(self, key: Key) -> None:
        """A request drops the partition."""
        row = self._rows.pop(key, None)
        if row is None:
            return
        self._subscriptions.unsubscribe(key, self, self.owner.uses_topic_ids)
        if not row.endswith(_CLEAN):
            self.left_in_queue()

    def all_changed(self) -> None:
        """What a request asks of every partition is another than before: all are dirty. O(partitions)."""
        for key, row in self._rows.items():
            if row.endswith(_CLEAN):
                self._rows[key] = row[:-4] + self._mark
                self.queue.append(key)

    # -- events

    def mark(self, key: Key, change: int) -> None:
        """The partition changed."""
        if not change & self._hears:
            return
        row = self._rows[key]
        was_clean = row.endswith(_CLEAN)
        if was_clean:
            self._rows[key] = row[:-4] + self._mark
        if self.fetch is not None and self.fetch.marked(key, was_clean, bool(change & self._wakes)):
            return
        if was_clean:
            self.queue.append(key)

    # -- the queue

    def take(self) -> Key | None:
        """The next dirty partition, None if there is none left. It must come back to the queue if it stays dirty."""
        rows, queue = self._rows, self.queue
        while queue:
            key = queue.popleft()
            row = rows.get(key)
            if row is not None and not row.endswith(_CLEAN):
                return key
        self._stale = 0
        return None

    def left_in_queue(self) -> None:
        """A partition was forgotten or cleaned while it is queued: `take` drops it, and too many are swept out here."""
        self._stale += 1
        if self._stale > _STALE_MIN and self._stale * 2 > len(self.queue):
            rows = self._rows
            self.queue = deque(
                [key for key in dict.fromkeys(self.queue) if key in rows and not rows[key].endswith(_CLEAN)]
            )
            self._stale = 0

    def tell(self, key: Key, data: PartitionData, is_clean: bool) -> bool:
        """The answer for a partition: whether it is to be in an incremental response (227-08). Takes it as sent.

        What stays dirty without being cut or looked at again has to be there in any case: records, or `must_react`.
        """
        row = self._rows[key]
        if data.error_code:
            sent = _NOTHING_SENT
        else:
            sent = _SENT.pack(data.high_watermark, data.last_stable_offset, data.log_start_offset)
        is_told = row[_SENT_AT:_SENT_END] == sent
        if is_clean:
            self._rows[key] = row[:-4] + _CLEAN if is_told else row[:_SENT_AT] + sent + row[_SENT_END:-4] + _CLEAN
            return not is_told
        if not is_told:
            self._rows[key] = row[:_SENT_AT] + sent + row[_SENT_END:]
            return True
        return bool(data.records) or must_react(data)

    def close(self) -> None:
        """It is no more: the partitions know it no longer, and a fetch that waits is ended."""
        for key in self._rows:
            self._subscriptions.unsubscribe(key, self, self.owner.uses_topic_ids)
        fetch, self.fetch = self.fetch, None
        if fetch is not None:
            fetch.ended()
        self._rows = {}
        self.queue.clear()


def must_react(data: PartitionData) -> bool:
    """Whether the answer asks the client to do something, records aside."""
    return bool(
        data.error_code
        or data.diverging_epoch is not None
        or data.snapshot_id is not None
        or data.preferred_read_replica >= 0
    )
