"""Eviction of fetch sessions, case by case (227-13 to 227-16), and the quota per client id."""

from __future__ import annotations

import pytest

from kipmesh.core.fetch_session import (
    AdoptedPolicy,
    Eviction,
    EvictionPolicy,
    FetchSessionCache,
    Refusal,
    ReservedPolicy,
    Subscriptions,
)
from kipmesh.core.fetch_session.metrics import CLIENT_IDS_MAX, OTHERS
from kipmesh.core.fetch_session.session import Owner, Session
from kipmesh.core.fetch_session.subscriptions import partition_key
from kipmesh.messages import FetchPartition

LIMIT_MS = 1000
CONSUMER, FOLLOWER = -1, 7


class Cache(FetchSessionCache):
    """A cache that creates sessions without requests. Ids count from 1."""

    def __init__(self, policy: EvictionPolicy, quota: int = 0) -> None:
        self._last_id = 0
        super().__init__(Subscriptions(), policy, self._count, sessions_per_client_id=quota, unused_ms_max=LIMIT_MS)

    def _count(self) -> int:
        self._last_id += 1
        return self._last_id

    def add(self, replica_id: int, size: int, now_ms: int, client_id: str = "") -> Session | None:
        owner = Owner(client_id, replica_id, True, True)
        if not self.make_room(owner, size, now_ms):
            return None
        session = Session(owner, self.subscriptions, now_ms)
        self.resize(session, size)
        assert self.admit(session)
        return session

    @staticmethod
    def resize(session: Session, size: int) -> None:
        for number in range(size, session.size):
            session.forget(partition_key(b"topic", number))
        for number in range(session.size, size):
            session.put(partition_key(b"topic", number), FetchPartition(number))

    @property
    def ids(self) -> list[int]:
        return [info.session_id for info in self.list(0)]


# Existing session: owner, partitions, age_ms, idle_ms. New session: owner, partitions. Expected eviction.
CELLS = [
    # A follower replaces a consumer of any size, age and use.
    (CONSUMER, 9, 0, 0, FOLLOWER, 1, Eviction.PRIVILEGE),
    (CONSUMER, 1, LIMIT_MS, 0, FOLLOWER, 1, Eviction.PRIVILEGE),
    (CONSUMER, 9, LIMIT_MS + 1, 0, FOLLOWER, 1, Eviction.PRIVILEGE),
    # Otherwise a young session stays.
    (CONSUMER, 1, 0, 0, CONSUMER, 9, None),
    (FOLLOWER, 1, 0, 0, FOLLOWER, 9, None),
    (FOLLOWER, 1, 0, 0, CONSUMER, 9, None),
    # The age limit is exclusive.
    (CONSUMER, 1, LIMIT_MS, 0, CONSUMER, 9, None),
    (FOLLOWER, 1, LIMIT_MS, 0, FOLLOWER, 9, None),
    (CONSUMER, 1, LIMIT_MS, LIMIT_MS, CONSUMER, 9, None),
    # An old session is replaced by a larger session.
    (CONSUMER, 1, LIMIT_MS + 1, 0, CONSUMER, 2, Eviction.SIZE),
    (FOLLOWER, 1, LIMIT_MS + 1, 0, FOLLOWER, 2, Eviction.SIZE),
    # A consumer never replaces a follower by size.
    (FOLLOWER, 1, LIMIT_MS + 1, 0, CONSUMER, 9, None),
    # A session of equal or smaller size evicts nothing.
    (CONSUMER, 2, LIMIT_MS + 1, 0, CONSUMER, 2, None),
    (FOLLOWER, 2, LIMIT_MS + 1, 0, FOLLOWER, 2, None),
    (CONSUMER, 2, LIMIT_MS + 1, 0, CONSUMER, 1, None),
    (FOLLOWER, 2, LIMIT_MS + 1, 0, FOLLOWER, 1, None),
    # An inactive session is replaced by any session.
    (CONSUMER, 9, LIMIT_MS + 1, LIMIT_MS + 1, CONSUMER, 1, Eviction.INACTIVE),
    (FOLLOWER, 9, LIMIT_MS + 1, LIMIT_MS + 1, CONSUMER, 1, Eviction.INACTIVE),
    (FOLLOWER, 9, LIMIT_MS + 1, LIMIT_MS + 1, FOLLOWER, 1, Eviction.INACTIVE),
    (CONSUMER, 9, LIMIT_MS + 1, LIMIT_MS + 1, FOLLOWER, 1, Eviction.INACTIVE),
]


