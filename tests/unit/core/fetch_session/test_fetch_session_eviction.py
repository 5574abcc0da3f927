"""Who evicts whom (227-13 to 227-16), cell by cell, and the quota for each client id."""

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
    """A cache whose sessions are made by hand; ids count from 1."""

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


# Whether the new session gets the only slot. Existing: who, partitions, ms since it was made and since its last use.
# New: who, partitions.
CELLS = [
    # a follower takes a consumer's slot, whatever its size, age and use
    (CONSUMER, 9, 0, 0, FOLLOWER, 1, Eviction.PRIVILEGE),
    (CONSUMER, 1, LIMIT_MS, 0, FOLLOWER, 1, Eviction.PRIVILEGE),
    (CONSUMER, 9, LIMIT_MS + 1, 0, FOLLOWER, 1, Eviction.PRIVILEGE),
    # a young one stays, if it is not a consumer's before a follower
    (CONSUMER, 1, 0, 0, CONSUMER, 9, None),
    (FOLLOWER, 1, 0, 0, FOLLOWER, 9, None),
    (FOLLOWER, 1, 0, 0, CONSUMER, 9, None),
    # exactly as old as the limit is not older
    (CONSUMER, 1, LIMIT_MS, 0, CONSUMER, 9, None),
    (FOLLOWER, 1, LIMIT_MS, 0, FOLLOWER, 9, None),
    (CONSUMER, 1, LIMIT_MS, LIMIT_MS, CONSUMER, 9, None),
    # an old one gives way to a larger one
    (CONSUMER, 1, LIMIT_MS + 1, 0, CONSUMER, 2, Eviction.SIZE),
    (FOLLOWER, 1, LIMIT_MS + 1, 0, FOLLOWER, 2, Eviction.SIZE),
    # but by size alone never a follower's to a consumer
    (FOLLOWER, 1, LIMIT_MS + 1, 0, CONSUMER, 9, None),
    # and equal sizes evict nothing
    (CONSUMER, 2, LIMIT_MS + 1, 0, CONSUMER, 2, None),
    (FOLLOWER, 2, LIMIT_MS + 1, 0, FOLLOWER, 2, None),
    (CONSUMER, 2, LIMIT_MS + 1, 0, CONSUMER, 1, None),
    (FOLLOWER, 2, LIMIT_MS + 1, 0, FOLLOWER, 1, None),
    # one that is not used gives way to anybody
    (CONSUMER, 9, LIMIT_MS + 1, LIMIT_MS + 1, CONSUMER, 1, Eviction.INACTIVE),
    (FOLLOWER, 9, LIMIT_MS + 1, LIMIT_MS + 1, CONSUMER, 1, Eviction.INACTIVE),
    (FOLLOWER, 9, LIMIT_MS + 1, LIMIT_MS + 1, FOLLOWER, 1, Eviction.INACTIVE),
    (CONSUMER, 9, LIMIT_MS + 1, LIMIT_MS + 1, FOLLOWER, 1, Eviction.INACTIVE),
]


@pytest.mark.parametrize(("who", "size", "age_ms", "idle_ms", "new", "new_size", "evicted"), CELLS)
def test_one_slot(
    who: int, size: int, age_ms: int, idle_ms: int, new: int, new_size: int, evicted: Eviction | None
) -> None:
    cache = Cache(AdoptedPolicy(1, LIMIT_MS))
    old = cache.add(who, size, 0)
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


