"""Fetch state of a consumer: assigned partitions with their buffered batches, and the requests to each broker.

Each broker has one fetch session (227-07, 227-17 to 227-19), whose request usually waits at the broker for records. A
partition that becomes fetchable meanwhile (drained, sought, resumed or assigned) must not wait for that request. It is
fetched without a session until it can join, with at most one request of each kind:

- `catch_up`: partitions below their high watermark; returns immediately;
- `bridge`: waits for new records of a few other partitions; cancelled when they can join the session.

Invariants: a partition is in the session, in one sessionless request, pending, or in none of these; only the response
to `PartitionState.requested` counts; an incremental request costs O(changed partitions).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
"""Maximum partitions of a bridge request. Others wait for the session, at most `fetch.max.wait.ms`."""


FOLLOWER_TIMEOUT_MS: Final = 1000
"""Time beyond `fetch.max.wait.ms` after which a follower that does not respond counts as failed (392-14)."""
RECHECK_SECONDS: Final = 0.25
"""Interval of further checks of a follower that timed out, for partitions that were added later."""
LINGER_SECONDS: Final = 1.0
"""Time to keep a session without partitions, in case other partitions of the broker are assigned."""
DECODE_ON_LOOP_BYTES_MAX = 64 << 10
"""Larger compressed batches are decoded on a thread."""


class Blocked:
    """A buffered item after all records: only a seek or reset by the application lets the partition continue."""


BLOCKED = Blocked()


class Parsed(NamedTuple):
    """The whole batches of a fetch response from the fetch offset on, with their byte positions and epochs."""

    batches: list[tuple[int, BatchHeader]]
    spans: list[EpochSpan]
    failure: KafkaError | None
    """Set only if there is no whole batch."""


def parse_records(records: bytes, fetch_offset: int) -> Parsed:
    """Find the whole batches of a fetch response that end above `fetch_offset`. Never raises.

    Invalid bytes after a whole batch are left to the next fetch. `failure` is a CorruptRecordError if there are bytes
    but no whole batch.
    """
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
        text = f"fetch response has no whole batch at offset {fetch_offset}"
        return Parsed([], [], failure or CorruptRecordError(text))
    return Parsed(batches, spans, None)


@dataclass(slots=True, eq=False, repr=False)
class Chunk:
    """The batches of one fetch response. Batches are decoded one at a time, when they are consumed."""

    data: bytes
    batches: list[tuple[int, BatchHeader]]
    node_id: int
    _index: int = 0
    _records: list[ConsumerRecord] = field(default_factory=list)
    _taken: int = 0

    @property
    def size_bytes(self) -> int:
        """Size of the fetch response in bytes, consumed batches included."""
        return len(self.data)

    @property
    def exhausted(self) -> bool:
        """Whether all batches were consumed."""
        return self._index >= len(self.batches)

    @property
    def decodes_slowly(self) -> bool:
        """Whether the next batch should be decoded on a thread, because it is compressed and large."""
        if self._records or self.exhausted:
            return False
        header = self.batches[self._index][1]
        return header.compression != 0 and header.size_bytes > DECODE_ON_LOOP_BYTES_MAX

    def decode(self, state: PartitionState, check_crcs: bool) -> list[ConsumerRecord]:
        """Return the next batch's records from the position on, for `take`. Changes no state and may run on a thread.

        Raises CorruptRecordError, or KafkaError(UNSUPPORTED_COMPRESSION_TYPE).
        """
        if self._records:
            return self._records
        position, header = self.batches[self._index]
        if check_crcs:
            check_crc(self.data, position, header)
        return consumer_records(state.topic, state.partition, self.data, position, header, state.position or 0)

    def take(self, state: PartitionState, records: list[ConsumerRecord], count_max: int) -> list[ConsumerRecord]:
        """Return up to `count_max` of the `records` that `decode` returned and advance the position past them."""
        header = self.batches[self._index][1]
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
        """Return the remaining batches undecoded, and advance the position past them."""
        start = self.batches[self._index][0]
        header = self.batches[-1][1]
        position = state.position or 0
        state.reader.position = header.next_offset
        self._index = len(self.batches)
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


@dataclass(slots=True, eq=False)
class SharedState:
    """State shared by all partitions of a consumer, so that the fetcher need not iterate over them."""

    buffered_bytes: int = 0
    """Sum over all partitions."""
    changed: dict[PartitionState, None] = field(default_factory=dict)
    """Partitions that changed in a way that may allow a fetch."""

    def take_changed(self) -> dict[PartitionState, None]:
        """Return and clear the changed partitions, in the order of their changes."""
        changed, self.changed = self.changed, {}
        return changed


@dataclass(slots=True, eq=False, repr=False)
class PartitionState:
    """An assigned partition: its reader and its buffer, which ends at the reader's fetch offset."""

    topic: str
    partition: int
    shared: SharedState
    reader: PartitionReader
    topic_id: bytes = b""
    paused: bool = False
    broker: BrokerFetches | None = None
    """The broker that the partition is fetched from."""
    in_session: bool = False
    sessionless_fetch: SessionlessFetch | None = None
    """The sessionless request that contains the partition."""
    is_queued: bool = False
    """Whether the partition is in `Fetcher.completed`."""
    buffer: deque[Chunk | Blocked | KafkaError] = field(default_factory=deque)
    buffered_bytes: int = 0
    requested: m.FetchPartition | None = None
    """The current request. Responses to other requests are ignored."""
    request_id: int = 0
    """The reader's id of the current request."""
    generation: int = 0
    """Incremented when the buffer is discarded."""
    attempts: int = 0
    retry_at_s: float = 0.0
    recheck_at_s: float = 0.0
    """When the replica selection must be checked again; 0 for never."""
    reset_to: int | None = None
    """Timestamp of a reset by the application that is not complete."""
    fatal_error: KafkaError | None = None
    """An error until the next seek that the reader does not know, such as a recreated topic."""

    def __post_init__(self) -> None:
        self.clear()

    @property
    def topic_partition(self) -> TopicPartition:
        """Topic and partition number as a pair."""
        return TopicPartition(self.topic, self.partition)

    @property
    def position(self) -> int | None:
        """Offset of the next record for the application; None until it is known."""
        return self.reader.position

    @property
    def is_halted(self) -> bool:
        """Whether the partition has an error that only a seek ends, or may have one because it has no position."""
        return self.fatal_error is not None or self.reader.state in (State.HALTED, State.RESETTING)

    def blocking_error(self) -> KafkaError | None:
        """Return the error that every poll raises until the application calls seek; None if there is none."""
        if self.fatal_error is not None:
            return self.fatal_error
        problem, name = self.reader.unresolved_problem(), f"{self.topic}-{self.partition}"
        if problem is None:
            return None
        if isinstance(problem, TruncationFound):
            end = f"offset {problem.end_offset}" if problem.end_offset is not None else "an unknown offset"
            text = f"log of {name} was truncated to {end}, below the position {problem.position}; call seek"
            return KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, text)
        if problem.offset < 0:
            text = f"{name} has no position and auto.offset.reset is none; call seek"
            return KafkaError(problem.code, text)
        bounds = f"{problem.log_start_offset} and {problem.high_watermark}"
        text = f"offset {problem.offset} of {name} is not between {bounds} and auto.offset.reset is none; call seek"
        return KafkaError(problem.code, text)

    def clear(self) -> None:
        """Discard the buffer and ignore the response to the current request."""
        self.generation += 1
        self.requested = None
        self.request_id = 0
        self.buffer = deque()
        self.shared.buffered_bytes -= self.buffered_bytes
        self.buffered_bytes = 0
        self.shared.changed[self] = None

    def seek(self, offset: int) -> None:
        """Continue at `offset`. Discards the buffer and any error of the partition."""
        self.fatal_error = self.reset_to = None
        self.retry_at_s = 0.0
        self.reader.seek(offset)
        self.clear()

    def reset(self, timestamp: int) -> None:
        """Continue at the offset of a timestamp, which the reader requests with ListOffsets. Discards the buffer."""
        self.fatal_error = None
        self.reset_to = timestamp
        self.retry_at_s = 0.0
        self.reader.reset(timestamp)
        self.clear()

    def drop_first(self) -> None:
        """Remove the first buffered item: a chunk, an error or `BLOCKED`."""
        item = self.buffer.popleft()
        if isinstance(item, Chunk):
            self.buffered_bytes -= item.size_bytes
            self.shared.buffered_bytes -= item.size_bytes
        self.shared.changed[self] = None

    def put(self, chunk: Chunk) -> None:
        """Append the batches of a response to the buffer."""
        self.buffer.append(chunk)
        self.buffered_bytes += chunk.size_bytes
        self.shared.buffered_bytes += chunk.size_bytes

    def located(self, error: KafkaError) -> KafkaError:
        """Return a new error with the same code, and with the partition and fetch offset in its message."""
        place = f"{self.topic}-{self.partition} at offset {self.reader.fetch_offset}"
        return KafkaError(error.code, f"{place}: {error.message}")