@pytest.mark.parametrize(("owner", "size", "age_ms", "idle_ms", "new", "new_size", "evicted"), CELLS)
def test_new_session_takes_the_only_slot_by_privilege_size_or_inactivity(
    owner: int, size: int, age_ms: int, idle_ms: int, new: int, new_size: int, evicted: Eviction | None
) -> None:
    cache = Cache(AdoptedPolicy(1, LIMIT_MS))
    old = cache.add(owner, size, 0)
    assert old is not None
    if idle_ms != age_ms:
        cache.used(old, age_ms - idle_ms)
    added = cache.add(new, new_size, age_ms, "evictor")
    assert (added is not None) is (evicted is not None)
    assert cache.ids == ([1] if evicted is None else [2])
    assert cache.partitions == (size if evicted is None else new_size)
    assert cache.metrics.evictions == (evicted is not None)
    if evicted is None:
        assert cache.metrics.refusals == {Refusal.FULL: 1}
    else:
        assert cache.metrics.evictions_by_reason == {evicted: 1}
        assert cache.metrics.evictions_by_client == {"evictor": 1}


# Existing sessions 1 to 3 (owner, partitions, age_ms, idle_ms), the new session, the evicted id (None: new is refused).
AGED, IDLE = 2 * LIMIT_MS, LIMIT_MS + 1
CHOICES = [
    # The stalest inactive session, of any owner.
    ([(CONSUMER, 1, AGED, IDLE), (FOLLOWER, 9, AGED, IDLE + 1), (CONSUMER, 1, AGED, 0)], (CONSUMER, 1), 2),
    # Inactive sessions before a consumer that a follower may evict.
    ([(CONSUMER, 1, 0, 0), (FOLLOWER, 9, AGED, IDLE), (CONSUMER, 1, 0, 0)], (FOLLOWER, 1), 2),
    # Equally stale: consumers first, then the smallest, then the lowest id.
    ([(FOLLOWER, 1, AGED, IDLE), (CONSUMER, 9, AGED, IDLE), (FOLLOWER, 1, AGED, IDLE)], (CONSUMER, 1), 2),
    ([(CONSUMER, 3, AGED, IDLE), (CONSUMER, 2, AGED, IDLE), (CONSUMER, 2, AGED, IDLE)], (CONSUMER, 1), 2),
    # A new follower evicts the smallest consumer of any age, then the lowest id.
    ([(CONSUMER, 3, AGED, 0), (CONSUMER, 2, 0, 0), (CONSUMER, 2, 0, 0)], (FOLLOWER, 1), 2),
    ([(CONSUMER, 2, AGED, 0), (CONSUMER, 2, AGED, 0), (FOLLOWER, 1, AGED, 0)], (FOLLOWER, 9), 1),
    # A new consumer evicts the smallest old consumer, never a smaller follower.
    ([(FOLLOWER, 1, AGED, 0), (CONSUMER, 3, AGED, 0), (CONSUMER, 2, AGED, 0)], (CONSUMER, 9), 3),
    ([(FOLLOWER, 1, AGED, 0), (CONSUMER, 3, AGED, 0), (CONSUMER, 2, 0, 0)], (CONSUMER, 9), 2),
    ([(FOLLOWER, 1, AGED, 0), (CONSUMER, 3, AGED, 0), (CONSUMER, 3, AGED, 0)], (CONSUMER, 3), None),
    # Without consumers, a new follower evicts the smallest old follower.
    ([(FOLLOWER, 3, AGED, 0), (FOLLOWER, 2, AGED, 0), (FOLLOWER, 1, 0, 0)], (FOLLOWER, 9), 2),
    ([(FOLLOWER, 3, AGED, 0), (FOLLOWER, 3, AGED, 0), (FOLLOWER, 1, 0, 0)], (FOLLOWER, 4), 1),
]


