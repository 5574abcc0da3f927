"""Eviction policies of fetch sessions: `adopted` (227-14) and `reserved` (227-15).

A policy keeps the sessions of the cache ordered, so that a decision costs O(log sessions) even with 10,000 sessions and
thousands of new clients. It only decides; the cache evicts.

Ages are compared with "more than": a session exactly at the limit is neither old nor inactive yet.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from kipmesh.core.fetch_session.session import Owner, Session
from kipmesh.core.fetch_session.types import SESSION_SLOTS, UNUSED_MS_MAX


class Eviction(Enum):
    """Why a session was evicted; the value is its label in metrics."""

    INACTIVE = "inactive"
    PRIVILEGE = "privilege"
    """A follower took the slot of a consumer."""
    SIZE = "size"
    """A larger session took the slot of an old, smaller one."""


class Refusal(Enum):
    """Why no session was created; the value is its label in metrics."""

    OFF = "off"
    """There are no slots: sessions are disabled."""
    FULL = "full"
    TOO_SMALL = "too_small"
    QUOTA = "quota"
    """`max.incremental.fetch.sessions.per.client.id`; checked by the cache."""
    TOO_LARGE = "too_large"
    """Too many partitions for one session; checked by the cache."""


class SlotDecision(NamedTuple):
    """Decision about a slot: refused, or granted if `refusal` is None. A `victim` must be evicted to free the slot."""

    refusal: Refusal | None = None
    victim: Session | None = None
    eviction: Eviction | None = None


class EvictionPolicy(Protocol):
    """Decides which sessions get a slot. `now_ms` never decreases."""

    def room(self, owner: Owner, size: int, now_ms: int) -> SlotDecision:
        """Decide whether a session of `size` partitions gets a slot, and which session it replaces. Changes nothing."""
        ...

    def added(self, session: Session) -> None:
        """Add a session that got a slot and was used now."""
        ...

    def used(self, session: Session) -> None:
        """Update a session whose `last_used_ms` is now (227-16) and whose size may have changed."""
        ...

    def removed(self, session: Session) -> None:
        """Remove a session that was closed or evicted."""
        ...


class SessionsByUse:
    """Sessions ordered by last use, least recently used first."""

    __slots__ = ("_sessions",)

    def __init__(self) -> None:
        self._sessions: OrderedDict[Session, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def used(self, session: Session) -> None:
        """Move a session, or add it, to the most recently used end."""
        self._sessions[session] = None
        self._sessions.move_to_end(session)

    def remove(self, session: Session) -> None:
        """Remove a session if it is present."""
        self._sessions.pop(session, None)

    def unused(self, now_ms: int, unused_ms_max: int) -> Session | None:
        """Return the least recently used session, or None if no session has been unused for more than `unused_ms_max`
        ms.

        Ties: consumers before followers, then fewest partitions, then lowest id. A session with a running fetch counts
        as used now (227-16).
        """
        while self._sessions:
            first = next(iter(self._sessions))
            if now_ms - first.last_used_ms <= unused_ms_max:
                return None
            if first.fetch is None:
                return self._least(first)
            first.last_used_ms = now_ms
            self._sessions.move_to_end(first)
        return None

    def _least(self, first: Session) -> Session:
        least = first
        for session in self._sessions:
            if session.last_used_ms != first.last_used_ms:
                break
            if session.fetch is None and _rank(session) < _rank(least):
                least = session
        return least


def _rank(session: Session) -> tuple[bool, int, int]:
    return session.owner.privileged, session.size, session.session_id


class SessionsBySize:
    """Sessions ordered by size, then id. A heap whose outdated entries are dropped when they reach the top."""

    __slots__ = ("_heap", "_sessions", "_sizes")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._sizes: dict[int, int] = {}
        self._sessions: dict[int, Session] = {}

    def __contains__(self, session: Session) -> bool:
        return session.session_id in self._sizes

    def put(self, session: Session) -> None:
        """Add a session or update its size."""
        session_id, size = session.session_id, session.size
        if self._sizes.get(session_id) == size:
            return
        self._sizes[session_id] = size
        self._sessions[session_id] = session
        heapq.heappush(self._heap, (size, session_id))
        if len(self._heap) > 2 * len(self._sizes) + 64:
            self._heap = [(size, session_id) for session_id, size in self._sizes.items()]
            heapq.heapify(self._heap)

    def remove(self, session: Session) -> None:
        """Remove a session if it is present."""
        if self._sizes.pop(session.session_id, None) is not None:
            del self._sessions[session.session_id]

    def smallest(self) -> Session | None:
        """Return the session with the fewest partitions, then the lowest id; None if there is none."""
        while self._heap:
            size, session_id = self._heap[0]
            if self._sizes.get(session_id) == size:
                return self._sessions[session_id]
            heapq.heappop(self._heap)
        return None


class AdoptedPolicy:
    """An `EvictionPolicy` with one pool of slots for followers and consumers (227-13, 227-14).

    Prefers followers to consumers, large sessions to small ones, and used sessions to unused ones. Args: slots: maximum
    number of sessions, 0 disables them; eviction_ms: idle time after which a session is inactive, and age after which a
    larger session may replace it.
    """

    def __init__(self, slots: int = SESSION_SLOTS, eviction_ms: int = UNUSED_MS_MAX) -> None:
        self._slots = slots
        self._eviction_ms = eviction_ms
        self._by_use = SessionsByUse()
        self._young: OrderedDict[Session, None] = OrderedDict()  # in order of creation
        self._consumers = SessionsBySize()
        self._old_consumers = SessionsBySize()
        self._old_followers = SessionsBySize()

    def room(self, owner: Owner, size: int, now_ms: int) -> SlotDecision:
        """Return a free slot or a victim's slot (227-14). Refusals: OFF if sessions are disabled, FULL if there is no
        victim.

        The victim is an inactive session; else, for a follower, the smallest consumer session; else the smallest old
        session of the owner's kind (follower or consumer), if it has fewer than `size` partitions.
        """
        if self._slots <= 0:
            return SlotDecision(Refusal.OFF)
        if len(self._by_use) < self._slots:
            return SlotDecision()
        victim = self._by_use.unused(now_ms, self._eviction_ms)
        if victim is not None:
            return SlotDecision(victim=victim, eviction=Eviction.INACTIVE)
        self._age(now_ms)
        victim = self._consumers.smallest() if owner.privileged else None
        if victim is not None:
            return SlotDecision(victim=victim, eviction=Eviction.PRIVILEGE)
        victim = (self._old_followers if owner.privileged else self._old_consumers).smallest()
        if victim is not None and victim.size < size:
            return SlotDecision(victim=victim, eviction=Eviction.SIZE)
        return SlotDecision(Refusal.FULL)

    def _age(self, now_ms: int) -> None:
        while self._young:
            session = next(iter(self._young))
            if now_ms - session.created_ms <= self._eviction_ms:
                break
            del self._young[session]
            (self._old_followers if session.owner.privileged else self._old_consumers).put(session)

    def added(self, session: Session) -> None:
        """Add a session, marked as just used. For `eviction_ms`, larger sessions cannot replace it."""
        self._by_use.used(session)
        self._young[session] = None
        if not session.owner.privileged:
            self._consumers.put(session)

    def used(self, session: Session) -> None:
        """Mark a session as just used, and update its size."""
        self._by_use.used(session)
        for table in (self._consumers, self._old_consumers, self._old_followers):
            if session in table:
                table.put(session)

    def removed(self, session: Session) -> None:
        """Remove a session from all orderings."""
        self._by_use.remove(session)
        self._young.pop(session, None)
        for table in (self._consumers, self._old_consumers, self._old_followers):
            table.remove(session)


@dataclass(eq=False, repr=False)
class ReservedPolicy:
    """An `EvictionPolicy` with reserved slots for each broker and a common pool for clients (227-15).

    Evicts only inactive sessions: those unused for more than `unused_ms_max`.

    Args: is_broker: whether an id belongs to a registered broker. A request with any other replica id uses the client
    pool; otherwise a client could claim slots with arbitrary ids. size_min: minimum number of partitions of a session.
    """

    is_broker: Callable[[int], bool]
    _: KW_ONLY
    slots_per_broker: int
    consumer_slots: int
    size_min: int
    unused_ms_max: int = UNUSED_MS_MAX

    def __post_init__(self) -> None:
        self._clients = SessionsByUse()
        self._brokers: dict[int, SessionsByUse] = {}
        self._pools: dict[int, SessionsByUse] = {}
        """Pool of each session by id. A broker's session stays in its pool when the registration ends."""

    def _pool(self, owner: Owner) -> tuple[SessionsByUse, int]:
        if owner.privileged and self.is_broker(owner.replica_id):
            return self._brokers.get(owner.replica_id) or SessionsByUse(), self.slots_per_broker
        return self._clients, self.consumer_slots

    def room(self, owner: Owner, size: int, now_ms: int) -> SlotDecision:
        """Return a slot in the owner's pool: a free one or an inactive session's. Refusals: OFF, TOO_SMALL and FULL."""
        pool, slots = self._pool(owner)
        if slots <= 0:
            return SlotDecision(Refusal.OFF)
        if size < self.size_min:
            return SlotDecision(Refusal.TOO_SMALL)
        if len(pool) < slots:
            return SlotDecision()
        victim = pool.unused(now_ms, self.unused_ms_max)
        return SlotDecision(Refusal.FULL) if victim is None else SlotDecision(victim=victim, eviction=Eviction.INACTIVE)

    def added(self, session: Session) -> None:
        """Add a session to its pool."""
        pool, _ = self._pool(session.owner)
        if pool is not self._clients:
            self._brokers[session.owner.replica_id] = pool
        self._pools[session.session_id] = pool
        pool.used(session)

    def used(self, session: Session) -> None:
        """Mark a session as the most recently used of its pool."""
        self._pools[session.session_id].used(session)

    def removed(self, session: Session) -> None:
        """Remove a session from its pool. Drop a broker's pool when it becomes empty."""
        pool = self._pools.pop(session.session_id)
        pool.remove(session)
        if not pool and self._brokers.get(session.owner.replica_id) is pool:
            del self._brokers[session.owner.replica_id]
