"""The server's fetch sessions: what kind a request is, and whose slot a new session gets (227-01 to 227-07).

Sans-IO: time, ids and the partitions are the caller's (see `kipmesh.core.fetch_session.fetch` for the order of calls).
A request never raises: what makes no sense is answered with an error and leaves every session as it was.

Invariants: a session is in the cache, in its policy and in the subscriptions of all its partitions, or in none of them;
its epoch is the one that the next request must have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session.fetch import ErrorFetch, Fetch, FullFetch, IncrementalFetch, terms_of, topic_bytes
from kipmesh.core.fetch_session.metrics import FetchSessionMetrics
from kipmesh.core.fetch_session.policy import Candidate, Eviction, EvictionPolicy, Refusal
from kipmesh.core.fetch_session.session import Owner, Session
from kipmesh.core.fetch_session.subscriptions import Key, Subscriptions, partition_key
from kipmesh.core.fetch_session.types import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    INT_MAX,
    INVALID_SESSION_ID,
    SESSION_PARTITIONS_MAX,
    TOPIC_BYTES_MAX,
    UNUSED_MS_MAX,
    FetchSessionDescription,
    SessionEvent,
)
from kipmesh.messages import FetchPartition, FetchRequest, FetchResponse

CLIENT_ID_LENGTH_MAX = 255
_ID_ATTEMPTS_MAX = 100


class FetchSessionCache:
    """All fetch sessions of one node.

    `new_id` gives random int32 above 0 from a cryptographic source (227-01). `sessions_per_client_id` is ours, 0 for no
    quota; followers are not under it. `unused_ms_max`: a client at its quota may take the slot of a session of its own
    that was unused for longer. `tell` hears of each session that is made, closed or evicted.
    """

    def __init__(
        self,
        subscriptions: Subscriptions,
        policy: EvictionPolicy,
        new_id: Callable[[], int],
        *,
        sessions_per_client_id: int = 0,
        unused_ms_max: int = UNUSED_MS_MAX,
        partitions_max: int = SESSION_PARTITIONS_MAX,
        answers_stale_high_watermark: bool = True,
        tell: Callable[[SessionEvent], None] | None = None,
    ) -> None:
        self.subscriptions = subscriptions
        self.metrics = FetchSessionMetrics()
        self._policy = policy
        self._new_id = new_id
        self._quota = sessions_per_client_id
        self._unused_ms_max = unused_ms_max
        self._partitions_max = partitions_max
        self._answers_stale_high_watermark = answers_stale_high_watermark
        self._sessions: dict[int, Session] = {}
        self._sizes: dict[int, int] = {}
        self._by_client: dict[str, dict[Session, None]] = {}
        self._by_follower: dict[int, dict[Session, None]] = {}
        self._partitions = 0
        self._tell = tell
        self.by_privilege: Counter[bool] = Counter({False: 0, True: 0})
        """How many sessions are consumers', and how many followers' (227-02)."""

    def __len__(self) -> int:
        """`NumIncrementalFetchSessions`."""
        return len(self._sessions)

    @property
    def partitions(self) -> int:
        """`NumIncrementalFetchPartitionsCached`."""
        return self._partitions

    def list(self, now_ms: int) -> Iterator[FetchSessionDescription]:
        """The sessions by id. O(partitions): for people, not for scrapes."""
        for session_id in sorted(self._sessions):
            yield self._sessions[session_id].info(now_ms)

    # -- requests

    def begin(self, request: FetchRequest, client_id: str, now_ms: int) -> Fetch:
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

    def _owner(self, request: FetchRequest, client_id: str) -> Owner:
        by_id = bool(request.topics) and bool(request.topics[0].topic_id)
        client_id = client_id[:CLIENT_ID_LENGTH_MAX]
        return Owner(client_id, request.replica_id, by_id, self._answers_stale_high_watermark)

    def _check(self, session: Session | None, request: FetchRequest) -> ErrorCode:
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

    def _take(self, session: Session, request: FetchRequest, client_id: str, now_ms: int) -> Fetch:
        overtaken, session.fetch = session.fetch, None
        if overtaken is not None:
            overtaken.ended()
        # First forget, then add: a topic that was made anew under its name is both (227-07).
        for topic in request.forgotten_topics_data:
            prefix = topic_bytes(topic)
            for partition in topic.partitions:
                session.forget(partition_key(prefix, partition))
        named: dict[Key, FetchPartition] = {}
        for wanted in request.topics:
            prefix = topic_bytes(wanted)
            for asked in wanted.partitions:
                named[partition_key(prefix, asked.partition)] = asked
        if session.size + len(named) > self._partitions_max and self._grown(session, named) > self._partitions_max:
            self._said("closed", session, Refusal.TOO_LARGE.value)
            self._remove(session)
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

    @staticmethod
    def _grown(session: Session, named: dict[Key, FetchPartition]) -> int:
        return session.size + sum(key not in session for key in named)

    def end_older(self, replica_id: int, broker_epoch: int) -> None:
        """A broker has this registration now: the sessions of its older ones are nobody's, and would stay for ever."""
        for session in list(self._by_follower.get(replica_id, ())):
            if session.terms[2] < broker_epoch:
                self._close(session, "registered anew")

    # -- for the fetches

    def is_open(self, session: Session) -> bool:
        """Whether the session is still in the cache."""
        return self._sessions.get(session.session_id) is session

    def refuse(self, error: ErrorCode) -> FetchResponse:
        """The response with a session error."""
        self.metrics.failed(error)
        return FetchResponse(error_code=error, session_id=INVALID_SESSION_ID)

    def used(self, session: Session, now_ms: int) -> None:
        """A request was taken, or answered (227-16)."""
        session.last_used_ms = now_ms
        self._partitions += session.size - self._sizes[session.session_id]
        self._sizes[session.session_id] = session.size
        self._policy.used(session)

    def _has_room(self, owner: Owner, size: int, now_ms: int) -> bool:
        """Whether a follower's session of this size will get a slot; without one, its full fetches wait like others."""
        candidate = Candidate(owner.privileged, owner.replica_id, size)
        return (
            owner.privileged and size <= self._partitions_max and self._policy.room(candidate, now_ms).refusal is None
        )

    def make_room(self, owner: Owner, size: int, now_ms: int) -> bool:
        """Whether there is a slot for a session of this size; evicts who has to leave it."""
        if size > self._partitions_max:
            self.metrics.refused(Refusal.TOO_LARGE, owner.client_id)
            return False
        own = self._unused_of(owner, now_ms)
        if own is Refusal.QUOTA:
            self.metrics.refused(Refusal.QUOTA, owner.client_id)
            return False
        if isinstance(own, Session):
            self._evict(own, Eviction.INACTIVE, owner.client_id)
        room = self._policy.room(Candidate(owner.privileged, owner.replica_id, size), now_ms)
        if room.refusal is not None:
            self.metrics.refused(room.refusal, owner.client_id)
            return False
        if room.victim is not None and room.eviction is not None:
            self._evict(room.victim, room.eviction, owner.client_id)
        return True

    def admit(self, session: Session) -> bool:
        """Give a session its id and its slot, after `make_room`; False if no unused id was to be had."""
        for _ in range(_ID_ATTEMPTS_MAX):
            session_id = self._new_id()
            if 0 < session_id <= INT_MAX and session_id not in self._sessions:
                break
        else:
            session.close()
            return False
        session.session_id = session_id
        self._sessions[session_id] = session
        self._sizes[session_id] = session.size
        self._partitions += session.size
        if self._quota and not session.owner.privileged:
            self._by_client.setdefault(session.owner.client_id, {})[session] = None
        if session.owner.privileged:
            self._by_follower.setdefault(session.owner.replica_id, {})[session] = None
        self._policy.added(session)
        self.metrics.created += 1
        self.by_privilege[session.owner.privileged] += 1
        self._said("made", session)
        return True

    def _unused_of(self, owner: Owner, now_ms: int) -> Session | Refusal | None:
        """Under the quota None; at it a session of the same client id that may go, or the refusal."""
        if not self._quota or owner.privileged:
            return None
        own = self._by_client.get(owner.client_id, {})
        if len(own) < self._quota:
            return None
        oldest = min(own, key=lambda session: session.last_used_ms)
        is_unused = oldest.fetch is None and now_ms - oldest.last_used_ms > self._unused_ms_max
        return oldest if is_unused else Refusal.QUOTA

    def _close(self, session: Session, reason: str | None = None) -> None:
        self._said("closed", session, reason)
        self._remove(session)
        self.metrics.closed += 1

    def _evict(self, session: Session, eviction: Eviction, evictor: str) -> None:
        self._said("evicted", session, eviction.value, evictor)
        self._remove(session)
        self.metrics.evicted(eviction, evictor)

    def _said(
        self,
        what: Literal["made", "closed", "evicted"],
        session: Session,
        reason: str | None = None,
        evictor: str | None = None,
    ) -> None:
        if self._tell is not None:
            client_id, privileged = session.owner.client_id, session.owner.privileged
            self._tell(SessionEvent(what, session.session_id, client_id, privileged, session.size, reason, evictor))

    def _remove(self, session: Session) -> None:
        session_id = session.session_id
        del self._sessions[session_id]
        self._partitions -= self._sizes.pop(session_id)
        owner = session.owner
        self.by_privilege[owner.privileged] -= 1
        _drop(self._by_client, owner.client_id, session)
        _drop(self._by_follower, owner.replica_id, session)
        self._policy.removed(session)
        session.close()


_Name = TypeVar("_Name", str, int)


def _drop(table: dict[_Name, dict[Session, None]], name: _Name, session: Session) -> None:
    own = table.get(name)
    if own is not None:
        own.pop(session, None)
        if not own:
            del table[name]
