"""In-memory partitions, a server that keeps the contract of `kipmesh.core.fetch_session.server`, and clients.

Each record is one batch: length, offset, leader epoch and a unique number. `World.read` reads a partition without a
session. Tests use it as the oracle.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session import (
    HIGH_WATERMARK,
    LEADERSHIP,
    LOG_END,
    LOG_START,
    AdoptedPolicy,
    Fetch,
    FetchSessionCache,
    FetchSessionHandler,
    PartitionRead,
    SessionRequest,
    Subscriptions,
    partition_key,
)
from kipmesh.core.fetch_session.policy import EvictionPolicy
from kipmesh.core.replica.follower import has_diverged
from kipmesh.messages import (
    EpochEndOffset,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
    PartitionData,
)

RECORD = struct.Struct("<iqiq")
MORE = 1 << 30


def records_in(data: bytes) -> list[tuple[int, int, int]]:
    """Return (offset, leader epoch, number) of each record."""
    found, position = [], 0
    while position < len(data):
        size, offset, epoch, number = RECORD.unpack_from(data, position)
        found.append((offset, epoch, number))
        position += size
    return found


@dataclass
class Partition:
    topic: str
    topic_id: bytes
    number: int
    log: list[tuple[int, int, int]] = field(default_factory=list)
    """(leader epoch, number, size) by offset."""
    log_start: int = 0
    high_watermark: int = 0
    leader_epoch: int = 0
    is_leader: bool = True

    @property
    def key(self) -> bytes:
        return partition_key(self.topic_id, self.number)

    @property
    def log_end(self) -> int:
        return len(self.log)

    def end_of_epoch(self, epoch: int) -> EpochEndOffset:
        known = [(record[0], offset + 1) for offset, record in enumerate(self.log) if record[0] <= epoch]
        return EpochEndOffset(*known[-1]) if known else EpochEndOffset(epoch, 0)


class World:
    """All partitions, and the subscriptions to their changes."""

    def __init__(self) -> None:
        self.partitions: dict[tuple[bytes, int], Partition] = {}
        self.ids: dict[str, bytes] = {}
        self.subscriptions = Subscriptions()
        self._numbers = itertools.count(1)
        self._ids = itertools.count(1)
        self.reads = 0

    def create(self, topic: str, partitions: int) -> bytes:
        topic_id = next(self._ids).to_bytes(16, "big")
        self.ids[topic] = topic_id
        for number in range(partitions):
            self.partitions[topic_id, number] = Partition(topic, topic_id, number)
        return topic_id

    def delete(self, topic: str) -> None:
        topic_id = self.ids.pop(topic)
        for key in [key for key in self.partitions if key[0] == topic_id]:
            self.notify(self.partitions.pop(key), LEADERSHIP)

    def get(self, topic: str, number: int) -> Partition:
        return self.partitions[self.ids[topic], number]

    def notify(self, partition: Partition, change: int) -> None:
        self.subscriptions.changed(partition.key, partition.topic, change)

    def append(self, partition: Partition, count: int = 1, size: int = 30) -> None:
        for _ in range(count):
            partition.log.append((partition.leader_epoch, next(self._numbers), max(size, RECORD.size)))
        self.notify(partition, LOG_END)

    def commit(self, partition: Partition, high_watermark: int | None = None) -> None:
        end = partition.log_end if high_watermark is None else min(high_watermark, partition.log_end)
        if end > partition.high_watermark:
            partition.high_watermark = end
            self.notify(partition, HIGH_WATERMARK)

    def delete_records(self, partition: Partition, offset: int) -> None:
        offset = min(offset, partition.high_watermark)
        if offset > partition.log_start:
            partition.log_start = offset
            self.notify(partition, LOG_START)

    def lead(self, partition: Partition, is_leader: bool, end: int | None = None) -> None:
        """Start a new leader epoch. `end` truncates the log, but never below the high watermark."""
        partition.leader_epoch += 1
        partition.is_leader = is_leader
        if end is not None:
            del partition.log[max(end, partition.high_watermark) :]
        self.notify(partition, LEADERSHIP)

    # -- reading

    def find(self, topic: str, topic_id: bytes, number: int) -> Partition | None:
        return self.partitions.get((topic_id or self.ids.get(topic, b"?"), number))

    def read(
        self,
        topic: str,
        topic_id: bytes,
        requested: FetchPartition,
        max_bytes: int = MORE,
        min_one_batch: bool = True,
        *,
        replica_id: int = -1,
        moves: bool = False,
    ) -> PartitionRead:
        partition = self.find(topic, topic_id, requested.partition)
        if partition is None:
            code = ErrorCode.UNKNOWN_TOPIC_ID if topic_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            return PartitionRead(PartitionData(requested.partition, code), completes_fetch=True)
        code = self._check(partition, requested)
        diverging = None
        if not code and requested.last_fetched_epoch >= 0:
            at_leader = partition.end_of_epoch(requested.last_fetched_epoch)
            if has_diverged(requested.fetch_offset, requested.last_fetched_epoch, at_leader):
                diverging = at_leader
        if not code and diverging is None and not partition.log_start <= requested.fetch_offset <= partition.log_end:
            code = ErrorCode.OFFSET_OUT_OF_RANGE
        if not code and diverging is None and replica_id >= 0 and moves:
            self.commit(partition, requested.fetch_offset)
        records, is_cut = b"", False
        if not code and diverging is None:
            end = partition.log_end if replica_id >= 0 else partition.high_watermark
            records = self._records(partition, requested.fetch_offset, end, max_bytes, min_one_batch)
            is_cut = requested.fetch_offset + len(records_in(records)) < end
        data = PartitionData(
            requested.partition,
            code,
            partition.high_watermark,
            partition.high_watermark,
            partition.log_start,
            diverging_epoch=diverging,
            records=records,
        )
        return PartitionRead(data, bool(code) or diverging is not None, is_cut)

    @staticmethod
    def _check(partition: Partition, requested: FetchPartition) -> ErrorCode:
        if requested.current_leader_epoch >= 0 and requested.current_leader_epoch != partition.leader_epoch:
            older = requested.current_leader_epoch < partition.leader_epoch
            return ErrorCode.FENCED_LEADER_EPOCH if older else ErrorCode.UNKNOWN_LEADER_EPOCH
        return ErrorCode.NONE if partition.is_leader else ErrorCode.NOT_LEADER_OR_FOLLOWER

    @staticmethod
    def _records(partition: Partition, offset: int, end: int, max_bytes: int, min_one_batch: bool) -> bytes:
        out = b""
        for at in range(offset, end):
            epoch, number, size = partition.log[at]
            if len(out) + size > max_bytes and (out or not min_one_batch):
                break
            out += RECORD.pack(size, at, epoch, number).ljust(size, b".")
        return out


class WorldReader:
    """Reads partitions for one request."""

    def __init__(self, world: World, replica_id: int) -> None:
        self._world = world
        self._replica_id = replica_id

    def read(
        self, topic: str, topic_id: bytes, requested: FetchPartition, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        self._world.reads += 1
        return self._world.read(
            topic, topic_id, requested, max_bytes, min_one_batch, replica_id=self._replica_id, moves=True
        )

    def topic_name(self, topic_id: bytes) -> str:
        return next((name for name, known in self._world.ids.items() if known == topic_id), "")


@dataclass(eq=False)
class Waiting:
    """A fetch that waits on the server."""

    fetch: Fetch
    request: FetchRequest
    reader: WorldReader
    done: Callable[[FetchResponse], None]
    is_woken: bool = False

    def wake(self) -> None:
        self.is_woken = True


class Server:
    """The broker's fetch handler with a manual clock. `run` and `expire` complete waiting fetches."""

    def __init__(self, world: World, policy: EvictionPolicy | None = None, **settings: int) -> None:
        self.world = world
        self.now_ms = 0
        self._ids = itertools.count(1000)
        self.cache = FetchSessionCache(
            world.subscriptions,
            policy or AdoptedPolicy(),
            lambda: next(self._ids),
            sessions_per_client_id=settings.get("quota", 0),
            partitions_max=settings.get("partitions_max", 1 << 20),
            wakes_on_high_watermark=bool(settings.get("wakes_on_high_watermark", 1)),
        )
        self.waiting: list[Waiting] = []

    def handle(self, request: FetchRequest, done: Callable[[FetchResponse], None], client_id: str = "") -> None:
        fetch = self.cache.begin(request, client_id, self.now_ms)
        reader = WorldReader(self.world, request.replica_id)
        fetch.read(reader)
        if fetch.is_complete or request.max_wait_ms <= 0:
            done(fetch.respond(self.now_ms))
            return
        waiting = Waiting(fetch, request, reader, done)
        fetch.wait(waiting.wake)
        self.waiting.append(waiting)

    def run(self) -> None:
        """Read for woken fetches until none is left."""
        while woken := [waiting for waiting in self.waiting if waiting.is_woken]:
            for waiting in woken:
                waiting.is_woken = False
                waiting.fetch.read(waiting.reader)
                if waiting.fetch.is_complete:
                    self._finish(waiting)

    def expire(self, waiting: Waiting) -> None:
        """Complete a fetch whose max_wait_ms has elapsed."""
        waiting.fetch.read(waiting.reader)
        self._finish(waiting)

    def _finish(self, waiting: Waiting) -> None:
        self.waiting.remove(waiting)
        waiting.done(waiting.fetch.respond(self.now_ms))

    def fetch(self, request: FetchRequest, client_id: str = "") -> FetchResponse:
        """Return the response to a request; a fetch that still waits expires."""
        responses: list[FetchResponse] = []
        self.handle(request, responses.append, client_id)
        self.run()
        for waiting in list(self.waiting):
            if waiting.request is request:
                self.expire(waiting)
        return responses[0]


