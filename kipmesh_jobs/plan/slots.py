"""A broker's session cache with many clients, under both policies (227-13 to 227-15).

Followers and consumers arrive, fetch and leave. Cache, policy and session handlers are those of brokers and clients.
Only the clients' number, size and idle time matter, so partitions have no records and respond immediately. A steady
client fetches every 30 s, which the policy treats like one that always has a fetch pending. A tenth of the consumers is
slow: five minutes between fetches, more than `min.incremental.fetch.session.eviction.ms`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from random import Random
from typing import NamedTuple

from kipmesh.core.fetch_session import (
    AdoptedPolicy,
    EvictionPolicy,
    FetchKind,
    FetchSessionCache,
    FetchSessionHandler,
    PartitionRead,
    ReservedPolicy,
    Subscriptions,
)
from kipmesh.messages import FetchPartition, FetchRequest, PartitionData
from kipmesh_jobs.plan.sizes import Sizes, Task, binomial

POLICIES = ("adopted", "reserved")
LOADS = (0.5, 1.0, 2.0)
"""Consumers per slot of a broker."""
STEADY_MS = 30_000
SLOW_MS = 300_000
SLOW_SHARE = 0.1
LIFE_MS = 900_000
DURATION_MS = 600_000
WARM_UP_MS = 150_000
MEDIAN_PARTITIONS = 5
SPREAD = 1.2
CONSUMER_PARTITIONS_MAX = 500
LARGE = 20
"""Minimum number of partitions of a large consumer."""
FOLLOWER_PARTITIONS_MAX = 200
SLOTS_PER_BROKER = 1
"""A follower has one fetcher, and so one session, per leader."""


class Client(NamedTuple):
    """A follower or a consumer: its session handler and the ms between its fetches. `replica_id` is -1 for
    a consumer.
    """

    name: str
    kind: str
    replica_id: int
    interval_ms: int
    handler: FetchSessionHandler


class _Empty:
    """A `Reader` whose partitions are all empty."""

    def read(
        self, topic: str, topic_id: bytes, requested: FetchPartition, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        """Return no records, with end offsets of 0."""
        return PartitionRead(PartitionData(requested.partition, 0, 0, 0, 0))

    def topic_name(self, topic_id: bytes) -> str:
        """Return the hexadecimal topic id as the topic's name."""
        return topic_id.hex()


