"""When brokers were last heard of: kept in memory only, so a new controller gives every broker a fresh session.

| what is seen                                        | then                                             |
| --------------------------------------------------- | ------------------------------------------------ |
| a heartbeat, over a connection or without one       | the session begins anew, nothing is missing      |
| no heartbeat for `timeout_ms`                       | the session has ended                            |
| the last connection broke that had its heartbeats   | it is missing, from now on                       |
| nothing listens where a broker was, of which this   | it is missing, from now on                       |
| controller has not heard yet                        |                                                  |
| missing for `loss_timeout_ms` (0: never)            | the session has ended                            |
| missing, and the controller itself stood still      | missing from now on: it could not have seen it   |
| missing, and another incarnation registers          | it may: the one before is not alive              |

A connection counts once it has brought a heartbeat of the session's registration, and no other does: not those that
another controller had, nor those of a registration before. So a new controller ends no session for a connection, until
it has seen one of its own break; those that died with the one before it are found by their addresses (`refused`).

Invariants: at most one session a broker; a session is of one registration (broker epoch); it ends by a lost connection
only if the controller looked all the while, at least every `2 * check_interval_ms`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

CHECKS = 4
"""How often the controller looks while a connection is missing, before the session ends."""


@dataclass(slots=True)
class Session:
    """One broker's session."""

    broker_epoch: int
    last_contact_ms: int
    heard: bool
    """False for one that was granted and not yet used: it does not prove that the broker lives."""
    metadata_offset: int = -1
    """The highest metadata offset that the broker says it has applied."""
    shutdown_offset: int | None = None
    """In controlled shutdown: what the other brokers must have applied before the broker may stop."""
    connections: set[int] = field(default_factory=set)
    """The connections that are open and have brought heartbeats of this session."""
    missing_since_ms: int | None = None
    """When the last of them broke, or the broker's address refused, if nothing was heard of it since."""
    since_ms: int = 0
    """When this controller first knew of it."""


class BrokerSessions:
    """The sessions of all brokers; times are of one monotonic clock, in ms, and never go back."""

    def __init__(self, timeout_ms: int, loss_timeout_ms: int = 0) -> None:
        self.timeout_ms = timeout_ms
        self.loss_timeout_ms = loss_timeout_ms
        self.check_interval_ms = max(loss_timeout_ms // CHECKS, 1)
        self._sessions: dict[int, Session] = {}
        self._missing: set[int] = set()
        """Brokers whose session has `missing_since_ms`."""
        self._checked_ms = 0

    def has_heard(self, broker_id: int) -> bool:
        """Whether the broker has used its session, which may have ended by now."""
        session = self._sessions.get(broker_id)
        return session is not None and session.heard

    def grant(self, broker_id: int, broker_epoch: int, now_ms: int) -> None:
        """A whole timeout for a broker that was not heard of yet."""
        self._missing.discard(broker_id)
        self._sessions[broker_id] = Session(broker_epoch, now_ms, heard=False, since_ms=now_ms)

    def touch(
        self, broker_id: int, broker_epoch: int, now_ms: int, metadata_offset: int = -1, connection: int = 0
    ) -> Session:
        """The broker of that epoch was heard of, over this connection; 0 for none that could tell of its end."""
        session = self._sessions.get(broker_id)
        if session is None or session.broker_epoch != broker_epoch:
            session = self._sessions[broker_id] = Session(broker_epoch, now_ms, heard=True, since_ms=now_ms)
        session.last_contact_ms = now_ms
        session.heard = True
        session.metadata_offset = max(session.metadata_offset, metadata_offset)
        if connection:
            session.connections.add(connection)
        session.missing_since_ms = None
        self._missing.discard(broker_id)
        return session

    def end(self, broker_id: int) -> None:
        """Forget the broker's session."""
        self._missing.discard(broker_id)
        self._sessions.pop(broker_id, None)

    def disconnected(self, broker_id: int, connection: int, now_ms: int) -> bool:
        """A connection is over; says whether the broker is missing from now on."""
        session = self._sessions.get(broker_id)
        if session is None or connection not in session.connections:
            return False
        session.connections.discard(connection)
        return not session.connections and self._miss(broker_id, session, now_ms)

    def unheard(self) -> list[int]:
        """The brokers that were granted a session and have not used it yet."""
        return [broker_id for broker_id, session in self._sessions.items() if not session.heard]

    def refused(self, broker_id: int, now_ms: int) -> bool:
        """Nothing listens where the broker was; says whether it is missing from now on. Who was heard of is not."""
        session = self._sessions.get(broker_id)
        return session is not None and not session.heard and self._miss(broker_id, session, now_ms)

    def _miss(self, broker_id: int, session: Session, now_ms: int) -> bool:
        if not self.loss_timeout_ms or session.missing_since_ms is not None:
            return False
        self._note_check(now_ms)
        session.missing_since_ms = now_ms
        self._missing.add(broker_id)
        return True

    def _note_check(self, now_ms: int) -> None:
        """Who looks too late stood still, and heard nobody meanwhile."""
        if now_ms - self._checked_ms > 2 * self.check_interval_ms:
            for broker_id in self._missing:
                self._sessions[broker_id].missing_since_ms = now_ms
        self._checked_ms = now_ms

    def missing(self) -> frozenset[int]:
        """The brokers that are missing, and of which nothing was heard since."""
        return frozenset(self._missing)

    def is_live(self, broker_id: int, now_ms: int) -> bool:
        """Whether the broker itself was heard of within the timeout, and is not missing."""
        session = self._sessions.get(broker_id)
        return (
            session is not None
            and session.heard
            and now_ms < session.last_contact_ms + self.timeout_ms
            and session.missing_since_ms is None
        )

    def expired(self, now_ms: int) -> list[int]:
        """The brokers whose sessions have ended, the longest ended first; to be asked at `next_deadline_ms`."""
        if self._missing:
            self._note_check(now_ms)
        ended = []
        for broker_id, session in self._sessions.items():
            end_ms = session.last_contact_ms + self.timeout_ms
            if session.missing_since_ms is not None:
                end_ms = min(end_ms, session.missing_since_ms + self.loss_timeout_ms)
            if now_ms >= end_ms:
                ended.append((end_ms, broker_id))
        return [broker_id for _, broker_id in sorted(ended)]

    def next_deadline_ms(self) -> int | None:
        """When to ask `expired` next, if no session is used until then; None without sessions."""
        if not self._sessions:
            return None
        first = min(session.last_contact_ms for session in self._sessions.values()) + self.timeout_ms
        return min(first, self._checked_ms + self.check_interval_ms) if self._missing else first

    def extend(self, now_ms: int) -> None:
        """Give every broker a whole timeout: the controller itself was away and cannot tell who was not."""
        for session in self._sessions.values():
            session.last_contact_ms = now_ms
            if session.missing_since_ms is not None:
                session.missing_since_ms = now_ms
        self._checked_ms = now_ms

    def least_metadata_offset(self, broker_ids: Iterable[int]) -> int | None:
        """What all of these brokers have applied; None for no brokers."""
        offsets = [
            session.metadata_offset if (session := self._sessions.get(broker_id)) else -1 for broker_id in broker_ids
        ]
        return min(offsets, default=None)
