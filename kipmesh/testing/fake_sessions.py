"""Fetch sessions of a fake broker, with the real broker's core.

Tests change partitions directly, without notifying the sessions. Each read therefore compares all partitions with their
previous state and marks the changed ones. This is O(partitions), which the real broker must avoid.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session import (
    HIGH_WATERMARK,
    LEADERSHIP,
    LOG_END,
    LOG_START,
    AdoptedPolicy,
    Fetch,
    FetchSessionCache,
    PartitionRead,
    Subscriptions,
    partition_key,
)
from kipmesh.core.replica.serving import offset_case
from kipmesh.testing.fake_partitions import FakePartition, FakeTopic, epoch_end

Topics = dict[str, FakeTopic]
Preference = Callable[[FakePartition], int]
"""Returns the preferred read replica of a partition, or -1."""
_Seen = tuple[str, int, int, int, int, str]


@dataclass(eq=False)
class FakeReader:
    """A `Reader` of a fake broker's partitions for one fetch, at a leader or follower.

    Args:
        served: returns a partition of this broker by topic, topic id, index and leader epoch, or an error.
        error_of: returns the injected error of a topic, or NONE.
        prefers: returns the preferred read replica of a partition, or -1.
    """

    topics: Topics
    node_id: int
    served: Callable[[str, bytes, int, int], FakePartition | ErrorCode]
    error_of: Callable[[str], ErrorCode]
    prefers: Preference

    def topic_name(self, topic_id: bytes) -> str:
        """Return the name of a topic, or "" if the id is unknown."""
        return next((topic.name for topic in self.topics.values() if topic.topic_id == topic_id), "")

    def read(
        self, topic: str, topic_id: bytes, requested: m.FetchPartition, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        """Return complete batches of a partition from the fetch offset, up to `max_bytes` and the high watermark.

        `min_one_batch` allows the first batch to exceed the limit. Instead of records, the result may have a preferred
        read replica, a diverging epoch or an error code; this method does not raise.
        """
        name = self.topic_name(topic_id) if topic_id and not topic else topic
        index = requested.partition
        if topic_id and not name:
            return _error(index, ErrorCode.UNKNOWN_TOPIC_ID)
        error = self.error_of(name)
        if error:
            return _error(index, error)
        found = self.served(name, topic_id, index, requested.current_leader_epoch)
        if isinstance(found, ErrorCode):
            return _error(index, found, self._leader(name, index))
        end, start, high_watermark = found.end_offset, found.log_start_offset, found.end_offset
        follower = found.followers.get(self.node_id)
        if follower is not None:
            if follower.code is not None:
                return _error(index, follower.code)
            start = start if follower.log_start_offset is None else follower.log_start_offset
            end = end if follower.end_offset is None else follower.end_offset
            if follower.known_high_watermark is not None:
                high_watermark = follower.known_high_watermark
        data = m.PartitionData(index, 0, high_watermark, high_watermark, start)
        if follower is None:
            preferred = self.prefers(found)
            if preferred >= 0:
                return PartitionRead(data._replace(preferred_read_replica=preferred), completes_fetch=True)
        diverging = epoch_end(found, requested.last_fetched_epoch) if requested.last_fetched_epoch >= 0 else None
        if diverging is not None and follower is None and start <= diverging.end_offset < requested.fetch_offset:
            return PartitionRead(data._replace(diverging_epoch=diverging), completes_fetch=True)
        code = offset_case(
            requested.fetch_offset,
            log_start_offset=start,
            log_end_offset=end,
            high_watermark=min(end, high_watermark),
            leader_high_watermark=high_watermark,
        ).error_code
        if code:
            return PartitionRead(data._replace(error_code=code), completes_fetch=True)
        records: list[bytes] = []
        is_cut = False
        for header, batch in found.batches:
            if header.next_offset <= requested.fetch_offset:
                continue
            if header.next_offset > min(end, high_watermark):
                break
            if len(batch) > max_bytes and not (min_one_batch and not records):
                is_cut = True
                break
            records.append(batch)
            max_bytes -= len(batch)
        return PartitionRead(data._replace(records=b"".join(records)), is_cut=is_cut)

    def _leader(self, name: str, index: int) -> m.LeaderIdAndEpoch | None:
        topic = self.topics.get(name)
        if topic is None or not 0 <= index < len(topic.partitions):
            return None
        return m.LeaderIdAndEpoch(topic.partitions[index].leader_id, topic.partitions[index].leader_epoch)


def _error(index: int, code: ErrorCode, leader: m.LeaderIdAndEpoch | None = None) -> PartitionRead:
    return PartitionRead(m.PartitionData(index, code, current_leader=leader), completes_fetch=True)


class FakeSessions:
    """Fetch sessions of one broker, from its start to its stop. `slots` is the size of the cache."""

    def __init__(self, topics: Topics, slots: int) -> None:
        self.cache = FetchSessionCache(
            Subscriptions(), AdoptedPolicy(slots), lambda: secrets.randbelow((1 << 31) - 1) + 1
        )
        self._topics = topics
        self._seen: dict[bytes, _Seen] = {}

    async def fetch(
        self,
        request: m.FetchRequest,
        client_id: str,
        reader: FakeReader,
        wait: Callable[[asyncio.Event, float], Awaitable[bool]],
    ) -> m.FetchResponse:
        """Handle one fetch: respond when it is complete, or after its `max_wait_ms`.

        `wait(woken, seconds)` waits for `woken` or another change, and returns False when the fetch must respond.
        """
        self._mark_changes()
        fetch = self.cache.begin(request, client_id, _now_ms())
        deadline = time.monotonic() + request.max_wait_ms / 1000
        woken = asyncio.Event()
        try:
            fetch.read(reader)
            if not fetch.is_complete and request.max_wait_ms > 0:
                fetch.wait(woken.set)
                may_wait = True
                while may_wait and not fetch.is_complete:
                    may_wait = await wait(woken, deadline - time.monotonic())
                    woken.clear()
                    self._mark_changes()
                    fetch.read(reader)
            return fetch.respond(_now_ms())
        except asyncio.CancelledError:
            fetch.cancel()
            raise

    def list(self) -> list[m.FetchSession]:
        """Return all sessions for ListFetchSessions."""
        return [m.FetchSession(*each) for each in self.cache.list(_now_ms())]

    def mark_all_changed(self) -> None:
        """Mark all partitions known from earlier fetches as changed, so that incremental fetches return them."""
        for key, (name, *_) in self._seen.items():
            self.cache.subscriptions.changed(key, name, LEADERSHIP)

    # -- changes that clients do not request

    def evict(self, session_id: int | None = None) -> None:
        """Remove a session, or all sessions if `session_id` is None, as an eviction does. Ignores an unknown id."""
        for each in [one.session_id for one in self.cache.list(0)] if session_id is None else [session_id]:
            self._begin(each, -1).cancel()

    def overtake(self, session_id: int | None = None) -> None:
        """Use the next epoch of a session, or of all if `session_id` is None, as another client would.

        The real client's next fetch then has an outdated epoch. Ignores an unknown id.
        """
        for one in list(self.cache.list(0)):
            if session_id in (None, one.session_id):
                self._begin(one.session_id, one.epoch).cancel()

    def _begin(self, session_id: int, epoch: int) -> Fetch:
        return self.cache.begin(m.FetchRequest(session_id=session_id, session_epoch=epoch), "fault", _now_ms())

    # -- events

    def _mark_changes(self) -> None:
        seen = dict(self._positions())
        for key, now in seen.items():
            before = self._seen.get(key)
            if before != now:
                self.cache.subscriptions.changed(key, now[0], _change(before, now))
        for key, before in self._seen.items():
            if key not in seen:
                self.cache.subscriptions.changed(key, before[0], LEADERSHIP)
        self._seen = seen

    def _positions(self) -> Iterator[tuple[bytes, _Seen]]:
        for topic in self._topics.values():
            for index, each in enumerate(topic.partitions):
                key = partition_key(topic.topic_id, index)
                followers = repr(each.followers) if each.followers else ""
                seen = topic.name, each.end_offset, each.log_start_offset, each.leader_id, each.leader_epoch
                yield key, (*seen, followers)


def _change(before: _Seen | None, now: _Seen) -> int:
    if before is None or before[3:] != now[3:] or now[1] < before[1]:
        return LEADERSHIP
    change = LOG_END | HIGH_WATERMARK if now[1] != before[1] else 0
    return change | (LOG_START if now[2] != before[2] else 0)


def _now_ms() -> int:
    return int(time.monotonic() * 1000)