# Existing sessions 1, 2, 3 (who, partitions, ms since they were made, since their last use), the new one, the victim.
AGED, IDLE = 2 * LIMIT_MS, LIMIT_MS + 1
CHOICES = [
    # the stalest of the inactive, whoever it is
    ([(CONSUMER, 1, AGED, IDLE), (FOLLOWER, 9, AGED, IDLE + 1), (CONSUMER, 1, AGED, 0)], (CONSUMER, 1), 2),
    # inactive ones before a consumer that a follower may evict
    ([(CONSUMER, 1, 0, 0), (FOLLOWER, 9, AGED, IDLE), (CONSUMER, 1, 0, 0)], (FOLLOWER, 1), 2),
    # equally stale: consumers first, then the smallest, then the lowest id
    ([(FOLLOWER, 1, AGED, IDLE), (CONSUMER, 9, AGED, IDLE), (FOLLOWER, 1, AGED, IDLE)], (CONSUMER, 1), 2),
    ([(CONSUMER, 3, AGED, IDLE), (CONSUMER, 2, AGED, IDLE), (CONSUMER, 2, AGED, IDLE)], (CONSUMER, 1), 2),
    # a follower among consumers: the smallest of them, young or old, then the lowest id
    ([(CONSUMER, 3, AGED, 0), (CONSUMER, 2, 0, 0), (CONSUMER, 2, 0, 0)], (FOLLOWER, 1), 2),
    ([(CONSUMER, 2, AGED, 0), (CONSUMER, 2, AGED, 0), (FOLLOWER, 1, AGED, 0)], (FOLLOWER, 9), 1),
    # a consumer: the smallest old consumer, never the follower that is smaller
    ([(FOLLOWER, 1, AGED, 0), (CONSUMER, 3, AGED, 0), (CONSUMER, 2, AGED, 0)], (CONSUMER, 9), 3),
    ([(FOLLOWER, 1, AGED, 0), (CONSUMER, 3, AGED, 0), (CONSUMER, 2, 0, 0)], (CONSUMER, 9), 2),
    ([(FOLLOWER, 1, AGED, 0), (CONSUMER, 3, AGED, 0), (CONSUMER, 3, AGED, 0)], (CONSUMER, 3), None),
    # followers among themselves: the smallest old one
    ([(FOLLOWER, 3, AGED, 0), (FOLLOWER, 2, AGED, 0), (FOLLOWER, 1, 0, 0)], (FOLLOWER, 9), 2),
    ([(FOLLOWER, 3, AGED, 0), (FOLLOWER, 3, AGED, 0), (FOLLOWER, 1, 0, 0)], (FOLLOWER, 4), 1),
]


@pytest.mark.parametrize(("existing", "new", "victim"), CHOICES)
def test_several_slots(existing: list[tuple[int, int, int, int]], new: tuple[int, int], victim: int | None) -> None:
    cache = Cache(AdoptedPolicy(3, LIMIT_MS))
    now_ms = 10 * LIMIT_MS
    # The clock never goes back: sessions are made in the order of their ages, under the ids of the table.
    sessions = {}
    for session_id, (who, size, age_ms, _) in sorted(enumerate(existing, 1), key=lambda one: -one[1][2]):
        cache._last_id = session_id - 1
        sessions[session_id] = cache.add(who, size, now_ms - age_ms)
    for session_id, (_, _, _, idle_ms) in sorted(enumerate(existing, 1), key=lambda one: -one[1][3]):
        session = sessions[session_id]
        assert session is not None
        cache.used(session, now_ms - idle_ms)
    cache._last_id = 3
    cache.add(*new, now_ms)
    assert set(cache.ids) == {1, 2, 3, 4} - {4 if victim is None else victim}


def test_no_slots_no_sessions() -> None:
    cache = Cache(AdoptedPolicy(0, LIMIT_MS))
    assert cache.add(FOLLOWER, 5, 0) is None
    assert cache.metrics.refusals == {Refusal.OFF: 1}
    assert (len(cache), cache.partitions, cache.ids) == (0, 0, [])


def test_a_use_resets_the_clock() -> None:
    cache = Cache(AdoptedPolicy(1, LIMIT_MS))
    session = cache.add(CONSUMER, 5, 0)
    assert session is not None
    for now_ms in range(0, 20 * LIMIT_MS, LIMIT_MS):
        cache.used(session, now_ms)
        assert cache.add(CONSUMER, 5, now_ms + LIMIT_MS) is None
    assert cache.add(CONSUMER, 5, 21 * LIMIT_MS) is not None


def test_a_session_grows_and_shrinks_in_the_order() -> None:
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


def test_a_flood_of_clients_costs_no_follower_its_session() -> None:
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


