"""Fetch sessions of one node (server side): from a request to its response. Rules 227-01 to 227-11 and 227-21.

Classifies each Fetch request, creates and closes sessions, and evicts them according to the policy. Sans-IO: the caller
supplies time, ids and partitions. Requests never raise; an invalid request returns an error and leaves all sessions
unchanged.

The driver's part, always in this order, all on the task that owns the partitions:

    fetch = cache.begin(request, client_id, now_ms)
    fetch.read(reader)
    if not fetch.is_complete and request.max_wait_ms > 0:
        fetch.wait(wake)              # from now on `wake` is called when there is reason to read again
        while not fetch.is_complete and not expired:
            ... await wake, or the end of max_wait_ms ...
            fetch.read(reader)
    response = fetch.respond(now_ms)  # or fetch.cancel(), if nobody wants the answer any more

Between the last `read` and `respond`, and between the first `read` and `wait`, nothing may be awaited: a partition that
changes there would not be seen. `wake` must do no more than remember that it was called.

Invariants: a session is in the cache, its policy and the subscriptions of all its partitions, or in none of them. Its
epoch is the epoch of the next valid request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeVar

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session.metrics import FetchSessionMetrics
from kipmesh.core.fetch_session.policy import Eviction, EvictionPolicy, Refusal
from kipmesh.core.fetch_session.session import Owner, Session, must_react
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
)

CLIENT_ID_LENGTH_MAX = 255
_ID_ATTEMPTS_MAX = 100


@dataclass(eq=False, repr=False)
class FetchSessionCache:
    """All fetch sessions of one node.

    `new_id` gives random int32 above 0 from a cryptographic source (227-01). `sessions_per_client_id` is ours, 0 for no
    quota; followers are not under it. `unused_ms_max`: a client at its quota may take the slot of a session of its own
    that was unused for longer. `tell` hears of each session that is made, closed or evicted.
    """

    subscriptions: Subscriptions
    policy: EvictionPolicy
    new_id: Callable[[], int]
    _: KW_ONLY
    sessions_per_client_id: int = 0
    unused_ms_max: int = UNUSED_MS_MAX
    partitions_max: int = SESSION_PARTITIONS_MAX
    answers_stale_high_watermark: bool = True
    tell: Callable[[SessionEvent], None] | None = None

    def __post_init__(self) -> None:
        self.metrics = FetchSessionMetrics()
        self._sessions: dict[int, Session] = {}
        self._sizes: dict[int, int] = {}
        self._by_client: dict[str, dict[Session, None]] = {}
        self._by_follower: dict[int, dict[Session, None]] = {}
        self.partitions = 0
        """`NumIncrementalFetchPartitionsCached`."""
        self.by_privilege: Counter[bool] = Counter({False: 0, True: 0})
        """How many sessions are consumers', and how many followers' (227-02)."""

    def __len__(self) -> int:
        """`NumIncrementalFetchSessions`."""
        return len(self._sessions)

    def list(self, now_ms: int) -> Iterator[FetchSessionDescription]:
        """The sessions by id. O(partitions): for people, not for scrapes."""
        for session_id in sorted(self._sessions):
            yield self._sessions[session_id].info(now_ms)

    # -- requests

    def begin(self, request: m.FetchRequest, client_id: str, now_ms: int) -> Fetch:
        """What to do for a request (227-04). An incremental one is taken into its session here."""
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
        error = self._check(session, request)
        if error or session is None:
            return ErrorFetch(self, request, error or ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        return self._take(session, request, client_id, now_ms)

    def _find(self, session_id: int, replica_id: int) -> Session | None:
        """A session is known to whom it was made for only: what a follower and a consumer are told differs."""
        session = self._sessions.get(session_id)
        return session if session is not None and session.owner.replica_id == replica_id else None

    def _owner(self, request: m.FetchRequest, client_id: str) -> Owner:
        by_id = bool(request.topics) and bool(request.topics[0].topic_id)
        client_id = client_id[:CLIENT_ID_LENGTH_MAX]
        return Owner(client_id, request.replica_id, by_id, self.answers_stale_high_watermark)

    def _check(self, session: Session | None, request: m.FetchRequest) -> ErrorCode:
        """227-05; nothing is changed."""
        if session is None:
            return ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        if session.epoch != request.session_epoch:
            return ErrorCode.INVALID_FETCH_SESSION_EPOCH
        by_id = session.owner.uses_topic_ids
        ids = [topic.topic_id for topic in request.topics] + [topic.topic_id for topic in request.forgotten_topics_data]
        if any(bool(topic_id) is not by_id for topic_id in ids):
            return ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
        return ErrorCode.NONE

    def _take(self, session: Session, request: m.FetchRequest, client_id: str, now_ms: int) -> Fetch:
        overtaken, session.fetch = session.fetch, None
        if overtaken is not None:
            overtaken.ended()
        # First forget, then add: a topic that was made anew under its name is both (227-07).
        for topic in request.forgotten_topics_data:
            prefix = topic_bytes(topic)
            for partition in topic.partitions:
                session.forget(partition_key(prefix, partition))
        named: dict[Key, m.FetchPartition] = {}
        for wanted in request.topics:
            prefix = topic_bytes(wanted)
            for asked in wanted.partitions:
                named[partition_key(prefix, asked.partition)] = asked
        size_max = session.size + len(named)  # counts partitions twice that are in the session already
        if size_max > self.partitions_max and size_max - sum(key in session for key in named) > self.partitions_max:
            self._remove(session, "closed", Refusal.TOO_LARGE.value)
            self.metrics.refused(Refusal.TOO_LARGE, session.owner.client_id)
            return ErrorFetch(self, request, ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        for key, asked in named.items():
            session.put(key, asked)
        if not session.size:
            self._close(session)
            return FullFetch(self, request, self._owner(request, client_id), False)
        terms = terms_of(request)
        if session.terms != terms:
            session.terms = terms
            session.all_changed()
        session.advance()
        self.used(session, now_ms)
        return IncrementalFetch(self, session, request, named)

    def end_older(self, replica_id: int, broker_epoch: int) -> None:
        """A broker has this registration now: the sessions of its older ones are nobody's, and would stay for ever."""
        for session in list(self._by_follower.get(replica_id, ())):
            if session.terms[2] < broker_epoch:
                self._close(session, "registered anew")

    # -- for the fetches

    def is_open(self, session: Session) -> bool:
        """Whether the session is still in the cache."""
        return self._sessions.get(session.session_id) is session

    def refuse(self, error: ErrorCode) -> m.FetchResponse:
        """The response with a session error."""
        self.metrics.failed(error)
        return m.FetchResponse(error_code=error, session_id=INVALID_SESSION_ID)

    def used(self, session: Session, now_ms: int) -> None:
        """A request was taken, or answered (227-16)."""
        session.last_used_ms = now_ms
        self.partitions += session.size - self._sizes[session.session_id]
        self._sizes[session.session_id] = session.size
        self.policy.used(session)

    def _has_room(self, owner: Owner, size: int, now_ms: int) -> bool:
        """Whether a follower's session of this size will get a slot; without one, its full fetches wait like others."""
        fits = owner.privileged and size <= self.partitions_max
        return fits and self.policy.room(owner, size, now_ms).refusal is None

    def make_room(self, owner: Owner, size: int, now_ms: int) -> bool:
        """Whether there is a slot for a session of this size; evicts who has to leave it."""
        if size > self.partitions_max:
            self.metrics.refused(Refusal.TOO_LARGE, owner.client_id)
            return False
        own = self._unused_of(owner, now_ms)
        if own is Refusal.QUOTA:
            self.metrics.refused(Refusal.QUOTA, owner.client_id)
            return False
        if isinstance(own, Session):
            self._evict(own, Eviction.INACTIVE, owner.client_id)
        room = self.policy.room(owner, size, now_ms)
        if room.refusal is not None:
            self.metrics.refused(room.refusal, owner.client_id)
            return False
        if room.victim is not None and room.eviction is not None:
            self._evict(room.victim, room.eviction, owner.client_id)
        return True

    def admit(self, session: Session) -> bool:
        """Give a session its id and its slot, after `make_room`; False if no unused id was to be had."""
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
        if self.sessions_per_client_id and not session.owner.privileged:
            self._by_client.setdefault(session.owner.client_id, {})[session] = None
        if session.owner.privileged:
            self._by_follower.setdefault(session.owner.replica_id, {})[session] = None
        self.policy.added(session)
        self.metrics.created += 1
        self.by_privilege[session.owner.privileged] += 1
        self._notify("made", session)
        return True

    def _unused_of(self, owner: Owner, now_ms: int) -> Session | Refusal | None:
        """Under the quota None; at it a session of the same client id that may go, or the refusal."""
        if not self.sessions_per_client_id or owner.privileged:
            return None
        own = self._by_client.get(owner.client_id, {})
        if len(own) < self.sessions_per_client_id:
            return None
        oldest = min(own, key=lambda session: session.last_used_ms)
        is_unused = oldest.fetch is None and now_ms - oldest.last_used_ms > self.unused_ms_max
        return oldest if is_unused else Refusal.QUOTA

    def _close(self, session: Session, reason: str | None = None) -> None:
        self._remove(session, "closed", reason)
        self.metrics.closed += 1

    def _evict(self, session: Session, eviction: Eviction, evictor: str) -> None:
        self._remove(session, "evicted", eviction.value, evictor)
        self.metrics.evicted(eviction, evictor)

    def _notify(
        self,
        what: Literal["made", "closed", "evicted"],
        session: Session,
        reason: str | None = None,
        evictor: str | None = None,
    ) -> None:
        if self.tell is not None:
            client_id, privileged = session.owner.client_id, session.owner.privileged
            self.tell(SessionEvent(what, session.session_id, client_id, privileged, session.size, reason, evictor))

    def _remove(
        self, session: Session, what: Literal["closed", "evicted"], reason: str | None, evictor: str | None = None
    ) -> None:
        self._notify(what, session, reason, evictor)
        session_id = session.session_id
        del self._sessions[session_id]
        self.partitions -= self._sizes.pop(session_id)
        owner = session.owner
        self.by_privilege[owner.privileged] -= 1
        _drop(self._by_client, owner.client_id, session)
        _drop(self._by_follower, owner.replica_id, session)
        self.policy.removed(session)
        session.close()


