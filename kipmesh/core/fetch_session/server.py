"""Fetch sessions of one node (server side), from request to response. Rules 227-01 to 227-11 and 227-21.

Classifies each Fetch request, creates and closes sessions, and evicts them according to the policy. Sans-IO: the caller
supplies time, ids and partitions. Requests never raise; an invalid request returns an error and leaves all sessions
unchanged. The driver calls, in this order and on the task that owns the partitions:

    fetch = cache.begin(request, client_id, now_ms)
    fetch.read(reader)
    if not fetch.is_complete and request.max_wait_ms > 0:
        fetch.wait(wake)              # `wake` is called when `read` should be called again
        while not fetch.is_complete and not expired:
            ... await wake, or the end of max_wait_ms ...
            fetch.read(reader)
    response = fetch.respond(now_ms)  # or fetch.cancel() if the client is gone

The driver must not await between the last `read` and `respond`, or between the first `read` and `wait`: changes in
between would be missed. `wake` may only record that it was called.

Invariants: a session is in the cache, its policy and the subscriptions of all its partitions, or in none. Its
epoch is the epoch of the next valid request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session.metrics import FetchSessionMetrics
from kipmesh.core.fetch_session.policy import Eviction, EvictionPolicy, Refusal, SlotDecision
from kipmesh.core.fetch_session.session import Owner, Session, requires_action
from kipmesh.core.fetch_session.subscriptions import Key, Subscriptions, name_bytes, partition_key, topic_of
from kipmesh.core.fetch_session.types import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    INT_MAX,
    INVALID_SESSION_ID,
    SESSION_PARTITIONS_MAX,
    TOPIC_BYTES_MAX,
    UNUSED_MS_MAX,
    FetchKind,
    FetchSessionDescription,
    PartitionRead,
    Reader,
    SessionEvent,
    SessionEventKind,
)

CLIENT_ID_LENGTH_MAX = 255
_ID_ATTEMPTS_MAX = 100


@dataclass(eq=False, repr=False)
class FetchSessionCache:
    """All fetch sessions of one node.

    Args: new_id: returns a random positive int32 from a cryptographic source (227-01). sessions_per_client_id: quota
    per client id (0 disables it; followers are exempt). unused_ms_max: a client at its quota may replace its own
    session after this idle time. partitions_max: limit per session. wakes_on_high_watermark: a new high watermark
    completes a follower's waiting fetch (392-02). on_event: called for each created, closed or evicted session.
    """

    subscriptions: Subscriptions
    policy: EvictionPolicy
    new_id: Callable[[], int]
    _: KW_ONLY
    sessions_per_client_id: int = 0
    unused_ms_max: int = UNUSED_MS_MAX
    partitions_max: int = SESSION_PARTITIONS_MAX
    wakes_on_high_watermark: bool = True
    on_event: Callable[[SessionEvent], None] | None = None

    def __post_init__(self) -> None:
        self.metrics = FetchSessionMetrics()
        self._sessions: dict[int, Session] = {}
        self._sizes: dict[int, int] = {}
        self._by_owner: dict[str | int, dict[Session, None]] = {}
        self.partitions = 0
        """Number of partitions in all sessions (metric `NumIncrementalFetchPartitionsCached`)."""
        self.by_privilege: Counter[bool] = Counter({False: 0, True: 0})
        """Number of consumers' sessions (False) and followers' sessions (True) (227-02)."""

    def __len__(self) -> int:
        """Number of sessions (metric `NumIncrementalFetchSessions`)."""
        return len(self._sessions)

    def list(self, now_ms: int) -> Iterator[FetchSessionDescription]:
        """Yield a description of each session, in the order of session ids. O(partitions)."""
        for session_id in sorted(self._sessions):
            yield self._sessions[session_id].info(now_ms)

    # -- requests

    def begin(self, request: m.FetchRequest, client_id: str, now_ms: int) -> Fetch:
        """Classify a request (227-04) and return the fetch that handles it.

        A full request closes the session that it names. An incremental one is applied to its session; if that leaves no
        partitions, the session is closed. Returns an `ErrorFetch` for a session error: INVALID_REQUEST (topic name too
        long), FETCH_SESSION_ID_NOT_FOUND, INVALID_FETCH_SESSION_EPOCH, FETCH_SESSION_TOPIC_ID_ERROR.
        """
        session_id, epoch = request.session_id, request.session_epoch
        if any(len(topic_bytes(topic)) > TOPIC_BYTES_MAX for topic in request.topics):
            return ErrorFetch(self, request, ErrorCode.INVALID_REQUEST)
        if epoch in (INITIAL_EPOCH, FINAL_EPOCH):
            session = self._find(session_id, request.replica_id)
            if session is not None:
                self._close(session)
            owner, wants_session = self._owner(request, client_id), epoch == INITIAL_EPOCH
            size = sum(len(topic.partitions) for topic in request.topics)
            begins = wants_session and self._has_room(owner, size, now_ms)
            return FullFetch(self, request, owner, wants_session, begins_session=begins)
        session = self._find(session_id, request.replica_id)
        if session is None:
            return ErrorFetch(self, request, ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        error = self._check(session, request)
        if error:
            return ErrorFetch(self, request, error)
        return self._apply_incremental(session, request, client_id, now_ms)

    def _find(self, session_id: int, replica_id: int) -> Session | None:
        """Return the session if it belongs to this replica id, else None: followers and consumers cannot share a
        session."""
        session = self._sessions.get(session_id)
        return session if session is not None and session.owner.replica_id == replica_id else None

    def _owner(self, request: m.FetchRequest, client_id: str) -> Owner:
        by_id = bool(request.topics) and bool(request.topics[0].topic_id)
        client_id = client_id[:CLIENT_ID_LENGTH_MAX]
        return Owner(client_id, request.replica_id, by_id, self.wakes_on_high_watermark)

    @staticmethod
    def _check(session: Session, request: m.FetchRequest) -> ErrorCode:
        """Return the session error of an incremental request, or NONE (227-05). Changes nothing."""
        if session.epoch != request.session_epoch:
            return ErrorCode.INVALID_FETCH_SESSION_EPOCH
        by_id = session.owner.uses_topic_ids
        ids = [topic.topic_id for topic in request.topics] + [topic.topic_id for topic in request.forgotten_topics_data]
        if any(bool(topic_id) is not by_id for topic_id in ids):
            return ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
        return ErrorCode.NONE

    def _apply_incremental(self, session: Session, request: m.FetchRequest, client_id: str, now_ms: int) -> Fetch:
        superseded, session.fetch = session.fetch, None
        if superseded is not None:
            superseded.on_session_end()
        # Forget before adding: a topic that was recreated under its name is in both lists (227-07).
        for topic in request.forgotten_topics_data:
            prefix = topic_bytes(topic)
            for partition in topic.partitions:
                session.forget(partition_key(prefix, partition))
        named: dict[Key, m.FetchPartition] = {}
        for wanted in request.topics:
            prefix = topic_bytes(wanted)
            for requested in wanted.partitions:
                named[partition_key(prefix, requested.partition)] = requested
        size_max = session.size + len(named)  # counts partitions that are already in the session twice
        if size_max > self.partitions_max and size_max - sum(key in session for key in named) > self.partitions_max:
            self._remove(session, "closed", Refusal.TOO_LARGE.value)
            self.metrics.refused(Refusal.TOO_LARGE, session.owner.client_id)
            return ErrorFetch(self, request, ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        for key, requested in named.items():
            session.put(key, requested)
        if not session.size:
            self._close(session)
            return FullFetch(self, request, self._owner(request, client_id), False)
        options = read_options(request)
        if session.read_options != options:
            session.read_options = options
            session.mark_all()
        session.advance()
        self.used(session, now_ms)
        return IncrementalFetch(self, session, request, named)

    def close_superseded(self, replica_id: int, broker_epoch: int) -> None:
        """Close the sessions of older registrations of broker `replica_id`: their broker epoch is below `broker_epoch`.

        No further request will use or close these sessions.
        """
        for session in list(self._by_owner.get(replica_id, ())):
            if session.read_options[2] < broker_epoch:
                self._close(session, "broker registered again")

    # -- called by fetches

    def is_open(self, session: Session) -> bool:
        """Whether the session is still in the cache."""
        return self._sessions.get(session.session_id) is session

    def refuse(self, error: ErrorCode) -> m.FetchResponse:
        """Count a session error and return a response with that error, no session and no partitions."""
        self.metrics.failed(error)
        return m.FetchResponse(error_code=error, session_id=INVALID_SESSION_ID)

    def used(self, session: Session, now_ms: int) -> None:
        """Record that a request was accepted or responded to (227-16), and update the size of the session."""
        session.last_used_ms = now_ms
        self.partitions += session.size - self._sizes[session.session_id]
        self._sizes[session.session_id] = session.size
        self.policy.used(session)

    def _has_room(self, owner: Owner, size: int, now_ms: int) -> bool:
        """Whether the owner is a follower that would get a session of `size` partitions."""
        fits = owner.privileged and size <= self.partitions_max
        return fits and self.policy.room(owner, size, now_ms).refusal is None

    def make_room(self, owner: Owner, size: int, now_ms: int) -> bool:
        """Evict sessions if necessary to free a slot for a session of `size` partitions. Return False if refused."""
        for decide in (self._check_limits, self.policy.room):
            decision = decide(owner, size, now_ms)
            if decision.refusal is not None:
                self.metrics.refused(decision.refusal, owner.client_id)
                return False
            if decision.victim is not None and decision.eviction is not None:
                self._evict(decision.victim, decision.eviction, owner.client_id)
        return True

    def _check_limits(self, owner: Owner, size: int, now_ms: int) -> SlotDecision:
        """Check size and quota. A client at its quota may replace its least recently used session if that is
        inactive."""
        if size > self.partitions_max:
            return SlotDecision(Refusal.TOO_LARGE)
        owned = self._by_owner.get(owner.key, {})
        if owner.privileged or not self.sessions_per_client_id or len(owned) < self.sessions_per_client_id:
            return SlotDecision()
        oldest = min(owned, key=lambda session: session.last_used_ms)
        if oldest.fetch is None and now_ms - oldest.last_used_ms > self.unused_ms_max:
            return SlotDecision(victim=oldest, eviction=Eviction.INACTIVE)
        return SlotDecision(Refusal.QUOTA)

    def admit(self, session: Session) -> bool:
        """Add a session under a new id after `make_room`; return False and close it if no unused id was found."""
        for _ in range(_ID_ATTEMPTS_MAX):
            session_id = self.new_id()
            if 0 < session_id <= INT_MAX and session_id not in self._sessions:
                break
        else:
            session.close()
            return False
        session.session_id = session_id
        self._sessions[session_id] = session
        self._sizes[session_id] = session.size
        self.partitions += session.size
        self._by_owner.setdefault(session.owner.key, {})[session] = None
        self.policy.added(session)
        self.metrics.created += 1
        self.by_privilege[session.owner.privileged] += 1
        self._notify("created", session)
        return True

    def _close(self, session: Session, reason: str | None = None) -> None:
        self._remove(session, "closed", reason)
        self.metrics.closed += 1

    def _evict(self, session: Session, eviction: Eviction, evictor: str) -> None:
        self._remove(session, "evicted", eviction.value, evictor)
        self.metrics.evicted(eviction, evictor)

    def _notify(
        self,
        kind: SessionEventKind,
        session: Session,
        reason: str | None = None,
        evictor: str | None = None,
    ) -> None:
        if self.on_event is not None:
            client_id, privileged = session.owner.client_id, session.owner.privileged
            self.on_event(SessionEvent(kind, session.session_id, client_id, privileged, session.size, reason, evictor))

    def _remove(self, session: Session, kind: SessionEventKind, reason: str | None, evictor: str | None = None) -> None:
        self._notify(kind, session, reason, evictor)
        session_id = session.session_id
        del self._sessions[session_id]
        self.partitions -= self._sizes.pop(session_id)
        owner = session.owner
        self.by_privilege[owner.privileged] -= 1
        siblings = self._by_owner[owner.key]
        del siblings[session]
        if not siblings:
            del self._by_owner[owner.key]
        self.policy.removed(session)
        session.close()


# -- fetches


def topic_bytes(topic: m.FetchTopic | m.ForgottenTopic) -> bytes:
    """Return the prefix of a topic's partition keys: its id, or its name if the request has no id."""
    return topic.topic_id or name_bytes(topic.topic)


