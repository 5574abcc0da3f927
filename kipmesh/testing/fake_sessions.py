"""Fetch sessions of a fake broker: the core of the real ones, over partitions that tests change as they like.

Nobody tells a fake broker what a test does to its partitions; so it compares all of them with what they were before
each read. That is O(partitions) and what the real broker must never do, but here it makes the rules of sessions hold
whatever a test does.
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
"""To whom a leader sends the reader, -1 for nobody."""
_Seen = tuple[str, int, int, int, int, str]


@dataclass(eq=False)
class FakeReader:
    """Reads for one fetch at a leader or follower. `served` finds a partition that this broker has, `broken` says which
    topics have an error, `prefers` whom the reader is sent to."""

    topics: Topics
    node_id: int
    served: Callable[[str, bytes, int, int], FakePartition | ErrorCode]
    broken: Callable[[str], ErrorCode]
    prefers: Preference

    def topic_name(self, topic_id: bytes) -> str:
        """The name of the topic, empty if there is none."""
        return next((topic.name for topic in self.topics.values() if topic.topic_id == topic_id), "")

    def read(
        self, topic: str, topic_id: bytes, asked: m.FetchPartition, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        """Whole batches, or an error."""
        name = self.topic_name(topic_id) if topic_id and not topic else topic
        index = asked.partition
        if topic_id and not name:
            return _error(index, ErrorCode.UNKNOWN_TOPIC_ID)
        broken = self.broken(name)
        if broken:
            return _error(index, broken)
        found = self.served(name, topic_id, index, asked.current_leader_epoch)
        if isinstance(found, ErrorCode):
            return _error(index, found, self._leader(name, index))
        end, start, told = found.end_offset, found.log_start_offset, found.end_offset
        follower = found.followers.get(self.node_id)
        if follower is not None:
            if follower.code is not None:
                return _error(index, follower.code)
            start = start if follower.log_start_offset is None else follower.log_start_offset
            end = end if follower.end_offset is None else follower.end_offset
            told = told if follower.told is None else follower.told
        data = m.PartitionData(index, 0, told, told, start)
        if follower is None:
            preferred = self.prefers(found)
            if preferred >= 0:
                return PartitionRead(data._replace(preferred_read_replica=preferred), completes_fetch=True)
        diverging = epoch_end(found, asked.last_fetched_epoch) if asked.last_fetched_epoch >= 0 else None
        if diverging is not None and follower is None and start <= diverging.end_offset < asked.fetch_offset:
            return PartitionRead(data._replace(diverging_epoch=diverging), completes_fetch=True)
        code = offset_case(
            asked.fetch_offset,
            log_start_offset=start,
            log_end_offset=end,
            high_watermark=min(end, told),
            leader_high_watermark=told,
        ).error_code
        if code:
            return PartitionRead(data._replace(error_code=code), completes_fetch=True)
        records: list[bytes] = []
        is_cut = False
        for header, batch in found.batches:
            if header.next_offset <= asked.fetch_offset:
                continue
            if header.next_offset > min(end, told):
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
    """The sessions of one broker between its start and its stop."""

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
        """One fetch. `wait(woken, seconds)` returns when something may have happened; False: answer now."""
        self._notice()
        fetch = self.cache.begin(request, client_id, _now_ms())
        deadline = time.monotonic() + request.max_wait_ms / 1000
        woken = asyncio.Event()
        try:
            fetch.read(reader)
            if not fetch.is_complete and request.max_wait_ms > 0:
                fetch.wait(woken.set)
                goes_on = True
                while goes_on and not fetch.is_complete:
                    goes_on = await wait(woken, deadline - time.monotonic())
                    woken.clear()
                    self._notice()
                    fetch.read(reader)
            return fetch.respond(_now_ms())
        except asyncio.CancelledError:
            fetch.cancel()
            raise

    def list(self) -> list[m.FetchSession]:
        """What there is, for ListFetchSessions."""
        return [m.FetchSession(*each) for each in self.cache.list(_now_ms())]

    def disturb(self) -> None:
        """Every partition may answer otherwise than before."""
        for key, (name, *_) in self._seen.items():
            self.cache.subscriptions.changed(key, name, LEADERSHIP)

    # -- what may happen to sessions behind their clients' backs

    def evict(self, session_id: int | None = None) -> None:
        """Sessions are gone, as after an eviction: this one or all."""
        for each in [one.session_id for one in self.cache.list(0)] if session_id is None else [session_id]:
            self._begin(each, -1).cancel()

    def overtake(self, session_id: int | None = None) -> None:
        """Somebody else used the next epoch of this session, or of all."""
        for one in list(self.cache.list(0)):
            if session_id in (None, one.session_id):
                self._begin(one.session_id, one.epoch).cancel()

    def _begin(self, session_id: int, epoch: int) -> Fetch:
        return self.cache.begin(m.FetchRequest(session_id=session_id, session_epoch=epoch), "fault", _now_ms())

    # -- events

    def _notice(self) -> None:
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
