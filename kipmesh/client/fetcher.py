"""Fetches ahead for the assigned partitions: the one task that decides what is asked, and of whom.

A partition is asked for while less than `max.partition.fetch.bytes` of it is buffered and less than `fetch.max.bytes`
of all; so the next answer is under way while the last one is read. Each broker has a fetch session and, for what cannot
wait for that, requests aside (`kipmesh.client.broker_fetches`). Partitions that returned records go to the back of the
order, so a byte limit cannot starve the others.

A step looks at the partitions that changed, not at all of them: only news of the metadata or the assignment make all of
them pass again. What is wanted in a session stays wanted until something about the partition changes.

Invariants: an assigned partition that is not in a session, request or line of a broker, not waiting for the reader and
not waiting for metadata is changed or unsettled (no position yet, not validated, backing off). Only an answer to what
the partition asks now counts: one from before a seek, reset, reassignment or change of leaders is thrown away, and the
broker says it again. Reads from followers (4 of 8) belong in `_choose_node`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from kipmesh.client.broker_fetches import BrokerFetches
from kipmesh.client.cluster import Cluster
from kipmesh.client.fetch_state import Chunk, Ledger, OutOfRange, PartitionState
from kipmesh.client.metadata import UNKNOWN_ANSWERS_MAX
from kipmesh.client.offsets import end_of_epochs_call, list_offsets_call
from kipmesh.client.supervision import task_failure
from kipmesh.client.types import (
    TIMESTAMP_EARLIEST,
    TIMESTAMP_LATEST,
    FetchStats,
    PartitionMetadata,
    TopicPartition,
)
from kipmesh.core.config import ConsumerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.fetch_session import Answered
from kipmesh.core.messages import EpochEndOffset, FetchPartition, NodeEndpoint, PartitionData

log = logging.getLogger(__name__)

CLOSE_SECONDS_MAX: Final = 1.0
"""Longest time for the brokers to hear that their sessions end."""

_RAISED = frozenset({ErrorCode.CORRUPT_MESSAGE})
"""Retriable errors that the reader still wants to know at once."""


class Fetcher:
    """Owns the states of the assigned partitions."""

    def __init__(self, config: ConsumerConfig, cluster: Cluster) -> None:
        self.states: dict[TopicPartition, PartitionState] = {}
        self.completed: deque[PartitionState] = deque()
        self.arrived = asyncio.Event()
        self.failure: KafkaError | None = None
        self._config = config
        self._cluster = cluster
        self._metadata = cluster.metadata
        self._ledger = Ledger()
        self._unsettled: dict[PartitionState, None] = {}
        self._brokers: dict[int, BrokerFetches] = {}
        self._past = FetchStats()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._looking_up = False
        self._validating = False

    def start(self) -> None:
        """Begin to fetch."""
        self._task = asyncio.create_task(self._run(), name="kipmesh-consumer")
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop, and tell the brokers that the sessions end (227-17); takes CLOSE_SECONDS_MAX at most."""
        if self._task is not None:
            self._task.cancel()
        try:
            await asyncio.gather(*[self._close_broker(each) for each in list(self._brokers.values())])
        finally:
            tasks = [*self._tasks, *([self._task] if self._task is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _close_broker(self, broker: BrokerFetches) -> None:
        await broker.close(CLOSE_SECONDS_MAX)

    @property
    def stats(self) -> FetchStats:
        """What was fetched how, all brokers together."""
        return sum((each.stats for each in self._brokers.values()), self._past)

    # -- from the consumer

    def wake(self) -> None:
        """Something changed: positions, pauses, buffers, metadata."""
        self._wake.set()

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Exactly these partitions; those that stay keep their position."""
        old = self.states
        self.states = {where: old.get(where) or PartitionState(*where, self._ledger) for where in partitions}
        for where, state in old.items():
            if where not in self.states:
                state.clear(None)
                if state.broker is not None:
                    state.broker.leave(state, is_unassigned=True)
        self._look_at_all()

    def _look_at_all(self) -> None:
        self._unsettled.clear()
        self._ledger.changed = dict.fromkeys(self.states.values())
        self.wake()

    def pause(self, state: PartitionState) -> None:
        """Neither fetch nor return records of the partition until `resume`."""
        state.paused = True
        self._ledger.changed[state] = None
        self.wake()

    def resume(self, state: PartitionState) -> None:
        """Fetch and return records of the partition again."""
        state.paused = False
        self._ledger.changed[state] = None
        if state.buffer:
            self._complete(state)
        self.wake()

    @property
    def buffered_bytes(self) -> int:
        """Bytes that are fetched and not taken."""
        return self._ledger.buffered_bytes

    def on_metadata(self) -> None:
        """Metadata changed: see who leads now, and whether topics are still the same."""
        for state in self.states.values():
            topic_id = self._cluster.topic_id(state.topic)
            if topic_id and topic_id != state.topic_id:
                if state.topic_id:
                    self._recreated(state)
                if state.broker is not None:
                    state.broker.withdraw(state)
                state.topic_id = topic_id
            epoch = self._cluster.leader_epoch(state.topic, state.partition)
            if epoch > state.leader_epoch:
                state.leader_epoch = epoch
                state.unvalidated = state.fetch_epoch >= 0 and state.fetch_offset is not None
                if state.unvalidated:
                    state.asked = None  # what is under way would move what is validated
                state.retry_at_s = 0.0
        self._look_at_all()
        self.arrived.set()

    def _recreated(self, state: PartitionState) -> None:
        log.warning("topic of %s-%d was recreated; position was %s", state.topic, state.partition, state.position)
        state.leader_epoch = -1
        position = state.position
        if self._policy() is None:
            state.clear(None)
            text = f"{state.topic}-{state.partition}: the topic was recreated; position {position} is of the old one"
            self._fail(state, KafkaError(ErrorCode.UNKNOWN_TOPIC_ID, text))
        elif position is not None or state.reset_to is None:
            # All its records are newer than this consumer, so `latest` wants them too.
            state.reset(TIMESTAMP_EARLIEST)

    def _policy(self) -> int | None:
        return {"earliest": TIMESTAMP_EARLIEST, "latest": TIMESTAMP_LATEST}.get(self._config.auto_offset_reset)

    def out_of_range(self, state: PartitionState, what: OutOfRange) -> KafkaError | None:
        """Reset as `auto.offset.reset` says; the error to raise where it says none."""
        log.info("%s-%d: %s", state.topic, state.partition, what)
        policy = self._policy()
        if policy is not None:
            state.reset(policy)
            self.wake()
            return None
        text = (
            f"{state.topic}-{state.partition}: offset {what.offset} is not between "
            f"{what.log_start_offset} and {what.high_watermark}"
        )
        return KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, text)

    # -- the task

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            delay_s = self._step(loop.time())
            try:
                async with asyncio.timeout(delay_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _step(self, now: float) -> float | None:
        """Start what can be started; the seconds until the next backoff is over."""
        lookups: dict[PartitionState, int] = {}
        validations: list[PartitionState] = []
        waiting: dict[PartitionState, None] = {}
        stale: set[str] = set()
        for state in self._unsettled | self._ledger.take_changed():
            if self._may_fetch(state, now, stale):
                continue  # an answer brings it here again
            if state.retry_at_s <= now:
                if state.position is None:
                    self._need_position(state, lookups)
                elif state.unvalidated:
                    validations.append(state)
                else:
                    continue  # the reader, or metadata, brings it here again
            waiting[state] = None
        self._unsettled = waiting
        if stale:
            self._metadata.request_refresh(stale)
        if lookups and not self._looking_up:
            self._looking_up = True
            self.spawn(self._look_up([(state, state.generation, when) for state, when in lookups.items()]))
        if validations and not self._validating:
            self._validating = True
            self.spawn(self._validate([(state, state.generation) for state in validations]))
        self._fetch_all(now)
        times = [state.retry_at_s for state in waiting if state.retry_at_s > now]
        for broker in self._brokers.values():
            times += [when for when in (broker.retry_at_s, broker.close_at_s) if when is not None and when > now]
        return min(times) - now if times else None

    def _may_fetch(self, state: PartitionState, now: float, stale: set[str]) -> bool:
        """Ask the partition's leader for it, if it is settled and wants more; otherwise ask no more."""
        known = None
        if self._is_fetchable(state, now):
            known = self._metadata.partition(state.topic, state.partition)
            if known is None:
                self._failed(state, KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
            elif known.leader_id not in self._metadata.brokers:
                stale.add(state.topic)
                known = None
        if known is None:
            if state.broker is not None:
                state.broker.withdraw(state)
            return False
        asked = FetchPartition(
            partition=state.partition,
            current_leader_epoch=known.leader_epoch,
            fetch_offset=state.fetch_offset or 0,
            partition_max_bytes=self._config.max_partition_fetch_bytes,
        )
        self._home(state, self._choose_node(known)).place(state, asked)
        return True

    def _home(self, state: PartitionState, node_id: int) -> BrokerFetches:
        broker = state.broker
        if broker is not None and broker.node_id == node_id:
            return broker
        if broker is not None:
            broker.leave(state)
        broker = self._brokers.get(node_id)
        if broker is None:
            broker = self._brokers[node_id] = BrokerFetches(node_id, self._config, self._cluster, self)
        broker.adopt(state)
        return broker

    def _fetch_all(self, now: float) -> None:
        for node_id, broker in list(self._brokers.items()):
            if broker.close_at_s is not None:
                if now < broker.close_at_s:
                    continue
                del self._brokers[node_id]
                self._past += replace(broker.stats, sessions=0, partitions=0)
                self.spawn(self._close_broker(broker))
            elif self._ledger.buffered_bytes < self._config.fetch_max_bytes:
                broker.send(now)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something whose unexpected end is the consumer's."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        failure = task_failure(task, "the consumer's fetching task")
        if failure is not None:
            self.failure = self.failure or failure
            self.arrived.set()

    def _is_fetchable(self, state: PartitionState, now: float) -> bool:
        if state.paused or state.position is None or state.unvalidated or state.retry_at_s > now:
            return False
        if state.buffered_bytes >= self._config.max_partition_fetch_bytes:
            return False
        return not state.buffer or isinstance(state.buffer[-1], Chunk)

    def _choose_node(self, known: PartitionMetadata) -> int:
        return known.leader_id

    def _need_position(self, state: PartitionState, lookups: dict[PartitionState, int]) -> None:
        if state.reset_to is None:
            state.reset_to = self._policy()
        if state.reset_to is not None:
            if self._metadata.topic(state.topic) is not None:  # else its metadata brings it here again
                lookups[state] = state.reset_to
        elif not state.buffer:
            text = f"{state.topic}-{state.partition} has no position and auto.offset.reset is none"
            self._fail(state, KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, text))

    # -- positions

    async def _look_up(self, wanted: Sequence[tuple[PartitionState, int, int]]) -> None:
        """States, their generations when this was decided (a seek or assignment makes it void) and timestamps."""
        lookups = {state.where: timestamp for state, generation, timestamp in wanted if state.generation == generation}
        call = list_offsets_call(self._cluster, lookups)
        try:
            found, failures = await self._cluster.ask_leaders(lookups, call, self._config.request_timeout_ms / 1000)
            for state, generation, _ in wanted:
                if state.generation != generation:
                    continue
                if state.where in failures:
                    self._failed(state, failures[state.where])
                else:
                    state.clear(max(found[state.where].offset, 0))
                    state.attempts = 0
        finally:
            self._looking_up = False
            self.wake()
            self.arrived.set()

    async def _validate(self, wanted: Sequence[tuple[PartitionState, int]]) -> None:
        """After a leader change: is what we have read still in the leader's log? (392-08). As in `_look_up`."""
        asked = [
            (state, generation, state.leader_epoch) for state, generation in wanted if state.generation == generation
        ]
        epochs = {state.where: state.fetch_epoch for state, _, _ in asked}
        call = end_of_epochs_call(self._cluster, epochs)
        try:
            ends, failures = await self._cluster.ask_leaders(epochs, call, self._config.request_timeout_ms / 1000)
            for state, generation, leader_epoch in asked:
                if state.generation != generation:
                    continue
                if state.where in failures:
                    self._failed(state, failures[state.where])
                else:
                    state.unvalidated = state.leader_epoch != leader_epoch
                    state.attempts = 0
                    self._diverged(state, ends[state.where])
        finally:
            self._validating = False
            self.wake()
            self.arrived.set()

    def _failed(self, state: PartitionState, error: KafkaError) -> None:
        """A request for the partition had an error: try again later, or tell the reader."""
        code = error.code
        self._back_off(state)
        if code.refreshes_metadata or code is ErrorCode.UNKNOWN_LEADER_EPOCH:
            self._metadata.request_refresh((state.topic,))
        unknown = self._metadata.topic(state.topic) is not None and not self._cluster.knows(state.where)
        if unknown and state.attempts >= UNKNOWN_ANSWERS_MAX:
            state.attempts = 0
            text = f"topic {state.topic!r} has no partition {state.partition}"
            self._fail(state, KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text))
        elif code in _RAISED or not code.retriable:
            self._fail(state, error)

    def _diverged(self, state: PartitionState, end: EpochEndOffset) -> None:
        offset = state.fetch_offset
        if offset is None or end.end_offset < 0 or end.end_offset >= offset:
            return
        position = state.position if state.position is not None else offset
        if end.end_offset >= position:
            state.clear(position, state.position_epoch)
            return
        log.warning("%s-%d was truncated to %d, below %d", *state.where, end.end_offset, offset)
        if self._policy() is None:
            text = (
                f"{state.topic}-{state.partition}: the log was truncated to offset {end.end_offset}, below {position}"
            )
            state.clear(position)
            self._fail(state, KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, text))
        else:
            state.clear(end.end_offset, end.epoch)

    # -- answers

    def take(self, broker: BrokerFetches, partitions: Sequence[Answered], endpoints: Iterable[NodeEndpoint]) -> None:
        """Partitions' answers; one to what the partition does not ask any more tells its watermarks only."""
        leaders = [
            (one.topic, one.asked.partition, one.data.current_leader)
            for one in partitions
            if one.data.current_leader is not None
        ]
        if leaders:
            self._metadata.apply_leaders(leaders, endpoints)
        for one in partitions:
            state = broker.state_of(self.states, one)
            if state is None:
                continue
            data = one.data
            if not data.error_code:
                state.high_watermark = data.high_watermark
                state.log_start_offset = data.log_start_offset
            if state.broker is not broker:
                continue  # it has left
            if state.asked == one.asked:
                if data.records or data.error_code or data.diverging_epoch is not None:
                    state.asked = None
                self._answered(state, data)
            if state.asked is None or not state.in_session:
                self._ledger.changed[state] = None
        self.wake()
        self.arrived.set()

    def broker_failed(self, broker: BrokerFetches, error: KafkaError) -> None:
        """All of its partitions wait; errors that retries do not cure are the reader's."""
        states = [state for state in self.states.values() if state.broker is broker]
        if error.code.refreshes_metadata:
            self._metadata.request_refresh({state.topic for state in states})
        if error.code in _RAISED or not error.code.retriable:
            for state in states:
                if state.in_session:
                    self._failed(state, state.located(error))
                    self._ledger.changed[state] = None

    def _answered(self, state: PartitionState, answer: PartitionData) -> None:
        code = KafkaError(answer.error_code).code
        if code is ErrorCode.NONE:
            state.attempts = 0
            if answer.diverging_epoch is not None:
                self._diverged(state, answer.diverging_epoch)
                return
            if answer.records:
                self._buffer(state, answer)
        elif code is ErrorCode.OFFSET_OUT_OF_RANGE:
            what = OutOfRange(state.fetch_offset or 0, answer.log_start_offset, answer.high_watermark)
            if state.buffer or self._policy() is None:
                state.buffer.append(what)
                self._complete(state)
            else:
                self.out_of_range(state, what)
        else:
            self._failed(state, state.located(KafkaError(answer.error_code)))

    def _buffer(self, state: PartitionState, answer: PartitionData) -> None:
        state.put(answer)
        if state.buffer:
            if not isinstance(state.buffer[-1], Chunk):
                self._back_off(state)
            self._complete(state)

    def _fail(self, state: PartitionState, error: KafkaError) -> None:
        state.buffer.append(error)
        self._complete(state)

    def _complete(self, state: PartitionState) -> None:
        if not state.listed:
            state.listed = True
            self.completed.append(state)
        self.arrived.set()

    def _back_off(self, state: PartitionState) -> None:
        state.attempts += 1
        state.retry_at_s = asyncio.get_running_loop().time() + self._cluster.backoff.delay_s(state.attempts)