class FetchListener(Protocol):
    """Receives the results of `BrokerFetches`. Implemented by the fetcher."""

    def on_fetched(
        self, broker: BrokerFetches, partitions: Sequence[FetchedPartition], endpoints: Iterable[m.NodeEndpoint]
    ) -> None:
        """Handle the partitions of a response. `endpoints` are those of the current leaders that the response names."""
        ...

    def on_broker_failed(self, broker: BrokerFetches, error: KafkaError) -> None:
        """Handle a full fetch that failed. The fetch is repeated after the broker's backoff."""
        ...

    def on_connection_lost(self, broker: BrokerFetches) -> None:
        """Handle a broken connection of a session. The session recovers, but followers count as failed (392-14)."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a background task that sends a request, and return it."""
        ...


class SessionlessFetch:
    """A pending fetch request without a session, with its partitions and their requests."""

    __slots__ = ("requested", "sent_s", "task")

    def __init__(self, states: Iterable[PartitionState], sent_s: float) -> None:
        self.sent_s = sent_s
        self.requested = [(state, state.requested) for state in states if state.requested is not None]
        self.task: asyncio.Task[None] | None = None
        for state, _ in self.requested:
            state.sessionless_fetch = self

    def cancel(self) -> list[PartitionState]:
        """Cancel the request; detach and return the partitions that still belong to it."""
        if self.task is not None:
            self.task.cancel()
        return self.release()

    def release(self) -> list[PartitionState]:
        """Detach and return the partitions that still belong to this request."""
        states = [state for state, _ in self.requested if state.sessionless_fetch is self]
        for state in states:
            state.sessionless_fetch = None
        return states


