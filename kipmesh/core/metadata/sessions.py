"""When brokers were last heard of: kept in memory only, so a new controller gives every broker a fresh session.

Invariant: at most one session a broker; a session is of one registration (broker epoch).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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


class BrokerSessions:
    """The sessions of all brokers; times are of one monotonic clock, in ms."""

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self._sessions: dict[int, Session] = {}

    def get(self, broker_id: int) -> Session | None:
        """The broker's session, which may have ended by now."""
        return self._sessions.get(broker_id)

    def grant(self, broker_id: int, broker_epoch: int, now_ms: int) -> None:
        """A whole timeout for a broker that was not heard of yet."""
        self._sessions[broker_id] = Session(broker_epoch, now_ms, heard=False)

    def touch(self, broker_id: int, broker_epoch: int, now_ms: int, metadata_offset: int = -1) -> Session:
        """The broker of that epoch was heard of."""
        session = self._sessions.get(broker_id)
        if session is None or session.broker_epoch != broker_epoch:
            session = self._sessions[broker_id] = Session(broker_epoch, now_ms, heard=True)
        session.last_contact_ms = now_ms
        session.heard = True
        session.metadata_offset = max(session.metadata_offset, metadata_offset)
        return session

    def end(self, broker_id: int) -> None:
        """Forget the broker's session."""
        self._sessions.pop(broker_id, None)

    def is_live(self, broker_id: int, now_ms: int) -> bool:
        """Whether the broker itself was heard of within the timeout."""
        session = self._sessions.get(broker_id)
        return session is not None and session.heard and now_ms < session.last_contact_ms + self.timeout_ms

    def expired(self, now_ms: int) -> list[int]:
        """The brokers whose sessions have ended, the longest ended first."""
        ended = [
            (session.last_contact_ms, broker_id)
            for broker_id, session in self._sessions.items()
            if now_ms >= session.last_contact_ms + self.timeout_ms
        ]
        return [broker_id for _, broker_id in sorted(ended)]

    def next_deadline_ms(self) -> int | None:
        """When the first session ends unless it is used; None without sessions."""
        if not self._sessions:
            return None
        return min(session.last_contact_ms for session in self._sessions.values()) + self.timeout_ms

    def extend(self, now_ms: int) -> None:
        """Give every broker a whole timeout: the controller itself was away and cannot tell who was not."""
        for session in self._sessions.values():
            session.last_contact_ms = now_ms

    def least_metadata_offset(self, broker_ids: Iterable[int]) -> int | None:
        """What all of these brokers have applied; None for no brokers."""
        offsets = [
            session.metadata_offset if (session := self._sessions.get(broker_id)) else -1 for broker_id in broker_ids
        ]
        return min(offsets, default=None)
