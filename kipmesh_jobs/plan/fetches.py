"""Fetch overhead between followers and leaders, with sessions and without (227-07 to 227-10).

A pair is a leader with its session cache, and a follower with its session handler. Requests and responses are encoded
as on the wire. Appends follow the rates of random partitions of the cluster, and a fetch waits up to
`replica.fetch.wait.max.ms`. Bytes of records are equal in both cases and not counted.
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
"""Has the encoded length of most session ids."""


class Leader:
    """The leader's side of partitions with one follower, as a `Reader` of the fetch session. A log is only a count:
    each batch has one offset, and `ends` has each log's end offset.
    """

    def __init__(self, topic_ids: list[bytes], batch_bytes: int) -> None:
        self.topic_ids = topic_ids
        self.index = {topic_id: at for at, topic_id in enumerate(topic_ids)}
        self.subscriptions = Subscriptions()
        self.ends = [0] * len(topic_ids)
        self._batch_bytes = batch_bytes

    def append(self, at: int) -> None:
        """Append one batch to the partition with index `at`."""
        self.ends[at] += 1
        topic_id = self.topic_ids[at]
        self.subscriptions.changed(partition_key(topic_id, 0), self.topic_name(topic_id), LOG_END)

    def read(
        self, topic: str, topic_id: bytes, requested: m.FetchPartition, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        """Return the batches (filled with zero bytes) from the fetch offset, at most `max_bytes` in total. With
        `min_one_batch`, returns at least one batch. High watermark and last stable offset equal the fetch offset,
        because the follower acknowledges it.
        """
        available = self.ends[self.index[topic_id]] - requested.fetch_offset
        count = min(available, max(max_bytes // self._batch_bytes, 1 if min_one_batch else 0))
        records = bytes(count * self._batch_bytes)
        data = m.PartitionData(0, 0, requested.fetch_offset, requested.fetch_offset, 0, records=records)
        return PartitionRead(data, is_cut=count < available)

    def topic_name(self, topic_id: bytes) -> str:
        """Return the hexadecimal topic id as the topic's name."""
        return topic_id.hex()


class Traffic(NamedTuple):
    """Number of fetches, bytes of requests and responses without the bytes of records, and number of
    fetched batches.
    """

    fetches: int
    request_bytes: int
    response_bytes: int
    batches: int

    def __add__(self, other: tuple[int, ...]) -> Traffic:  # type: ignore[override]
        """Return the field-by-field sum of both tuples."""
        return Traffic(*(one + two for one, two in zip(self, other, strict=True)))


class Pair:
    """A leader and a follower that share `count` partitions, each of a different topic, in simulated time."""

    def __init__(self, count: int, batch_bytes: int, rng: Random, *, with_sessions: bool) -> None:
        self.leader = Leader([rng.randbytes(16) for _ in range(count)], batch_bytes)
        self._cache = FetchSessionCache(self.leader.subscriptions, AdoptedPolicy(1), lambda: _SESSION_ID)
        self._handler = FetchSessionHandler(enabled=with_sessions)
        self._batch_bytes = batch_bytes
        self._moved = list(range(count))
        self._positions = [0] * count

    def run(self, rates: list[float], duration_s: float, rng: Random) -> Traffic:
        """Fetch for `duration_s` simulated seconds; return the traffic without that of the first, full fetch. `rates`
        are the appended batches per second of each partition.
        """
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
        """Run one fetch that starts at `now_ms`. Returns its traffic and the time of its response, at most `WAIT_MS`
        later.
        """
        for at in self._moved:
            topic_id = self.leader.topic_ids[at]
            partition = m.FetchPartition(0, 0, self._positions[at], 0, 0, PARTITION_MAX_BYTES)
            self._handler.want(self.leader.topic_name(topic_id), topic_id, partition)
        self._moved = []
        session_request = self._handler.next_request()
        request = session_request.fill(
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
        records = 0
        for one in self._handler.handle_response(session_request, response).partitions:
            if one.data.records:
                at = self.leader.index[one.topic_id]
                self._positions[at] += len(one.data.records) // self._batch_bytes
                self._moved.append(at)
                records += len(one.data.records)
        overhead = len(encode(response)) - records
        return Traffic(1, len(encode(request)), overhead, records // self._batch_bytes), now_ms


class _Appends:
    """Poisson appends to the leader's partitions, in order of time. `rates` are batches per second by partition."""

    def __init__(self, leader: Leader, rates: list[float], rng: Random) -> None:
        self._leader = leader
        self._rng = rng
        self._weights = list(accumulate(rates))
        self._total = self._weights[-1] / 1000 if rates else 0.0
        self._next_ms = self._after(0.0)

    def _after(self, now_ms: float) -> float:
        return now_ms + self._rng.expovariate(self._total) if self._total > 0 else float("inf")

    def next(self, until_ms: float) -> float:
        """Append the next batch and return its time in ms. Return `until_ms` without appending if the next batch is due
        then or later.
        """
        if self._next_ms >= until_ms:
            return until_ms
        now_ms = self._next_ms
        at = self._rng.choices(range(len(self._weights)), cum_weights=self._weights)[0]
        self._leader.append(at)
        self._next_ms = self._after(now_ms)
        return now_ms

    def until(self, until_ms: float) -> None:
        """Append all batches that are due before `until_ms`."""
        while self.next(until_ms) < until_ms:
            pass


def sample(task: Task) -> dict[str, float]:
    """Simulate `sizes.pairs` pairs; return means per pair, and `mesh_bytes_per_s` for all pairs of the cluster.

    Bytes are requests and responses without records. The case is `sessions` or `without`.
    """
    sizes, rng = task.sizes, task.rng()
    leads = sizes.partitions * (sizes.replication_factor - 1) // sizes.brokers
    total, partitions = Traffic(0, 0, 0, 0), 0
    for _ in range(sizes.pairs):
        count = max(binomial(rng, leads, 1 / (sizes.brokers - 1)), 1)
        rates = [zipf_rate(rng, sizes) for _ in range(count)]
        pair_rng = Random(rng.getrandbits(64))
        pair = Pair(count, sizes.batch_bytes, pair_rng, with_sessions=task.case == "sessions")
        total += pair.run(rates, sizes.simulated_s, pair_rng)
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
    """Return the traffic of one incremental or full fetch of `partitions` partitions, `changed` of which have one new
    batch.
    """
    rng = Random(f"{seed}:size")
    pair = Pair(partitions, sizes.batch_bytes, rng, with_sessions=with_sessions)
    idle = _Appends(pair.leader, [], rng)
    pair.fetch(0.0, idle)
    for now_ms in (1000.0, 2000.0):  # the second request has the positions after the first one
        for at in range(changed):
            pair.leader.append(at)
        traffic, _ = pair.fetch(now_ms, idle)
    return traffic


def sample_sizes(task: Task) -> dict[str, float]:
    """Return the bytes of request plus response, without records, by `CASE:PARTITIONS`, for each of `SESSION_SIZES` up
    to the number of partitions of the cluster. `task.case` is the number of changed partitions.
    """
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
