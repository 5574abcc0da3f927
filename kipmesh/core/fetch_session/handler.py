"""Client side of a fetch session with one server (227-07, 227-12, 227-17 to 227-19).

There is one handler per session: a follower's fetcher of one leader, or a consumer's or Spark reader's connection to
one broker. The user calls `want` and `unwant` at any time, and sends one request at a time:

    request = handler.next_request()
    response = ...send request.fill(...)
    outcome = handler.handle_response(request, response)   # or handler.handle_error(request)

An incremental request contains only differences from what was last sent, so it costs O(changed). After any error the
next request is a full one with the positions wanted by then: no record is skipped or returned twice.

Next request: `(0,0)` without a session; `(id,n)` after `n` requests of session `id`; `(id,0)` after an error in session
`id`; `(0,-1)` if sessions are disabled (227-18).
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
"""Topic id, or name if the id is unknown, and partition."""


class WantedPartition(NamedTuple):
    """A partition that the user wants to fetch, with the position and limits to request."""

    topic: str
    topic_id: bytes
    requested: m.FetchPartition


class SessionRequest(NamedTuple):
    """Session fields of a Fetch request; `fill` adds them to the other fields."""

    session_id: int
    session_epoch: int
    topics: list[m.FetchTopic]
    forgotten_topics_data: list[m.ForgottenTopic]

    @property
    def is_full(self) -> bool:
        """Whether the request is a full one, which names all partitions, instead of an incremental one."""
        return self.session_epoch <= INITIAL_EPOCH

    def fill(self, request: m.FetchRequest) -> m.FetchRequest:
        """Return `request` with its session fields and topics replaced by those of this object."""
        return request._replace(**self._asdict())


class FetchedPartition(NamedTuple):
    """A partition of an accepted response, with the topic name and id that the user passed to `want`."""

    topic: str
    topic_id: bytes
    requested: m.FetchPartition
    """Partition as requested. The user may want another position, or no longer want it, by now."""
    data: m.PartitionData


class SessionResponse(NamedTuple):
    """Outcome of a response.

    - `is_accepted`: `partitions` are the partitions of the response. If False, `partitions` is empty.
    - `error`: top-level error; NONE for a malformed response.
    - `retry_immediately`: only the session was lost; send the next request without backoff (227-19). If False, a full
      fetch failed and the user backs off.
    """

    is_accepted: bool
    error: ErrorCode = ErrorCode.NONE
    retry_immediately: bool = False
    partitions: list[FetchedPartition] = []  # noqa: RUF012 - never changed


class FetchSessionHandler:
    """Client side of the session with one server. Unless `enabled`, all requests are full and sessionless (227-18)."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.resets: Counter[str] = Counter()
        """Sessions given up, by error name, TRANSPORT or MALFORMED (227-19)."""
        self.full_requests = 0
        self.incremental_requests = 0
        self._first_epoch = INITIAL_EPOCH if enabled else FINAL_EPOCH
        self.session_id = INVALID_SESSION_ID
        """Last known session id, 0 without a session."""
        self._epoch = self._first_epoch
        self._by_id = True
        self._in_flight: SessionRequest | None = None
        self._is_closed = False
        self._wanted: dict[_Key, WantedPartition] = {}  # in fetch order
        self._without_id = 0
        self._changed: dict[_Key, None] = {}
        self._removed: dict[_Key, WantedPartition] = {}
        # Partitions last sent in this session, keyed as in requests and responses.
        self._sent: dict[_Key, WantedPartition] = {}

    # -- wanted partitions

    def __len__(self) -> int:
        """Number of wanted partitions."""
        return len(self._wanted)

    @property
    def is_waiting(self) -> bool:
        """Whether a request is in flight."""
        return self._in_flight is not None

    def want(self, topic: str, topic_id: bytes, requested: m.FetchPartition) -> None:
        """Add a partition to fetch, or update its position and limits. `topic_id` is empty if it is unknown."""
        key: _Key = (topic_id or topic, requested.partition)
        before = self._wanted.get(key)
        wanted = WantedPartition(topic, topic_id, requested)
        if before == wanted:
            return
        if before is None and not topic_id:
            self._without_id += 1
        self._wanted[key] = wanted
        self._changed[key] = None
        self._removed.pop(key, None)

    def unwant(self, topic: str, topic_id: bytes, partition: int) -> None:
        """Stop fetching a partition. Ignored if it is not wanted.

        If the same partition is wanted again, unchanged, before the next request, the server does not notice. The user
        must then keep the values that the server last sent for it.
        """
        key: _Key = (topic_id or topic, partition)
        wanted = self._wanted.pop(key, None)
        if wanted is None:
            return
        if not topic_id:
            self._without_id -= 1
        self._changed.pop(key, None)
        self._removed[key] = wanted

    # -- requests

    def next_request(self) -> SessionRequest:
        """Return the next request, which is then in flight: incremental in O(changed), or full.

        A request that was still in flight counts as failed (`handle_error`), so the new one is full.
        """
        if self._in_flight is not None:
            self.handle_error(self._in_flight)
        self._is_closed = False
        by_id = not self._without_id
        if self._epoch > INITIAL_EPOCH and by_id is not self._by_id:
            self._epoch = INITIAL_EPOCH  # a session has ids or names, never both (227-05)
        request = self._full(by_id) if self._epoch <= INITIAL_EPOCH else self._incremental()
        self._changed = {}
        self._removed = {}
        self._in_flight = request
        return request

    def _wire_key(self, wanted: WantedPartition) -> _Key:
        return wanted.topic_id if self._by_id else wanted.topic, wanted.requested.partition

    def _full(self, by_id: bool) -> SessionRequest:
        self.full_requests += 1
        self._by_id = by_id
        self._sent = {self._wire_key(wanted): wanted for wanted in self._wanted.values()}
        return SessionRequest(self.session_id, self._epoch, self._topics(self._sent.values()), [])

    def _incremental(self) -> SessionRequest:
        self.incremental_requests += 1
        forgotten = []
        for wanted in self._removed.values():
            sent = self._sent.get(self._wire_key(wanted))
            if sent is not None and sent.topic_id == wanted.topic_id:
                del self._sent[self._wire_key(wanted)]
                forgotten.append(wanted)
        named = []
        for key in self._changed:
            wanted = self._wanted[key]
            wire_key = self._wire_key(wanted)
            if self._sent.get(wire_key) != wanted:
                self._sent[wire_key] = wanted
                named.append(wanted)
        groups = groupby(forgotten, key=self._wire_topic)
        forgotten_topics = [
            m.ForgottenTopic(*topic, [wanted.requested.partition for wanted in group]) for topic, group in groups
        ]
        return SessionRequest(self.session_id, self._epoch, self._topics(named), forgotten_topics)

    def _wire_topic(self, wanted: WantedPartition) -> tuple[str, bytes]:
        return wanted.topic, wanted.topic_id if self._by_id else b""

    def _topics(self, partitions: Iterable[WantedPartition]) -> list[m.FetchTopic]:
        groups = groupby(partitions, key=self._wire_topic)
        return [m.FetchTopic(*topic, [wanted.requested for wanted in group]) for topic, group in groups]

    # -- responses

    def handle_response(self, request: SessionRequest, response: m.FetchResponse) -> SessionResponse:
        """Process the response to `request`. Never raises: session errors and malformed responses are reported in the
        result.

        A late or duplicate response is not accepted and changes nothing, except that the next `close` closes a session
        that was opened after the last `close`.
        """
        if request is not self._in_flight:
            if self._is_closed and request.is_full and not response.error_code and response.session_id > 0:
                self.session_id = response.session_id  # a further `close` ends this session
            return SessionResponse(False, retry_immediately=True)
        self._in_flight = None
        if response.error_code:
            error = ErrorCode.of(response.error_code)
            if error is ErrorCode.FETCH_SESSION_ID_NOT_FOUND:
                self.session_id = INVALID_SESSION_ID
            self._reset(error.name)
            return SessionResponse(False, error, not request.is_full)
        if request.is_full:
            return self._full_response(response)
        return self._incremental_response(response)

    def _full_response(self, response: m.FetchResponse) -> SessionResponse:
        partitions = self._match(response)
        # Even if the response is not accepted, it closed the previous session and opened this one.
        if self._first_epoch == INITIAL_EPOCH:
            self.session_id = max(response.session_id, INVALID_SESSION_ID)
        if partitions is None or len(partitions) != len(self._sent):
            # A response without partitions but with a throttle time is no error: the server only throttles.
            if response.responses or not response.throttle_time_ms:
                self._reset(MALFORMED)
            else:
                self._epoch = self._first_epoch
            return SessionResponse(False)
        self._epoch = next_epoch(INITIAL_EPOCH) if self.session_id else self._first_epoch
        return self._accept(partitions)

    def _incremental_response(self, response: m.FetchResponse) -> SessionResponse:
        partitions = self._match(response)
        if partitions is None or response.session_id not in (INVALID_SESSION_ID, self.session_id):
            self._reset(MALFORMED)
            return SessionResponse(False, retry_immediately=True)
        if response.session_id == INVALID_SESSION_ID:  # closed: the last partition was forgotten (227-06)
            self.session_id = INVALID_SESSION_ID
            self._epoch = self._first_epoch
        else:
            self._epoch = next_epoch(self._epoch)
        return self._accept(partitions)

    def _match(self, response: m.FetchResponse) -> list[FetchedPartition] | None:
        """Return the partitions of a response, or None if one of them is a duplicate or was not requested."""
        matched: dict[_Key, FetchedPartition] = {}
        count = 0
        for topic in response.responses:
            wire_topic: bytes | str = topic.topic_id if self._by_id else topic.topic
            for data in topic.partitions:
                key = wire_topic, data.partition_index
                sent = self._sent.get(key)
                if sent is None:
                    return None
                matched[key] = FetchedPartition(*sent, data)
                count += 1
        return list(matched.values()) if len(matched) == count else None

    def _accept(self, partitions: list[FetchedPartition]) -> SessionResponse:
        for partition in partitions:
            if partition.data.records:  # moves to the end of the next full request (227-11)
                key: _Key = (partition.topic_id or partition.topic, partition.data.partition_index)
                wanted = self._wanted.pop(key, None)
                if wanted is not None:
                    self._wanted[key] = wanted
        return SessionResponse(True, partitions=partitions)

    def handle_error(self, request: SessionRequest) -> None:
        """Record that `request` will get no response: transport failure, timeout or cancellation.

        The next request is a full one. Ignored unless `request` is in flight.
        """
        if request is self._in_flight:
            self._in_flight = None
            self._reset(TRANSPORT)

    def _reset(self, cause: str) -> None:
        self.resets[cause] += 1
        self._epoch = self._first_epoch

    def close(self) -> SessionRequest | None:
        """Return the request that closes the session (227-17), or None if there is no session. The response can be
        ignored.

        If a late response opened another session, a further `close` returns the request that closes that session. The
        handler may be reused; from its next request on, such a late response is ignored.
        """
        self._is_closed = True
        session_id, self.session_id = self.session_id, INVALID_SESSION_ID
        self._epoch = self._first_epoch
        self._in_flight = None
        return SessionRequest(session_id, FINAL_EPOCH, [], []) if session_id else None
