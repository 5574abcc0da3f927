"""The asynchronous consumer. Returns records or raw batches of the assigned partitions in offset order.

`assign` selects partitions. `subscribe` selects topics: all their partitions, or with `group.id` the partitions that
the group assigns (`kipmesh.client.consumer.group`). One task at a time may poll. Returned records advance the position;
a cancelled `poll` loses none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kipmesh.client import arguments
from kipmesh.client.calls import raise_failure
from kipmesh.client.cluster import Client, Cluster, parse_config
from kipmesh.client.consumer.broker_fetches import Blocked, Chunk, PartitionState
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
    """Consumes records. Use `async with`, or `start` and `close`. Belongs to one event loop.

    `config` takes Kafka's consumer settings with dots or underscores; the constructor raises InvalidConfigError.
    `pause`, `resume`, `position`, `high_watermark` and the seek methods raise ValueError for a partition that is not
    assigned. Methods that contact the cluster raise RuntimeError unless the consumer is started and not closed.
    Arguments of a wrong type raise TypeError.
    """

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
        """Connect to the cluster.

        Raises KafkaError if no bootstrap server responds within `request.timeout.ms`, and RuntimeError if the consumer
        was started or closed before.
        """
        if self._started or self._closed:
            raise RuntimeError("consumer was already started; create a new one")
        self._metadata.listeners.append(self._on_metadata)
        try:
            await self._cluster.start(self.config.request_timeout_ms / 1000)
        except BaseException:
            self._closed = True
            raise
        self._started = True
        self._fetcher.start()

    async def close(self, *, commit: bool = True, leave: bool = True) -> None:
        """Commit and leave the group, close the fetch sessions and disconnect. Idempotent.

        Takes up to one second, plus up to ten seconds for a group member. `commit` applies only with
        `enable.auto.commit`; a failed commit is only logged. Without `leave`, and for a static member, the group keeps
        the partitions assigned until `session.timeout.ms`. Raises exceptions of the rebalance listener.
        """
        if not self._closed:
            self._closed = True
            self._fetcher.arrived.set()
            try:
                if self._group is not None and self._started:
                    self._leaving = True  # lets the rebalance listener commit revoked partitions
                    await self._group.close(commit=commit, leave=leave)
            finally:
                self._leaving = False
                try:
                    await self._fetcher.close()
                finally:
                    await self._cluster.close()

    # -- assignment

    def assign(self, partitions: Partitions) -> None:
        """Consume exactly these partitions. Partitions that were already assigned keep their position.

        Unlike in Kafka, the others start according to `auto.offset.reset`, not at the offsets committed by `group.id`.
        Raises ValueError if the consumer has subscribed as a member of a group.
        """
        if self._group is not None and self._group.is_subscribed:
            raise ValueError("cannot assign partitions after subscribing in a group; use another consumer")
        self._topics = None
        wanted = arguments.topic_partitions(partitions)
        self._track({topic_partition.topic for topic_partition in wanted})
        self._fetcher.assign(wanted)
        self._on_metadata()

    def subscribe(self, topics: Iterable[str], listener: RebalanceListener | None = None) -> None:
        """Consume all partitions of these topics. Partitions that are added later start at their beginning.

        Replaces an earlier subscription or assignment. With `group.id` the partitions are shared with the group; `poll`
        assigns and revokes them and calls `listener`. Raises ValueError for a listener without `group.id`.
        """
        wanted = tuple(dict.fromkeys(arguments.names("topics", topics)))
        if self._group is not None:
            self._topics = None
            self._track(set(wanted))
            self._group.subscribe(wanted, listener)
            return
        if listener is not None:
            raise ValueError("a rebalance listener requires group.id")
        self._topics = wanted
        self._seen_topics.clear()
        self._track(set(self._topics))
        self._fetcher.assign(
            [topic_partition for topic_partition in self._fetcher.states if topic_partition.topic in self._topics]
        )
        self._on_metadata()

    def _track(self, topics: set[str]) -> None:
        for topic in self._tracked - topics:
            self._metadata.forget(topic)
        for topic in topics:
            self._metadata.track(topic)
        self._tracked = topics

    def assignment(self) -> list[TopicPartition]:
        """Return the assigned partitions, sorted."""
        return sorted(self._fetcher.states)

    def pause(self, partitions: Partitions) -> None:
        """Stop fetching and returning records of these partitions until `resume`. Their positions are kept."""
        for state in self._states(partitions):
            self._fetcher.pause(state)

    def resume(self, partitions: Partitions) -> None:
        """Fetch and return records of these partitions again. Partitions that are not paused are unaffected."""
        for state in self._states(partitions):
            self._fetcher.resume(state)
        self._fetcher.arrived.set()

    def paused(self) -> list[TopicPartition]:
        """Return the paused partitions among the assigned ones."""
        return [topic_partition for topic_partition, state in self._fetcher.states.items() if state.paused]

    # -- positions

    def seek(self, partition: tuple[str, int], offset: int) -> None:
        """Continue this partition at `offset`. Raises ValueError for an offset that is negative or exceeds int64.

        If the log does not have the offset, `auto.offset.reset` applies at a later poll.
        """
        arguments.check_integer("offset", offset)
        if not 0 <= offset <= MAX_INT64:
            raise ValueError(f"offset must be between 0 and {MAX_INT64}, got {offset}")
        for state in self._states([arguments.topic_partition(partition)]):
            state.seek(offset)
        self._fetcher.wake.set()

    def seek_to_beginning(self, partitions: Partitions | None = None) -> None:
        """Continue at the log start of these partitions (None: all assigned). A later poll looks up the offset."""
        self._reset(partitions, TIMESTAMP_EARLIEST)

    def seek_to_end(self, partitions: Partitions | None = None) -> None:
        """Continue at the high watermark of these partitions (None: all assigned). A later poll looks up the offset."""
        self._reset(partitions, TIMESTAMP_LATEST)

    async def position(self, partition: tuple[str, int]) -> int:
        """Return the offset of the next record of this partition, waiting until it is known.

        Raises KafkaError: REQUEST_TIMED_OUT after `default.api.timeout.ms`; immediately, an error of the topic or of
        the partition, such as OFFSET_OUT_OF_RANGE without `auto.offset.reset`.
        """
        wanted = [arguments.topic_partition(partition)]
        timeout_s = self.config.default_api_timeout_ms / 1000
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            self._check_open()
            (state,) = self._states(wanted)
            if state.position is not None:
                return state.position
            if state.buffer and not isinstance(state.buffer[0], Chunk):
                first = state.buffer[0]
                error = state.blocking_error() if isinstance(first, Blocked) else first
                if error is not None:
                    raise error.with_traceback(None)
            self._check_topics()
            remaining_s = deadline - asyncio.get_running_loop().time()
            if remaining_s <= 0:
                text = f"no position of {partition[0]}-{partition[1]} within {timeout_s:g} s"
                raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, text)
            await self._wait(remaining_s)

    def high_watermark(self, partition: tuple[str, int]) -> int | None:
        """Return the highest high watermark received for the partition, or None before the first one.

        It decreases only after a truncation of the log. Sends no request.
        """
        (state,) = self._states([arguments.topic_partition(partition)])
        return state.reader.high_watermark if state.reader.high_watermark >= 0 else None

    async def beginning_offsets(self, partitions: Partitions) -> dict[TopicPartition, int]:
        """Return the log start offset of each partition, which need not be assigned.

        Retriable errors are retried for `default.api.timeout.ms`, then raised as KafkaError; others are raised
        immediately. UNKNOWN_TOPIC_OR_PARTITION means that the topic or partition does not exist.
        """
        return await self._list_offsets(partitions, TIMESTAMP_EARLIEST)

    async def end_offsets(self, partitions: Partitions) -> dict[TopicPartition, int]:
        """Return the high watermark of each partition, which need not be assigned.

        Retriable errors are retried for `default.api.timeout.ms`, then raised as KafkaError; others are raised
        immediately.
        """
        return await self._list_offsets(partitions, TIMESTAMP_LATEST)

    async def offsets_for_times(
        self, timestamps: Mapping[tuple[str, int], int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return each partition's first record at or after its timestamp (ms since 1970), or None if there is none.

        The partitions need not be assigned. Retriable errors are retried for `default.api.timeout.ms`, then raised as
        KafkaError; others are raised immediately.
        """
        self._check_open()
        wanted = arguments.by_partition("timestamps", timestamps, arguments.TIMESTAMP)
        return await list_offsets(self._cluster, wanted, self.config.default_api_timeout_ms / 1000)

    async def partitions_for(self, topic: str) -> TopicMetadata:
        """Return a topic's metadata, requesting it if it is not cached.

        Raises KafkaError: UNKNOWN_TOPIC_OR_PARTITION if the topic does not exist, INVALID_TOPIC_EXCEPTION, or
        REQUEST_TIMED_OUT or NETWORK_EXCEPTION after `default.api.timeout.ms`.
        """
        self._check_open()
        arguments.check_text("topic", topic)
        return await self._metadata.wait_for_topic(topic, self.config.default_api_timeout_ms / 1000)

    @property
    def fetch_stats(self) -> FetchStats:
        """Fetch counters since the consumer started; `sessions` and `partitions` are current values."""
        return self._fetcher.stats

    @property
    def unreachable_s(self) -> float:
        """Seconds for which all metadata requests have failed; 0 if the last one succeeded."""
        return self._metadata.unreachable_s

    # -- committed offsets

    async def commit(self, offsets: Mapping[tuple[str, int], int] | None = None) -> None:
        """Commit these offsets for the group (None: the known positions of all assigned partitions) and wait for it.

        An offset is that of the next record to consume. Raises ValueError without `group.id`. Raises KafkaError:
        UNKNOWN_MEMBER_ID, ILLEGAL_GENERATION or REBALANCE_IN_PROGRESS if the member may have lost its partitions; other
        errors of the coordinator, after retries for `default.api.timeout.ms` if they are retriable.
        """
        self._check_open(or_leaving=True)
        wanted = None if offsets is None else arguments.by_partition("offsets", offsets)
        timeout_s = CLOSE_TIMEOUT_S if self._leaving else self.config.default_api_timeout_ms / 1000
        await self._membership.commit(wanted, timeout_s)

    async def committed(self, partitions: Partitions) -> dict[TopicPartition, int]:
        """Return the group's committed offsets of these partitions. Partitions without one are omitted.

        Raises KafkaError, after retries for `default.api.timeout.ms` if it is retriable, and ValueError without
        `group.id`.
        """
        self._check_open(or_leaving=True)
        wanted = arguments.topic_partitions(partitions)
        return await self._membership.coordinator.committed(wanted, self.config.default_api_timeout_ms / 1000)

    def group_metadata(self) -> ConsumerGroupMetadata:
        """Return the group id, generation (-1: not a member) and member id. Raises ValueError without `group.id`."""
        group = self._membership
        return ConsumerGroupMetadata(group.group_id, group.generation_id, group.member_id)

    @property
    def _membership(self) -> Membership:
        if self._group is None:
            raise ValueError("committed offsets require group.id")
        return self._group

    # -- records

    async def poll(self, timeout_ms: int = 0, max_records: int | None = None) -> list[ConsumerRecord]:
        """Return records as soon as there are any, or an empty list after `timeout_ms`.

        `max_records` is the maximum number, by default `max.poll.records`. For a group member this also joins the group
        and calls the rebalance listener, whose exceptions are raised. Raises KafkaError for non-retriable errors, for a
        missing topic and, without `auto.offset.reset`, for OFFSET_OUT_OF_RANGE; the consumer remains usable. Raises
        ValueError for `max_records` below 1.
        """
        if max_records is not None:
            arguments.check_integer("max_records", max_records)
        count_max = self.config.max_poll_records if max_records is None else max_records
        if count_max < 1:
            raise ValueError(f"max_records must be at least 1, got {count_max}")
        return await self._poll_until(lambda: self._take(count_max), timeout_ms)

    async def fetch_batches(self, timeout_ms: int = 0) -> list[FetchedBatches]:
        """Return all buffered records as raw batches, or an empty list after `timeout_ms`.

        Waits, joins the group and raises like `poll`. Decode the batches with `kipmesh.client.records.decode_columns`.
        """
        return await self._poll_until(self._take_batches, timeout_ms)

    async def _poll_until(self, take: Callable[[], Awaitable[list[T]]], timeout_ms: int) -> list[T]:
        loop = asyncio.get_running_loop()
        try:
            deadline = loop.time() + timeout_ms / 1000
        except TypeError:
            raise TypeError(f"timeout_ms must be a number of milliseconds, got {timeout_ms!r}") from None
        while True:
            self._check_open()
            if self._idle:  # yield before taking records, so that a loop of polls does not starve the fetcher
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
            remaining_s = deadline - loop.time()
            if remaining_s <= 0:
                return taken
            await self._wait(remaining_s)

    async def __aiter__(self) -> AsyncIterator[ConsumerRecord]:
        while True:
            for record in await self.poll(timeout_ms=60_000):
                yield record

    # -- internals

    def _check_open(self, *, or_leaving: bool = False) -> None:
        if (self._closed and not (or_leaving and self._leaving)) or not self._started:
            raise RuntimeError(
                f"consumer is {'closed' if self._closed else 'not started; call start or use async with'}"
            )
        raise_failure(self._fetcher.failure)
        raise_failure(self._metadata.failure)

    def _states(self, partitions: Partitions) -> list[PartitionState]:
        try:
            return [self._fetcher.states[each] for each in arguments.topic_partitions(partitions)]
        except KeyError as error:
            topic, partition = error.args[0]
            raise ValueError(f"partition {topic}-{partition} is not assigned") from None

    def _reset(self, partitions: Partitions | None, timestamp: int) -> None:
        for state in self._states(self._fetcher.states if partitions is None else partitions):
            state.reset(timestamp)
        self._fetcher.wake.set()

    async def _list_offsets(self, partitions: Partitions, timestamp: int) -> dict[TopicPartition, int]:
        self._check_open()
        wanted = dict.fromkeys(arguments.topic_partitions(partitions), timestamp)
        found = await list_offsets(self._cluster, wanted, self.config.default_api_timeout_ms / 1000)
        return {partition: record.offset if record is not None else 0 for partition, record in found.items()}

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
        self._drop_missing(topics)
        states = self._fetcher.states
        added: list[TopicPartition] = []
        for topic in topics:
            metadata = self._metadata.topic(topic)
            if metadata is not None:
                wanted = [TopicPartition(topic, partition) for partition in metadata.partitions]
                added.extend(topic_partition for topic_partition in wanted if topic_partition not in states)
        if added:
            self._fetcher.assign([*states, *added])
        for topic_partition in added:
            if topic_partition.topic in self._seen_topics:
                self._fetcher.states[topic_partition].reset(TIMESTAMP_EARLIEST)
        self._seen_topics.update(topic_partition.topic for topic_partition in added)

    def _drop_missing(self, topics: Iterable[str]) -> None:
        """Unassign partitions that a recreated topic lacks. Partitions of an unchanged topic never disappear."""
        known = {topic: self._metadata.topic(topic) for topic in topics}
        missing: set[TopicPartition] = set()
        for topic_partition, state in self._fetcher.states.items():
            metadata = known.get(topic_partition.topic)
            if metadata is None or topic_partition.partition in metadata.partitions:
                continue
            if metadata.topic_id and state.topic_id not in (b"", metadata.topic_id):
                missing.add(topic_partition)
        if missing:
            names = ", ".join([f"{topic}-{partition}" for topic, partition in sorted(missing)])
            log.warning("recreated topic lacks partitions partitions=%s", names)
            self._fetcher.assign(
                [topic_partition for topic_partition in self._fetcher.states if topic_partition not in missing]
            )

    def _check_topics(self) -> None:
        for topic in self._tracked:
            error = self._metadata.take_error(topic)
            if error is not None:
                raise error

    def _next(self) -> tuple[PartitionState, Chunk | Blocked | KafkaError] | None:
        """Return the first unpaused partition with a buffered item, and the item; None if there is none."""
        completed = self._fetcher.completed
        while completed:
            state = completed[0]
            if state.buffer and not state.paused and self._fetcher.states.get(state.topic_partition) is state:
                return state, state.buffer[0]
            completed.popleft().is_queued = False  # `resume` queues a paused partition again
        return None

    def _finish_item(self, state: PartitionState) -> None:
        state.drop_first()
        self._fetcher.completed.popleft()
        state.is_queued = bool(state.buffer)
        if state.is_queued:
            self._fetcher.completed.append(state)
        self._fetcher.delivered(state)
        self._idle = True
        self._fetcher.wake.set()

    def _raise_item(self, state: PartitionState, item: Blocked | KafkaError) -> None:
        """Remove the first buffered item, which is not a chunk, and raise its error if it still has one."""
        self._finish_item(state)
        error = state.blocking_error() if isinstance(item, Blocked) else item
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
                self._raise_item(state, item)
                continue
            generation = state.generation
            try:
                if not item.decodes_slowly:
                    decoded = item.decode(state, self.config.check_crcs)
                elif records:
                    break  # cancellation while decoding would lose the records taken so far
                else:
                    decoded = await asyncio.to_thread(item.decode, state, self.config.check_crcs)
            except KafkaError as error:
                if state.generation == generation:
                    self._fetcher.on_corrupt(state, item.node_id, error)
                continue
            if state.generation != generation:
                continue
            taken = item.take(state, decoded, count_max - len(records))
            records = taken if not records else records + taken
            if item.exhausted:
                self._finish_item(state)
        return records

    async def _take_batches(self) -> list[FetchedBatches]:
        batches: list[FetchedBatches] = []
        while (found := self._next()) is not None:
            state, item = found
            if not isinstance(item, Chunk):
                if batches:
                    break
                self._raise_item(state, item)
                continue
            batches.append(item.rest(state, state.topic_id))
            self._finish_item(state)
        return batches
