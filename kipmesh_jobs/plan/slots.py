"""A broker's session cache in a crowd, under both policies (227-13 to 227-15).

Followers and consumers come, fetch and go; the cache, its policy and each client's handler are those of brokers and
clients. What decides is who is there, how large it is and how long it is silent. So partitions have no records and
answer at once, and a client that fetches steadily is one that fetches every 30 seconds: to a policy it is the same as
one that always waits here, and costs less. A tenth of the consumers is slow: five minutes between two fetches, longer
than `min.incremental.fetch.session.eviction.ms`.
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
"""Consumers of a broker, beside the slots that it has."""
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
"""From so many partitions on a consumer is a large one."""
FOLLOWER_PARTITIONS_MAX = 200
SLOTS_PER_BROKER = 1
"""One fetcher for each leader, so one session for each follower."""


class Client(NamedTuple):
    """A follower or a consumer."""

    name: str
    kind: str
    replica_id: int
    interval_ms: int
    handler: FetchSessionHandler


class _Empty:
    """Partitions without records."""

    def read(
        self, topic: str, topic_id: bytes, asked: FetchPartition, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        """See `Reader`."""
        return PartitionRead(PartitionData(asked.partition, 0, 0, 0, 0))

    def topic_name(self, topic_id: bytes) -> str:
        """See `Reader`."""
        return topic_id.hex()


class Crowd:
    """One broker and who fetches from it."""

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
        """Of all reasons."""
        return self._cache.metrics.evictions

    def live(self, duration_ms: float, warm_up_ms: float) -> None:
        """Let them fetch; counted is what comes after the warm-up."""
        reader = _Empty()
        while self._due and self._due[0][0] < duration_ms:
            now_ms, _, client, gone_ms = heapq.heappop(self._due)
            kind = self._fetch(client, now_ms, reader)
            if kind is FetchKind.ERROR:  # it lost its session: the next request is full, and at once (227-19)
                self._fetch(client, now_ms, reader)
            if now_ms >= warm_up_ms:
                self.fetches[client.kind] += 1
                self.incremental[client.kind] += kind is FetchKind.INCREMENTAL
            self.most = max(self.most, len(self._cache))
            if now_ms < gone_ms:
                self._at(now_ms + client.interval_ms * self._rng.uniform(0.9, 1.1), client, gone_ms)
            else:
                self._leave(client, now_ms, reader)

    def _fetch(self, client: Client, now_ms: float, reader: _Empty) -> FetchKind:
        said = client.handler.next_request()
        request = said.fill(FetchRequest(None, client.replica_id, 1))
        fetch = self._cache.begin(request, client.name, int(now_ms))
        fetch.read(reader)
        client.handler.handle_response(said, fetch.respond(int(now_ms)))
        return fetch.kind

    def _leave(self, client: Client, now_ms: float, reader: _Empty) -> None:
        """Half of them say goodbye (227-17), the others are gone; another one comes."""
        said = client.handler.close() if self._rng.random() < 0.5 else None
        if said is not None:
            fetch = self._cache.begin(said.fill(FetchRequest(None, client.replica_id, 1)), client.name, int(now_ms))
            fetch.read(reader)
            fetch.respond(int(now_ms))
        self._consumer(now_ms + self._rng.uniform(0, STEADY_MS))

    def _follower(self, replica_id: int, now_ms: float) -> None:
        leads = self._sizes.partitions * (self._sizes.replication_factor - 1) // self._sizes.brokers
        size = max(binomial(self._rng, leads, 1 / (self._sizes.brokers - 1)), 1)
        handler = _handler(min(size, FOLLOWER_PARTITIONS_MAX), self._rng)
        client = Client(f"broker-{replica_id}", "follower", replica_id, STEADY_MS, handler)
        self._at(now_ms, client, float("inf"))

    def _consumer(self, now_ms: float) -> None:
        rng = self._rng
        size = min(max(round(rng.lognormvariate(0, SPREAD) * MEDIAN_PARTITIONS), 1), CONSUMER_PARTITIONS_MAX)
        slow = rng.random() < SLOW_SHARE
        kind = "slow consumer" if slow else "large consumer" if size >= LARGE else "small consumer"
        self._number += 1
        client = Client(f"consumer-{self._number}", kind, -1, SLOW_MS if slow else STEADY_MS, _handler(size, rng))
        self._at(now_ms, client, now_ms + rng.expovariate(1 / LIFE_MS))

    def _at(self, when_ms: float, client: Client, gone_ms: float) -> None:
        self._number += 1
        heapq.heappush(self._due, (when_ms, self._number, client, gone_ms))


def _handler(partitions: int, rng: Random) -> FetchSessionHandler:
    handler = FetchSessionHandler()
    topic_id = rng.randbytes(16)
    for partition in range(partitions):
        handler.want(topic_id.hex(), topic_id, FetchPartition(partition, 0, 0, 0, 0, 1 << 20))
    return handler


def make_policy(name: str, slots: int, followers: int) -> EvictionPolicy:
    """Both have so many slots in all; `reserved` gives each follower its own first."""
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
    """The name of a case."""
    return f"{policy}:{load:g}"


def sample(task: Task) -> dict[str, float]:
    """One broker for ten minutes."""
    policy, load = task.case.split(":")
    followers = task.sizes.brokers - 1
    consumers = round(task.sizes.slots * float(load))
    made = make_policy(policy, task.sizes.slots, followers)
    crowd = Crowd(made, followers, consumers, task.sizes, task.rng())
    crowd.live(DURATION_MS, WARM_UP_MS)
    figures = {"sessions_most": float(crowd.most), "evictions": float(crowd.evictions)}
    for kind, count in sorted(crowd.fetches.items()):
        figures[f"hits:{kind}"] = crowd.incremental[kind] / count
    figures["hits:all"] = sum(crowd.incremental.values()) / max(sum(crowd.fetches.values()), 1)
    return figures