@pytest.mark.parametrize(("existing", "new", "victim"), CHOICES)
def test_adopted_policy_evicts_stalest_then_smallest_session(
    existing: list[tuple[int, int, int, int]], new: tuple[int, int], victim: int | None
) -> None:
    cache = Cache(AdoptedPolicy(3, LIMIT_MS))
    now_ms = 10 * LIMIT_MS
    # The clock is monotonic: create the oldest session first, each with its id of the table.
    sessions = {}
    for session_id, (owner, size, age_ms, _) in sorted(enumerate(existing, 1), key=lambda item: -item[1][2]):
        cache._last_id = session_id - 1
        sessions[session_id] = cache.add(owner, size, now_ms - age_ms)
    for session_id, (_, _, _, idle_ms) in sorted(enumerate(existing, 1), key=lambda item: -item[1][3]):
        session = sessions[session_id]
        assert session is not None
        cache.used(session, now_ms - idle_ms)
    cache._last_id = 3
    cache.add(*new, now_ms)
    assert set(cache.ids) == {1, 2, 3, 4} - {4 if victim is None else victim}


def test_cache_without_slots_creates_no_session() -> None:
    cache = Cache(AdoptedPolicy(0, LIMIT_MS))
    assert cache.add(FOLLOWER, 5, 0) is None
    assert cache.metrics.refusals == {Refusal.OFF: 1}
    assert (len(cache), cache.partitions, cache.ids) == (0, 0, [])


def test_use_resets_inactivity_timer() -> None:
    cache = Cache(AdoptedPolicy(1, LIMIT_MS))
    session = cache.add(CONSUMER, 5, 0)
    assert session is not None
    for now_ms in range(0, 20 * LIMIT_MS, LIMIT_MS):
        cache.used(session, now_ms)
        assert cache.add(CONSUMER, 5, now_ms + LIMIT_MS) is None
    assert cache.add(CONSUMER, 5, 21 * LIMIT_MS) is not None


def test_eviction_order_follows_session_resize() -> None:
    cache = Cache(AdoptedPolicy(2, LIMIT_MS))
    first, second = cache.add(CONSUMER, 5, 0), cache.add(CONSUMER, 6, 0)
    assert first is not None
    assert second is not None
    cache.resize(first, 20)
    cache.used(first, LIMIT_MS)
    cache.used(second, LIMIT_MS)
    assert cache.partitions == 26
    assert cache.add(CONSUMER, 7, LIMIT_MS + 1) is not None
    assert cache.ids == [1, 3]
    cache.resize(first, 2)
    cache.used(first, LIMIT_MS + 1)
    assert cache.add(FOLLOWER, 1, LIMIT_MS + 2) is not None
    assert cache.ids == [3, 4]


def test_flood_of_clients_evicts_no_follower_session() -> None:
    cache = Cache(AdoptedPolicy(1000, LIMIT_MS))
    followers = [cache.add(broker, 1, 0) for broker in (1, 2, 3)]
    for count in range(50_000):
        now_ms = count // 10
        if not count % 1000:
            for follower in followers:
                assert follower is not None
                cache.used(follower, now_ms)
        cache.add(CONSUMER, 1 + count % 50, now_ms, f"one-shot-{count}")
        assert len(cache) <= 1000
    assert cache.ids[:3] == [1, 2, 3]
    metrics = cache.metrics
    assert metrics.created == 1000 + metrics.evictions
    assert metrics.created + metrics.refusals[Refusal.FULL] == 50_003
    assert set(metrics.evictions_by_reason) == {Eviction.INACTIVE}
    assert len(metrics.evictions_by_client) == CLIENT_IDS_MAX + 1
    assert sum(metrics.evictions_by_client.values()) == metrics.evictions
    assert metrics.evictions_by_client[OTHERS] > 0


# -- reserved policy (227-15)


def reserved(slots_per_broker: int = 2, consumer_slots: int = 2, size_min: int = 1) -> ReservedPolicy:
    return ReservedPolicy(
        lambda broker: broker in (1, 2),
        slots_per_broker=slots_per_broker,
        consumer_slots=consumer_slots,
        size_min=size_min,
        unused_ms_max=LIMIT_MS,
    )


def test_reserved_policy_gives_slots_per_broker_and_shared_consumer_slots() -> None:
    cache = Cache(reserved())
    for owner in (1, 2, CONSUMER):
        assert [cache.add(owner, 5, 0) is not None for _ in range(3)] == [True, True, False]
    assert cache.metrics.refusals == {Refusal.FULL: 3}