_Name = TypeVar("_Name", str, int)


def _drop(table: dict[_Name, dict[Session, None]], name: _Name, session: Session) -> None:
    own = table.get(name)
    if own is not None:
        own.pop(session, None)
        if not own:
            del table[name]


# -- one fetch


def topic_bytes(topic: m.FetchTopic | m.ForgottenTopic) -> bytes:
    """What the keys of a topic's partitions begin with, as the request names it: its id, or its name if it has none."""
    return topic.topic_id or name_bytes(topic.topic)


def key_of(topic: m.FetchTopic, partition: int) -> Key:
    """The key of a partition as the request names its topic."""
    return partition_key(topic_bytes(topic), partition)


def terms_of(request: m.FetchRequest) -> tuple[int, str, int]:
    """What the answer of each partition depends on beside the partition: with others, all have to be read again."""
    return request.isolation_level, request.rack_id, request.replica_epoch


class Fetch:
    """What the kinds share: bytes against limits, and when a fetch is to be answered."""

    kind: FetchKind

    def __init__(self, cache: FetchSessionCache, request: m.FetchRequest) -> None:
        self._cache = cache
        self.error = ErrorCode.NONE
        """The top-level error, once it is known."""
        self.size_bytes = 0
        """Bytes of records found."""
        self._max_bytes = max(request.max_bytes, 0)
        # More than the maximum never comes, so it is not waited for.
        self._min_bytes = min(request.min_bytes, self._max_bytes)
        self._has_news = False
        self._has_read = False
        self._is_limited = False
        self._wake: Callable[[], None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether it is answered now: enough bytes, no room for more, news, or nothing to wait for."""
        return self._has_news or self._is_limited or self.size_bytes >= self._min_bytes

    def read(self, reader: Reader) -> None:
        """Read what was not read yet, and again what changed since."""
        raise NotImplementedError

    def wait(self, wake: Callable[[], None]) -> None:
        """Call `wake` when it should read again."""
        self._wake = wake

    def respond(self, now_ms: int) -> m.FetchResponse:
        """The answer. Once, and then the fetch is over."""
        raise NotImplementedError

    def cancel(self) -> None:
        """It will not be answered: as if it had never read anything."""

    def _read_limited(
        self, reader: Reader, topic: str, topic_id: bytes, asked: m.FetchPartition, before: PartitionRead | None
    ) -> PartitionRead:
        """Read one partition within the limits; `before` is what this replaces."""
        if before is not None:
            self.size_bytes -= len(before.data.records)
        room = self._max_bytes - self.size_bytes
        limit = 0 if self._is_limited else max(min(asked.partition_max_bytes, room), 0)
        found = reader.read(topic, topic_id, asked, limit, self.size_bytes == 0 and not self._is_limited)
        self.size_bytes += len(found.data.records)
        self._has_news |= found.has_news
        if self.size_bytes and (self.size_bytes >= self._max_bytes or (found.is_cut and limit >= room)):
            self._is_limited = True
        return found

    def _notify(self) -> None:
        if self._wake is not None:
            self._wake()


class ErrorFetch(Fetch):
    """A request whose session is not as it thinks (227-05): nothing is read."""

    kind = FetchKind.ERROR

    def __init__(self, cache: FetchSessionCache, request: m.FetchRequest, error: ErrorCode) -> None:
        super().__init__(cache, request)
        self._has_news = True
        self.error = error

    def read(self, reader: Reader) -> None:
        """Nothing."""

    def respond(self, now_ms: int) -> m.FetchResponse:
        """The error, without partitions."""
        return self._cache.refuse(self.error)


class FullFetch(Fetch):
    """A request that names all its partitions, with a session for the next ones or without.

    The response names them all, in the request's order. Whether there is a session is decided when it is answered.
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
        self._asked = [(topic, asked) for topic in request.topics for asked in topic.partitions]
        self._reads: list[PartitionRead] = []
        self._places: dict[Key, int] = {}
        self._fresh: dict[int, None] = {}
        # No partitions: nothing to wait for (227-21). A follower's first fetch of a session tells it all high
        # watermarks (392-02); one for which there is no slot would be answered at once for ever.
        self._has_news = not self._asked or (begins_session and owner.privileged and owner.answers_stale_high_watermark)

    def read(self, reader: Reader) -> None:
        """All partitions at first, then those that changed."""
        if not self._has_read:
            self._has_read = True
            for topic, asked in self._asked:
                self._reads.append(self._read_limited(reader, topic.topic, topic.topic_id, asked, None))
        while self._fresh and not self.is_complete:
            for place in list(self._fresh):  # one by one off its front would be O(changed ** 2)
                if self.is_complete:
                    break
                topic, asked = self._asked[place]
                self._reads[place] = self._read_limited(reader, topic.topic, topic.topic_id, asked, self._reads[place])
                del self._fresh[place]

    def wait(self, wake: Callable[[], None]) -> None:
        """Watch all partitions: O(partitions), as reading them was."""
        super().wait(wake)
        subscriptions = self._cache.subscriptions
        for place, (topic, asked) in enumerate(self._asked):
            key = key_of(topic, asked.partition)
            self._places[key] = place
            subscriptions.subscribe(key, self, bool(topic.topic_id))

    def mark(self, key: Key, change: int) -> None:
        """A partition changed."""
        hears, wakes = self._interests
        if change & hears:
            self._fresh[self._places[key]] = None
        if change & wakes:
            self._notify()

    def cancel(self) -> None:
        """Watch no more."""
        if self._places:
            subscriptions = self._cache.subscriptions
            for topic, asked in self._asked:
                subscriptions.unsubscribe(key_of(topic, asked.partition), self, bool(topic.topic_id))
            self._places = {}
        self._wake = None

    def respond(self, now_ms: int) -> m.FetchResponse:
        """All partitions; with a session's id if one was wanted and could be had."""
        self.cancel()
        session = self._open_session(now_ms) if self.kind is FetchKind.FULL else None
        session_id = INVALID_SESSION_ID if session is None else session.session_id
        responses, place = [], 0
        for topic in self._request.topics:
            end = place + len(topic.partitions)
            data = [found.data for found in self._reads[place:end]]
            responses.append(m.FetchableTopicResponse(topic.topic, topic.topic_id, data))
            place = end
        self._cache.metrics.answered(self.kind)
        return m.FetchResponse(session_id=session_id, responses=responses)

    def _open_session(self, now_ms: int) -> Session | None:
        asked = self._asked
        by_id = self._owner.uses_topic_ids
        if not asked or any(bool(topic.topic_id) is not by_id for topic in self._request.topics):
            return None
        if not self._cache.make_room(self._owner, len(asked), now_ms):
            return None
        results: dict[Key, PartitionRead] = {}
        session = Session(self._owner, self._cache.subscriptions, now_ms)
        session.terms = terms_of(self._request)
        for place, (topic, one) in enumerate(asked):
            key = key_of(topic, one.partition)
            session.put(key, one)  # if it is named twice, the last one counts
            results[key] = self._reads[place]
        session.queue.clear()  # every partition was read: only what `settle` gives back is dirty
        fresh = {key_of(asked[place][0], asked[place][1].partition): None for place in self._fresh}
        settle(session, results, fresh)
        return session if self._cache.admit(session) else None


class IncrementalFetch(Fetch):
    """A request within a session: it reads what is dirty, and answers what is news."""

    kind = FetchKind.INCREMENTAL

    def __init__(
        self, cache: FetchSessionCache, session: Session, request: m.FetchRequest, named: dict[Key, m.FetchPartition]
    ) -> None:
        super().__init__(cache, request)
        self._session = session
        self._named = named
        self._results: dict[Key, PartitionRead] = {}
        # Named by the request and read for their positions only, as the limit was reached; they are in the queue.
        self._peeked: dict[Key, PartitionRead] = {}
        self._fresh: dict[Key, None] = {}
        self._reader: Reader | None = None
        self._stale_counts = session.owner.privileged and session.owner.answers_stale_high_watermark
        session.fetch = self

    def read(self, reader: Reader) -> None:
        """What changed under the fetch, then the queue until a limit is reached, then who else the request names.

        The latter for the followers' positions in them, without records: the high watermark must not wait for a limit.
        """
        self._reader = reader
        if self.error or (self._has_read and self.is_complete):
            return
        session, results, fresh = self._session, self._results, self._fresh
        self._has_read = True
        while fresh and not self._is_limited:
            for key in list(fresh):  # one by one off its front would be O(changed ** 2)
                if self._is_limited:
                    break
                results[key] = self._read(reader, key, results.get(key))
                fresh.pop(key, None)
        while not self._is_limited:
            taken = session.take()
            if taken is None:
                break
            if taken not in results:
                results[taken] = self._read(reader, taken, None)
        if self._is_limited:
            for key in self._named:
                if key not in results and key not in self._peeked:
                    self._peeked[key] = self._read(reader, key, None)

    def _read(self, reader: Reader, key: Key, before: PartitionRead | None) -> PartitionRead:
        session = self._session
        topic, topic_id = session.topic_of(key)
        asked = self._named.get(key) or session.asked(key)
        found = self._read_limited(reader, topic, topic_id, asked, before)
        if self._stale_counts and not self._has_news:
            self._has_news = found.data.high_watermark > session.sent_high_watermark(key)
        return found

    def marked(self, key: Key, was_clean: bool, wakes: bool) -> bool:
        """A partition of the session changed."""
        takes = was_clean or key in self._results or key in self._peeked
        if takes:
            self._fresh[key] = None
        if wakes:
            self._notify()
        return takes

    def ended(self) -> None:
        """A later request has overtaken it, or the session is closed: answered at once with that error (227-05)."""
        if not self.error:
            is_open = self._cache.is_open(self._session)
            self.error = ErrorCode.INVALID_FETCH_SESSION_EPOCH if is_open else ErrorCode.FETCH_SESSION_ID_NOT_FOUND
            self._has_news = True
            self._give_back()
            self._notify()

    def cancel(self) -> None:
        """Nobody waits any more: what it looked at stays dirty."""
        self._wake = None
        if self._session.fetch is self:
            self._session.fetch = None
            self._give_back()

    def _give_back(self) -> None:
        results, self._results = self._results, {}
        queue = self._session.queue
        queue.extendleft(reversed(results))
        queue.extend([key for key in self._fresh if key not in results and key not in self._peeked])
        self._fresh, self._peeked = {}, {}

    def respond(self, now_ms: int) -> m.FetchResponse:
        """What is news, or that another request was faster."""
        self._wake = None
        session = self._session
        if session.fetch is self:
            session.fetch = None
        if self.error:
            return self._cache.refuse(self.error)
        fresh = {key: None for key in self._fresh if key not in self._peeked}
        news = settle(session, self._results, fresh)
        for key, found in self._peeked.items():
            stays = found.data.records or found.is_cut or found.again or must_react(found.data) or key in self._fresh
            is_clean = not stays
            if session.tell(key, found.data, is_clean):
                news.append((key, found.data))
            if is_clean:
                session.left_in_queue()
        self._cache.used(session, now_ms)
        self._cache.metrics.answered(self.kind)
        self._cache.metrics.saved(session.size - len(self._named), session.size - len(news))
        return m.FetchResponse(session_id=session.session_id, responses=self._by_topic(news))

    def _by_topic(self, news: Iterable[tuple[Key, m.PartitionData]]) -> list[m.FetchableTopicResponse]:
        topics: dict[bytes, list[m.PartitionData]] = {}
        names: dict[bytes, tuple[str, bytes]] = {}
        for key, data in news:
            topic = topic_of(key)
            found = topics.get(topic)
            if found is None:
                topics[topic] = [data]
                name, topic_id = self._session.topic_of(key)
                if topic_id and self._reader is not None:
                    name = self._reader.topic_name(topic_id)
                names[topic] = name, topic_id
            else:
                found.append(data)
        return [m.FetchableTopicResponse(*names[topic], partitions) for topic, partitions in topics.items()]


def settle(
    session: Session, results: dict[Key, PartitionRead], fresh: dict[Key, None]
) -> list[tuple[Key, m.PartitionData]]:
    """Take results as sent, and queue who stays dirty (227-10); what is news, for an incremental response (227-08).

    Who was cut is next, in the old order; who got records is last (227-11). `fresh` changed since it was read.
    """
    news: list[tuple[Key, m.PartitionData]] = []
    cut: list[Key] = []
    others = [key for key in fresh if key not in results]
    served: list[Key] = []
    for key, found in results.items():
        data = found.data
        has_records = bool(data.records)
        stays = has_records or found.is_cut or found.again or must_react(data) or key in fresh
        if session.tell(key, data, not stays):
            news.append((key, data))
        if has_records:
            served.append(key)
        elif found.is_cut:
            cut.append(key)
        elif stays:
            others.append(key)
    session.queue.extendleft(reversed(cut))
    session.queue.extend(others)
    session.queue.extend(served)
    return news
