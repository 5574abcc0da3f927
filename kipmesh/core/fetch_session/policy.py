"""Who gets a slot: the policies `adopted` (227-14) and `reserved` (227-15), and what a third one would have to be.

A policy holds the sessions of the cache in the orders that it needs, so that a decision costs O(log sessions) also when
10,000 of them are there and clients come by the thousand. It decides, and the cache does: `room` changes nothing.

Ages are compared with "more than": a session whose time is up exactly now is not old, nor unused for too long, yet.
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
    """Why a session lost its slot."""

    INACTIVE = "inactive"
    PRIVILEGE = "privilege"
    """A follower took a consumer's."""
    SIZE = "size"
    """An old one was smaller."""


class Refusal(Enum):
    """Why there was no session for who wanted one."""

    OFF = "off"
    """There are no slots at all."""
    FULL = "full"
    TOO_SMALL = "too_small"
    QUOTA = "quota"
    """`max.incremental.fetch.sessions.per.client.id`, which is the cache's."""
    TOO_LARGE = "too_large"
    """More partitions than a session may have, also the cache's."""


class Room(NamedTuple):
    """The decision: a refusal, or a slot, which the victim has to leave first if there is one."""

    refusal: Refusal | None = None
    victim: Session | None = None
    eviction: Eviction | None = None


class EvictionPolicy(Protocol):
    """Decides about slots. `now_ms` never goes back."""

    def room(self, owner: Owner, size: int, now_ms: int) -> Room:
        """Whether a session of `size` partitions gets a slot, and whose."""
        ...

    def added(self, session: Session) -> None:
        """The session has a slot; its `last_used_ms` is now."""
        ...

    def used(self, session: Session) -> None:
        """Its `last_used_ms` is now (227-16), and its size may be another."""
        ...

    def removed(self, session: Session) -> None:
        """It has left its slot."""
        ...