# -- reserved (227-15)


def reserved(slots_per_broker: int = 2, consumer_slots: int = 2, size_min: int = 1) -> ReservedPolicy:
    return ReservedPolicy(
        lambda broker: broker in (1, 2),
        slots_per_broker=slots_per_broker,
        consumer_slots=consumer_slots,
        size_min=size_min,
        unused_ms_max=LIMIT_MS,
    )


def test_each_broker_has_its_slots_and_clients_share_theirs() -> None:
    cache = Cache(reserved())
    for owner in (1, 2, CONSUMER):
        assert [cache.add(owner, 5, 0) is not None for _ in range(3)] == [True, True, False]
    assert cache.metrics.refusals == {Refusal.FULL: 3}


def test_who_only_says_that_it_is_a_broker_is_a_client() -> None:
    cache = Cache(reserved())
    assert [cache.add(broker, 5, 0) is not None for broker in (90, 91, 92)] == [True, True, False]
    assert cache.add(1, 5, 0) is not None


@pytest.mark.parametrize(("size", "gets"), [(3, False), (4, True), (5, True)])
@pytest.mark.parametrize("who", [1, CONSUMER])
def test_small_requests_get_no_session(who: int, size: int, gets: bool) -> None:
    cache = Cache(reserved(size_min=4))
    assert (cache.add(who, size, 0) is not None) is gets
    assert cache.metrics.refusals == ({} if gets else {Refusal.TOO_SMALL: 1})


@pytest.mark.parametrize(
    ("idle_ms", "size", "victim"), [(LIMIT_MS, 9, None), (LIMIT_MS + 1, 1, 1), (LIMIT_MS + 1, 9, 1)]
)
@pytest.mark.parametrize("who", [1, CONSUMER])
def test_only_the_unused_give_way_in_their_own_pool(who: int, idle_ms: int, size: int, victim: int | None) -> None:
    cache = Cache(reserved())
    other = 2 if who == 1 else 1
    sessions = [cache.add(owner, 5, 0) for owner in (who, who, other, other)]
    assert sessions[1] is not None
    cache.used(sessions[1], 1)
    assert (cache.add(who, size, idle_ms) is not None) is (victim is not None)
    assert cache.ids == ([1, 2, 3, 4] if victim is None else [2, 3, 4, 5])


@pytest.mark.parametrize("who", [1, CONSUMER])
def test_pools_without_slots(who: int) -> None:
    cache = Cache(reserved(slots_per_broker=0, consumer_slots=0))
    assert cache.add(who, 5, 0) is None
    assert cache.metrics.refusals == {Refusal.OFF: 1}


def test_pools_of_brokers_go_with_their_sessions() -> None:
    policy = reserved()
    cache = Cache(policy)
    session = cache.add(1, 5, 0)
    assert session is not None
    cache._close(session)
    assert (policy._brokers, policy._pools) == ({}, {})


# -- the quota, ours


def test_a_client_id_has_so_many_sessions_and_no_more() -> None:
    cache = Cache(AdoptedPolicy(10, LIMIT_MS), quota=2)
    assert [cache.add(CONSUMER, 5, 0, "greedy") is not None for _ in range(4)] == [True, True, False, False]
    assert cache.add(CONSUMER, 5, 0, "modest") is not None
    assert all(cache.add(FOLLOWER, 5, 0, "greedy") for _ in range(4))
    assert cache.metrics.refusals == {Refusal.QUOTA: 2}
    assert cache.metrics.quota_refusals_by_client == {"greedy": 2}


def test_at_its_quota_a_client_replaces_what_it_does_not_use() -> None:
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


def test_no_more_client_ids_are_counted_than_there_is_room_for() -> None:
    cache = Cache(AdoptedPolicy(10, LIMIT_MS), quota=1)
    for count in range(CLIENT_IDS_MAX + 50):
        cache.metrics.refused(Refusal.QUOTA, str(count))
    assert len(cache.metrics.quota_refusals_by_client) == CLIENT_IDS_MAX + 1
    assert cache.metrics.quota_refusals_by_client[OTHERS] == 50