class Broker:
    """One broker's session cache and its clients, in simulated time.

    `fetches` and `incremental` count fetches by kind of client. `most` is the greatest number of sessions.
    """

    def __init__(self, policy: EvictionPolicy, followers: int, consumers: int, sizes: Sizes, rng: Random) -> None:
        self._cache = FetchSessionCache(Subscriptions(), policy, lambda: rng.randrange(1, 1 << 31))
        self._rng = rng
        self._sizes = sizes
        self._due: list[tuple[float, int, Client, float]] = []
        self._number = 0
        self.fetches: Counter[str] = Counter()
        self.incremental: Counter[str] = Counter()
        self.most = 0
        for replica_id in range(1, followers + 1):
            self._follower(replica_id, rng.uniform(0, STEADY_MS))
        for _ in range(consumers):
            self._consumer(rng.uniform(0, STEADY_MS))

    @property
    def evictions(self) -> int:
        """Number of sessions evicted for any reason, including during the warm-up."""
        return self._cache.metrics.evictions

    def run(self, duration_ms: float, warm_up_ms: float) -> None:
        """Simulate all fetches of the clients before `duration_ms`. `fetches` and `incremental` count only those from
        `warm_up_ms` on.
        """
        reader = _Empty()
        while self._due and self._due[0][0] < duration_ms:
            now_ms, _, client, gone_ms = heapq.heappop(self._due)
            kind = self._fetch(client, now_ms, reader)
            if kind is FetchKind.ERROR:  # the session was evicted; a full request follows immediately (227-19)
                self._fetch(client, now_ms, reader)
            if now_ms >= warm_up_ms:
                self.fetches[client.kind] += 1
                self.incremental[client.kind] += kind is FetchKind.INCREMENTAL
            self.most = max(self.most, len(self._cache))
            if now_ms < gone_ms:
                self._schedule(now_ms + client.interval_ms * self._rng.uniform(0.9, 1.1), client, gone_ms)
            else:
                self._replace(client, now_ms, reader)

    def _fetch(self, client: Client, now_ms: float, reader: _Empty) -> FetchKind:
        session_request = client.handler.next_request()
        request = session_request.fill(FetchRequest(None, client.replica_id, 1))
        fetch = self._cache.begin(request, client.name, int(now_ms))
        fetch.read(reader)
        client.handler.handle_response(session_request, fetch.respond(int(now_ms)))
        return fetch.kind

    def _replace(self, client: Client, now_ms: float, reader: _Empty) -> None:
        """End a consumer and schedule a new one. Half of the ended consumers close their session (227-17)."""
        session_request = client.handler.close() if self._rng.random() < 0.5 else None
        if session_request is not None:
            fetch = self._cache.begin(
                session_request.fill(FetchRequest(None, client.replica_id, 1)), client.name, int(now_ms)
            )
            fetch.read(reader)
            fetch.respond(int(now_ms))
        self._consumer(now_ms + self._rng.uniform(0, STEADY_MS))

    def _follower(self, replica_id: int, now_ms: float) -> None:
        leads = self._sizes.partitions * (self._sizes.replication_factor - 1) // self._sizes.brokers
        size = max(binomial(self._rng, leads, 1 / (self._sizes.brokers - 1)), 1)
        handler = _handler(min(size, FOLLOWER_PARTITIONS_MAX), self._rng)
        client = Client(f"broker-{replica_id}", "follower", replica_id, STEADY_MS, handler)
        self._schedule(now_ms, client, float("inf"))

    def _consumer(self, now_ms: float) -> None:
        rng = self._rng
        size = min(max(round(rng.lognormvariate(0, SPREAD) * MEDIAN_PARTITIONS), 1), CONSUMER_PARTITIONS_MAX)
        slow = rng.random() < SLOW_SHARE
        kind = "slow consumer" if slow else "large consumer" if size >= LARGE else "small consumer"
        self._number += 1
        client = Client(f"consumer-{self._number}", kind, -1, SLOW_MS if slow else STEADY_MS, _handler(size, rng))
        self._schedule(now_ms, client, now_ms + rng.expovariate(1 / LIFE_MS))

    def _schedule(self, when_ms: float, client: Client, gone_ms: float) -> None:
        self._number += 1
        heapq.heappush(self._due, (when_ms, self._number, client, gone_ms))


def _handler(partitions: int, rng: Random) -> FetchSessionHandler:
    handler = FetchSessionHandler()
    topic_id = rng.randbytes(16)
    for partition in range(partitions):
        handler.want(topic_id.hex(), topic_id, FetchPartition(partition, 0, 0, 0, 0, 1 << 20))
    return handler


def make_policy(name: str, slots: int, followers: int) -> EvictionPolicy:
    """Return the eviction policy `adopted` or `reserved` for `slots` slots in total. `reserved` keeps one slot for each
    follower; consumers share the rest.
    """
    if name == "adopted":
        return AdoptedPolicy(slots)
    own = followers * SLOTS_PER_BROKER
    return ReservedPolicy(
        lambda replica_id: 0 < replica_id <= followers,
        slots_per_broker=SLOTS_PER_BROKER,
        consumer_slots=max(slots - own, 0),
        size_min=1,
    )


def case_of(policy: str, load: float) -> str:
    """Return the name of a case, `POLICY:LOAD`, such as `adopted:0.5`."""
    return f"{policy}:{load:g}"


def sample(task: Task) -> dict[str, float]:
    """Simulate one broker for ten minutes. Returns `sessions_most`, `evictions`, and `hits:KIND`, the share of
    incremental fetches after the warm-up, by kind of client and for `all`.
    """
    policy, load = task.case.split(":")
    followers = task.sizes.brokers - 1
    consumers = round(task.sizes.slots * float(load))
    made = make_policy(policy, task.sizes.slots, followers)
    broker = Broker(made, followers, consumers, task.sizes, task.rng())
    broker.run(DURATION_MS, WARM_UP_MS)
    figures = {"sessions_most": float(broker.most), "evictions": float(broker.evictions)}
    for kind, count in sorted(broker.fetches.items()):
        figures[f"hits:{kind}"] = broker.incremental[kind] / count
    figures["hits:all"] = sum(broker.incremental.values()) / max(sum(broker.fetches.values()), 1)
    return figures
