"""What followers and leaders say to each other, with sessions and without (227-07 to 227-10).

A pair is a broker that leads some partitions and one that follows them: the session cache and the fetch of the one, the
session handler of the other, requests and responses encoded as they are sent. Appends come at the rates of partitions
drawn from the whole mesh; a fetch waits for records as long as `replica.fetch.wait.max.ms` says. The bytes of records
are the same either way and are not counted: what is counted is what is said about them.
"""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.core.fetch_session import (
    LOG_END,
    AdoptedPolicy,
    FetchSessionCache,
    FetchSessionHandler,
    PartitionRead,
    Subscriptions,
    partition_key,
)
from kipmesh.messages.proto import encode
from kipmesh_jobs.plan.sizes import Sizes, Task, binomial, zipf_rate

WAIT_MS = 500
"""`replica.fetch.wait.max.ms`."""
ROUND_TRIP_MS = 1.0
PARTITION_MAX_BYTES = 1 << 20
RESPONSE_MAX_BYTES = 10 << 20
CASES = ("sessions", "without")
_FOLLOWER = 2
_SESSION_ID = 1 << 30
"""As long on the wire as nearly all are."""


class Place(NamedTuple):
    """A partition of the pair."""

    topic: str
    topic_id: bytes
    partition: int


class Leader:
    """Partitions that are read by one follower; the log of each is how many batches it has."""

    def __init__(self, places: list[Place], batch_bytes: int) -> None:
        self.places = places
        self.subscriptions = Subscriptions()
        self.ends = [0] * len(places)
        self._batch_bytes = batch_bytes
        self._index = {(place.topic_id, place.partition): at for at, place in enumerate(places)}

    def append(self, at: int) -> None:
        """A batch, of one offset."""
        self.ends[at] += 1
        place = self.places[at]
        self.subscriptions.changed(partition_key(place.topic_id, place.partition), place.topic, LOG_END)

    def read(
        self, topic: str, topic_id: bytes, asked: m.FetchPartition, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        """See `Reader`. What the follower asks for is what it has: the high watermark is there."""
        end = self.ends[self._index[topic_id, asked.partition]]
        there = end - asked.fetch_offset
        count = min(there, max(max_bytes // self._batch_bytes, 1 if min_one_batch else 0))
        data = m.PartitionData(
            asked.partition, 0, asked.fetch_offset, asked.fetch_offset, 0, records=bytes(count * self._batch_bytes)
        )
        return PartitionRead(data, is_cut=count < there)

    def topic_name(self, topic_id: bytes) -> str:
        """See `Reader`."""
        return topic_id.hex()


class Traffic(NamedTuple):
    """Of one pair. Bytes without those of records."""

    fetches: int
    request_bytes: int
    response_bytes: int
    batches: int

    def __add__(self, other: tuple[int, ...]) -> Traffic:  # type: ignore[override]
        """Both together."""
        return Traffic(*(one + two for one, two in zip(self, other, strict=True)))


def places_of(count: int, rng: Random) -> list[Place]:
    """Partitions of topics that are others each: two partitions of a topic are rarely of one pair."""
    found = []
    for _ in range(count):
        topic_id = rng.randbytes(16)
        found.append(Place(topic_id.hex(), topic_id, 0))
    return found


class Pair:
    """A leader and a follower in simulated time."""

    def __init__(self, places: list[Place], batch_bytes: int, *, with_sessions: bool) -> None:
        self.leader = Leader(places, batch_bytes)
        self._cache = FetchSessionCache(self.leader.subscriptions, AdoptedPolicy(1), lambda: _SESSION_ID)
        self._handler = FetchSessionHandler(enabled=with_sessions)
        self._batch_bytes = batch_bytes
        self._moved = list(range(len(places)))
        self._positions = [0] * len(places)
        self._index = {(place.topic_id, place.partition): at for at, place in enumerate(places)}

    def live(self, rates: list[float], duration_s: float, rng: Random) -> Traffic:
        """Fetch for so long, while batches come at these rates a second; the first, full fetch is not counted."""
        appends = _Appends(self.leader, rates, rng)
        traffic, now_ms = Traffic(0, 0, 0, 0), 0.0
        self.fetch(now_ms, appends)
        end_ms = duration_s * 1000
        while now_ms < end_ms:
            found, now_ms = self.fetch(now_ms, appends)
            traffic += found
            now_ms += ROUND_TRIP_MS
            appends.until(now_ms)
        return traffic

    def fetch(self, now_ms: float, appends: _Appends) -> tuple[Traffic, float]:
        """One fetch, and when it is answered."""
        for at in self._moved:
            place = self.leader.places[at]
            asked = m.FetchPartition(place.partition, 0, self._positions[at], 0, 0, PARTITION_MAX_BYTES)
            self._handler.want(place.topic, place.topic_id, asked)
        self._moved = []
        said = self._handler.next_request()
        request = said.fill(
            m.FetchRequest("cluster", _FOLLOWER, 1, max_wait_ms=WAIT_MS, min_bytes=1, max_bytes=RESPONSE_MAX_BYTES)
        )
        fetch = self._cache.begin(request, "follower", int(now_ms))
        fetch.read(self.leader)
        if not fetch.is_complete:
            woken: list[bool] = []
            fetch.wait(lambda: woken.append(True))
            deadline_ms = now_ms + WAIT_MS
            while not fetch.is_complete:
                now_ms = appends.next(deadline_ms)
                if now_ms >= deadline_ms:
                    break
                if woken:
                    woken.clear()
                    fetch.read(self.leader)
        response = fetch.respond(int(now_ms))
        answer = self._handler.handle_response(said, response)
        records = 0
        for one in answer.partitions:
            if one.data.records:
                at = self._index[one.topic_id, one.requested.partition]
                self._positions[at] += len(one.data.records) // self._batch_bytes
                self._moved.append(at)
                records += len(one.data.records)
        sent = len(encode(request))
        traffic = Traffic(1, sent, response_overhead(response, records), records // self._batch_bytes)
        return traffic, now_ms


def response_overhead(response: m.FetchResponse, records: int) -> int:
    """Bytes of a response that has so many bytes of records, without those."""
    return len(encode(response)) - records


class _Appends:
    """Poisson appends to the leader's partitions, in order of time."""

    def __init__(self, leader: Leader, rates: list[float], rng: Random) -> None:
        self._leader = leader
        self._rng = rng
        self._weights = list(accumulate(rates))
        self._total = self._weights[-1] / 1000 if rates else 0.0
        self._next_ms = self._after(0.0)

    def _after(self, now_ms: float) -> float:
        return now_ms + self._rng.expovariate(self._total) if self._total > 0 else float("inf")

    def next(self, until_ms: float) -> float:
        """The next append, done; `until_ms` when there is none before."""
        if self._next_ms >= until_ms:
            return until_ms
        now_ms = self._next_ms
        at = self._rng.choices(range(len(self._weights)), cum_weights=self._weights)[0]
        self._leader.append(at)
        self._next_ms = self._after(now_ms)
        return now_ms

    def until(self, until_ms: float) -> None:
        """All appends before a time, done."""
        while self.next(until_ms) < until_ms:
            pass


def sample(task: Task) -> dict[str, float]:
    """Some pairs of the mesh: what one says a second on average, and what all would."""
    sizes, rng = task.sizes, task.rng()
    leads = sizes.partitions * (sizes.replication_factor - 1) // sizes.brokers
    total, partitions = Traffic(0, 0, 0, 0), 0
    for _ in range(sizes.pairs):
        count = max(binomial(rng, leads, 1 / (sizes.brokers - 1)), 1)
        rates = [zipf_rate(rng, sizes) for _ in range(count)]
        pair_rng = Random(rng.getrandbits(64))
        pair = Pair(places_of(count, pair_rng), sizes.batch_bytes, with_sessions=task.case == "sessions")
        total += pair.live(rates, sizes.simulated_s, pair_rng)
        partitions += count
    simulated_s = sizes.pairs * sizes.simulated_s
    pairs = sizes.brokers * (sizes.brokers - 1)
    return {
        "partitions_of_pair": partitions / sizes.pairs,
        "fetches_per_s": total.fetches / simulated_s,
        "request_bytes_per_s": total.request_bytes / simulated_s,
        "response_bytes_per_s": total.response_bytes / simulated_s,
        "request_bytes": total.request_bytes / total.fetches,
        "response_bytes": total.response_bytes / total.fetches,
        "mesh_bytes_per_s": pairs * (total.request_bytes + total.response_bytes) / simulated_s,
        "batches_per_s": total.batches / simulated_s,
    }


def by_size(partitions: int, changed: int, *, with_sessions: bool, sizes: Sizes, seed: int) -> Traffic:
    """One fetch of a follower of so many partitions, of which so many got a batch since the last one."""
    rng = Random(f"{seed}:size")
    pair = Pair(places_of(partitions, rng), sizes.batch_bytes, with_sessions=with_sessions)
    idle = _Appends(pair.leader, [], rng)
    pair.fetch(0.0, idle)
    for at in range(changed):
        pair.leader.append(at)
    pair.fetch(1000.0, idle)  # its positions are told by the next one
    for at in range(changed):
        pair.leader.append(at)
    return pair.fetch(2000.0, idle)[0]


def sample_sizes(task: Task) -> dict[str, float]:
    """The bytes of a fetch by the partitions of its session: the case says how many have changed."""
    changed = int(task.case)
    figures: dict[str, float] = {}
    for partitions in SESSION_SIZES:
        if partitions <= min(task.sizes.partitions, 100_000):
            for name in CASES:
                found = by_size(partitions, changed, with_sessions=name == "sessions", sizes=task.sizes, seed=task.seed)
                figures[f"{name}:{partitions}"] = found.request_bytes + found.response_bytes
    return figures


SESSION_SIZES = (100, 1_000, 10_000, 100_000)
CHANGED_CASES = ("0", "10", "100")