class BrokerFetches:
    """Fetches of one consumer from one broker: its fetch session and up to two sessionless requests."""

    def __init__(self, node_id: int, config: ConsumerConfig, cluster: Cluster, listener: FetchListener) -> None:
        self.node_id = node_id
        self.session = FetchSessionHandler(enabled=config.enable_incremental_fetch)
        self.partitions = 0
        """Number of partitions that are fetched from this broker."""
        self.close_at_s: float | None = None
        """When to close the session; None while there are partitions."""
        self.retry_at_s = 0.0
        self.fetches_aside = 0
        self.followers: dict[PartitionState, None] = {}
        """Partitions that are fetched from this broker as a follower."""
        self.last_timeout_s = 0.0
        """When the followers' timeout was last checked."""
        self._rackless: dict[PartitionState, None] = {}
        self._sent_s = 0.0
        self._follower_timeout_s = (config.fetch_max_wait_ms + FOLLOWER_TIMEOUT_MS) / 1000
        self._config = config
        self._cluster = cluster
        self._listener = listener
        self._unassigned: dict[tuple[str, int], PartitionState] = {}
        self._behind: dict[PartitionState, None] = {}
        self._caught_up: dict[PartitionState, None] = {}
        self._catch_up: SessionlessFetch | None = None
        self._bridge: SessionlessFetch | None = None
        self._task: asyncio.Task[None] | None = None
        self._attempts = 0

    @property
    def stats(self) -> FetchStats:
        """Fetch counters of this broker. Counters of the whole consumer are 0."""
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

    # -- partitions of this broker

    def add(self, state: PartitionState) -> None:
        """Make this the broker that the partition is fetched from. Sends no request."""
        state.broker = self
        self.partitions += 1
        self.close_at_s = None
        left = self._unassigned.pop(state.topic_partition, None)
        if left is not None and left.topic_id == state.topic_id and state.reader.high_watermark < 0:
            # The session still contains the partition and would not repeat unchanged values.
            state.reader.high_watermark = left.reader.high_watermark
            state.reader.log_start_offset = left.reader.log_start_offset

    def remove(self, state: PartitionState, *, is_unassigned: bool = False) -> None:
        """Stop fetching the partition from this broker.

        `is_unassigned` means that the consumer has dropped the partition, rather than moved it to another broker.
        """
        self.withdraw(state)
        self.set_role(state, is_follower=False, is_rackless=False)
        state.broker = None
        self.partitions -= 1
        if not self.partitions:
            self.close_at_s = asyncio.get_running_loop().time() + LINGER_SECONDS
        if is_unassigned:
            self._unassigned[state.topic_partition] = state
        else:  # the next broker may get the same request, to which this broker's response must not be assigned
            state.sessionless_fetch = None

    def state_of(self, states: dict[Any, PartitionState], one: FetchedPartition) -> PartitionState | None:
        """Return a response's partition if it belongs to this broker or was just unassigned, otherwise None."""
        topic_partition = one.topic, one.requested.partition
        state = self._unassigned.get(topic_partition)
        if state is None:
            state = states.get(topic_partition)
            if state is None or state.broker is not self:
                return None
        return state if state.topic_id == one.topic_id else None

    def set_role(self, state: PartitionState, *, is_follower: bool, is_rackless: bool) -> None:
        """Set whether this broker is a follower for the partition, and whether fetches must omit the rack (392-17)."""
        for is_member, group in ((is_follower, self.followers), (is_rackless, self._rackless)):
            if is_member:
                group[state] = None
            else:
                group.pop(state, None)

    @property
    def follower_timeout_at_s(self) -> float | None:
        """Time at which the pending request to a follower times out (392-14); None if there is no such request."""
        if not self.followers:
            return None
        sent = [one.sent_s for one in (self._catch_up, self._bridge) if one is not None]
        if self.session.is_waiting:
            sent.append(self._sent_s)
        return max(min(sent) + self._follower_timeout_s, self.last_timeout_s + RECHECK_SECONDS) if sent else None

    # -- partitions to fetch

    def add_request(self, state: PartitionState, requested: m.FetchPartition) -> None:
        """Fetch the partition as requested, unless the session or a pending request already does."""
        if state.requested == requested and (
            state.in_session or state.sessionless_fetch is not None or state in self._behind or state in self._caught_up
        ):
            return
        state.sessionless_fetch = None
        if not self.session.is_waiting:
            state.requested = requested
            self._add_to_session(state)
            return
        self.withdraw(state)
        state.requested = requested
        is_caught_up = 0 <= state.reader.high_watermark <= requested.fetch_offset
        (self._caught_up if is_caught_up else self._behind)[state] = None

    def withdraw(self, state: PartitionState) -> None:
        """Stop requesting the partition. The response to a pending request is still accepted."""
        self._behind.pop(state, None)
        self._caught_up.pop(state, None)
        if state.in_session:
            state.in_session = False
            self.session.unwant(state.topic, state.topic_id, state.partition)

    def _add_to_session(self, state: PartitionState) -> None:
        if state.requested is not None:
            state.in_session = True
            self.session.want(state.topic, state.topic_id, state.requested)

    # -- requests

    def send(self, now: float) -> None:
        """Start the requests that are possible now: the session's, or sessionless ones while the session's is pending.

        Does nothing during the backoff, or while the broker's address is unknown.
        """
        address = self._cluster.metadata.address(self.node_id)
        if now < self.retry_at_s or address is None:
            return
        if self.session.is_waiting:
            if self._behind and self._catch_up is None:
                self._catch_up = self._start_sessionless(address, list(self._behind), max_wait_ms=0)
            if self._caught_up and self._bridge is None:
                few = list(islice(self._caught_up, BRIDGE_PARTITIONS_MAX))
                self._bridge = self._start_sessionless(address, few, self._config.fetch_max_wait_ms)
            return
        bridge, self._bridge = self._bridge, None
        for state in [*(bridge.cancel() if bridge is not None else ()), *self._behind, *self._caught_up]:
            self._add_to_session(state)
        self._behind, self._caught_up = {}, {}
        if len(self.session):
            self._unassigned = {}
            # The first request only creates the session and must not wait.
            max_wait_ms = self._config.fetch_max_wait_ms if self.session.full_requests else 0
            self._sent_s = now
            request = self.session.next_request()
            self._task = self._listener.spawn(self._run_session(address, request, max_wait_ms))

    def _make_request(self, max_wait_ms: int, topics: Sequence[m.FetchTopic] = ()) -> m.FetchRequest:
        config = self._config
        is_own_selection = config.replica_selection_mode != "fetch" and config.replica_selection_policy == "preferred"
        has_rack = config.replica_selection_mode == "fetch" and not self._rackless
        return m.FetchRequest(
            # All partitions of a session share one replica id, including those that this broker leads (392-16).
            replica_id=FOLLOWER_READER_ID if is_own_selection else CONSUMER_ID,
            max_wait_ms=max_wait_ms,
            min_bytes=self._config.fetch_min_bytes,
            max_bytes=self._config.fetch_max_bytes,
            topics=topics,
            rack_id=config.client_rack if has_rack else "",
        )

    async def _fetch(self, address: str, request: m.FetchRequest) -> m.FetchResponse:
        timeout_s = (self._config.request_timeout_ms + request.max_wait_ms) / 1000
        response: m.FetchResponse = await self._cluster.pool.get(address).fetch(request, timeout_s)
        return response

    async def _run_session(self, address: str, request: SessionRequest, max_wait_ms: int) -> None:
        session, session_id = self.session, self.session.session_id
        try:
            response = await self._fetch(address, request.fill(self._make_request(max_wait_ms)))
        except TransportError as error:
            session.handle_error(request)
            self._log_session_reset(session_id, str(error))
            if request.is_full:
                self._back_off(ErrorCode.NETWORK_EXCEPTION, str(error))
            else:
                self._listener.on_connection_lost(self)
            self._listener.on_fetched(self, (), ())
            return
        result = session.handle_response(request, response)
        if result.is_accepted:
            self._attempts = 0
        else:
            self._log_session_reset(session_id, result.error.name if result.error else "malformed response")
            if not result.retry_immediately:
                text = f"invalid fetch response from broker {self.node_id}"
                self._back_off(result.error or ErrorCode.NETWORK_EXCEPTION, text)
        self._listener.on_fetched(self, result.partitions, response.node_endpoints)

    def _log_session_reset(self, session_id: int, cause: str) -> None:
        log.debug("fetch session reset session_id=%d broker=%d cause=%s", session_id, self.node_id, cause)

    def _back_off(self, code: ErrorCode, text: str) -> None:
        self._attempts += 1
        self.retry_at_s = asyncio.get_running_loop().time() + self._cluster.backoff.delay_s(self._attempts)
        self._listener.on_broker_failed(self, KafkaError(code, text))

    def _start_sessionless(self, address: str, states: list[PartitionState], max_wait_ms: int) -> SessionlessFetch:
        self.fetches_aside += 1
        for state in states:
            self._behind.pop(state, None)
            self._caught_up.pop(state, None)
        fetch = SessionlessFetch(states, asyncio.get_running_loop().time())
        by_topic: dict[tuple[str, bytes], list[m.FetchPartition]] = {}
        for state, requested in fetch.requested:
            by_topic.setdefault((state.topic, state.topic_id), []).append(requested)
        topics = [m.FetchTopic(*topic, partitions) for topic, partitions in by_topic.items()]
        fetch.task = self._listener.spawn(
            self._run_sessionless(address, fetch, self._make_request(max_wait_ms, topics))
        )
        return fetch

    async def _run_sessionless(self, address: str, fetch: SessionlessFetch, request: m.FetchRequest) -> None:
        data: dict[tuple[str, int], m.PartitionData] = {}
        endpoints: Sequence[m.NodeEndpoint] = ()
        missing = m.PartitionData(error_code=ErrorCode.NETWORK_EXCEPTION)
        try:
            response = await self._fetch(address, request)
        except TransportError as error:
            log.debug("fetch failed error=%s", error)
        else:
            endpoints = response.node_endpoints
            if response.error_code:
                missing = m.PartitionData(error_code=response.error_code)
            for topic in response.responses:
                data.update({(topic.topic, each.partition_index): each for each in topic.partitions})
        if self._catch_up is fetch:
            self._catch_up = None
        elif self._bridge is fetch:
            self._bridge = None
        current = dict.fromkeys(fetch.release())
        fetched = [
            FetchedPartition(state.topic, state.topic_id, requested, data.get(state.topic_partition, missing))
            for state, requested in fetch.requested
            if state in current
        ]
        self._listener.on_fetched(self, fetched, endpoints)

    # -- closing

    async def close(self, timeout_s: float) -> None:
        """Cancel all requests and close the session at the broker (227-17), within `timeout_s`. Ignores errors."""
        tasks = [one.task for one in (self._catch_up, self._bridge) if one is not None and one.task is not None]
        if self._task is not None:
            tasks.append(self._task)
        with suppress(TimeoutError, TransportError):
            async with asyncio.timeout(timeout_s):
                if self._task is not None and self._is_creating_session:
                    await asyncio.wait([self._task])  # the response has the id of the session to close
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                last = self.session.close()
                address = self._cluster.metadata.address(self.node_id)
                if last is not None and address is not None:
                    await self._cluster.pool.get(address).fetch(last.fill(self._make_request(0)), timeout_s)
        for task in tasks:
            task.cancel()

    @property
    def _is_creating_session(self) -> bool:
        """Whether the request that creates the session is pending. The broker responds to it immediately."""
        is_first = self.session.full_requests == 1 and not self.session.incremental_requests
        return is_first and self.session.is_waiting and self._config.enable_incremental_fetch
