"""The client's side of a fetch session with one server (227-07, 227-12, 227-17 to 227-19): what to send next.

One handler for each session: a follower's fetcher of a leader, a consumer's or Spark reader's connection to a broker.
The user says which partitions it wants and from where (`want`, `unwant`), at any time, and sends one request at a time:

    request = handler.next_request()
    response = ...send request.fill(...)
    outcome = handler.handle_response(request, response)   # or handler.handle_error(request)

What was said stays said: only what changed since the server was last told goes into an incremental request, so that a
request costs O(changed). Whatever goes wrong makes the next request a full one; it carries the positions that are
wanted then, so no record is skipped or returned twice.

| state | next request |
|---|---|
| no session | `(0,0)` |
| session `id`, `n` requests so far | `(id,n)` |
| something was wrong with session `id` | `(id,0)` |
| switched off (227-18) | `(0,-1)` |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple, TypeAlias

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session.types import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    INVALID_SESSION_ID,
    next_epoch,
)

TRANSPORT = "TRANSPORT"
MALFORMED = "MALFORMED"

_Key: TypeAlias = "tuple[bytes | str, int]"
"""Topic id, or the name where there is no id, and partition."""


class WantedPartition(NamedTuple):
    """A partition and what is asked of it."""

    topic: str
    topic_id: bytes
    asked: m.FetchPartition


class SessionRequest(NamedTuple):
    """What the session has to say in a request; the other fields are the user's."""

    session_id: int
    session_epoch: int
    topics: list[m.FetchTopic]
    forgotten_topics_data: list[m.ForgottenTopic]

    @property
    def is_full(self) -> bool:
        """Whether it names all partitions."""
        return self.session_epoch <= INITIAL_EPOCH

    def fill(self, request: m.FetchRequest) -> m.FetchRequest:
        """The request with these fields."""
        return request._replace(
            session_id=self.session_id,
            session_epoch=self.session_epoch,
            topics=self.topics,
            forgotten_topics_data=self.forgotten_topics_data,
        )


class FetchedPartition(NamedTuple):
    """A partition in an accepted response, under the names that the user gave."""

    topic: str
    topic_id: bytes
    asked: m.FetchPartition
    """What the answer is to: it may be wanted otherwise by now, or no longer."""
    data: m.PartitionData


class SessionResponse(NamedTuple):
    """What a response means.

    - `is_accepted`: `partitions` are the news; all others of the session have none. Otherwise there are no partitions.
    - `error`: the top-level error; NONE for a response that made no sense.
    - `again_at_once`: the session only was lost, and the next request heals it (227-19). Where it is False a full fetch
      went wrong, and the user backs off.
    """

    is_accepted: bool
    error: ErrorCode = ErrorCode.NONE
    again_at_once: bool = False
    partitions: list[FetchedPartition] = []  # noqa: RUF012 - never changed


