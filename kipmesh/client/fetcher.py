"""Fetches ahead for the assigned partitions: the one task that decides, and a task for each request.

A partition is asked for while less than `max.partition.fetch.bytes` of it is buffered and less than `fetch.max.bytes`
of all; so the next answer is under way while the last one is read. A broker has at most two requests of this consumer,
for different partitions: the second serves partitions that became free while the first one waits for new records.
Partitions that returned records go to the back of the order, so a byte limit cannot starve the others.

A step looks at the partitions that changed, not at all of them: those that could be asked for wait by leader until a
request to it is free, and only news of the metadata or the assignment make all of them pass again.

Invariants: an assigned partition that is not in a request, not waiting for the reader and not waiting for metadata is
changed, unsettled (no position yet, not validated, backing off) or fetchable. A partition is in at most one request; an
answer to a request from before a seek, reset or reassignment is thrown away; epochs and topic ids are those of the
metadata when the request was made. Fetch sessions (3 of 8) and reads from followers (4 of 8) belong in `_request` and
`_choose_node`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Sequence

from kipmesh.client.cluster import Cluster
from kipmesh.client.fetch_state import Chunk, Ledger, OutOfRange, PartitionState
from kipmesh.client.metadata import UNKNOWN_ANSWERS_MAX
from kipmesh.client.offsets import end_of_epochs_call, list_offsets_call
from kipmesh.client.supervision import task_failure
from kipmesh.client.types import TIMESTAMP_EARLIEST, TIMESTAMP_LATEST, PartitionMetadata, TopicPartition
from kipmesh.core.config import ConsumerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.messages import (
    EpochEndOffset,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
)
from kipmesh.rpc.client import TransportError

log = logging.getLogger(__name__)

REQUESTS_PER_BROKER_MAX = 2

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
        self._fetchable: dict[int, dict[PartitionState, None]] = {}
        self._wake = asyncio.Event()
        self._requests: dict[int, int] = {}
        self._tasks: set[asyncio.Future[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._looking_up = False
        self._validating = False

    def start(self) -> None:
        """Begin to fetch."""
        self._task = asyncio.create_task(self._run(), name="kipmesh-consumer")
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop."""
        tasks = [*self._tasks, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        self._look_at_all()

    def _look_at_all(self) -> None:
        self._unsettled.clear()
        self._fetchable.clear()
        self._ledger.changed = dict.fromkeys(self.states.values())
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
                state.topic_id = topic_id
            epoch = self._cluster.leader_epoch(state.topic, state.partition)
            if epoch > state.leader_epoch:
                state.leader_epoch = epoch
                state.unvalidated = state.fetch_epoch >= 0 and state.fetch_offset is not None
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
        lookups: dict[TopicPartition, int] = {}
        validations: list[PartitionState] = []
        waiting: dict[PartitionState, None] = {}
        stale: set[str] = set()
        for state in self._unsettled | self._ledger.take_changed():
            if state.in_flight or self._may_fetch(state, now, stale):
                continue  # its answer, or the request that it waits for, brings it here again
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
            self._spawn(self._look_up(lookups))
        if validations and not self._validating:
            self._validating = True
            self._spawn(self._validate(validations))
        self._fetch_all(now)
        return min((state.retry_at_s - now for state in waiting if state.retry_at_s > now), default=None)

    def _may_fetch(self, state: PartitionState, now: float, stale: set[str]) -> bool:
        """Line the partition up for its leader's next request, if it is settled and wants more."""
        if not self._is_fetchable(state, now):
            return False
        known = self._metadata.partition(state.topic, state.partition)
        if known is None:
            self._failed(state, KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
            return False
        if known.leader_id not in self._metadata.brokers:
            stale.add(state.topic)
            return False
        self._fetchable.setdefault(self._choose_node(known), {})[state] = None
        return True

    def _fetch_all(self, now: float) -> None:
        for node_id, waiting in self._fetchable.items():
            if self._ledger.buffered_bytes >= self._config.fetch_max_bytes:
                break
            if waiting and self._requests.get(node_id, 0) < REQUESTS_PER_BROKER_MAX:
                states = [state for state in waiting if not state.in_flight and self._is_fetchable(state, now)]
                waiting.clear()
                if states:
                    self._fetch(node_id, states)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
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

    def _need_position(self, state: PartitionState, lookups: dict[TopicPartition, int]) -> None:
        if state.reset_to is None:
            state.reset_to = self._policy()
        if state.reset_to is not None:
            lookups[state.where] = state.reset_to
        elif not state.buffer:
            text = f"{state.topic}-{state.partition} has no position and auto.offset.reset is none"
            self._fail(state, KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, text))

    # -- positions

    async def _look_up(self, lookups: dict[TopicPartition, int]) -> None:
        asked = {where: (self.states[where], self.states[where].generation) for where in lookups}
        call = list_offsets_call(self._cluster, lookups)
        try:
            found, failures = await self._cluster.ask_leaders(lookups, call, self._config.request_timeout_ms / 1000)
            for where, (state, generation) in asked.items():
                if state.generation != generation:
                    continue
                if where in failures:
                    self._failed(state, failures[where])
                else:
                    state.clear(max(found[where].offset, 0))
                    state.attempts = 0
        finally:
            self._looking_up = False
            self.wake()
            self.arrived.set()

    async def _validate(self, states: list[PartitionState]) -> None:
        """After a leader change: is what we have read still in the leader's log? (392-08)."""
        asked = [(state, state.generation, state.leader_epoch) for state in states]
        epochs = {state.where: state.fetch_epoch for state in states}
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

    # -- fetching

    def _fetch(self, node_id: int, states: list[PartitionState]) -> None:
        address = self._metadata.address(node_id)
        if address is None:
            return
        generations = [(state, state.generation) for state in states]
        for state in states:
            state.in_flight = True
        self._requests[node_id] = self._requests.get(node_id, 0) + 1
        self._spawn(self._exchange(node_id, address, self._request(states), generations))

    def _request(self, states: list[PartitionState]) -> FetchRequest:
        topics: dict[str, list[FetchPartition]] = {}
        for state in states:
            epoch = self._cluster.leader_epoch(state.topic, state.partition)
            topics.setdefault(state.topic, []).append(
                FetchPartition(
                    partition=state.partition,
                    current_leader_epoch=epoch,
                    fetch_offset=state.fetch_offset or 0,
                    partition_max_bytes=self._config.max_partition_fetch_bytes,
                )
            )
        return FetchRequest(
            max_wait_ms=self._config.fetch_max_wait_ms,
            min_bytes=self._config.fetch_min_bytes,
            max_bytes=self._config.fetch_max_bytes,
            session_id=0,
            session_epoch=-1,
            topics=[FetchTopic(topic, self._cluster.topic_id(topic), parts) for topic, parts in topics.items()],
            rack_id=self._config.client_rack,
        )

    async def _exchange(
        self, node_id: int, address: str, request: FetchRequest, asked: list[tuple[PartitionState, int]]
    ) -> None:
        timeout_s = (self._config.request_timeout_ms + self._config.fetch_max_wait_ms) / 1000
        answers: dict[tuple[str, int], PartitionData] = {}
        missing = PartitionData(error_code=ErrorCode.NETWORK_EXCEPTION)
        try:
            response: FetchResponse = await self._cluster.pool.get(address).fetch(request, timeout_s)
            if response.error_code:
                missing = PartitionData(error_code=response.error_code)
            for topic in response.responses:
                for each in topic.partitions:
                    answers[topic.topic, each.partition_index] = each
                    self._metadata.apply_leader(
                        topic.topic, each.partition_index, each.current_leader, response.node_endpoints
                    )
        except TransportError as error:
            log.debug("fetch failed: %s", error)
        finally:
            self._requests[node_id] -= 1
            for state, generation in asked:
                state.in_flight = False
                if state.generation == generation:
                    self._answered(state, answers.get((state.topic, state.partition), missing))
            states = [state for state, _ in asked if self.states.get(state.where) is state]
            self._ledger.changed.update(dict.fromkeys(sorted(states, key=lambda state: bool(state.buffer))))
            self.wake()
            self.arrived.set()

    def _answered(self, state: PartitionState, answer: PartitionData) -> None:
        code = KafkaError(answer.error_code).code
        if code is ErrorCode.NONE:
            state.attempts = 0
            state.high_watermark = answer.high_watermark
            state.log_start_offset = answer.log_start_offset
            if answer.diverging_epoch is not None:
                self._diverged(state, answer.diverging_epoch)
                return
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
