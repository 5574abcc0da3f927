"""What a consumer fetches: the state of each assigned partition, its buffered batches, and the requests to each broker.

A broker has a fetch session (227-07, 227-17 to 227-19), and requests for partitions that cannot wait for it.
Nearly always a request of the session is under way: it waits at the broker for new records of the session's partitions.
A partition that may be fetched again meanwhile (its buffer was full, it was sought, resumed or assigned) would wait
with it; so it is asked for aside, without a session, in at most two requests at a time, and joins the session as soon
as that is free:

- `catch-up` asks for partitions that are behind their high watermark, and is answered at once;
- `bridge` waits for new records of a few that are not, and is given up when they can join the session.

Invariants: a partition is in the session, in one request aside, pending, or in none of these; only an answer to what
the partition asks now (`PartitionState.asked`) counts; a request costs O(partitions that changed), a full one aside;
the ledger's `buffered_bytes` are the sum of all partitions'; a partition whose state changed in a way that may let it
be asked for again is in the ledger's `changed`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

from kipmesh import messages as m
from kipmesh.client.cluster import Cluster
from kipmesh.client.consumer.rules.reader import PartitionReader
from kipmesh.client.consumer.rules.states import State
from kipmesh.client.consumer.rules.values import EpochSpan, TruncationFound
from kipmesh.client.records import consumer_records
from kipmesh.client.types import ConsumerRecord, FetchedBatches, FetchStats, TopicPartition
from kipmesh.core.config import ConsumerConfig
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.fetch_session import FetchedPartition, FetchSessionHandler, SessionRequest
from kipmesh.core.record_batch import BatchHeader, check_crc, iterate
from kipmesh.core.replica.serving import CONSUMER_ID, FOLLOWER_READER_ID
from kipmesh.transport.grpc.client import TransportError

log = logging.getLogger(__name__)

BRIDGE_PARTITIONS_MAX: Final = 100
"""Partitions of a bridge; others wait for the session, which is at most `fetch.max.wait.ms`."""


FOLLOWER_SILENCE_MS: Final = 1000
"""How long beyond `fetch.max.wait.ms` a follower may leave a fetch unanswered before the leader is asked (392-14)."""
RECHECK_SECONDS: Final = 0.25
"""How long after that it is looked at again, for partitions that came later."""
LINGER_SECONDS: Final = 1.0
"""How long a session without partitions is kept: who goes on with other partitions of the broker has it still."""
DECODE_ON_LOOP_BYTES_MAX = 64 << 10
"""Compressed batches that are larger are decoded on a thread."""


class AskUser:
    """Stands behind what is buffered: only the user can say how to go on."""


ASK_USER = AskUser()


class Parsed(NamedTuple):
    """The records of an answer: whole batches from the fetch offset on, and their epochs."""

    batches: list[tuple[int, BatchHeader]]
    spans: list[EpochSpan]
    failure: KafkaError | None
    """Set only where there is not one whole batch."""


def parse_records(records: bytes, fetch_offset: int) -> Parsed:
    """What is in an answer; garbage behind whole batches is found by the next fetch."""
    batches: list[tuple[int, BatchHeader]] = []
    spans: list[EpochSpan] = []
    failure: KafkaError | None = None
    offset = fetch_offset
    try:
        for position, header in iterate(records, allow_partial=True):
            if header.next_offset <= offset:
                continue
            batches.append((position, header))
            offset, epoch = header.next_offset, header.partition_leader_epoch
            if spans and spans[-1].epoch == epoch:
                spans[-1] = spans[-1]._replace(next_offset=offset)
            else:
                spans.append(EpochSpan(header.base_offset, offset, epoch))
    except CorruptRecordError as error:
        failure = error
    if records and not batches:
        return Parsed([], [], failure or CorruptRecordError("an answer without a whole batch at the offset"))
    return Parsed(batches, spans, None)


class Chunk:
    """The batches of one answer, taken batch by batch; batches are decoded when they are taken."""

    __slots__ = ("_batches", "_index", "_records", "_taken", "data", "node_id", "size_bytes")

    def __init__(self, data: bytes, batches: list[tuple[int, BatchHeader]], node_id: int) -> None:
        self.data = data
        self.size_bytes = len(data)
        self.node_id = node_id
        self._batches = batches
        self._index = 0
        self._records: list[ConsumerRecord] = []
        self._taken = 0

    @property
    def exhausted(self) -> bool:
        """Whether everything was taken."""
        return self._index >= len(self._batches)

    @property
    def decodes_slowly(self) -> bool:
        """Whether the next batch should be decoded on a thread."""
        if self._records or self.exhausted:
            return False
        header = self._batches[self._index][1]
        return header.compression != 0 and header.size_bytes > DECODE_ON_LOOP_BYTES_MAX

    def decode(self, state: PartitionState, check_crcs: bool) -> list[ConsumerRecord]:
        """The records of the next batch, for `take`; raises KafkaError. Changes nothing; may run on a thread."""
        if self._records:
            return self._records
        position, header = self._batches[self._index]
        if check_crcs:
            check_crc(self.data, position, header)
        return consumer_records(state.topic, state.partition, self.data, position, header, state.position or 0)

    def take(self, state: PartitionState, records: list[ConsumerRecord], count_max: int) -> list[ConsumerRecord]:
        """Up to `count_max` of the batch's decoded records; moves the position."""
        header = self._batches[self._index][1]
        whole = self._taken == 0 and len(records) <= count_max
        taken = records if whole else records[self._taken : self._taken + count_max]
        self._taken += len(taken)
        self._records = records
        if self._taken >= len(records):
            self._records = []
            self._taken = 0
            self._index += 1
            state.reader.position = max(state.position or 0, header.next_offset)
        else:
            state.reader.position = taken[-1].offset + 1
        return taken

    def rest(self, state: PartitionState, topic_id: bytes) -> FetchedBatches:
        """What was not taken yet, as whole batches; moves the position past it."""
        start = self._batches[self._index][0]
        header = self._batches[-1][1]
        position = state.position or 0
        state.reader.position = header.next_offset
        self._index = len(self._batches)
        return FetchedBatches(
            state.topic,
            state.partition,
            topic_id,
            position,
            header.next_offset,
            state.reader.high_watermark,
            state.reader.log_start_offset,
            self.data[start:] if start else self.data,
        )


