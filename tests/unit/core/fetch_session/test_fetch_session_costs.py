"""Memory of fetch sessions, and CPU of fetches: it depends on changed partitions, not on all partitions (227-10)."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from types import FrameType

import pytest

from kipmesh.core.fetch_session import HIGH_WATERMARK, FetchSessionHandler, partition_key
from kipmesh.messages import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from tests.unit.core.fetch_session.fetch_session_costs import FOLLOWER, OFFSET, Partitions, memory_bytes, topic_ids

BYTES_MAX = 300


@pytest.mark.parametrize(
    # 110 topics: the dictionaries have just been resized.
    ("topics", "partitions_per_topic", "sessions"),
    [(100, 100, 1), (110, 100, 1), (3000, 1, 1), (50, 100, 2), (10, 100, 6)],
)
def test_session_memory_per_partition_is_bounded(topics: int, partitions_per_topic: int, sessions: int) -> None:
    clean, dirty = memory_bytes(topics, partitions_per_topic, sessions)
    assert 0 < clean <= dirty < BYTES_MAX


def count_calls(action: Callable[[], object]) -> int:
    """Count the function calls of an action, including C functions."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # Hypothesis registers callbacks for each collection.
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def fetch_calls(topics: int) -> tuple[int, int]:
    """Count the calls of a fetch with ten changed partitions and of a fetch without changes."""
    partitions = Partitions(topics, 100)
    partitions.fetch(partitions.request())
    changed = topic_ids(topics)[-1]
    for number in range(10):
        partitions.offsets[changed][number] += 1
        partitions.subscriptions.changed(partition_key(changed, number), "topic", HIGH_WATERMARK)
    named = [FetchTopic("", changed, [FetchPartition(number, 3, OFFSET + 1, 3, 1, 9) for number in range(10)])]
    first = FetchRequest(replica_id=FOLLOWER, session_id=1, session_epoch=1, topics=named)
    responses: list[FetchResponse] = []
    busy = count_calls(lambda: responses.append(partitions.fetch(first)))
    idle = count_calls(lambda: responses.append(partitions.fetch(first._replace(session_epoch=2, topics=[]))))
    assert [sum(len(topic.partitions) for topic in response.responses) for response in responses] == [10, 0]
    return busy, idle


def test_fetch_cost_depends_on_changed_partitions_only() -> None:
    assert fetch_calls(1) == fetch_calls(100)


def handler_calls(topics: int) -> int:
    handler = FetchSessionHandler()
    partitions = Partitions(topics, 100)
    for topic in partitions.request().topics:
        for requested in topic.partitions:
            handler.want("topic", topic.topic_id, requested)
    request = handler.next_request()
    assert handler.handle_response(request, partitions.fetch(request.fill(FetchRequest()))).is_accepted
    changed = topic_ids(1)[0]

    def action() -> None:
        for number in range(10):
            handler.want("topic", changed, FetchPartition(number, 3, OFFSET + 2, 3, 1, 9))
        handler.unwant("topic", changed, 99)
        result = handler.handle_response(handler.next_request(), FetchResponse(session_id=1))
        assert result.is_accepted

    return count_calls(action)


def test_request_cost_depends_on_changed_partitions_only() -> None:
    assert handler_calls(1) == handler_calls(100)


def test_dirty_queue_drops_forgotten_partitions_after_burst() -> None:
    """Forgotten dirty partitions are swept from the queue."""
    partitions = Partitions(10, 100)
    partitions.fetch(partitions.request())
    session = next(iter(partitions.cache._sessions.values()))
    keys = list(session.keys)
    for _ in range(50):
        partitions.change_all()
        for key in keys:
            requested = session.requested(key)
            session.forget(key)
            session.put(key, requested)
    assert len(session.queue) <= 3 * len(keys)
    partitions.fetch(FetchRequest(replica_id=FOLLOWER, session_id=1, session_epoch=1))
    assert not session.queue


@pytest.mark.parametrize("session_epoch", [-1, 1])
def test_waiting_fetch_reads_burst_in_linear_time(session_epoch: int) -> None:
    """60,000 partitions change before the waiting fetch reads again: 0.2 s if linear, 1.5 s if quadratic."""
    few, many = (burst_read_s(topics, session_epoch) for topics in (150, 600))
    assert many < max(0.5, 8 * few)  # The second limit is for slow machines.


def burst_read_s(topics: int, session_epoch: int) -> float:
    partitions = Partitions(topics, 100)
    request = partitions.request()._replace(min_bytes=1, session_epoch=session_epoch)
    if session_epoch > 0:
        partitions.fetch(partitions.request())
        partitions.fetch(FetchRequest(replica_id=FOLLOWER, session_id=1, session_epoch=1))
        request = request._replace(session_id=1, session_epoch=2, topics=[])
    fetch = partitions.cache.begin(request, "client", 0)
    fetch.read(partitions)
    wakes: list[None] = []
    fetch.wait(lambda: wakes.append(None))
    partitions.change_all()
    assert wakes
    partitions.reads, begin = 0, time.thread_time()
    gc.disable()  # A collection scans all objects of the process.
    try:
        fetch.read(partitions)
    finally:
        gc.enable()
    spent = time.thread_time() - begin
    assert partitions.reads == topics * 100
    assert sum(len(topic.partitions) for topic in fetch.respond(0).responses) == topics * 100
    return spent