def fetch_request(
    topics: list[FetchTopic] | None = None,
    session_id: int = 0,
    session_epoch: int = 0,
    forgotten: list[ForgottenTopic] | None = None,
    **fields: int,
) -> FetchRequest:
    return FetchRequest(
        session_id=session_id, session_epoch=session_epoch, topics=topics or [], forgotten_topics_data=forgotten or []
    )._replace(**fields)


def fetch_topic(world: World, topic: str, *numbers: int, offset: int = 0, max_bytes: int = MORE) -> FetchTopic:
    """Request partitions by topic id, all from the same offset."""
    partitions = [FetchPartition(number, fetch_offset=offset, partition_max_bytes=max_bytes) for number in numbers]
    return FetchTopic(topic, world.ids[topic], partitions)


def partitions_by_index(response: FetchResponse) -> dict[int, PartitionData]:
    """Return the partitions of a response by index."""
    return {data.partition_index: data for topic in response.responses for data in topic.partitions}


@dataclass
class View:
    """A client's state of one partition."""

    topic_id: bytes
    position: int = 0
    leader_epoch: int = -1
    records: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(leader epoch, number) by offset."""
    high_watermark: int = -1
    log_start: int = -1
    error: int = 0


class Client:
    """A consumer, or a follower if it has a replica id, that uses a FetchSessionHandler."""

    def __init__(self, world: World, replica_id: int = -1, by_name: bool = False, name: str = "") -> None:
        self.world = world
        self.replica_id = replica_id
        self.by_name = by_name
        self.name = name
        self.handler = FetchSessionHandler()
        self.views: dict[tuple[str, int], View] = {}
        self.left: dict[tuple[str, int], View] = {}
        """Partitions left since the last request. The server still has them, so their offsets stay valid."""
        self.max_bytes = MORE
        self.partition_max_bytes = MORE
        self.min_bytes = 1
        self.accepted = 0

    def follow(self, topic: str, number: int) -> None:
        """Follow a partition: from offset 0, or from the current position with current metadata."""
        topic_id = self.world.ids.get(topic, b"")
        view = self.views.get((topic, number))
        if view is not None and view.topic_id != topic_id:
            self.leave(topic, number)
            view = None
        if view is None:
            view = self.views[topic, number] = View(topic_id)
            left = self.left.pop((topic, number), None)
            if left is not None and left.topic_id == topic_id:
                view.high_watermark, view.log_start, view.error = left.high_watermark, left.log_start, left.error
        partition = self.world.find(topic, topic_id, number)
        if partition is not None:
            view.leader_epoch = partition.leader_epoch
        self._want(topic, number, view)

    def leave(self, topic: str, number: int) -> None:
        view = self.left[topic, number] = self.views.pop((topic, number))
        self.handler.unwant(topic, self._id(view), number)

    def _id(self, view: View) -> bytes:
        return b"" if self.by_name else view.topic_id

    def _want(self, topic: str, number: int, view: View) -> None:
        last = view.records.get(view.position - 1)
        fetched_epoch = -1 if self.replica_id < 0 or last is None else last[0]
        self.handler.want(
            topic,
            self._id(view),
            FetchPartition(number, view.leader_epoch, view.position, fetched_epoch, -1, self.partition_max_bytes),
        )

    def refresh(self) -> None:
        """Apply new metadata to all followed partitions."""
        for topic, number in list(self.views):
            self.follow(topic, number)

    def next(self, max_wait_ms: int = 100) -> tuple[SessionRequest, FetchRequest]:
        session = self.handler.next_request()
        self.left.clear()
        request = FetchRequest(
            replica_id=self.replica_id,
            max_wait_ms=max_wait_ms,
            min_bytes=self.min_bytes,
            max_bytes=self.max_bytes,
        )
        return session, session.fill(request)

    def apply(self, session: SessionRequest, response: FetchResponse, keeps_records: bool = True) -> int:
        """Apply a response and return its number of partitions. `keeps_records=False` drops records and epochs."""
        result = self.handler.handle_response(session, response)
        if not result.is_accepted:
            return 0
        self.accepted += 1
        for topic, topic_id, requested, data in result.partitions:
            view = self.views.get((topic, requested.partition))
            if view is None or self._id(view) != topic_id:
                continue
            assert data.partition_index == requested.partition
            if keeps_records or data.error_code:
                self._apply(view, requested, data)
            else:  # The client keeps the offsets and drops the records.
                view.high_watermark, view.log_start, view.error = data.high_watermark, data.log_start_offset, 0
            self._want(topic, requested.partition, view)
        return len(result.partitions)

    def _apply(self, view: View, requested: FetchPartition, data: PartitionData) -> None:
        view.error = data.error_code
        if data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE and view.position == requested.fetch_offset:
            view.position = max(data.log_start_offset, 0)
            view.records.clear()
        if data.error_code:
            return
        view.high_watermark, view.log_start = data.high_watermark, data.log_start_offset
        if view.position != requested.fetch_offset:
            return  # The position moved during the request.
        if data.diverging_epoch is not None:
            self._truncate(view, data.diverging_epoch)
            return
        for offset, epoch, number in records_in(data.records):
            assert offset == view.position, "a record was skipped or duplicated"
            view.records[offset] = epoch, number
            view.position += 1

    @staticmethod
    def _truncate(view: View, diverging: EpochEndOffset) -> None:
        own = [offset + 1 for offset, (epoch, _) in view.records.items() if epoch <= diverging.epoch]
        end = min(max(own, default=0), diverging.end_offset, view.position)
        view.records = {offset: record for offset, record in view.records.items() if offset < end}
        view.position = end
