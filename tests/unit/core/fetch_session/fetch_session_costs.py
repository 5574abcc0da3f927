"""Memory and CPU cost of fetch sessions by size: `python tests/unit/core/fetch_session/fetch_session_costs.py`.

Reads of the simulated partitions cost almost nothing, so the tables show the cost of the sessions alone.
"""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc
from collections.abc import Callable

from kipmesh.core.fetch_session import (
    HIGH_WATERMARK,
    LOG_END,
    AdoptedPolicy,
    FetchSessionCache,
    FetchSessionHandler,
    PartitionRead,
    Subscriptions,
    partition_key,
)
from kipmesh.messages import FetchPartition, FetchRequest, FetchResponse, FetchTopic, PartitionData

FOLLOWER = 7
OFFSET = 1 << 40
MAX_BYTES = 1 << 20


def topic_ids(count: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(1, count + 1)]


class Partitions:
    """Reader and event source that has high watermarks but no records."""

    def __init__(self, topics: int, partitions_per_topic: int) -> None:
        self.offsets = {topic_id: [OFFSET] * partitions_per_topic for topic_id in topic_ids(topics)}
        self.reads = 0
        self.subscriptions = Subscriptions()
        ids = itertools.count(1)
        self.cache = FetchSessionCache(self.subscriptions, AdoptedPolicy(), lambda: next(ids))

    def read(
        self, topic: str, topic_id: bytes, requested: FetchPartition, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        self.reads += 1
        offset = self.offsets[topic_id][requested.partition]
        return PartitionRead(PartitionData(requested.partition, 0, offset, offset, 0))

    def topic_name(self, topic_id: bytes) -> str:
        return "topic"

    def request(self, replica_id: int = FOLLOWER) -> FetchRequest:
        topics = [
            FetchTopic(
                "topic", topic_id, [FetchPartition(number, 3, at + 1, 3, 1, MAX_BYTES) for number, at in enumerate(ats)]
            )
            for topic_id, ats in self.offsets.items()
        ]
        return FetchRequest(replica_id=replica_id, topics=topics, session_epoch=0)

    def fetch(self, request: FetchRequest) -> FetchResponse:
        fetch = self.cache.begin(request, "client", 0)
        fetch.read(self)
        return fetch.respond(0)

    def change_all(self) -> None:
        for topic_id, offsets in self.offsets.items():
            for number in range(len(offsets)):
                offsets[number] += 1
                self.subscriptions.changed(partition_key(topic_id, number), "topic", LOG_END | HIGH_WATERMARK)


def memory_bytes(topics: int, partitions_per_topic: int, sessions: int = 1) -> tuple[float, float]:
    """Return bytes per partition of a session: without and with all partitions dirty."""
    partitions = Partitions(topics, partitions_per_topic)
    count = sessions * topics * partitions_per_topic
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for session in range(sessions):
        partitions.fetch(partitions.request(FOLLOWER + session))
    gc.collect()
    clean = tracemalloc.get_traced_memory()[0] - before
    # The replicas own the keys of events, so their memory is not part of the session's.
    keys = [
        partition_key(topic_id, number)
        for topic_id, offsets in partitions.offsets.items()
        for number in range(len(offsets))
    ]
    gc.collect()
    middle = tracemalloc.get_traced_memory()[0]
    for key in keys:
        partitions.subscriptions.changed(key, "topic", LOG_END)
    gc.collect()
    dirty = clean + tracemalloc.get_traced_memory()[0] - middle
    tracemalloc.stop()
    return clean / count, dirty / count


def seconds(action: Callable[[], object], times: int) -> float:
    """Return the duration of the fastest of `times` calls."""
    best = 1e9
    for _ in range(times):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def fetch_us(count: int, changed: int, with_session: bool, times: int = 200) -> float:
    """Return server CPU of a fetch of `count` partitions, `changed` of them changed (the only ones if sessionless)."""
    partitions = Partitions(max(count // 100, 1), 100)
    step = count // changed if changed else 1
    positions = [(number * step // 100, number * step % 100) for number in range(changed)]
    ids = list(partitions.offsets)
    epoch = 0
    if with_session:
        partitions.fetch(partitions.request())

    def fetch_once() -> None:
        nonlocal epoch, spent
        epoch += 1
        topics: dict[bytes, list[FetchPartition]] = {}
        for topic, number in positions:
            partitions.offsets[ids[topic]][number] += 1
            topics.setdefault(ids[topic], []).append(
                FetchPartition(number, 3, partitions.offsets[ids[topic]][number], 3, 1, MAX_BYTES)
            )
        named = [FetchTopic("", topic_id, many) for topic_id, many in topics.items()]
        request = FetchRequest(replica_id=FOLLOWER, topics=named, session_epoch=-1)
        if with_session:
            request = request._replace(session_id=1, session_epoch=epoch)
        start = time.perf_counter()
        response = partitions.fetch(request)
        spent = min(spent, time.perf_counter() - start)
        assert not response.error_code

    spent = 1e9
    for _ in range(times):
        fetch_once()
    return spent * 1e6


def handler_us(count: int, changed: int, times: int = 200) -> float:
    """Return client CPU of a request and its response in a session with `changed` of `count` partitions changed."""
    handler = FetchSessionHandler()
    partitions = Partitions(max(count // 100, 1), 100)
    for topic in partitions.request().topics:
        for requested in topic.partitions:
            handler.want("topic", topic.topic_id, requested)
    result = handler.handle_response(first := handler.next_request(), partitions.fetch(first.fill(FetchRequest())))
    assert result.is_accepted
    ids = list(partitions.offsets)
    step = count // changed if changed else 1
    offset = OFFSET

    def request_once() -> None:
        nonlocal offset
        offset += 1
        for number in range(changed):
            topic_id = ids[number * step // 100]
            handler.want("topic", topic_id, FetchPartition(number * step % 100, 3, offset, 3, 1, MAX_BYTES))
        result = handler.handle_response(handler.next_request(), FetchResponse(session_id=1))
        assert result.is_accepted

    return seconds(request_once, times) * 1e6


def main() -> None:
    print("bytes per partition of a session: clean, all dirty")
    for topics, partitions_per_topic, sessions in ((1000, 100, 1), (100, 100, 1), (10_000, 1, 1), (100, 100, 2)):
        clean, dirty = memory_bytes(topics, partitions_per_topic, sessions)
        print(f"{topics:6} topics x {partitions_per_topic:3}, {sessions} session(s): {clean:6.0f} {dirty:6.0f}")
    print("us per fetch: changed partitions / server by session size / sessionless fetch of the changed / client")
    for changed in (0, 10, 1000):
        sizes = [fetch_us(count, changed, True) for count in (1000, 10_000, 100_000)]
        alone = fetch_us(1000, changed, False)
        clients = [handler_us(count, changed) for count in (1000, 100_000)]
        print(
            f"{changed:5}: {' '.join(f'{size:8.1f}' for size in sizes)}   {alone:8.1f}   "
            f"{' '.join(f'{cost:8.1f}' for cost in clients)}"
        )


if __name__ == "__main__":
    main()
