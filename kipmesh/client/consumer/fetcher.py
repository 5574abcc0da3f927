"""Prefetches records of the assigned partitions: one task that sends the partition readers' requests.

Fetches a partition while less than `max.partition.fetch.bytes` of it and less than `fetch.max.bytes` in total are
buffered. The reader of each partition (`kipmesh.client.consumer.rules`) decides what to request from which replica
(392-08, 392-10, 392-13 to 392-17). A step handles changed partitions only; metadata and assignments change all.

Invariants: an assigned partition is requested from a broker, blocked until the application or metadata changes it, in
`SharedState.changed`, or deferred (in backoff, or waiting for a leader request). Responses from before a seek, reset,
reassignment or leader change are ignored; the broker sends their records again.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter, deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from kipmesh.client.calls import task_failure
from kipmesh.client.cluster import Cluster
from kipmesh.client.consumer.broker_fetches import (
    BLOCKED,
    BrokerFetches,
    Chunk,
    PartitionState,
    SharedState,
    parse_records,
)
from kipmesh.client.consumer.leader_requests import LeaderRequest, LeaderRequests
from kipmesh.client.consumer.replica_selection import ReplicaReturn, ReplicaSelection
from kipmesh.client.consumer.rules import values as reading
from kipmesh.client.consumer.rules.states import State
from kipmesh.client.metadata import UNKNOWN_RESPONSES_MAX
from kipmesh.client.types import TIMESTAMP_EARLIEST, FetchStats, TopicPartition
from kipmesh.core.config import ConsumerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.fetch_session import FetchedPartition
from kipmesh.messages import FetchPartition, NodeEndpoint, PartitionData

log = logging.getLogger(__name__)

CLOSE_SECONDS_MAX: Final = 1.0
"""Maximum time for closing the fetch sessions."""


class Fetcher:
    """Fetches the assigned partitions of one consumer.

    `completed` lists the partitions with buffered items, and `arrived` is set when that list may have changed.
    `failure` is the error that ended the fetcher.
    """

    def __init__(self, config: ConsumerConfig, cluster: Cluster) -> None:
        self.states: dict[TopicPartition, PartitionState] = {}
        self.completed: deque[PartitionState] = deque()
        self.arrived = asyncio.Event()
        self.failure: KafkaError | None = None
        self._config = config
        self._cluster = cluster
        self._metadata = cluster.metadata
        self._shared = SharedState()
        self._deferred: dict[PartitionState, None] = {}
        self._brokers: dict[int, BrokerFetches] = {}
        self._closed_stats = FetchStats()
        self.wake = asyncio.Event()
        """Set after a change of positions, pauses, buffers or metadata."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._selection = ReplicaSelection(config, cluster)
        self._rechecks: list[tuple[float, int, PartitionState]] = []
        self._recheck_count = 0
        self._replica_return = ReplicaReturn(config.retry_backoff_max_ms / 1000, config.metadata_max_age_ms / 1000)
        timeout_s = config.request_timeout_ms / 1000
        self._leader_requests = LeaderRequests(cluster, timeout_s, self._apply, self._wake_waiters)
        self._bytes: Counter[int] = Counter()
        self._redirects: Counter[int] = Counter()
        self._returns: Counter[str] = Counter()
        self._truncations = 0

    def start(self) -> None:
        """Start the task that sends requests. Call it once."""
        self._task = asyncio.create_task(self._run(), name="kipmesh-consumer")
        self._task.add_done_callback(self._on_task_done)

    async def close(self) -> None:
        """Stop the task and close the fetch sessions (227-17), within CLOSE_SECONDS_MAX."""
        if self._task is not None:
            self._task.cancel()
        try:
            await asyncio.gather(*[each.close(CLOSE_SECONDS_MAX) for each in list(self._brokers.values())])
        finally:
            tasks = [*self._tasks, *([self._task] if self._task is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._selection.close()

    @property
    def stats(self) -> FetchStats:
        """Fetch counters of all brokers since the start; `sessions` and `partitions` are current values."""
        return replace(
            sum((each.stats for each in self._brokers.values()), self._closed_stats),
            bytes_by_node=Counter(self._bytes),
            redirects=Counter(self._redirects),
            returns=Counter(self._returns),
            truncations=self._truncations,
            selector_failures=self._selection.selector_failures,
        )

    # -- called by the consumer

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Replace the assignment. Partitions that remain assigned keep their position and buffer; others lose both."""
        old = self.states
        self.states = {
            each: old.get(each) or PartitionState(*each, self._shared, self._selection.reader()) for each in partitions
        }
        for topic_partition, state in old.items():
            if topic_partition not in self.states:
                state.seek(0)  # the response to a pending request must be ignored
                if state.broker is not None:
                    state.broker.remove(state, is_unassigned=True)
        self._mark_all_changed()

    def _mark_all_changed(self) -> None:
        self._deferred.clear()
        self._shared.changed = dict.fromkeys(self.states.values())
        self.wake.set()

    def pause(self, state: PartitionState) -> None:
        """Stop fetching and returning records of the partition until `resume`. Its buffer is kept."""
        state.paused = True
        self._shared.changed[state] = None
        self.wake.set()

    def resume(self, state: PartitionState) -> None:
        """Resume fetching and returning records of a paused partition, buffered records first."""
        state.paused = False
        self._shared.changed[state] = None
        if state.buffer:
            self._complete(state)
        self.wake.set()

    @property
    def buffered_bytes(self) -> int:
        """Total size in bytes of the batches that were fetched but not consumed yet."""
        return self._shared.buffered_bytes

    def on_metadata(self) -> None:
        """Apply new metadata: leaders, replicas, and topics that were recreated."""
        now_ms = _ms(asyncio.get_running_loop().time())
        for state in self.states.values():
            topic_id = self._cluster.topic_id(state.topic)
            if topic_id and topic_id != state.topic_id:
                if state.broker is not None:
                    state.broker.withdraw(state)
                if state.topic_id:
                    self._handle_recreated(state)
                state.topic_id = topic_id
            known = self._metadata.partition(state.topic, state.partition)
            if known is not None:
                state.attempts = 0
                self._apply(state, state.reader.metadata(self._selection.of(state.topic, known), now_ms))
                if self._selection.changes_with_metadata:
                    self._recheck(state, now_ms)
        self._mark_all_changed()
        self.arrived.set()

    def _handle_recreated(self, state: PartitionState) -> None:
        log.warning(
            "topic was recreated topic=%s partition=%d position=%s", state.topic, state.partition, state.position
        )
        position, reset_to = state.position, state.reset_to
        state.reader.recreated()
        if self._selection.config.reset_to is None:
            state.reset(TIMESTAMP_EARLIEST)
            text = f"topic of {state.topic}-{state.partition} was recreated, position was {position}; call seek"
            state.fatal_error = KafkaError(ErrorCode.UNKNOWN_TOPIC_ID, text)
        else:
            # All records of the new topic are newer than this consumer, so `latest` must include them.
            state.reset(TIMESTAMP_EARLIEST if position is not None or reset_to is None else reset_to)

    def delivered(self, state: PartitionState) -> None:
        """Notify the reader that the application has all records below the position."""
        if state.reader.position is not None:
            self._apply(state, state.reader.delivered(state.reader.position))

    def on_corrupt(self, state: PartitionState, node_id: int, error: KafkaError) -> None:
        """Refetch a batch that cannot be decoded. If it came from the leader, the next poll also raises `error`."""
        effects = state.reader.corrupt(node_id, _ms(asyncio.get_running_loop().time()))
        state.clear()
        self._apply(state, effects, state.located(error))
        self.wake.set()

    # -- the task

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self.wake.clear()
            delay_s = self._step(loop.time())
            try:
                async with asyncio.timeout(delay_s):
                    await self.wake.wait()
            except TimeoutError:
                pass

    def _step(self, now: float) -> float | None:
        """Send all possible requests and return the seconds until the next deadline, or None."""
        now_ms = _ms(now)
        self._recheck_due(now)
        for broker in list(self._brokers.values()):
            follower_timeout_at_s = broker.follower_timeout_at_s
            if follower_timeout_at_s is not None and follower_timeout_at_s <= now:
                broker.last_timeout_s = now
                for state in list(broker.followers):
                    self._apply(state, state.reader.tick(now_ms))
        stale = self._replica_return.topics(now, self._reads_from_leader)
        pending = self._deferred | self._shared.take_changed()
        self._deferred = {state: None for state in pending if self._advance_partition(state, now, stale)}
        if stale:
            self._metadata.request_refresh(stale)
        self._leader_requests.start(now_ms, self.spawn)
        self._fetch_all(now)
        times = [state.retry_at_s for state in self._deferred if state.retry_at_s > now]
        for broker in self._brokers.values():
            due = (broker.retry_at_s, broker.close_at_s, broker.follower_timeout_at_s)
            times += [time for time in due if time is not None and time > now]
        if self._rechecks:
            times.append(self._rechecks[0][0])
        if self._replica_return.due_s is not None:
            times.append(self._replica_return.due_s)
        return max(min(times) - now, 0.0) if times else None

    def _advance_partition(self, state: PartitionState, now: float, stale: set[str]) -> bool:
        """Perform the reader's next action and return whether the partition is deferred to a later step.

        Adds the topic to `stale` if its metadata must be refreshed.
        """
        action = state.reader.next(_ms(now)) if state.fatal_error is None else reading.AWAIT_APPLICATION
        is_requested = isinstance(action, reading.AwaitResponse) and state.requested is not None
        if (is_requested or isinstance(action, reading.FetchFrom)) and self._has_room(state):
            self._request_fetch(state, action, now)
            return False
        if state.broker is not None:
            state.broker.withdraw(state)
        if isinstance(action, reading.BackOff):
            state.retry_at_s = (action.until_ms + 1) / 1000
            return True
        if isinstance(action, LeaderRequest):
            self._leader_requests.add(state, action)
            return True
        if isinstance(action, reading.AwaitMetadata):
            return self._await_leader(state, now, stale)
        is_reported = bool(state.buffer) and not isinstance(state.buffer[-1], Chunk)
        if isinstance(action, reading.AwaitApplication) and state.is_halted and not is_reported:
            state.buffer.append(BLOCKED)
            self._complete(state)
        return False

    def _reads_from_leader(self, topic_partition: TopicPartition) -> bool:
        state = self.states.get(topic_partition)
        return state is not None and (state.broker is None or state not in state.broker.followers)

    def _has_room(self, state: PartitionState) -> bool:
        if state.paused or state.buffered_bytes >= self._config.max_partition_fetch_bytes:
            return False
        return not state.buffer or isinstance(state.buffer[-1], Chunk)

    def _request_fetch(self, state: PartitionState, action: reading.Action, now: float) -> None:
        if not isinstance(action, reading.FetchFrom):  # add the current request to the session again
            if state.broker is not None and state.requested is not None:
                state.broker.add_request(state, state.requested)
            return
        requested = FetchPartition(
            partition=state.partition,
            current_leader_epoch=action.current_leader_epoch,
            fetch_offset=action.fetch_offset,
            last_fetched_epoch=action.last_fetched_epoch,
            partition_max_bytes=self._config.max_partition_fetch_bytes,
        )
        state.request_id = state.reader.sent(action, _ms(now))
        broker = self._assign_broker(state, action.node_id)
        config = self._selection.config
        is_rackless = config.has_rack and config.mode is reading.SelectionMode.FETCH and not action.offers_rack
        broker.set_role(state, is_follower=not action.is_leader, is_rackless=is_rackless)
        if is_rackless:
            self._schedule_recheck(state, now + config.retry_backoff_max_ms / 1000)
        broker.add_request(state, requested)

    def _await_leader(self, state: PartitionState, now: float, stale: set[str]) -> bool:
        """Wait for metadata with a leader, or report that the partition does not exist. Returns whether to defer."""
        if self._metadata.topic(state.topic) is None:
            return False
        if self._metadata.partition(*state.topic_partition) is not None:
            stale.add(state.topic)
            return False
        if state.retry_at_s <= now:
            state.attempts += 1
            state.retry_at_s = now + self._cluster.backoff.delay_s(state.attempts)
            stale.add(state.topic)
            if state.attempts >= UNKNOWN_RESPONSES_MAX:
                state.attempts = 0
                text = f"partition {state.partition} of topic {state.topic!r} does not exist"
                self._fail(state, KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text))
        return True

    # -- timers

    def _schedule_recheck(self, state: PartitionState, when_s: float) -> None:
        """Make the reader check its replica again at that time, even if the session returns no data."""
        state.recheck_at_s = when_s
        self._recheck_count += 1
        heapq.heappush(self._rechecks, (when_s, self._recheck_count, state))

    def _recheck_due(self, now: float) -> None:
        while self._rechecks and self._rechecks[0][0] <= now:
            when_s, _, state = heapq.heappop(self._rechecks)
            if state.recheck_at_s == when_s and self.states.get(state.topic_partition) is state:
                state.recheck_at_s = 0.0
                self._recheck(state, _ms(now))

    def _recheck(self, state: PartitionState, now_ms: int) -> None:
        """Complete the reader's request with an empty response, because sessions omit partitions without changes."""
        if state.requested is not None:
            nothing = PartitionData(log_start_offset=state.reader.log_start_offset)
            state.reader.fetched(state.request_id, nothing, (), now_ms)
            self._shared.changed[state] = None

    def _assign_broker(self, state: PartitionState, node_id: int) -> BrokerFetches:
        broker = state.broker
        if broker is not None and broker.node_id == node_id:
            return broker
        if broker is not None:
            broker.remove(state)
        broker = self._brokers.get(node_id)
        if broker is None:
            broker = self._brokers[node_id] = BrokerFetches(node_id, self._config, self._cluster, self)
        broker.add(state)
        return broker

    def _fetch_all(self, now: float) -> None:
        for node_id, broker in list(self._brokers.items()):
            if broker.close_at_s is not None:
                if now < broker.close_at_s:
                    continue
                del self._brokers[node_id]
                self._closed_stats += replace(broker.stats, sessions=0, partitions=0)
                self.spawn(broker.close(CLOSE_SECONDS_MAX))
            elif self._shared.buffered_bytes < self._config.fetch_max_bytes:
                broker.send(now)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a background task and return it. If it raises, `failure` is set to UNKNOWN_SERVER_ERROR."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        failure = task_failure(task, "the consumer's fetching task")
        if failure is not None:
            self.failure = self.failure or failure
            self.arrived.set()

    # -- responses

    def on_fetched(
        self, broker: BrokerFetches, partitions: Sequence[FetchedPartition], endpoints: Iterable[NodeEndpoint]
    ) -> None:
        """Handle the partitions of a response.

        A response to an outdated request only updates the high watermark and the log start offset.
        """
        leaders = [
            (one.topic, one.requested.partition, one.data.current_leader)
            for one in partitions
            if one.data.current_leader is not None
        ]
        if leaders:
            self._metadata.apply_leaders(leaders, endpoints)
        for one in partitions:
            state = broker.state_of(self.states, one)
            if state is None:
                continue
            if state.broker is broker and state.requested == one.requested:
                self._handle_data(state, one.data)
            elif not one.data.error_code:
                reader = state.reader
                reader.high_watermark = max(reader.high_watermark, one.data.high_watermark)
                reader.log_start_offset = one.data.log_start_offset
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        self.wake.set()
        self.arrived.set()

    def on_broker_failed(self, broker: BrokerFetches, error: KafkaError) -> None:
        """Handle a failed full fetch of a broker.

        Partitions that use the broker as a follower return to their leader. For the others, `poll` raises non-retriable
        errors and CORRUPT_MESSAGE; after any other error the fetch is repeated.
        """
        states = [state for state in self.states.values() if state.broker is broker]
        if error.code.refreshes_metadata:
            self._metadata.request_refresh({state.topic for state in states})
        is_raised = error.code is ErrorCode.CORRUPT_MESSAGE or not error.code.retriable
        self._fail_requests([state for state in states if is_raised or state in broker.followers], error)

    def on_connection_lost(self, broker: BrokerFetches) -> None:
        """Handle a broken connection: partitions that used the broker as a follower return to their leader."""
        self._fail_requests(list(broker.followers), KafkaError(ErrorCode.NETWORK_EXCEPTION))

    def _fail_requests(self, states: Iterable[PartitionState], error: KafkaError) -> None:
        now_ms = _ms(asyncio.get_running_loop().time())
        for state in states:
            if state.in_session and state.requested is not None:
                state.requested = None
                self._apply(state, state.reader.failed(state.request_id, error.code, now_ms), state.located(error))

    def _handle_data(self, state: PartitionState, data: PartitionData) -> None:
        reader, node_id = state.reader, state.reader.node_id
        now_ms = _ms(asyncio.get_running_loop().time())
        parsed = parse_records(data.records, reader.fetch_offset or 0)
        error = parsed.failure or KafkaError(data.error_code)
        if error.code or parsed.batches or data.diverging_epoch is not None:
            state.requested = None
        if parsed.failure is not None and not data.error_code:
            effects = reader.failed(state.request_id, error.code, now_ms)
        else:
            effects = reader.fetched(state.request_id, data, parsed.spans, now_ms)
        if parsed.batches and reading.TakeRecords() in effects:
            self._bytes[node_id] += len(data.records)
            state.put(Chunk(data.records, parsed.batches, node_id))
            self._complete(state)
        self._apply(state, effects, state.located(error) if error.code else None)

    def _apply(self, state: PartitionState, effects: reading.Effects, error: KafkaError | None = None) -> None:
        """Apply the reader's effects. `error` is the detailed error for a RaiseError effect."""
        for effect in effects:
            if isinstance(effect, reading.RefreshMetadata):
                self._metadata.request_refresh((state.topic,))
            elif isinstance(effect, reading.MoveTo):
                state.clear()
                if effect.offset is not None:
                    state.reset_to = None
            elif isinstance(effect, reading.Abandon):
                state.requested = None
            elif isinstance(effect, reading.OffsetReset):
                log.info("offset reset topic=%s partition=%d effect=%s", *state.topic_partition, effect)
            elif isinstance(effect, reading.TruncationFound):
                self._truncations += 1
                log.warning(
                    "log was truncated topic=%s partition=%d end_offset=%s position=%d",
                    *state.topic_partition,
                    effect.end_offset,
                    effect.position,
                )
            elif isinstance(effect, reading.RaiseError):
                if state.reader.state is not State.HALTED:
                    self._fail(state, error or state.located(KafkaError(effect.code)))
            elif isinstance(effect, reading.Redirected):
                self._redirects[effect.node_id] += 1
                max_age_s = self._selection.config.metadata_max_age_ms / 1000
                self._schedule_recheck(state, asyncio.get_running_loop().time() + max_age_s)
            elif isinstance(effect, reading.LeftFollower):
                self._returns[effect.cause.value] += 1
                if self._selection.changes_with_metadata:
                    self._replica_return.add(state.topic_partition, asyncio.get_running_loop().time())
                log.debug(
                    "left follower topic=%s partition=%d follower=%d cause=%s",
                    *state.topic_partition,
                    effect.node_id,
                    effect.cause.value,
                )
        self._shared.changed[state] = None
        if effects:
            self.wake.set()

    def _fail(self, state: PartitionState, error: KafkaError) -> None:
        state.buffer.append(error)
        self._complete(state)

    def _complete(self, state: PartitionState) -> None:
        if not state.is_queued:
            state.is_queued = True
            self.completed.append(state)
        self.arrived.set()


def _ms(now_s: float) -> int:
    return int(now_s * 1000)