class FetchSessionHandler:
    """The session with one server. `enabled` is `enable.incremental.fetch` (227-18)."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.resets: Counter[str] = Counter()
        """Sessions that were given up, by error name, TRANSPORT or MALFORMED (227-19)."""
        self.full_requests = 0
        self.incremental_requests = 0
        self._first_epoch = INITIAL_EPOCH if enabled else FINAL_EPOCH
        self._session_id = INVALID_SESSION_ID
        self._epoch = self._first_epoch
        self._by_id = True
        self._in_flight: SessionRequest | None = None
        self._is_closed = False
        self._wanted: dict[_Key, WantedPartition] = {}  # in fetch order
        self._without_id = 0
        self._changed: dict[_Key, None] = {}
        self._dropped: dict[_Key, WantedPartition] = {}
        # What the server was told in this session, by what stands in requests and responses.
        self._told: dict[_Key, WantedPartition] = {}

    # -- what is wanted

    def __len__(self) -> int:
        """Partitions that are wanted."""
        return len(self._wanted)

    @property
    def session_id(self) -> int:
        """Of the session as far as we know, 0 without one."""
        return self._session_id

    @property
    def is_waiting(self) -> bool:
        """Whether a request is under way."""
        return self._in_flight is not None

    def want(self, topic: str, topic_id: bytes, asked: m.FetchPartition) -> None:
        """Fetch a partition from now on, or otherwise than before; an empty id if it is not known."""
        key: _Key = (topic_id or topic, asked.partition)
        before = self._wanted.get(key)
        wanted = WantedPartition(topic, topic_id, asked)
        if before == wanted:
            return
        if before is None and not topic_id:
            self._without_id += 1
        self._wanted[key] = wanted
        self._changed[key] = None
        self._dropped.pop(key, None)

    def unwant(self, topic: str, topic_id: bytes, partition: int) -> None:
        """Fetch a partition no more.

        Wanted again, and the same, before the next request, the server never hears of it: the user keeps what it was
        told of the partition until then.
        """
        key: _Key = (topic_id or topic, partition)
        wanted = self._wanted.pop(key, None)
        if wanted is None:
            return
        if not topic_id:
            self._without_id -= 1
        self._changed.pop(key, None)
        self._dropped[key] = wanted

    # -- requests

    def next_request(self) -> SessionRequest:
        """The next one to send: O(changed), or all partitions. One that is under way counts as failed."""
        if self._in_flight is not None:
            self.handle_error(self._in_flight)
        self._is_closed = False
        by_id = not self._without_id
        if self._epoch > INITIAL_EPOCH and by_id is not self._by_id:
            self._epoch = INITIAL_EPOCH  # a session has ids or names, never both (227-05)
        request = self._full(by_id) if self._epoch <= INITIAL_EPOCH else self._incremental()
        self._changed = {}
        self._dropped = {}
        self._in_flight = request
        return request

    def _wire_key(self, wanted: WantedPartition) -> _Key:
        return wanted.topic_id if self._by_id else wanted.topic, wanted.asked.partition

    def _full(self, by_id: bool) -> SessionRequest:
        self.full_requests += 1
        self._by_id = by_id
        self._told = {self._wire_key(wanted): wanted for wanted in self._wanted.values()}
        return SessionRequest(self._session_id, self._epoch, self._topics(self._told.values()), [])

    def _incremental(self) -> SessionRequest:
        self.incremental_requests += 1
        forgotten = []
        for wanted in self._dropped.values():
            told = self._told.get(self._wire_key(wanted))
            if told is not None and told.topic_id == wanted.topic_id:
                del self._told[self._wire_key(wanted)]
                forgotten.append(wanted)
        named = []
        for key in self._changed:
            wanted = self._wanted[key]
            wire_key = self._wire_key(wanted)
            if self._told.get(wire_key) != wanted:
                self._told[wire_key] = wanted
                named.append(wanted)
        groups = groupby(forgotten, key=self._wire_topic)
        forgets = [m.ForgottenTopic(*topic, [one.asked.partition for one in group]) for topic, group in groups]
        return SessionRequest(self._session_id, self._epoch, self._topics(named), forgets)

    def _wire_topic(self, wanted: WantedPartition) -> tuple[str, bytes]:
        return wanted.topic, wanted.topic_id if self._by_id else b""

    def _topics(self, partitions: Iterable[WantedPartition]) -> list[m.FetchTopic]:
        groups = groupby(partitions, key=self._wire_topic)
        return [m.FetchTopic(*topic, [wanted.asked for wanted in group]) for topic, group in groups]

    # -- responses

    def handle_response(self, request: SessionRequest, response: m.FetchResponse) -> SessionResponse:
        """Take the response to `request`; one that comes too late, or twice, is not accepted and changes nothing."""
        if request is not self._in_flight:
            if self._is_closed and request.is_full and not response.error_code and response.session_id > 0:
                self._session_id = response.session_id  # for another `close`
            return SessionResponse(False, again_at_once=True)
        self._in_flight = None
        if response.error_code:
            error = ErrorCode.of(response.error_code)
            if error is ErrorCode.FETCH_SESSION_ID_NOT_FOUND:
                self._session_id = INVALID_SESSION_ID
            self._reset(error.name)
            return SessionResponse(False, error, not request.is_full)
        if request.is_full:
            return self._full_response(response)
        return self._incremental_response(response)

    def _full_response(self, response: m.FetchResponse) -> SessionResponse:
        partitions = self._match(response)
        # Whatever comes of this response: the session of before is closed, and this is the one that there is now.
        if self._first_epoch == INITIAL_EPOCH:
            self._session_id = max(response.session_id, INVALID_SESSION_ID)
        if partitions is None or len(partitions) != len(self._told):
            # A server that only wants to slow us down answers with no partitions at all.
            if response.responses or not response.throttle_time_ms:
                self._reset(MALFORMED)
            else:
                self._epoch = self._first_epoch
            return SessionResponse(False)
        self._epoch = next_epoch(INITIAL_EPOCH) if self._session_id else self._first_epoch
        return self._accept(partitions)

    def _incremental_response(self, response: m.FetchResponse) -> SessionResponse:
        partitions = self._match(response)
        if partitions is None or response.session_id not in (INVALID_SESSION_ID, self._session_id):
            self._reset(MALFORMED)
            return SessionResponse(False, again_at_once=True)
        if response.session_id == INVALID_SESSION_ID:  # its last partition was forgotten (227-06)
            self._session_id = INVALID_SESSION_ID
            self._epoch = self._first_epoch
        else:
            self._epoch = next_epoch(self._epoch)
        return self._accept(partitions)

    def _match(self, response: m.FetchResponse) -> list[FetchedPartition] | None:
        """The response's partitions, None if it has one twice or one that the server was not told of."""
        found: dict[_Key, FetchedPartition] = {}
        count = 0
        for topic in response.responses:
            wire_topic: bytes | str = topic.topic_id if self._by_id else topic.topic
            for data in topic.partitions:
                key = wire_topic, data.partition_index
                told = self._told.get(key)
                if told is None:
                    return None
                found[key] = FetchedPartition(*told, data)
                count += 1
        return list(found.values()) if len(found) == count else None

    def _accept(self, partitions: list[FetchedPartition]) -> SessionResponse:
        for one in partitions:
            if one.data.records:  # to the back of the next full request (227-11)
                key: _Key = (one.topic_id or one.topic, one.data.partition_index)
                wanted = self._wanted.pop(key, None)
                if wanted is not None:
                    self._wanted[key] = wanted
        return SessionResponse(True, partitions=partitions)

    def handle_error(self, request: SessionRequest) -> None:
        """There will be no response: transport failure, timeout, or the user gave up."""
        if request is self._in_flight:
            self._in_flight = None
            self._reset(TRANSPORT)

    def _reset(self, cause: str) -> None:
        self.resets[cause] += 1
        self._epoch = self._first_epoch

    def close(self) -> SessionRequest | None:
        """The request that ends the session (227-17), to be sent without waiting for what comes; None without one.

        A response that arrives later may say that there is another session: then `close` has another request. The
        handler may be used again; from its next request on, such a response is none of its business.
        """
        self._is_closed = True
        session_id, self._session_id = self._session_id, INVALID_SESSION_ID
        self._epoch = self._first_epoch
        self._in_flight = None
        return SessionRequest(session_id, FINAL_EPOCH, [], []) if session_id else None
