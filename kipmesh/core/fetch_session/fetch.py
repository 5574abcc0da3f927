"""One fetch at the server, of any of the four kinds, from its first read to its response (227-08 to 227-11, 227-21).

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session.session import Owner, Session, must_react
from kipmesh.core.fetch_session.subscriptions import Key, name_bytes, partition_key, topic_of
from kipmesh.core.fetch_session.types import INVALID_SESSION_ID, FetchKind, PartitionRead, Reader

if TYPE_CHECKING:
    from kipmesh.core.fetch_session.cache import FetchSessionCache


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

    __slots__ = ("_has_news", "_has_read", "_is_limited", "_max_bytes", "_min_bytes", "_wake", "error", "size_bytes")

    def __init__(self, request: m.FetchRequest) -> None:
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

    def _look(
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
    __slots__ = ("_cache",)

    def __init__(self, cache: FetchSessionCache, request: m.FetchRequest, error: ErrorCode) -> None:
        super().__init__(request)
        self._cache = cache
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

    __slots__ = (
        "_asked",
        "_cache",
        "_fresh",
        "_interests",
        "_owner",
        "_places",
        "_reads",
        "_request",
        "kind",
    )

    def __init__(
        self,
        cache: FetchSessionCache,
        request: m.FetchRequest,
        owner: Owner,
        wants_session: bool,
        *,
        begins_session: bool = False,
    ) -> None:
        super().__init__(request)
        self.kind = FetchKind.FULL if wants_session else FetchKind.SESSIONLESS
        self._cache = cache
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
                self._reads.append(self._look(reader, topic.topic, topic.topic_id, asked, None))
        while self._fresh and not self.is_complete:
            for place in list(self._fresh):  # one by one off its front would be O(changed ** 2)
                if self.is_complete:
                    break
                topic, asked = self._asked[place]
                self._reads[place] = self._look(reader, topic.topic, topic.topic_id, asked, self._reads[place])
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
        session.hold()
        fresh = {key_of(asked[place][0], asked[place][1].partition): None for place in self._fresh}
        settle(session, results, fresh)
        return session if self._cache.admit(session) else None


class IncrementalFetch(Fetch):
    """A request within a session: it reads what is dirty, and answers what is news."""

    kind = FetchKind.INCREMENTAL
    __slots__ = ("_cache", "_epoch", "_fresh", "_named", "_peeked", "_reader", "_results", "_session", "_stale_counts")

    def __init__(
        self, cache: FetchSessionCache, session: Session, request: m.FetchRequest, named: dict[Key, m.FetchPartition]
    ) -> None:
        super().__init__(request)
        self._cache = cache
        self._session = session
        self._epoch = session.epoch
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
        found = self._look(reader, topic, topic_id, asked, before)
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
        self._session.put_first(list(results))
        self._session.put_last([key for key in self._fresh if key not in results and key not in self._peeked])
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
    session.put_first(cut)
    session.put_last(others)
    session.put_last(served)
    return news
