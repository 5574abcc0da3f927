"""The asynchronous consumer: positions, and records or raw batches of the assigned partitions in offset order.

Partitions are given with `assign`, or topics with `subscribe`, which takes all their partitions; with `group.id` it
shares them with the other members of that group (`kipmesh.client.consumer.group`). One task at a time may poll. Records
that `poll` returned count as read; a cancelled `poll` loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kipmesh.client.calls import raise_failure
from kipmesh.client.cluster import Client, Cluster, parse_config
from kipmesh.client.consumer.broker_fetches import AskUser, Chunk, PartitionState
from kipmesh.client.consumer.fetcher import Fetcher
from kipmesh.client.consumer.group import CLOSE_TIMEOUT_S, ConsumerGroupMetadata, Membership, RebalanceListener
from kipmesh.client.consumer.replica_selection import rack_in_metadata
from kipmesh.client.offsets import list_offsets
from kipmesh.client.types import (
    TIMESTAMP_EARLIEST,
    TIMESTAMP_LATEST,
    ConsumerRecord,
    FetchedBatches,
    FetchStats,
    OffsetAndTimestamp,
    TopicMetadata,
    TopicPartition,
)
from kipmesh.core.config import ConsumerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages.schema import MAX_INT64

T = TypeVar("T")
Partitions = Iterable[tuple[str, int]]

log = logging.getLogger(__name__)


class Consumer(Client):
    """Reads records. Use `async with`, or `start` and `close`; one event loop."""

    def __init__(self, bootstrap: str | Sequence[str], **config: Any) -> None:
        self.config = parse_config(ConsumerConfig, config)
        self._cluster = Cluster(bootstrap, self.config, "kipmesh-consumer", rack_id=rack_in_metadata(self.config))
        self._metadata = self._cluster.metadata
        self._fetcher = Fetcher(self.config, self._cluster)
        self._group = None
        if self.config.group_id is not None:
            self._group = Membership(self.config, self._cluster, self._fetcher)
        self._topics: tuple[str, ...] | None = None
        self._seen_topics: set[str] = set()
        self._tracked: set[str] = set()
        self._started = self._closed = self._leaving = False
        self._idle = False

    async def start(self) -> None:
        """Connect; raises KafkaError when no bootstrap address answers."""
        if self._started or self._closed:
            raise RuntimeError("a consumer starts once")
        self._metadata.listeners.append(self._on_metadata)
        try:
            await self._cluster.start(self.config.request_timeout_ms / 1000)
        except BaseException:
            self._closed = True
            raise
        self._started = True
        self._fetcher.start()

    async def close(self, *, commit: bool = True, leave: bool = True) -> None:
        """Stop, end the fetch sessions and disconnect; a second at most for brokers that are gone. May be repeated.

        A member of a group commits, where `enable.auto.commit` says so, and leaves before, for which it takes up to ten
        seconds more. Without `commit` what was read since the last commit is read again; without `leave` the group
        waits for `session.timeout.ms`, as if the process had died.
        """
        if not self._closed:
            self._closed = True
            self._fetcher.arrived.set()
            try:
                if self._group is not None and self._started:
                    self._leaving = True  # a listener that is told what goes may still commit it
                    await self._group.close(commit=commit, leave=leave)
            finally:
                self._leaving = False
                try:
                    await self._fetcher.close()
                finally:
                    await self._cluster.close()

    # -- what to read

    def assign(self, partitions: Partitions) -> None:
        """Read exactly these partitions; those that were assigned before keep their position."""
        if self._group is not None and self._group.is_subscribed:
            raise ValueError("a member of a group has what the group assigns: use another consumer")
        self._topics = None
        wanted = [TopicPartition(topic, partition) for topic, partition in partitions]
        self._track({where.topic for where in wanted})
        self._fetcher.assign(wanted)
        self._on_metadata()

    def subscribe(self, topics: Iterable[str], listener: RebalanceListener | None = None) -> None:
        """Read all partitions of these topics, those that are added later from their beginning.

        With `group.id`: share them with the group. Partitions come and go within `poll`; `listener` is told.
        """
        if isinstance(topics, str):
            raise TypeError("subscribe takes a list of topics")
        if self._group is not None:
            wanted = tuple(dict.fromkeys(topics))
            self._topics = None
            self._track(set(wanted))
            self._group.subscribe(wanted, listener)
            return
        if listener is not None:
            raise ValueError("a listener to rebalances needs group.id")
        self._topics = tuple(dict.fromkeys(topics))
        self._seen_topics.clear()
        self._track(set(self._topics))
        self._fetcher.assign([where for where in self._fetcher.states if where.topic in self._topics])
        self._on_metadata()

    def _track(self, topics: set[str]) -> None:
        for topic in self._tracked - topics:
            self._metadata.forget(topic)
        for topic in topics:
            self._metadata.track(topic)
        self._tracked = topics

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are read now."""
        return sorted(self._fetcher.states)

    def pause(self, partitions: Partitions) -> None:
        """Return no records of these until `resume`."""
        for state in self._states(partitions):
            self._fetcher.pause(state)

    def resume(self, partitions: Partitions) -> None:
        """Return records of these again."""
        for state in self._states(partitions):
            self._fetcher.resume(state)
        self._fetcher.arrived.set()

    def paused(self) -> list[TopicPartition]:
        """Partitions that `pause` was called for."""
        return [where for where, state in self._fetcher.states.items() if state.paused]

    # -- positions

    def seek(self, partition: tuple[str, int], offset: int) -> None:
        """Go on at `offset`."""
        if not 0 <= offset <= MAX_INT64:
            raise ValueError(f"an offset is between 0 and {MAX_INT64}")
        for state in self._states([partition]):
            state.seek(offset)
        self._fetcher.wake.set()

    def seek_to_beginning(self, partitions: Partitions | None = None) -> None:
        """Go on at the first record of these (or all) partitions; found at the next poll."""
        self._reset(partitions, TIMESTAMP_EARLIEST)

    def seek_to_end(self, partitions: Partitions | None = None) -> None:
        """Go on after the last record of these (or all) partitions; found at the next poll."""
        self._reset(partitions, TIMESTAMP_LATEST)

    async def position(self, partition: tuple[str, int]) -> int:
        """The offset of the next record that `poll` returns of this partition."""
        timeout_s = self.config.default_api_timeout_ms / 1000
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            self._check_open()
            (state,) = self._states([partition])
            if state.position is not None:
                return state.position
            if state.buffer and not isinstance(state.buffer[0], Chunk):
                first = state.buffer[0]
                error = state.ask_user() if isinstance(first, AskUser) else first
                if error is not None:
                    raise error.with_traceback(None)
            self._check_topics()
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"position of {partition} within {timeout_s} s")
            await self._wait(left)

    def high_watermark(self, partition: tuple[str, int]) -> int | None:
        """The high watermark in the partition's last answer; None before there is one."""
        (state,) = self._states([partition])
        return state.reader.high_watermark if state.reader.high_watermark >= 0 else None

    async def beginning_offsets(self, partitions: Partitions) -> dict[TopicPartition, int]:
        """The first offset of each."""
        return await self._ends(partitions, TIMESTAMP_EARLIEST)

    async def end_offsets(self, partitions: Partitions) -> dict[TopicPartition, int]:
        """The offset after the last record of each."""
        return await self._ends(partitions, TIMESTAMP_LATEST)

    async def offsets_for_times(
        self, timestamps: Mapping[tuple[str, int], int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first record of each partition whose timestamp is at least so many ms; None where there is none."""
        self._check_open()
        wanted = {TopicPartition(*where): timestamp for where, timestamp in timestamps.items()}
        return await list_offsets(self._cluster, wanted, self.config.default_api_timeout_ms / 1000)

    async def partitions_for(self, topic: str) -> TopicMetadata:
        """A topic's metadata; raises KafkaError for one that does not exist."""
        self._check_open()
        return await self._metadata.wait_for_topic(topic, self.config.default_api_timeout_ms / 1000)

    @property
    def fetch_stats(self) -> FetchStats:
        """Fetch sessions that are open, and what was fetched with and without them since the start."""
        return self._fetcher.stats

    @property
    def unreachable_s(self) -> float:
        """For how long no broker has answered, though one was asked; 0 when all is well, or nobody is asked."""
        return self._metadata.unreachable_s

    # -- the group's offsets

    async def commit(self, offsets: Mapping[tuple[str, int], int] | None = None) -> None:
        """Commit for the group the positions of all assigned partitions, or these offsets; raises KafkaError."""
        self._check_open(or_leaving=True)
        given = None if offsets is None else {TopicPartition(*where): offset for where, offset in offsets.items()}
        timeout_s = CLOSE_TIMEOUT_S if self._leaving else self.config.default_api_timeout_ms / 1000
        await self._membership.commit(given, timeout_s)

    async def committed(self, partitions: Partitions) -> dict[TopicPartition, int]:
        """The group's committed offsets of these; partitions without one are left out."""
        self._check_open(or_leaving=True)
        wanted = [TopicPartition(*where) for where in partitions]
        return await self._membership.coordinator.committed(wanted, self.config.default_api_timeout_ms / 1000)

    def group_metadata(self) -> ConsumerGroupMetadata:
        """What the group knows this consumer by: its generation and member id, -1 and empty outside."""
        group = self._membership
        return ConsumerGroupMetadata(group.group_id, group.generation_id, group.member_id)

    @property
    def _membership(self) -> Membership:
        if self._group is None:
            raise ValueError("offsets are committed for a group: set group.id")
        return self._group

    # -- records

    async def poll(self, timeout_ms: int = 0, max_records: int | None = None) -> list[ConsumerRecord]:
        """Records, as soon as there are any; an empty list when there are none within `timeout_ms`.

        Raises KafkaError for what retries do not cure; the next poll tries again.
        """
        count_max = self.config.max_poll_records if max_records is None else max_records
        if count_max < 1:
            raise ValueError("max_records is at least 1")
        return await self._until_some(lambda: self._take(count_max), timeout_ms)

    async def fetch_batches(self, timeout_ms: int = 0) -> list[FetchedBatches]:
        """All that is fetched and not read yet, as raw batches; waits like `poll`. Decode with `decode_columns`."""
        return await self._until_some(self._take_batches, timeout_ms)

    async def _until_some(self, take: Callable[[], Awaitable[list[T]]], timeout_ms: int) -> list[T]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_ms / 1000
        while True:
            self._check_open()
            if self._idle:  # before anything is in a poll's hands: a loop of polls must not starve the fetcher
                self._idle = False
                await asyncio.sleep(0)
            self._fetcher.arrived.clear()
            if self._group is not None:
                await self._group.advance(max(deadline - loop.time(), 0))
            taken = await take()
            if taken:
                return taken
            self._check_open()
            self._check_topics()
            self._idle = True
            left = deadline - loop.time()
            if left <= 0:
                return taken
            await self._wait(left)

    async def __aiter__(self) -> AsyncIterator[ConsumerRecord]:
        while True:
            for record in await self.poll(timeout_ms=60_000):
                yield record

    # -- inside

    def _check_open(self, *, or_leaving: bool = False) -> None:
        if (self._closed and not (or_leaving and self._leaving)) or not self._started:
            raise RuntimeError("the consumer is closed" if self._closed else "the consumer is not started")
        raise_failure(self._fetcher.failure)
        raise_failure(self._metadata.failure)

    def _states(self, partitions: Partitions) -> list[PartitionState]:
        try:
            return [self._fetcher.states[TopicPartition(*where)] for where in partitions]
        except KeyError as error:
            raise ValueError(f"partition {error.args[0]} is not assigned") from None

    def _reset(self, partitions: Partitions | None, timestamp: int) -> None:
        for state in self._states(self._fetcher.states if partitions is None else partitions):
            state.reset(timestamp)
        self._fetcher.wake.set()

    async def _ends(self, partitions: Partitions, timestamp: int) -> dict[TopicPartition, int]:
        self._check_open()
        wanted = {TopicPartition(*where): timestamp for where in partitions}
        found = await list_offsets(self._cluster, wanted, self.config.default_api_timeout_ms / 1000)
        return {where: place.offset if place is not None else 0 for where, place in found.items()}

    async def _wait(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._fetcher.arrived.wait()
        except TimeoutError:
            pass
        self._fetcher.arrived.clear()

    def _on_metadata(self) -> None:
        if self._topics is not None:
            self._add_partitions(self._topics)
        self._fetcher.on_metadata()

    def _add_partitions(self, topics: Iterable[str]) -> None:
        self._drop_partitions(topics)
        states = self._fetcher.states
        added: list[TopicPartition] = []
        for topic in topics:
            metadata = self._metadata.topic(topic)
            if metadata is not None:
                wanted = [TopicPartition(topic, partition) for partition in metadata.partitions]
                added.extend(where for where in wanted if where not in states)
        if added:
            self._fetcher.assign([*states, *added])
        for where in added:
            if where.topic in self._seen_topics:
                self._fetcher.states[where].reset(TIMESTAMP_EARLIEST)
        self._seen_topics.update(where.topic for where in added)

    def _drop_partitions(self, topics: Iterable[str]) -> None:
        """Partitions that a recreated topic has no more. Of the same topic none is dropped: who says so lags behind."""
        known = {topic: self._metadata.topic(topic) for topic in topics}
        gone: set[TopicPartition] = set()
        for where, state in self._fetcher.states.items():
            metadata = known.get(where.topic)
            if metadata is None or where.partition in metadata.partitions:
                continue
            if metadata.topic_id and state.topic_id not in (b"", metadata.topic_id):
                gone.add(where)
        if gone:
            names = ", ".join([f"{topic}-{partition}" for topic, partition in sorted(gone)])
            log.warning("partitions that a recreated topic has no more: %s", names)
            self._fetcher.assign([where for where in self._fetcher.states if where not in gone])

    def _check_topics(self) -> None:
        for topic in self._tracked:
            error = self._metadata.take_error(topic)
            if error is not None:
                raise error

    def _next(self) -> tuple[PartitionState, Chunk | AskUser | KafkaError] | None:
        """The first partition in turn that has something to take."""
        completed = self._fetcher.completed
        while completed:
            state = completed[0]
            if state.buffer and not state.paused and self._fetcher.states.get(state.where) is state:
                return state, state.buffer[0]
            completed.popleft().listed = False  # one that is paused comes back with `resume`
        return None

    def _taken(self, state: PartitionState) -> None:
        state.drop_first()
        self._fetcher.completed.popleft()
        state.listed = bool(state.buffer)
        if state.listed:
            self._fetcher.completed.append(state)
        self._fetcher.delivered(state)
        self._idle = True
        self._fetcher.wake.set()

    def _handle(self, state: PartitionState, item: AskUser | KafkaError) -> None:
        """Something else than records is next: raises it."""
        self._taken(state)
        error = state.ask_user() if isinstance(item, AskUser) else item
        if error is not None:
            raise error.with_traceback(None)

    async def _take(self, count_max: int) -> list[ConsumerRecord]:
        records: list[ConsumerRecord] = []
        while len(records) < count_max:
            found = self._next()
            if found is None:
                break
            state, item = found
            if not isinstance(item, Chunk):
                if records:
                    break
                self._handle(state, item)
                continue
            generation = state.generation
            try:
                if not item.decodes_slowly:
                    decoded = item.decode(state, self.config.check_crcs)
                elif records:
                    break  # a cancelled poll would lose them
                else:
                    decoded = await asyncio.to_thread(item.decode, state, self.config.check_crcs)
            except KafkaError as error:
                if state.generation == generation:
                    self._fetcher.corrupt(state, item.node_id, error)
                continue
            if state.generation != generation:
                continue
            taken = item.take(state, decoded, count_max - len(records))
            records = taken if not records else records + taken
            if item.exhausted:
                self._taken(state)
        return records

    async def _take_batches(self) -> list[FetchedBatches]:
        batches: list[FetchedBatches] = []
        while (found := self._next()) is not None:
            state, item = found
            if not isinstance(item, Chunk):
                if batches:
                    break
                self._handle(state, item)
                continue
            batches.append(item.rest(state, state.topic_id))
            self._taken(state)
        return batches