class Ledger:
    """What the partitions of one consumer have in common, so that nobody has to go through all of them."""

    __slots__ = ("buffered_bytes", "changed")

    def __init__(self) -> None:
        self.buffered_bytes = 0
        self.changed: dict[PartitionState, None] = {}

    def take_changed(self) -> dict[PartitionState, None]:
        """Those that changed since the last call, in that order."""
        changed, self.changed = self.changed, {}
        return changed


class PartitionState:
    """One assigned partition: its reader, which decides, and what is fetched. What is buffered lies between the
    reader's position and fetch offset."""

    __slots__ = (
        "asked",
        "attempts",
        "broker",
        "buffer",
        "buffered_bytes",
        "exchange",
        "generation",
        "in_session",
        "ledger",
        "listed",
        "number",
        "partition",
        "paused",
        "reader",
        "renew_at_s",
        "reset_to",
        "retry_at_s",
        "topic",
        "topic_id",
        "verdict",
    )

    def __init__(self, topic: str, partition: int, ledger: Ledger, reader: PartitionReader) -> None:
        self.ledger = ledger
        self.topic = topic
        self.partition = partition
        self.reader = reader
        self.topic_id = b""
        self.paused = False
        self.broker: BrokerFetches | None = None
        """Where it is fetched."""
        self.in_session = False
        self.exchange: Exchange | None = None
        """The request without a session that it is in."""
        self.listed = False
        """Whether the fetcher lists it among those that have something to take."""
        self.buffered_bytes = 0
        self.generation = 0
        self.attempts = 0
        self.retry_at_s = 0.0
        self.renew_at_s = 0.0
        """When somebody else may have to be asked than now; 0 for never."""
        self.reset_to: int | None = None
        """The user's own reset that is not done yet."""
        self.verdict: KafkaError | None = None
        """Why it does not go on until the user seeks, where the reader does not know."""
        self.clear()

    @property
    def where(self) -> TopicPartition:
        """Topic and partition."""
        return TopicPartition(self.topic, self.partition)

    @property
    def position(self) -> int | None:
        """The offset of the next record that the user gets; None while it is not known."""
        return self.reader.position

    @property
    def is_halted(self) -> bool:
        """Whether only the user can say how to go on, or can if `auto.offset.reset` does not."""
        return self.verdict is not None or self.reader.state in (State.HALTED, State.RESETTING)

    def ask_user(self) -> KafkaError | None:
        """Why the partition does not go on until the user seeks; None if it does."""
        if self.verdict is not None:
            return self.verdict
        problem, where = self.reader.ask_user(), f"{self.topic}-{self.partition}"
        if problem is None:
            return None
        if isinstance(problem, TruncationFound):
            to = f"to offset {problem.end_offset}" if problem.end_offset is not None else "to an unknown offset"
            text = f"{where}: the log was truncated {to}, below {problem.position}"
            return KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, text)
        if problem.offset < 0:
            return KafkaError(problem.code, f"{where} has no position and auto.offset.reset is none")
        bounds = f"{problem.log_start_offset} and {problem.high_watermark}"
        return KafkaError(problem.code, f"{where}: offset {problem.offset} is not between {bounds}")

    def clear(self) -> None:
        """Without what was fetched; answers under way are void."""
        self.generation += 1
        self.asked: m.FetchPartition | None = None  # what answers have to be to
        self.number = 0  # the reader's for them
        self.buffer: deque[Chunk | AskUser | KafkaError] = deque()
        self.ledger.buffered_bytes -= self.buffered_bytes
        self.buffered_bytes = 0
        self.ledger.changed[self] = None

    def seek(self, offset: int) -> None:
        """Go on at `offset`."""
        self.verdict = self.reset_to = None
        self.retry_at_s = 0.0
        self.reader.seek(offset)
        self.clear()

    def reset(self, timestamp: int) -> None:
        """Find the position by ListOffsets."""
        self.verdict = None
        self.reset_to = timestamp
        self.retry_at_s = 0.0
        self.reader.reset(timestamp)
        self.clear()

    def drop_first(self) -> None:
        """The first of what is buffered was taken."""
        item = self.buffer.popleft()
        if isinstance(item, Chunk):
            self.buffered_bytes -= item.size_bytes
            self.ledger.buffered_bytes -= item.size_bytes
        self.ledger.changed[self] = None

    def put(self, chunk: Chunk) -> None:
        """Buffer an answer's batches."""
        self.buffer.append(chunk)
        self.buffered_bytes += chunk.size_bytes
        self.ledger.buffered_bytes += chunk.size_bytes

    def located(self, error: KafkaError) -> KafkaError:
        """The error with partition and offset in its message."""
        where = f"{self.topic}-{self.partition} at offset {self.reader.fetch_offset}"
        return KafkaError(error.code, f"{where}: {error.message}")


