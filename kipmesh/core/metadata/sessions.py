"""Broker sessions of the active controller.

Sessions are in memory only, so a new controller starts a fresh session for each unfenced broker.

| event                                                        | effect                                          |
| ------------------------------------------------------------ | ----------------------------------------------- |
| a heartbeat, with or without a known connection              | the timeout restarts; the broker is not missing |
| no heartbeat for `timeout_ms`                                | the session expires                             |
| the last connection that carried its heartbeats broke        | the broker is missing                           |
| the address of an unconfirmed broker refuses connections     | the broker is missing                           |
| missing for `loss_timeout_ms` (0: never)                     | the session expires                             |
| missing, but the controller did not check regularly          | the loss timeout restarts                       |
| missing, and another incarnation registers                   | the registration is accepted                    |

Only a connection that carried a heartbeat of the current registration counts. A new controller therefore expires no
session early, except for brokers whose address refuses connections (`refused`).

Invariants: a broker has at most one session; a session belongs to one registration (broker epoch); a session expires by
`loss_timeout_ms` only if the controller checked at least every `2 * check_interval_ms` meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

CHECKS = 4
"""Checks per `loss_timeout_ms` while a broker is missing."""


@dataclass(slots=True)
class Session:
    """One broker's session. Times are in ms, from a monotonic clock."""

    broker_epoch: int
    last_contact_ms: int
    confirmed: bool
    """Whether a heartbeat or registration has used the session. A session that was only granted does not prove that the
    broker is alive."""
    metadata_offset: int = -1
    """Highest metadata offset that the broker has reported as applied, or -1."""
    shutdown_offset: int | None = None
    """In controlled shutdown: metadata offset that all other brokers must apply before this broker may stop."""
    connections: set[int] = field(default_factory=set)
    """Open connections that have carried heartbeats of this session."""
    missing_since_ms: int | None = None
    """Time when the broker went missing: its last connection broke, or its address refused. None if it is not
    missing."""
    since_ms: int = 0
    """Time when this controller created the session."""


