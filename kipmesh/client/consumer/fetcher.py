"""Fetches ahead for the assigned partitions: the one task that decides what is asked, and of whom.

A partition is asked for while less than `max.partition.fetch.bytes` of it is buffered and less than `fetch.max.bytes`
of all; so the next answer is under way while the last one is read. Each broker has a fetch session and, for what cannot
wait for that, requests aside (`kipmesh.client.consumer.broker_fetches`). Partitions that returned records go to the
back of the order, so a byte limit cannot starve the others.

A step looks at the partitions that changed, not at all of them: only news of the metadata or the assignment make all of
them pass again. What is wanted in a session stays wanted until something about the partition changes.

What a partition wants, and what an answer means, is decided by its reader (`kipmesh.client.consumer.rules`): from which
replica to read, when to ask the leader instead, whether a reset or a truncation is due (392-08, 392-10, 392-13 to
392-17). Here its requests are sent and its effects done.

Invariants: an assigned partition that is not in a session, request or line of a broker, not waiting for the user and
not waiting for metadata is changed or unsettled (backing off, or its question to the leader is not sent yet). Only an
answer to what the partition asks now counts: one from before a seek, reset, reassignment or change of leaders is thrown
away, and the broker says it again.
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
from kipmesh.client.consumer.broker_fetches import ASK_USER, BrokerFetches, Chunk, Ledger, PartitionState, parse_records
from kipmesh.client.consumer.leader_requests import LeaderQuestions, Question
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
"""Longest time for the brokers to hear that their sessions end."""


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
        self.wake = asyncio.Event()
        """Set when something changed: positions, pauses, buffers, metadata."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._selection = ReplicaSelection(config, cluster)
        self._renewals: list[tuple[float, int, PartitionState]] = []
        self._renewals_made = 0
        self._return = ReplicaReturn(config.retry_backoff_max_ms / 1000, config.metadata_max_age_ms / 1000)
        timeout_s = config.request_timeout_ms / 1000
        self._questions = LeaderQuestions(cluster, timeout_s, self._do, self._was_told)
        self._bytes: Counter[int] = Counter()
        self._redirects: Counter[int] = Counter()
        self._returns: Counter[str] = Counter()
        self._truncations = 0

    def start(self) -> None:
        """Begin to fetch."""
        self._task = asyncio.create_task(self._run(), name="kipmesh-consumer")
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop, and tell the brokers that the sessions end (227-17); takes CLOSE_SECONDS_MAX at most."""
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
        """What was fetched how, all brokers together."""
        found = sum((each.stats for each in self._brokers.values()), self._past)
        return replace(
            found,
            bytes_by_node=Counter(self._bytes),
            redirects=Counter(self._redirects),
            returns=Counter(self._returns),
            truncations=self._truncations,
            selector_failures=self._selection.selector_failures,
        )

    # -- from the consumer

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Exactly these partitions; those that stay keep their position."""
        old = self.states
        self.states = {
            where: old.get(where) or PartitionState(*where, self._ledger, self._selection.reader())
            for where in partitions
        }
        for where, state in old.items():
            if where not in self.states:
                state.seek(0)  # whatever is under way for it is void
                if state.broker is not None:
                    state.broker.leave(state, is_unassigned=True)
        self._look_at_all()

    def _look_at_all(self) -> None:
        self._unsettled.clear()
        self._ledger.changed = dict.fromkeys(self.states.values())
        self.wake.set()

    def pause(self, state: PartitionState) -> None:
        """Neither fetch nor return records of the partition until `resume`."""
        state.paused = True
        self._ledger.changed[state] = None
        self.wake.set()

    def resume(self, state: PartitionState) -> None:
        """Fetch and return records of the partition again."""
        state.paused = False
        self._ledger.changed[state] = None
        if state.buffer:
            self._complete(state)
        self.wake.set()

    @property
    def buffered_bytes(self) -> int:
        """Bytes that are fetched and not taken."""
        return self._ledger.buffered_bytes

    def on_metadata(self) -> None:
        """Metadata changed: see who leads now, and whether topics are still the same."""
        now_ms = _ms(asyncio.get_running_loop().time())
        for state in self.states.values():
            topic_id = self._cluster.topic_id(state.topic)
            if topic_id and topic_id != state.topic_id:
                if state.broker is not None:
                    state.broker.withdraw(state)
                if state.topic_id:
                    self._recreated(state)
                state.topic_id = topic_id
            known = self._metadata.partition(state.topic, state.partition)
            if known is not None:
                state.attempts = 0
                self._do(state, state.reader.metadata(self._selection.of(state.topic, known), now_ms))
                if self._selection.changes_with_metadata:
                    self._renew(state, now_ms)
        self._look_at_all()
        self.arrived.set()

    def _recreated(self, state: PartitionState) -> None:
        log.warning("topic of %s-%d was recreated; position was %s", state.topic, state.partition, state.position)
        position, reset_to = state.position, state.reset_to
        state.reader.recreated()
        if self._selection.config.reset_to is None:
            state.reset(TIMESTAMP_EARLIEST)
            text = f"{state.topic}-{state.partition}: the topic was recreated; position {position} is of the old one"
            state.verdict = KafkaError(ErrorCode.UNKNOWN_TOPIC_ID, text)
        else:
            # All its records are newer than this consumer, so `latest` wants them too.
            state.reset(TIMESTAMP_EARLIEST if position is not None or reset_to is None else reset_to)

    def delivered(self, state: PartitionState) -> None:
        """The user has what is below the position."""
        if state.reader.position is not None:
            self._do(state, state.reader.delivered(state.reader.position))

    def corrupt(self, state: PartitionState, node_id: int, error: KafkaError) -> None:
        """What is next cannot be decoded: it is read again, elsewhere if there is somebody else, and told if not."""
        effects = state.reader.corrupt(node_id, _ms(asyncio.get_running_loop().time()))
        state.clear()
        self._do(state, effects, state.located(error))
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
        """Start what can be started; the seconds until the next backoff, or somebody's patience, is over."""
        now_ms = _ms(now)
        self._renew_due(now)
        for broker in list(self._brokers.values()):
            silent_at_s = broker.silent_at_s
            if silent_at_s is not None and silent_at_s <= now:
                broker.checked_s = now
                for state in list(broker.followers):
                    self._do(state, state.reader.tick(now_ms))
        waiting: dict[PartitionState, None] = {}
        stale = self._return.topics(now, self._reads_from_leader)
        for state in self._unsettled | self._ledger.take_changed():
            if self._is_unsettled(state, now, stale):
                waiting[state] = None
        self._unsettled = waiting
        if stale:
            self._metadata.request_refresh(stale)
        self._questions.start(now_ms, self.spawn)
        self._fetch_all(now)
        times = [state.retry_at_s for state in waiting if state.retry_at_s > now]
        for broker in self._brokers.values():
            due = (broker.retry_at_s, broker.close_at_s, broker.silent_at_s)
            times += [when for when in due if when is not None and when > now]
        if self._renewals:
            times.append(self._renewals[0][0])
        if self._return.due_s is not None:
            times.append(self._return.due_s)
        return max(min(times) - now, 0.0) if times else None

    def _is_unsettled(self, state: PartitionState, now: float, stale: set[str]) -> bool:
        """Do what the partition wants; True if nobody but time or another question brings it here again."""
        action = state.reader.next(_ms(now)) if state.verdict is None else reading.AwaitReader()
        is_asked = isinstance(action, reading.AwaitAnswer) and state.asked is not None
        if (is_asked or isinstance(action, reading.FetchFrom)) and self._has_room(state):
            self._place(state, action, now)
            return False
        if state.broker is not None:
            state.broker.withdraw(state)
        if isinstance(action, reading.BackOff):
            state.retry_at_s = (action.until_ms + 1) / 1000
            return True
        if isinstance(action, Question):
            self._questions.want(state, action)
            return True
        if isinstance(action, reading.AwaitMetadata):
            return self._without_leader(state, now, stale)
        is_told = bool(state.buffer) and not isinstance(state.buffer[-1], Chunk)
        if isinstance(action, reading.AwaitReader) and state.is_halted and not is_told:
            state.buffer.append(ASK_USER)
            self._complete(state)
        return False

    def _reads_from_leader(self, where: TopicPartition) -> bool:
        state = self.states.get(where)
        return state is not None and (state.broker is None or state not in state.broker.followers)

    def _has_room(self, state: PartitionState) -> bool:
        if state.paused or state.buffered_bytes >= self._config.max_partition_fetch_bytes:
            return False
        return not state.buffer or isinstance(state.buffer[-1], Chunk)

    def _place(self, state: PartitionState, action: reading.Action, now: float) -> None:
        if not isinstance(action, reading.FetchFrom):  # what is under way, in the session again
            if state.broker is not None and state.asked is not None:
                state.broker.place(state, state.asked)
            return
        asked = FetchPartition(
            partition=state.partition,
            current_leader_epoch=action.current_leader_epoch,
            fetch_offset=action.fetch_offset,
            last_fetched_epoch=action.last_fetched_epoch,
            partition_max_bytes=self._config.max_partition_fetch_bytes,
        )
        state.number = state.reader.sent(action, _ms(now))
        broker = self._home(state, action.node_id)
        config = self._selection.config
        is_rackless = config.has_rack and config.mode is reading.SelectionMode.FETCH and not action.offers_rack
        broker.route(state, is_follower=not action.is_leader, is_rackless=is_rackless)
        if is_rackless:
            self._renew_at(state, now + config.retry_backoff_max_ms / 1000)
        broker.place(state, asked)

    def _without_leader(self, state: PartitionState, now: float, stale: set[str]) -> bool:
        """There is nobody to ask: metadata will say more, or that there is no such partition."""
        if self._metadata.topic(state.topic) is None:
            return False
        if self._metadata.partition(*state.where) is not None:
            stale.add(state.topic)
            return False
        if state.retry_at_s <= now:
            state.attempts += 1
            state.retry_at_s = now + self._cluster.backoff.delay_s(state.attempts)
            stale.add(state.topic)
            if state.attempts >= UNKNOWN_RESPONSES_MAX:
                state.attempts = 0
                text = f"topic {state.topic!r} has no partition {state.partition}"
                self._fail(state, KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text))
        return True

    # -- what time brings

    def _renew_at(self, state: PartitionState, when_s: float) -> None:
        """Decide again then from whom the partition is read, though nothing may have come of it."""
        state.renew_at_s = when_s
        self._renewals_made += 1
        heapq.heappush(self._renewals, (when_s, self._renewals_made, state))

    def _renew_due(self, now: float) -> None:
        while self._renewals and self._renewals[0][0] <= now:
            when_s, _, state = heapq.heappop(self._renewals)
            if state.renew_at_s == when_s and self.states.get(state.where) is state:
                state.renew_at_s = 0.0
                self._renew(state, _ms(now))

    def _renew(self, state: PartitionState, now_ms: int) -> None:
        """A session answers for what has news only: all others have the answer that there is nothing new."""
        if state.asked is not None:
            nothing = PartitionData(log_start_offset=state.reader.log_start_offset)
            state.reader.fetched(state.number, nothing, (), now_ms)
            self._ledger.changed[state] = None

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
                self.spawn(broker.close(CLOSE_SECONDS_MAX))
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

    # -- answers

    def take(
        self, broker: BrokerFetches, partitions: Sequence[FetchedPartition], endpoints: Iterable[NodeEndpoint]
    ) -> None:
        """Partitions' answers; one to what the partition does not ask any more tells its watermarks only."""
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
            if state.broker is broker and state.asked == one.requested:
                self._answered(state, one.data)
            elif not one.data.error_code:
                reader = state.reader
                reader.high_watermark = max(reader.high_watermark, one.data.high_watermark)
                reader.log_start_offset = one.data.log_start_offset
        self._was_told()

    def _was_told(self) -> None:
        self.wake.set()
        self.arrived.set()

    def broker_failed(self, broker: BrokerFetches, error: KafkaError) -> None:
        """All of its partitions wait; errors that retries do not cure are the user's, and followers are left."""
        states = [state for state in self.states.values() if state.broker is broker]
        if error.code.refreshes_metadata:
            self._metadata.request_refresh({state.topic for state in states})
        is_raised = error.code is ErrorCode.CORRUPT_MESSAGE or not error.code.retriable
        self._lose([state for state in states if is_raised or state in broker.followers], error)

    def broker_lost(self, broker: BrokerFetches) -> None:
        """A session's connection broke: who was read from there as a follower is read from the leader now."""
        self._lose(list(broker.followers), KafkaError(ErrorCode.NETWORK_EXCEPTION))

    def _lose(self, states: Iterable[PartitionState], error: KafkaError) -> None:
        now_ms = _ms(asyncio.get_running_loop().time())
        for state in states:
            if state.in_session and state.asked is not None:
                state.asked = None
                self._do(state, state.reader.failed(state.number, error.code, now_ms), state.located(error))

    def _answered(self, state: PartitionState, answer: PartitionData) -> None:
        reader, node_id = state.reader, state.reader.node_id
        now_ms = _ms(asyncio.get_running_loop().time())
        parsed = parse_records(answer.records, reader.fetch_offset or 0)
        error = parsed.failure or KafkaError(answer.error_code)
        if error.code or parsed.batches or answer.diverging_epoch is not None:
            state.asked = None
        if parsed.failure is not None and not answer.error_code:
            effects = reader.failed(state.number, error.code, now_ms)
        else:
            effects = reader.fetched(state.number, answer, parsed.spans, now_ms)
        if parsed.batches and reading.TakeRecords() in effects:
            self._bytes[node_id] += len(answer.records)
            state.put(Chunk(answer.records, parsed.batches, node_id))
            self._complete(state)
        self._do(state, effects, state.located(error) if error.code else None)

    def _do(self, state: PartitionState, effects: reading.Effects, error: KafkaError | None = None) -> None:
        """What the reader decided; `error` is what it raises where it does."""
        for effect in effects:
            if isinstance(effect, reading.RefreshMetadata):
                self._metadata.request_refresh((state.topic,))
            elif isinstance(effect, reading.MoveTo):
                state.clear()
                if effect.offset is not None:
                    state.reset_to = None
            elif isinstance(effect, reading.Abandon):
                state.asked = None
            elif isinstance(effect, reading.OffsetReset):
                log.info("%s-%d: %s", *state.where, effect)
            elif isinstance(effect, reading.TruncationFound):
                self._truncations += 1
                log.warning("%s-%d was truncated to %s, below %d", *state.where, effect.end_offset, effect.position)
            elif isinstance(effect, reading.RaiseError):
                if state.reader.state is not State.HALTED:
                    self._fail(state, error or state.located(KafkaError(effect.code)))
            elif isinstance(effect, reading.Redirected):
                self._redirects[effect.node_id] += 1
                max_age_s = self._selection.config.metadata_max_age_ms / 1000
                self._renew_at(state, asyncio.get_running_loop().time() + max_age_s)
            elif isinstance(effect, reading.Left):
                self._returns[effect.cause.value] += 1
                if self._selection.changes_with_metadata:
                    self._return.left(state.where, asyncio.get_running_loop().time())
                log.debug("%s-%d: broker %d is left: %s", *state.where, effect.node_id, effect.cause.value)
        self._ledger.changed[state] = None
        if effects:
            self.wake.set()

    def _fail(self, state: PartitionState, error: KafkaError) -> None:
        state.buffer.append(error)
        self._complete(state)

    def _complete(self, state: PartitionState) -> None:
        if not state.listed:
            state.listed = True
            self.completed.append(state)
        self.arrived.set()


def _ms(now_s: float) -> int:
    return int(now_s * 1000)