class Listener(Protocol):
    """The fetcher, as the requests see it."""

    def take(
        self, broker: BrokerFetches, partitions: Sequence[FetchedPartition], endpoints: Iterable[m.NodeEndpoint]
    ) -> None:
        """Answers came."""
        ...

    def broker_failed(self, broker: BrokerFetches, error: KafkaError) -> None:
        """A full fetch failed; the broker is asked again when its backoff is over."""
        ...

    def broker_lost(self, broker: BrokerFetches) -> None:
        """The connection broke under a session, which heals; but followers are left (392-14)."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a request."""
        ...


class Exchange:
    """A request without a session that is under way: what it asks of whom."""

    __slots__ = ("asked", "sent_s", "task")

    def __init__(self, states: Iterable[PartitionState], sent_s: float) -> None:
        self.sent_s = sent_s
        self.asked = [(state, state.asked) for state in states if state.asked is not None]
        self.task: asyncio.Task[None] | None = None
        for state, _ in self.asked:
            state.exchange = self

    def give_up(self) -> list[PartitionState]:
        """No answer is wanted any more; the partitions that are still this request's."""
        if self.task is not None:
            self.task.cancel()
        return self.release()

    def release(self) -> list[PartitionState]:
        """It is over; the partitions that were still this request's."""
        states = [state for state, _ in self.asked if state.exchange is self]
        for state in states:
            state.exchange = None
        return states