def key_of(topic: m.FetchTopic, partition: int) -> Key:
    """Return the key of a partition of a topic in a request."""
    return partition_key(topic_bytes(topic), partition)


def read_options(request: m.FetchRequest) -> tuple[int, str, int]:
    """Return isolation level, rack and broker epoch. If one changes, all partitions of the session become dirty."""
    return request.isolation_level, request.rack_id, request.replica_epoch


class Fetch:
    """One Fetch request from its first read to its response. Base of ErrorFetch, FullFetch and IncrementalFetch."""

    kind: FetchKind

    def __init__(self, cache: FetchSessionCache, request: m.FetchRequest) -> None:
        self._cache = cache
        self.error = ErrorCode.NONE
        """Top-level error, NONE while there is none."""
        self.size_bytes = 0
        """Bytes of records read so far."""
        self._max_bytes = max(request.max_bytes, 0)
        # A fetch never returns more than the maximum, so it must not wait for more.
        self._min_bytes = min(request.min_bytes, self._max_bytes)
        self._must_respond = False
        self._has_read = False
        self._is_limited = False
        self._wake: Callable[[], None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether to respond now (227-21).

        True if `min_bytes` of records were read, the byte limit was reached, a result has `completes_fetch`, the
        request has no partitions, a follower's high watermark is stale or this is the first fetch of its session, or
        the fetch has a session error.
        """
        return self._must_respond or self._is_limited or self.size_bytes >= self._min_bytes

    def read(self, reader: Reader) -> None:
        """Read the partitions that were not read yet or have changed since they were read."""
        raise NotImplementedError

    def wait(self, wake: Callable[[], None]) -> None:
        """Register `wake`, which is called when `read` should be called again."""
        self._wake = wake

    def respond(self, now_ms: int) -> m.FetchResponse:
        """Return the response and end the fetch. Must be called at most once."""
        raise NotImplementedError

    def cancel(self) -> None:
        """End the fetch without a response; its partitions stay as if they had not been read."""

    def _read_limited(
        self, reader: Reader, topic: str, topic_id: bytes, requested: m.FetchPartition, before: PartitionRead | None
    ) -> PartitionRead:
        """Read one partition within the byte limits; `before` is the earlier result that this one replaces."""
        if before is not None:
            self.size_bytes -= len(before.data.records)
        room = self._max_bytes - self.size_bytes
        limit = 0 if self._is_limited else max(min(requested.partition_max_bytes, room), 0)
        result = reader.read(topic, topic_id, requested, limit, self.size_bytes == 0 and not self._is_limited)
        self.size_bytes += len(result.data.records)
        self._must_respond |= result.completes_fetch
        if self.size_bytes and (self.size_bytes >= self._max_bytes or (result.is_cut and limit >= room)):
            self._is_limited = True
        return result

    def _notify(self) -> None:
        if self._wake is not None:
            self._wake()


class ErrorFetch(Fetch):
    """A `Fetch` whose request has a session error (227-05). Reads nothing."""

    kind = FetchKind.ERROR

    def __init__(self, cache: FetchSessionCache, request: m.FetchRequest, error: ErrorCode) -> None:
        super().__init__(cache, request)
        self._must_respond = True
        self.error = error

    def read(self, reader: Reader) -> None:
        """Do nothing."""

    def respond(self, now_ms: int) -> m.FetchResponse:
        """Return the error without partitions."""
        return self._cache.refuse(self.error)


class FullFetch(Fetch):
    """A `Fetch` whose request names all its partitions, with or without creating a session.

    The response contains all of them in the request's order. A session is created in `respond`, if there is a slot.
    """

    def __init__(
        self,
        cache: FetchSessionCache,
        request: m.FetchRequest,
        owner: Owner,
        wants_session: bool,
        *,
        begins_session: bool = False,
    ) -> None:
        super().__init__(cache, request)
        self.kind = FetchKind.FULL if wants_session else FetchKind.SESSIONLESS
        self._owner = owner
        self._interests = owner.interests
        self._request = request
        self._partitions = [(topic, requested) for topic in request.topics for requested in topic.partitions]
        self._reads: list[PartitionRead] = []
        self._indexes: dict[Key, int] = {}
        self._changed: dict[int, None] = {}
        # Without partitions there is nothing to wait for (227-21). A follower's first fetch of a session never waits
        # (392-02); if it cannot get a session it must wait, or it would poll in a loop.
        is_first_of_session = begins_session and owner.privileged and owner.wakes_on_high_watermark
        self._must_respond = not self._partitions or is_first_of_session

    def read(self, reader: Reader) -> None:
        """Read all partitions on the first call, then those that changed."""
        if not self._has_read:
            self._has_read = True
            for topic, requested in self._partitions:
                self._reads.append(self._read_limited(reader, topic.topic, topic.topic_id, requested, None))
        while self._changed and not self.is_complete:
            for index in list(self._changed):  # popping the first key of a dict repeatedly is O(changed ** 2)
                if self.is_complete:
                    break
                topic, requested = self._partitions[index]
                self._reads[index] = self._read_limited(
                    reader, topic.topic, topic.topic_id, requested, self._reads[index]
                )
                del self._changed[index]

    def wait(self, wake: Callable[[], None]) -> None:
        """Subscribe to all partitions. O(partitions), like the first read."""
        super().wait(wake)
        subscriptions = self._cache.subscriptions
        for index, (topic, requested) in enumerate(self._partitions):
            key = key_of(topic, requested.partition)
            self._indexes[key] = index
            subscriptions.subscribe(key, self, bool(topic.topic_id))

    def mark(self, key: Key, change: int) -> None:
        """Record that a partition changed, and wake the driver if the change completes a wait."""
        dirty_changes, wake_changes = self._interests
        if change & dirty_changes:
            self._changed[self._indexes[key]] = None
        if change & wake_changes:
            self._notify()

    def cancel(self) -> None:
        """End the fetch without a response: unsubscribe from all partitions."""
        if self._indexes:
            subscriptions = self._cache.subscriptions
            for topic, requested in self._partitions:
                subscriptions.unsubscribe(key_of(topic, requested.partition), self, bool(topic.topic_id))
            self._indexes = {}
        self._wake = None

    def respond(self, now_ms: int) -> m.FetchResponse:
        """Return all partitions, with the id of the new session, or 0 if none was requested or created."""
        self.cancel()
        session = self._open_session(now_ms) if self.kind is FetchKind.FULL else None
        session_id = INVALID_SESSION_ID if session is None else session.session_id
        responses, index = [], 0
        for topic in self._request.topics:
            end = index + len(topic.partitions)
            data = [result.data for result in self._reads[index:end]]
            responses.append(m.FetchableTopicResponse(topic.topic, topic.topic_id, data))
            index = end
        self._cache.metrics.completed(self.kind)
        return m.FetchResponse(session_id=session_id, responses=responses)

    def _open_session(self, now_ms: int) -> Session | None:
        requested = self._partitions
        by_id = self._owner.uses_topic_ids
        if not requested or any(bool(topic.topic_id) is not by_id for topic in self._request.topics):
            return None
        if not self._cache.make_room(self._owner, len(requested), now_ms):
            return None
        results: dict[Key, PartitionRead] = {}
        session = Session(self._owner, self._cache.subscriptions, now_ms)
        session.read_options = read_options(self._request)
        for index, (topic, partition) in enumerate(requested):
            key = key_of(topic, partition.partition)
            session.put(key, partition)  # the last one counts if a partition is named twice
            results[key] = self._reads[index]
        session.queue.clear()  # all partitions were read: only those that `apply_results` requeues are dirty
        changed = {key_of(requested[index][0], requested[index][1].partition): None for index in self._changed}
        apply_results(session, results, changed)
        return session if self._cache.admit(session) else None


class IncrementalFetch(Fetch):
    """A `Fetch` within a session: reads dirty partitions and returns those that changed (227-08)."""

    kind = FetchKind.INCREMENTAL

    def __init__(
        self, cache: FetchSessionCache, session: Session, request: m.FetchRequest, named: dict[Key, m.FetchPartition]
    ) -> None:
        super().__init__(cache, request)
        self._session = session
        self._named = named
        self._results: dict[Key, PartitionRead] = {}
        # Named by the request but read without records, because the limit was reached; they stay in the queue.
        self._position_reads: dict[Key, PartitionRead] = {}
        self._changed: dict[Key, None] = {}
        self._reader: Reader | None = None
        self._wakes_on_high_watermark = session.owner.privileged and session.owner.wakes_on_high_watermark
        session.fetch = self

    def read(self, reader: Reader) -> None:
        """Read partitions that changed during the fetch, then the queue, until a limit is reached.

        Partitions named by the request that did not fit are read without records: a follower's new position must
        advance the high watermark regardless of the limit.
        """
        self._reader = reader
        if self.error or (self._has_read and self.is_complete):
            return
        session, results, changed = self._session, self._results, self._changed
        self._has_read = True
        while changed and not self._is_limited:
            for key in list(changed):  # popping the first key of a dict repeatedly is O(changed ** 2)
                if self._is_limited:
                    break
                results[key] = self._read(reader, key, results.get(key))
                changed.pop(key, None)
        while not self._is_limited:
            taken = session.take()
            if taken is None:
                break
            if taken not in results:
                results[taken] = self._read(reader, taken, None)
        if self._is_limited:
            for key in self._named:
                if key not in results and key not in self._position_reads:
                    self._position_reads[key] = self._read(reader, key, None)

    def _read(self, reader: Reader, key: Key, before: PartitionRead | None) -> PartitionRead:
        session = self._session
        topic, topic_id = session.topic_of(key)
        requested = self._named.get(key) or session.requested(key)
        result = self._read_limited(reader, topic, topic_id, requested, before)
        if self._wakes_on_high_watermark and not self._must_respond:
            self._must_respond = result.data.high_watermark > session.sent_high_watermark(key)
        return result

    def on_change(self, key: Key, was_clean: bool, wakes: bool) -> bool:
        """Record a changed partition. Returns True if this fetch will read it, False if it belongs in the queue."""
        takes = was_clean or key in self._results or key in self._position_reads
        if takes:
            self._changed[key] = None
        if wakes:
            self._notify()
        return takes

    def on_session_end(self) -> None:
        """End the fetch with a session error (227-05).

        The error is INVALID_FETCH_SESSION_EPOCH if a later request uses the session, FETCH_SESSION_ID_NOT_FOUND if it
        was closed.
        """
        if not self.error:
            is_open = self._cache.is_open(self._session)
            self.error = ErrorCode.INVALID_FETCH_SESSION_EPOCH if is_open else ErrorCode.FETCH_SESSION_ID_NOT_FOUND
            self._must_respond = True
            self._requeue()
            self._notify()

    def cancel(self) -> None:
        """End the fetch; the partitions that it read stay dirty."""
        self._wake = None
        if self._session.fetch is self:
            self._session.fetch = None
            self._requeue()

    def _requeue(self) -> None:
        results, self._results = self._results, {}
        queue = self._session.queue
        queue.extendleft(reversed(results))
        queue.extend([key for key in self._changed if key not in results and key not in self._position_reads])
        self._changed, self._position_reads = {}, {}

    def respond(self, now_ms: int) -> m.FetchResponse:
        """Return the changed partitions, or a session error.

        The error is INVALID_FETCH_SESSION_EPOCH if a later request used the session, FETCH_SESSION_ID_NOT_FOUND if it
        was closed.
        """
        self._wake = None
        session = self._session
        if session.fetch is self:
            session.fetch = None
        if self.error:
            return self._cache.refuse(self.error)
        changed = {key: None for key in self._changed if key not in self._position_reads}
        included = apply_results(session, self._results, changed)
        for key, result in self._position_reads.items():
            stays_dirty = key in self._changed or _stays_dirty(result)
            if session.record_sent(key, result.data, not stays_dirty):
                included.append((key, result.data))
            if not stays_dirty:
                session.count_outdated()
        self._cache.used(session, now_ms)
        self._cache.metrics.completed(self.kind)
        self._cache.metrics.saved(session.size - len(self._named), session.size - len(included))
        return m.FetchResponse(session_id=session.session_id, responses=self._by_topic(included))

    def _by_topic(self, included: Iterable[tuple[Key, m.PartitionData]]) -> list[m.FetchableTopicResponse]:
        topics: dict[bytes, list[m.PartitionData]] = {}
        names: dict[bytes, tuple[str, bytes]] = {}
        for key, data in included:
            topic = topic_of(key)
            partitions = topics.get(topic)
            if partitions is None:
                topics[topic] = [data]
                name, topic_id = self._session.topic_of(key)
                if topic_id and self._reader is not None:
                    name = self._reader.topic_name(topic_id)
                names[topic] = name, topic_id
            else:
                partitions.append(data)
        return [m.FetchableTopicResponse(*names[topic], partitions) for topic, partitions in topics.items()]


def _stays_dirty(result: PartitionRead) -> bool:
    return bool(result.data.records) or result.is_cut or result.again or requires_action(result.data)


def apply_results(
    session: Session, results: dict[Key, PartitionRead], changed: dict[Key, None]
) -> list[tuple[Key, m.PartitionData]]:
    """Apply a fetch's results to its session and requeue dirty partitions (227-10).

    Returns the results to include in an incremental response (227-08). Order of the queue: partitions left out by the
    limit first, in their old order; partitions that returned records last (227-11). `changed`: partitions that changed
    after they were read.
    """
    included: list[tuple[Key, m.PartitionData]] = []
    cut: list[Key] = []
    others = [key for key in changed if key not in results]
    served: list[Key] = []
    for key, result in results.items():
        stays_dirty = key in changed or _stays_dirty(result)
        if session.record_sent(key, result.data, not stays_dirty):
            included.append((key, result.data))
        if result.data.records:
            served.append(key)
        elif result.is_cut:
            cut.append(key)
        elif stays_dirty:
            others.append(key)
    session.queue.extendleft(reversed(cut))
    session.queue.extend(others)
    session.queue.extend(served)
    return included