class ByUse:
    """Sessions in the order of their last use."""

    __slots__ = ("_sessions",)

    def __init__(self) -> None:
        self._sessions: OrderedDict[Session, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def used(self, session: Session) -> None:
        """Now, or it is new."""
        self._sessions[session] = None
        self._sessions.move_to_end(session)

    def remove(self, session: Session) -> None:
        """It is no more."""
        self._sessions.pop(session, None)

    def unused(self, now_ms: int, unused_ms_max: int) -> Session | None:
        """The one to be evicted as inactive: unused for the longest time, and longer than `unused_ms_max`.

        Of several, a consumer's before a follower's, then the smallest, then the lowest id. A session whose fetch
        waits here is in use (227-16).
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


class BySize:
    """Sessions by size, then id. A heap whose outdated entries are dropped when they come up."""

    __slots__ = ("_heap", "_sessions", "_sizes")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._sizes: dict[int, int] = {}
        self._sessions: dict[int, Session] = {}

    def __contains__(self, session: Session) -> bool:
        return session.session_id in self._sizes

    def put(self, session: Session) -> None:
        """It is new, or its size is."""
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
        """It is no more."""
        if self._sizes.pop(session.session_id, None) is not None:
            del self._sessions[session.session_id]

    def smallest(self) -> Session | None:
        """The smallest; the lowest id of several."""
        while self._heap:
            size, session_id = self._heap[0]
            if self._sizes.get(session_id) == size:
                return self._sessions[session_id]
            heapq.heappop(self._heap)
        return None


class AdoptedPolicy:
    """227-13 and 227-14: one cache for all, followers before consumers, large before small, used before unused."""

    def __init__(self, slots: int = SESSION_SLOTS, eviction_ms: int = UNUSED_MS_MAX) -> None:
        self._slots = slots
        self._eviction_ms = eviction_ms
        self._by_use = ByUse()
        self._young: OrderedDict[Session, None] = OrderedDict()  # in the order in which they were made
        self._consumers = BySize()
        self._old_consumers = BySize()
        self._old_followers = BySize()

    def room(self, owner: Owner, size: int, now_ms: int) -> Room:
        """See 227-14; the order of the branches is the order in which victims are chosen."""
        if self._slots <= 0:
            return Room(Refusal.OFF)
        if len(self._by_use) < self._slots:
            return Room()
        victim = self._by_use.unused(now_ms, self._eviction_ms)
        if victim is not None:
            return Room(victim=victim, eviction=Eviction.INACTIVE)
        self._age(now_ms)
        victim = self._consumers.smallest() if owner.privileged else None
        if victim is not None:
            return Room(victim=victim, eviction=Eviction.PRIVILEGE)
        victim = (self._old_followers if owner.privileged else self._old_consumers).smallest()
        if victim is not None and victim.size < size:
            return Room(victim=victim, eviction=Eviction.SIZE)
        return Room(Refusal.FULL)

    def _age(self, now_ms: int) -> None:
        while self._young:
            session = next(iter(self._young))
            if now_ms - session.created_ms <= self._eviction_ms:
                break
            del self._young[session]
            (self._old_followers if session.owner.privileged else self._old_consumers).put(session)

    def added(self, session: Session) -> None:
        """It is young and used."""
        self._by_use.used(session)
        self._young[session] = None
        if not session.owner.privileged:
            self._consumers.put(session)

    def used(self, session: Session) -> None:
        """It is used, and sorted by its size anew."""
        self._by_use.used(session)
        for table in (self._consumers, self._old_consumers, self._old_followers):
            if session in table:
                table.put(session)

    def removed(self, session: Session) -> None:
        """It leaves all orders."""
        self._by_use.remove(session)
        self._young.pop(session, None)
        for table in (self._consumers, self._old_consumers, self._old_followers):
            table.remove(session)


@dataclass(eq=False, repr=False)
class ReservedPolicy:
    """227-15: slots for each broker, a pool for the clients, and nobody evicts who is in use.

    `is_broker` says whether an id is that of a registered broker; whoever only says so is a client, or anybody could
    have as many slots as there are numbers.
    """

    is_broker: Callable[[int], bool]
    _: KW_ONLY
    slots_per_broker: int
    consumer_slots: int
    size_min: int
    unused_ms_max: int = UNUSED_MS_MAX

    def __post_init__(self) -> None:
        self._clients = ByUse()
        self._brokers: dict[int, ByUse] = {}
        self._pools: dict[int, ByUse] = {}
        """Each session's pool: a broker's sessions stay in its pool when its registration ends."""

    def _pool(self, owner: Owner) -> tuple[ByUse, int]:
        if owner.privileged and self.is_broker(owner.replica_id):
            return self._brokers.get(owner.replica_id) or ByUse(), self.slots_per_broker
        return self._clients, self.consumer_slots

    def room(self, owner: Owner, size: int, now_ms: int) -> Room:
        """A slot of the owner's own pool, free or of one that was unused for too long."""
        pool, slots = self._pool(owner)
        if slots <= 0:
            return Room(Refusal.OFF)
        if size < self.size_min:
            return Room(Refusal.TOO_SMALL)
        if len(pool) < slots:
            return Room()
        victim = pool.unused(now_ms, self.unused_ms_max)
        return Room(Refusal.FULL) if victim is None else Room(victim=victim, eviction=Eviction.INACTIVE)

    def added(self, session: Session) -> None:
        """It is in its pool."""
        pool, _ = self._pool(session.owner)
        if pool is not self._clients:
            self._brokers[session.owner.replica_id] = pool
        self._pools[session.session_id] = pool
        pool.used(session)

    def used(self, session: Session) -> None:
        """It is the last of its pool to be evicted."""
        self._pools[session.session_id].used(session)

    def removed(self, session: Session) -> None:
        """It leaves its pool; a broker's empty pool goes."""
        pool = self._pools.pop(session.session_id)
        pool.remove(session)
        if not pool and self._brokers.get(session.owner.replica_id) is pool:
            del self._brokers[session.owner.replica_id]