class BrokerFetches:
    """All fetches of one consumer from one broker."""

    def __init__(self, node_id: int, config: ConsumerConfig, cluster: Cluster, listener: Listener) -> None:
        self.node_id = node_id
        self.session = FetchSessionHandler(enabled=config.enable_incremental_fetch)
        self.partitions = 0
        """Partitions whose home this is."""
        self.close_at_s: float | None = None
        """When the session is closed, while there are none."""
        self.retry_at_s = 0.0
        self.fetches_aside = 0
        self.followers: dict[PartitionState, None] = {}
        """Partitions that are read here though somebody else leads them."""
        self.checked_s = 0.0
        """When it was last found to be silent."""
        self._rackless: dict[PartitionState, None] = {}
        self._sent_s = 0.0
        self._patience_s = (config.fetch_max_wait_ms + FOLLOWER_SILENCE_MS) / 1000
        self._config = config
        self._cluster = cluster
        self._listener = listener
        self._left: dict[tuple[str, int], PartitionState] = {}
        self._behind: dict[PartitionState, None] = {}
        self._level: dict[PartitionState, None] = {}
        self._catch_up: Exchange | None = None
        self._bridge: Exchange | None = None
        self._request: SessionRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._attempts = 0

    @property
    def stats(self) -> FetchStats:
        """Of this broker."""
        session = self.session
        is_open = session.session_id != 0
        return FetchStats(
            int(is_open),
            len(session) if is_open else 0,
            session.full_requests,
            session.incremental_requests,
            self.fetches_aside,
            Counter(session.resets),
        )

    # -- whose home it is

    def adopt(self, state: PartitionState) -> None:
        """The partition is fetched here from now on."""
        state.broker = self
        self.partitions += 1
        self.close_at_s = None
        left = self._left.pop(state.where, None)
        if left is not None and left.topic_id == state.topic_id and state.reader.high_watermark < 0:
            # The session does not know that it left, and would not say again what did not change.
            state.reader.high_watermark = left.reader.high_watermark
            state.reader.log_start_offset = left.reader.log_start_offset

    def leave(self, state: PartitionState, *, is_unassigned: bool = False) -> None:
        """The partition is fetched here no more."""
        self.withdraw(state)
        self.route(state, is_follower=False, is_rackless=False)
        state.broker = None
        self.partitions -= 1
        if not self.partitions:
            self.close_at_s = asyncio.get_running_loop().time() + LINGER_SECONDS
        if is_unassigned:
            self._left[state.where] = state
        else:  # it may ask the same of the next one, and the answer from here is not for it
            state.exchange = None

    def state_of(self, states: dict[Any, PartitionState], one: FetchedPartition) -> PartitionState | None:
        """Whom an answer is for: a partition of this broker, or one that has just left."""
        where = one.topic, one.requested.partition
        state = self._left.get(where)
        if state is None:
            state = states.get(where)
            if state is None or state.broker is not self:
                return None
        return state if state.topic_id == one.topic_id else None

    def route(self, state: PartitionState, *, is_follower: bool, is_rackless: bool) -> None:
        """In what role the broker serves the partition, and whether the leader is to serve it itself (392-17)."""
        for there, group in ((is_follower, self.followers), (is_rackless, self._rackless)):
            if there:
                group[state] = None
            else:
                group.pop(state, None)

    @property
    def silent_at_s(self) -> float | None:
        """When the followers' patience with a request that is under way ends (392-14)."""
        if not self.followers:
            return None
        sent = [one.sent_s for one in (self._catch_up, self._bridge) if one is not None]
        if self.session.is_waiting:
            sent.append(self._sent_s)
        return max(min(sent) + self._patience_s, self.checked_s + RECHECK_SECONDS) if sent else None

    # -- what to ask

    def place(self, state: PartitionState, asked: m.FetchPartition) -> None:
        """Ask for the partition like that; nothing to do where that is under way, or what the session has."""
        if state.asked == asked and (
            state.in_session or state.exchange is not None or state in self._behind or state in self._level
        ):
            return
        state.exchange = None
        if not self.session.is_waiting:
            state.asked = asked
            self._join(state)
            return
        self.withdraw(state)
        state.asked = asked
        is_level = 0 <= state.reader.high_watermark <= asked.fetch_offset
        (self._level if is_level else self._behind)[state] = None

    def withdraw(self, state: PartitionState) -> None:
        """Ask for it no more; an answer that is under way is taken all the same."""
        self._behind.pop(state, None)
        self._level.pop(state, None)
        if state.in_session:
            state.in_session = False
            self.session.unwant(state.topic, state.topic_id, state.partition)

    def _join(self, state: PartitionState) -> None:
        if state.asked is not None:
            state.in_session = True
            self.session.want(state.topic, state.topic_id, state.asked)

    # -- requests

    def send(self, now: float) -> None:
        """Start the requests that can be started."""
        address = self._cluster.metadata.address(self.node_id)
        if now < self.retry_at_s or address is None:
            return
        if self.session.is_waiting:
            if self._behind and self._catch_up is None:
                self._catch_up = self._start_aside(address, list(self._behind), max_wait_ms=0)
            if self._level and self._bridge is None:
                few = list(islice(self._level, BRIDGE_PARTITIONS_MAX))
                self._bridge = self._start_aside(address, few, self._config.fetch_max_wait_ms)
            return
        bridge, self._bridge = self._bridge, None
        for state in [*(bridge.give_up() if bridge is not None else ()), *self._behind, *self._level]:
            self._join(state)
        self._behind, self._level = {}, {}
        if len(self.session):
            self._left = {}
            # The first one only makes the session: it is the next that waits.
            max_wait_ms = self._config.fetch_max_wait_ms if self.session.full_requests else 0
            self._request = self.session.next_request()
            self._sent_s = now
            self._task = self._listener.spawn(self._run_session(address, self._request, max_wait_ms))

    def _fill(self, max_wait_ms: int, topics: Sequence[m.FetchTopic] = ()) -> m.FetchRequest:
        config = self._config
        chooses_here = config.replica_selection_mode != "fetch" and config.replica_selection_policy == "preferred"
        names_rack = config.replica_selection_mode == "fetch" and not self._rackless
        return m.FetchRequest(
            # A session is for one replica id, so what the leader serves has that of the rest, too (392-16).
            replica_id=FOLLOWER_READER_ID if chooses_here else CONSUMER_ID,
            max_wait_ms=max_wait_ms,
            min_bytes=self._config.fetch_min_bytes,
            max_bytes=self._config.fetch_max_bytes,
            topics=topics,
            rack_id=config.client_rack if names_rack else "",
        )

    async def _fetch(self, address: str, request: m.FetchRequest) -> m.FetchResponse:
        timeout_s = (self._config.request_timeout_ms + request.max_wait_ms) / 1000
        response: m.FetchResponse = await self._cluster.pool.get(address).fetch(request, timeout_s)
        return response

    async def _run_session(self, address: str, asked: SessionRequest, max_wait_ms: int) -> None:
        session, before = self.session, self.session.session_id
        try:
            response = await self._fetch(address, asked.fill(self._fill(max_wait_ms)))
        except TransportError as error:
            session.handle_error(asked)
            self._lost(before, str(error))
            if asked.is_full:
                self._failed(ErrorCode.NETWORK_EXCEPTION, str(error))
            else:
                self._listener.broker_lost(self)
        else:
            answer = session.handle_response(asked, response)
            if answer.is_accepted:
                self._attempts = 0
            else:
                self._lost(before, answer.error.name if answer.error else "the answer made no sense")
                if not answer.retry_immediately:
                    self._failed(answer.error or ErrorCode.NETWORK_EXCEPTION, f"the answer of broker {self.node_id}")
            self._listener.take(self, answer.partitions, response.node_endpoints)
            return
        self._listener.take(self, (), ())

    def _lost(self, session_id: int, why: str) -> None:
        log.debug("fetch session %d with broker %d is given up: %s", session_id, self.node_id, why)

    def _failed(self, code: ErrorCode, text: str) -> None:
        self._attempts += 1
        self.retry_at_s = asyncio.get_running_loop().time() + self._cluster.backoff.delay_s(self._attempts)
        self._listener.broker_failed(self, KafkaError(code, text))

    def _start_aside(self, address: str, states: list[PartitionState], max_wait_ms: int) -> Exchange:
        self.fetches_aside += 1
        for state in states:
            self._behind.pop(state, None)
            self._level.pop(state, None)
        exchange = Exchange(states, asyncio.get_running_loop().time())
        by_topic: dict[tuple[str, bytes], list[m.FetchPartition]] = {}
        for state, asked in exchange.asked:
            by_topic.setdefault((state.topic, state.topic_id), []).append(asked)
        topics = [m.FetchTopic(*topic, partitions) for topic, partitions in by_topic.items()]
        exchange.task = self._listener.spawn(self._run_aside(address, exchange, self._fill(max_wait_ms, topics)))
        return exchange

    async def _run_aside(self, address: str, exchange: Exchange, request: m.FetchRequest) -> None:
        answers: dict[tuple[str, int], m.PartitionData] = {}
        endpoints: Sequence[m.NodeEndpoint] = ()
        missing = m.PartitionData(error_code=ErrorCode.NETWORK_EXCEPTION)
        try:
            response = await self._fetch(address, request)
        except TransportError as error:
            log.debug("fetch failed: %s", error)
        else:
            endpoints = response.node_endpoints
            if response.error_code:
                missing = m.PartitionData(error_code=response.error_code)
            for topic in response.responses:
                answers.update({(topic.topic, each.partition_index): each for each in topic.partitions})
        if self._catch_up is exchange:
            self._catch_up = None
        elif self._bridge is exchange:
            self._bridge = None
        still = dict.fromkeys(exchange.release())
        found = [
            FetchedPartition(state.topic, state.topic_id, asked, answers.get(state.where, missing))
            for state, asked in exchange.asked
            if state in still
        ]
        self._listener.take(self, found, endpoints)

    # -- the end

    async def close(self, timeout_s: float) -> None:
        """End all requests, and the session at the broker (227-17), within the time."""
        tasks = [one.task for one in (self._catch_up, self._bridge) if one is not None and one.task is not None]
        if self._task is not None:
            tasks.append(self._task)
        with suppress(TimeoutError, TransportError):
            async with asyncio.timeout(timeout_s):
                if self._task is not None and self._makes_session:
                    await asyncio.wait([self._task])  # its answer says which session to close
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                last = self.session.close()
                address = self._cluster.metadata.address(self.node_id)
                if last is not None and address is not None:
                    await self._cluster.pool.get(address).fetch(last.fill(self._fill(0)), timeout_s)
        for task in tasks:
            task.cancel()

    @property
    def _makes_session(self) -> bool:
        """Whether the first request, which is answered at once, is under way."""
        is_first = self.session.full_requests == 1 and not self.session.incremental_requests
        return is_first and self.session.is_waiting and self._config.enable_incremental_fetch