class BrokerSessions:
    """The sessions of all brokers. Times are in ms, all from the same monotonic clock."""

    def __init__(self, timeout_ms: int, loss_timeout_ms: int = 0) -> None:
        self.timeout_ms = timeout_ms
        self.loss_timeout_ms = loss_timeout_ms
        self.check_interval_ms = max(loss_timeout_ms // CHECKS, 1)
        self._sessions: dict[int, Session] = {}

        self._checked_ms = 0

    def is_confirmed(self, broker_id: int) -> bool:
        """Return whether the broker has a session and has used it. The session may have expired since."""
        session = self._sessions.get(broker_id)
        return session is not None and session.confirmed

    def grant(self, broker_id: int, broker_epoch: int, now_ms: int) -> None:
        """Start an unconfirmed session with a full timeout, replacing any session of the broker."""
        self._sessions[broker_id] = Session(broker_epoch, now_ms, confirmed=False, since_ms=now_ms)

    def touch(
        self, broker_id: int, broker_epoch: int, now_ms: int, metadata_offset: int = -1, connection: int = 0
    ) -> Session:
        """Record a heartbeat or registration of the broker, and return its session.

        Replaces a session that has another broker epoch. `connection` is the id of the connection that carried the
        heartbeat, or 0 if `disconnected` will not be called for it.
        """
        session = self._sessions.get(broker_id)
        if session is None or session.broker_epoch != broker_epoch:
            session = self._sessions[broker_id] = Session(broker_epoch, now_ms, confirmed=True, since_ms=now_ms)
        session.last_contact_ms = now_ms
        session.confirmed = True
        session.metadata_offset = max(session.metadata_offset, metadata_offset)
        if connection:
            session.connections.add(connection)
        session.missing_since_ms = None
        return session

    def end(self, broker_id: int) -> None:
        """Remove the broker's session, if any."""
        self._sessions.pop(broker_id, None)

    def disconnected(self, broker_id: int, connection: int, now_ms: int) -> bool:
        """Record the end of a connection that carried heartbeats. Return whether the broker is missing as a result,
        which starts its loss timeout.

        Returns False if the broker has another such connection or was already missing, or if `loss_timeout_ms` is 0.
        """
        session = self._sessions.get(broker_id)
        if session is None or connection not in session.connections:
            return False
        session.connections.discard(connection)
        return not session.connections and self._mark_missing(session, now_ms)

    def unconfirmed(self) -> list[int]:
        """Return the ids of brokers that have not sent a heartbeat or registered since their session was granted."""
        return [broker_id for broker_id, session in self._sessions.items() if not session.confirmed]

    def refused(self, broker_id: int, now_ms: int) -> bool:
        """Record that the broker's address refuses connections. Return whether that starts its loss timeout.

        Does nothing and returns False if the broker has no session, has used its session or is already missing, or if
        `loss_timeout_ms` is 0.
        """
        session = self._sessions.get(broker_id)
        return session is not None and not session.confirmed and self._mark_missing(session, now_ms)

    def _mark_missing(self, session: Session, now_ms: int) -> bool:
        if not self.loss_timeout_ms or session.missing_since_ms is not None:
            return False
        self._record_check(now_ms)
        session.missing_since_ms = now_ms
        return True

    def _record_check(self, now_ms: int) -> None:
        """Restart the loss timeouts if the last check was too long ago: the controller may have missed heartbeats while
        it was stalled."""
        if now_ms - self._checked_ms > 2 * self.check_interval_ms:
            for broker_id in self.missing():
                self._sessions[broker_id].missing_since_ms = now_ms
        self._checked_ms = now_ms

    def missing(self) -> frozenset[int]:
        """Return the ids of brokers that are missing: their last connection broke, or their address refused
        connections."""
        return frozenset([each for each, session in self._sessions.items() if session.missing_since_ms is not None])

    def is_live(self, broker_id: int, now_ms: int) -> bool:
        """Return whether the broker sent a heartbeat or registered within `timeout_ms` and is not missing. Returns
        False without a session."""
        session = self._sessions.get(broker_id)
        return (
            session is not None
            and session.confirmed
            and now_ms < session.last_contact_ms + self.timeout_ms
            and session.missing_since_ms is None
        )

    def expired(self, now_ms: int) -> list[int]:
        """Return the ids of brokers whose sessions have expired, earliest expiry first. The sessions remain until
        `grant` or `end` is called. Call this method at `next_deadline_ms`."""
        if self.missing():
            self._record_check(now_ms)
        ended = []
        for broker_id, session in self._sessions.items():
            end_ms = session.last_contact_ms + self.timeout_ms
            if session.missing_since_ms is not None:
                end_ms = min(end_ms, session.missing_since_ms + self.loss_timeout_ms)
            if now_ms >= end_ms:
                ended.append((end_ms, broker_id))
        return [broker_id for _, broker_id in sorted(ended)]

    def next_deadline_ms(self) -> int | None:
        """Return when to call `expired` next if no heartbeat arrives before then, or None if there are no sessions."""
        if not self._sessions:
            return None
        first = min(session.last_contact_ms for session in self._sessions.values()) + self.timeout_ms
        return min(first, self._checked_ms + self.check_interval_ms) if self.missing() else first

    def extend(self, now_ms: int) -> None:
        """Restart all session and loss timeouts, after a stall of the controller that may have hidden heartbeats."""
        for session in self._sessions.values():
            session.last_contact_ms = now_ms
            if session.missing_since_ms is not None:
                session.missing_since_ms = now_ms
        self._checked_ms = now_ms

    def least_metadata_offset(self, broker_ids: Iterable[int]) -> int | None:
        """Return the lowest metadata offset that these brokers have reported as applied (-1 for a broker without a
        session), or None if there are no brokers."""
        offsets = [
            session.metadata_offset if (session := self._sessions.get(broker_id)) else -1 for broker_id in broker_ids
        ]
        return min(offsets, default=None)
