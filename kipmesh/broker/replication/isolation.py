"""Whether this broker hears from the controllers; where it does not, its replicas send their clients away.

The rules are `kipmesh.core.replica.serving`'s. Followers are served as ever: what they fetch is for the controller
to judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.core.replica.serving import isolated_at_ms, sends_clients_away

log = structlog.get_logger(__name__)

CHECKS = 10
"""Checks within the session timeout."""


class Isolation:
    """One broker's; it belongs to the event loop. Times are monotonic, in ms."""

    def __init__(self, hosted_replicas: HostedReplicas, timeout_ms: int, now_ms: Callable[[], int]) -> None:
        self._hosted_replicas = hosted_replicas
        self._timeout_ms = timeout_ms
        self._now_ms = now_ms
        self._responded_ms: int | None = None  # none before the registration: nobody is served then
        self._changed_ms = 0
        self._controller = (-1, -1)
        self.is_isolated = False
        self.on_change: Callable[[], None] = lambda: None
        """Called when `is_isolated` changes."""

    @property
    def now_ms(self) -> int:
        """The time that `responded` is to be given."""
        return self._now_ms()

    @property
    def left_ms(self) -> int:
        """The time until it is isolated; 0 when it is, and before the registration."""
        if self._responded_ms is None:
            return 0
        return max(isolated_at_ms(self._responded_ms, self._changed_ms, self._timeout_ms) - self._now_ms(), 0)

    def responded(self, sent_ms: int) -> None:
        """The active controller responded to the registration, or to a heartbeat that was sent at `sent_ms`."""
        self._responded_ms = max(sent_ms, self._responded_ms or sent_ms)
        self.check_session_timeout()

    def controller_changed(self, leader_id: int, epoch: int) -> None:
        """What the metadata quorum says: -1 when no leader is known, which is no news of one."""
        if leader_id < 0 or (leader_id, epoch) == self._controller:
            return
        self._controller = (leader_id, epoch)
        self._changed_ms = self._now_ms()
        self.check_session_timeout()

    async def run(self) -> None:
        """Check for ever."""
        while True:
            await asyncio.sleep(self._timeout_ms / 1000 / CHECKS)
            self.check_session_timeout()

    def check_session_timeout(self) -> None:
        """Update `is_isolated` and the replicas."""
        is_isolated = self._responded_ms is not None and not self.left_ms
        has_changed = is_isolated != self.is_isolated
        self.is_isolated = is_isolated
        if has_changed and is_isolated:
            log.warning("isolated: no heartbeat was answered within the session timeout", timeout_ms=self._timeout_ms)
        elif has_changed:
            log.info("not isolated any more")
        if is_isolated or has_changed:
            self._flag_replicas()
        if has_changed:
            self.on_change()

    def _flag_replicas(self) -> None:
        for replica in self._hosted_replicas:
            leader = replica.leader
            replica.set_cut_off(
                sends_clients_away(
                    is_isolated=self.is_isolated,
                    is_leader=leader is not None,
                    members_heard_ms=leader.members_heard_ms() if leader is not None else (),
                    now_ms=self._now_ms(),
                    timeout_ms=self._timeout_ms,
                )
            )
