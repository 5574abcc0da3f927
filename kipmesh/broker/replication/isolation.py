"""Isolation of this broker from the controllers; an isolated broker redirects its clients.

`kipmesh.core.replica.serving` has the rules. Fetches of followers are served regardless: the controller decides about
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.core.replica.serving import isolated_at_ms, refuses_clients

log = structlog.get_logger(__name__)

CHECKS = 10
"""Number of checks within one session timeout."""


@dataclass(eq=False)
class Isolation:
    """Tracks when the active controller last responded. Belongs to the event loop.

    `is_isolated` is True if it has not responded within the session timeout. It is False before the registration.

    Args: timeout_ms: the session timeout; now_ms: monotonic clock in ms.
    """

    hosted_replicas: HostedReplicas
    timeout_ms: int
    now_ms: Callable[[], int]

    def __post_init__(self) -> None:
        self._responded_ms: int | None = None  # None before the registration
        self._changed_ms = 0
        self._controller = (-1, -1)
        self.is_isolated = False
        self.on_change: Callable[[], None] = lambda: None
        """Called when `is_isolated` changes. `BrokerLifecycle` sets it."""

    @property
    def left_ms(self) -> int:
        """Time in ms until the broker is isolated; 0 if it is isolated or not registered."""
        if self._responded_ms is None:
            return 0
        return max(isolated_at_ms(self._responded_ms, self._changed_ms, self.timeout_ms) - self.now_ms(), 0)

    def responded(self, sent_ms: int) -> None:
        """Record that the controller responded to the registration or heartbeat that was sent at `sent_ms`."""
        self._responded_ms = max(sent_ms, self._responded_ms or sent_ms)
        self.check_session_timeout()

    def controller_changed(self, leader_id: int, epoch: int) -> None:
        """Record a new active controller, which restarts the timeout. `leader_id` -1 (unknown) is ignored."""
        if leader_id < 0 or (leader_id, epoch) == self._controller:
            return
        self._controller = (leader_id, epoch)
        self._changed_ms = self.now_ms()
        self.check_session_timeout()

    async def run(self) -> None:
        """Check the session timeout periodically, until cancelled."""
        while True:
            await asyncio.sleep(self.timeout_ms / 1000 / CHECKS)
            self.check_session_timeout()

    def check_session_timeout(self) -> None:
        """Update `is_isolated` and whether the replicas reject clients. Calls `on_change` if `is_isolated` changed."""
        is_isolated = self._responded_ms is not None and not self.left_ms
        has_changed = is_isolated != self.is_isolated
        self.is_isolated = is_isolated
        if has_changed and is_isolated:
            log.warning("isolated from the controllers", timeout_ms=self.timeout_ms)
        elif has_changed:
            log.info("reconnected to the controllers")
        if is_isolated or has_changed:
            self._update_replicas()
        if has_changed:
            self.on_change()

    def _update_replicas(self) -> None:
        for replica in self.hosted_replicas:
            leader = replica.leader
            replica.set_rejects_clients(
                refuses_clients(
                    is_isolated=self.is_isolated,
                    is_leader=leader is not None,
                    members_last_fetch_ms=leader.members_last_fetch_ms() if leader is not None else (),
                    now_ms=self.now_ms(),
                    timeout_ms=self.timeout_ms,
                )
            )
