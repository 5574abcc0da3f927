"""What sessions cost, by size: `python tests/unit/core/fetch_session/fetch_session_costs.py` prints the tables.

The partitions are the cheapest that there can be, so this is the price of the sessions themselves.
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
    """Reader and event source: high watermarks by topic and partition, and no records."""

    def __init__(self, topics: int, partitions_per_topic: int) -> None:
        self.offsets = {topic_id: [OFFSET] * partitions_per_topic for topic_id in topic_ids(topics)}
        self.reads = 0
        self.subscriptions = Subscriptions()
        ids = itertools.count(1)
        self.cache = FetchSessionCache(self.subscriptions, AdoptedPolicy(), lambda: next(ids))

    def read(
        self, topic: str, topic_id: bytes, asked: FetchPartition, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        self.reads += 1
        offset = self.offsets[topic_id][asked.partition]
        return PartitionRead(PartitionData(asked.partition, 0, offset, offset, 0))

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

    def ask(self, request: FetchRequest) -> FetchResponse:
        fetch = self.cache.begin(request, "client", 0)
        fetch.read(self)
        return fetch.respond(0)

    def change_all(self) -> None:
        for topic_id, offsets in self.offsets.items():
            for number in range(len(offsets)):
                offsets[number] += 1
                self.subscriptions.changed(partition_key(topic_id, number), "topic", LOG_END | HIGH_WATERMARK)


def memory_bytes(topics: int, partitions_per_topic: int, sessions: int = 1) -> tuple[float, float]:
    """Bytes for each partition of a session: nothing dirty, and everything dirty at once."""
    partitions = Partitions(topics, partitions_per_topic)
    count = sessions * topics * partitions_per_topic
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for session in range(sessions):
        partitions.ask(partitions.request(FOLLOWER + session))
    gc.collect()
    clean = tracemalloc.get_traced_memory()[0] - before
    # Keys of events are those of the replicas, and no cost of a session.
    keys = [
        partition_key(topic_id, number) for topic_id, one in partitions.offsets.items() for number in range(len(one))
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
    """Of the fastest of `times`."""
    best = 1e9
    for _ in range(times):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def fetch_us(count: int, changed: int, with_session: bool, times: int = 200) -> float:
    """Server CPU of a fetch of a session of `count` partitions of which `changed` changed, or of just these."""
    partitions = Partitions(max(count // 100, 1), 100)
    step = count // changed if changed else 1
    places = [(number * step // 100, number * step % 100) for number in range(changed)]
    ids = list(partitions.offsets)
    epoch = 0
    if with_session:
        partitions.ask(partitions.request())

    def one() -> None:
        nonlocal epoch, spent
        epoch += 1
        topics: dict[bytes, list[FetchPartition]] = {}
        for topic, number in places:
            partitions.offsets[ids[topic]][number] += 1
            topics.setdefault(ids[topic], []).append(
                FetchPartition(number, 3, partitions.offsets[ids[topic]][number], 3, 1, MAX_BYTES)
            )
        named = [FetchTopic("", topic_id, many) for topic_id, many in topics.items()]
        request = FetchRequest(replica_id=FOLLOWER, topics=named, session_epoch=-1)
        if with_session:
            request = request._replace(session_id=1, session_epoch=epoch)
        start = time.perf_counter()
        response = partitions.ask(request)
        spent = min(spent, time.perf_counter() - start)
        assert not response.error_code

    spent = 1e9
    for _ in range(times):
        one()
    return spent * 1e6


def handler_us(count: int, changed: int, times: int = 200) -> float:
    """Client CPU of a request and its response, of a session of `count` partitions of which `changed` changed."""
    handler = FetchSessionHandler()
    partitions = Partitions(max(count // 100, 1), 100)
    for topic in partitions.request().topics:
        for asked in topic.partitions:
            handler.want("topic", topic.topic_id, asked)
    answer = handler.handle_response(first := handler.next_request(), partitions.ask(first.fill(FetchRequest())))
    assert answer.is_accepted
    ids = list(partitions.offsets)
    step = count // changed if changed else 1
    offset = OFFSET

    def one() -> None:
        nonlocal offset
        offset += 1
        for number in range(changed):
            topic_id = ids[number * step // 100]
            handler.want("topic", topic_id, FetchPartition(number * step % 100, 3, offset, 3, 1, MAX_BYTES))
        answer = handler.handle_response(handler.next_request(), FetchResponse(session_id=1))
        assert answer.is_accepted

    return seconds(one, times) * 1e6


def main() -> None:
    print("bytes a partition of a session: clean, all dirty")
    for topics, partitions_per_topic, sessions in ((1000, 100, 1), (100, 100, 1), (10_000, 1, 1), (100, 100, 2)):
        clean, dirty = memory_bytes(topics, partitions_per_topic, sessions)
        print(f"{topics:6} topics x {partitions_per_topic:3}, {sessions} session(s): {clean:6.0f} {dirty:6.0f}")
    print("us a fetch: partitions changed / server by size of the session / sessionless fetch of these / client")
    for changed in (0, 10, 1000):
        sizes = [fetch_us(count, changed, True) for count in (1000, 10_000, 100_000)]
        alone = fetch_us(1000, changed, False)
        clients = [handler_us(count, changed) for count in (1000, 100_000)]
        print(
            f"{changed:5}: {' '.join(f'{one:8.1f}' for one in sizes)}   {alone:8.1f}   "
            f"{' '.join(f'{one:8.1f}' for one in clients)}"
        )


if __name__ == "__main__":
    main()
