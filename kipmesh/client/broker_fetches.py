"""A consumer's requests to one broker: its fetch session (227-07, 227-17 to 227-19), and what cannot wait for it.

Nearly always a request of the session is under way: it waits at the broker for new records of the session's partitions.
A partition that may be fetched again meanwhile (its buffer was full, it was sought, resumed or assigned) would wait
with it; so it is asked for aside, without a session, in at most two requests at a time, and joins the session as soon
as that is free:

- `catch-up` asks for partitions that are behind their high watermark, and is answered at once;
- `bridge` waits for new records of a few that are not, and is given up when they can join the session.

Invariants: a partition is in the session, in one request aside, pending, or in none of these; only an answer to what
the partition asks now (`PartitionState.asked`) counts; a request costs O(partitions that changed), a full one aside.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, Protocol

from kipmesh import messages as m
from kipmesh.client.cluster import Cluster
from kipmesh.client.fetch_state import PartitionState
from kipmesh.client.types import FetchStats
from kipmesh.core.config import ConsumerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.fetch_session import Answered, FetchSessionHandler, SessionRequest
from kipmesh.core.replica.serving import CONSUMER_ID, FOLLOWER_READER_ID
from kipmesh.rpc.client import TransportError

log = logging.getLogger(__name__)

BRIDGE_PARTITIONS_MAX: Final = 100
"""Partitions of a bridge; others wait for the session, which is at most `fetch.max.wait.ms`."""


FOLLOWER_SILENCE_MS: Final = 1000
"""How long beyond `fetch.max.wait.ms` a follower may leave a fetch unanswered before the leader is asked (392-14)."""
RECHECK_SECONDS: Final = 0.25
"""How long after that it is looked at again, for partitions that came later."""
LINGER_SECONDS: Final = 1.0
"""How long a session without partitions is kept: who goes on with other partitions of the broker has it still."""


class Listener(Protocol):
    """The fetcher, as the requests see it."""

    def take(self, broker: BrokerFetches, partitions: Sequence[Answered], endpoints: Iterable[m.NodeEndpoint]) -> None:
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
        if left is not None and left.topic_id == state.topic_id and state.high_watermark < 0:
            # The session does not know that it left, and would not say again what did not change.
            state.reader.high_watermark, state.reader.log_start_offset = left.high_watermark, left.log_start_offset

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

    def state_of(self, states: dict[Any, PartitionState], one: Answered) -> PartitionState | None:
        """Whom an answer is for: a partition of this broker, or one that has just left."""
        where = one.topic, one.asked.partition
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
        is_level = 0 <= state.high_watermark <= asked.fetch_offset
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
            session.failed(asked)
            self._lost(before, str(error))
            if asked.is_full:
                self._failed(ErrorCode.NETWORK_EXCEPTION, str(error))
            else:
                self._listener.broker_lost(self)
        else:
            answer = session.answered(asked, response)
            if answer.is_accepted:
                self._attempts = 0
            else:
                self._lost(before, answer.error.name if answer.error else "the answer made no sense")
                if not answer.again_at_once:
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
            Answered(state.topic, state.topic_id, asked, answers.get(state.where, missing))
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