def test_reserved_policy_treats_unregistered_broker_ids_as_consumers() -> None:
    cache = Cache(reserved())
    assert [cache.add(broker, 5, 0) is not None for broker in (90, 91, 92)] == [True, True, False]
    assert cache.add(1, 5, 0) is not None


@pytest.mark.parametrize(("size", "is_added"), [(3, False), (4, True), (5, True)])
@pytest.mark.parametrize("owner", [1, CONSUMER])
def test_reserved_policy_refuses_sessions_below_minimum_size(owner: int, size: int, is_added: bool) -> None:
    cache = Cache(reserved(size_min=4))
    assert (cache.add(owner, size, 0) is not None) is is_added
    assert cache.metrics.refusals == ({} if is_added else {Refusal.TOO_SMALL: 1})


@pytest.mark.parametrize(
    ("idle_ms", "size", "victim"), [(LIMIT_MS, 9, None), (LIMIT_MS + 1, 1, 1), (LIMIT_MS + 1, 9, 1)]
)
@pytest.mark.parametrize("owner", [1, CONSUMER])
def test_reserved_policy_evicts_only_inactive_sessions_of_the_same_pool(
    owner: int, idle_ms: int, size: int, victim: int | None
) -> None:
    cache = Cache(reserved())
    other = 2 if owner == 1 else 1
    sessions = [cache.add(replica_id, 5, 0) for replica_id in (owner, owner, other, other)]
    assert sessions[1] is not None
    cache.used(sessions[1], 1)
    assert (cache.add(owner, size, idle_ms) is not None) is (victim is not None)
    assert cache.ids == ([1, 2, 3, 4] if victim is None else [2, 3, 4, 5])


@pytest.mark.parametrize("owner", [1, CONSUMER])
def test_reserved_policy_without_slots_creates_no_session(owner: int) -> None:
    cache = Cache(reserved(slots_per_broker=0, consumer_slots=0))
    assert cache.add(owner, 5, 0) is None
    assert cache.metrics.refusals == {Refusal.OFF: 1}


def test_reserved_policy_drops_empty_broker_pools() -> None:
    policy = reserved()
    cache = Cache(policy)
    session = cache.add(1, 5, 0)
    assert session is not None
    cache._close(session)
    assert (policy._brokers, policy._pools) == ({}, {})


# -- quota per client id (kipmesh extension)


def test_quota_limits_sessions_per_client_id() -> None:
    cache = Cache(AdoptedPolicy(10, LIMIT_MS), quota=2)
    assert [cache.add(CONSUMER, 5, 0, "greedy") is not None for _ in range(4)] == [True, True, False, False]
    assert cache.add(CONSUMER, 5, 0, "modest") is not None
    assert all(cache.add(FOLLOWER, 5, 0, "greedy") for _ in range(4))
    assert cache.metrics.refusals == {Refusal.QUOTA: 2}
    assert cache.metrics.quota_refusals_by_client == {"greedy": 2}


def test_client_at_quota_replaces_its_inactive_session() -> None:
    cache = Cache(AdoptedPolicy(10, LIMIT_MS), quota=2)
    first, second = cache.add(CONSUMER, 5, 0, "c"), cache.add(CONSUMER, 5, 0, "c")
    assert first is not None
    assert second is not None
    cache.used(first, LIMIT_MS)
    assert cache.add(CONSUMER, 5, LIMIT_MS, "c") is None
    assert cache.add(CONSUMER, 5, LIMIT_MS + 1, "c") is not None
    assert cache.ids == [1, 3]
    assert cache.metrics.evictions_by_reason == {Eviction.INACTIVE: 1}
    cache._close(first)
    assert cache.add(CONSUMER, 5, LIMIT_MS + 1, "c") is not None


def test_metrics_aggregate_excess_client_ids() -> None:
    cache = Cache(AdoptedPolicy(10, LIMIT_MS), quota=1)
    for count in range(CLIENT_IDS_MAX + 50):
        cache.metrics.refused(Refusal.QUOTA, str(count))
    assert len(cache.metrics.quota_refusals_by_client) == CLIENT_IDS_MAX + 1
    assert cache.metrics.quota_refusals_by_client[OTHERS] == 50
