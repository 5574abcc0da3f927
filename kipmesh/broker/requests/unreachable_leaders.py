"""Delays Metadata responses that would name an unreachable leader. See ADR 0006.

When a leader dies, clients refresh their metadata within a millisecond, but the controller needs about 0.2 s to elect a
successor. A client that receives the old leader again may wait a full second before its next request. A response that
would name an unreachable leader therefore waits for up to `HOLD_S`. A leader counts as unreachable when its fetch
stream breaks, or when it refuses a connection just before it is named to a Kafka client. The response always matches
the metadata image; reachability only delays it.

On Kafka listeners, fenced brokers stay in the broker list until their session would have expired, as in Apache Kafka:
librdkafka 2.10+ may discard a leader change that arrives together with the removal of a broker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.core.metadata.image import MetadataDelta
from kipmesh.core.metadata.records import NO_LEADER
from kipmesh.node.liveness_probe import Address, LivenessProber

HOLD_S = 0.5
"""Maximum delay, in total, of responses that name a leader after it became unreachable.

It covers `broker.connection.loss.timeout.ms` (200 by default), the election, and the metadata propagation.
"""
PROBE_TIMEOUT_S = 0.05
"""Maximum time to accept or refuse a connection. A leader that does neither is treated as reachable."""
FRESH_S = 0.005
"""A leader that accepted a connection within this time is not probed again."""
SLOW_S = 1.0
"""A leader that did not respond within this time is not probed again, because a name lookup may block a thread."""
PROBES_MAX = 16
"""A response that names more leaders is sent without probes."""


@dataclass(eq=False)
class UnreachableLeaders:
    """The leaders that this broker cannot reach, and how long responses that name them are held.

    A hold lasts `hold_s` seconds. An expired one stays recorded until the leader is reachable or its metadata changes.
    The object is truthy if it has any leaders. Belongs to the event loop.
    """

    now_s: Callable[[], float]
    hold_s: float = HOLD_S

    def __post_init__(self) -> None:
        self._held_until_s: dict[int, float] = {}
        self._changed = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._held_until_s)

    def reachability_changed(self, leader_id: int, is_unreachable: bool) -> None:
        """Record that the fetch stream to a leader broke, or that it works again or was closed."""
        if is_unreachable:
            self.add(leader_id)
        else:
            self.remove({leader_id})

    def add(self, leader_id: int) -> None:
        """Start a hold for a leader, unless it already has one, active or expired."""
        self._held_until_s.setdefault(leader_id, self.now_s() + self.hold_s)

    def record_probe(self, broker_id: int, has_refused: bool) -> None:
        """Record whether a broker refused a connection.

        If it did not, an expired hold is removed, so that the next failure starts a new one.
        """
        if has_refused:
            self.add(broker_id)
        elif broker_id in self._held_until_s and self._held_until_s[broker_id] < self.now_s():
            del self._held_until_s[broker_id]

    def remove(self, broker_ids: Collection[int]) -> None:
        """End the holds of brokers, because they are reachable or their metadata changed, and wake waiters."""
        for broker_id in broker_ids & self._held_until_s.keys():
            del self._held_until_s[broker_id]
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, leaders: Callable[[], AbstractSet[int]], limit_s: float) -> None:
        """Wait while one of the leaders is held, at most `limit_s` seconds.

        `leaders` returns the leaders of the requested topics in the current metadata.
        """
        deadline = self.now_s() + limit_s
        while self._held_until_s:
            now_s = self.now_s()
            waits = [self._held_until_s[leader_id] - now_s for leader_id in leaders() & self._held_until_s.keys()]
            left_s = min(max(waits, default=0.0), deadline - now_s)
            if left_s <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()


@dataclass(eq=False)
class LeaderProbes:
    """Probes leaders that a response is about to name. Belongs to the event loop.

    Args: address: returns a broker's inter-broker address, or None if it is unknown; on_probed: receives the broker id
    and whether it refused a connection; refuses: returns whether an address refuses a connection, given a timeout in
    seconds (default: `LivenessProber.refuses`).
    """

    address: Callable[[int], Address | None]
    on_probed: Callable[[int, bool], None]
    now_s: Callable[[], float]
    refuses: Callable[[Address, float], Awaitable[bool]] | None = None

    def __post_init__(self) -> None:
        self._prober = LivenessProber()
        self._refuses = self.refuses or self._prober.refuses
        self._fresh_until: dict[int, float] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    async def probe(self, broker_ids: Collection[int]) -> None:
        """Probe each broker that has not just been probed, and wait for the results. Concurrent requests share probes.

        Does nothing for more than `PROBES_MAX` brokers.
        """
        if len(broker_ids) > PROBES_MAX:
            return
        now_s = self.now_s()
        due = [each for each in broker_ids if self._fresh_until.get(each, now_s) <= now_s]
        if due:
            await asyncio.wait([self._task(broker_id) for broker_id in due])

    def _task(self, broker_id: int) -> asyncio.Task[None]:
        task = self._running.get(broker_id)
        if task is None:
            task = self._running[broker_id] = asyncio.create_task(self._probe(broker_id), name=f"probe-{broker_id}")
            task.add_done_callback(lambda _: self._running.pop(broker_id, None))
        return task

    async def _probe(self, broker_id: int) -> None:
        address, begin_s = self.address(broker_id), self.now_s()
        has_refused = address is not None and await self._refuses(address, PROBE_TIMEOUT_S)
        self.on_probed(broker_id, has_refused)
        now_s = self.now_s()
        if not has_refused:
            self._fresh_until[broker_id] = now_s + (FRESH_S if now_s - begin_s < PROBE_TIMEOUT_S / 2 else SLOW_S)

    async def stop(self) -> None:
        """Cancel the running probes and wait until they have ended."""
        self._prober.close()
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@dataclass(eq=False, kw_only=True)
class UnreachableLeaderGate:
    """Holds responses that name unreachable leaders, and keeps recently fenced brokers in the broker list."""

    broker_id: int
    hosted_replicas: HostedReplicas
    unreachable: UnreachableLeaders
    probes: LeaderProbes
    now_s: Callable[[], float]
    linger_s: float
    """Seconds that a broker stays listed after it was fenced."""
    listeners: Collection[str]
    """Names of the Kafka listeners. Only their clients see fenced brokers and cause probes."""

    def __post_init__(self) -> None:
        self._unfenced: AbstractSet[int] = frozenset()
        self._listed_until_s: dict[int, float] = {}

    def metadata_changed(self, delta: MetadataDelta) -> None:
        """Record fenced brokers of newly published metadata, and end the holds of all changed brokers."""
        if delta.changed_brokers:
            self._update_fenced()
        if self.unreachable:
            self.unreachable.remove(delta.changed_brokers)

    def _update_fenced(self) -> None:
        """Record brokers that were fenced. Brokers that shut down cleanly led nothing and are left out."""
        brokers, now_s = self.hosted_replicas.image.brokers, self.now_s()
        unfenced = {broker.broker_id for broker in brokers.values() if not broker.fenced}
        for broker_id in self._unfenced - unfenced:
            if broker_id in brokers and not brokers[broker_id].in_controlled_shutdown:
                self._listed_until_s[broker_id] = now_s + self.linger_s
        self._listed_until_s = {
            key: until for key, until in self._listed_until_s.items() if until > now_s and key not in unfenced
        }
        self._unfenced = unfenced

    async def hold(self, leaders: Callable[[], AbstractSet[int]], listener: str, limit_s: float) -> None:
        """Wait while one of `leaders()` is unreachable, at most `limit_s` seconds.

        If `listener` is a Kafka listener, the leaders are probed first.
        """
        if listener in self.listeners:
            await self.probes.probe(leaders() - {self.broker_id, NO_LEADER})
        if self.unreachable:
            await self.unreachable.wait(leaders, limit_s)

    def lingering(self, listener: str) -> Iterable[int]:
        """Return the ids of fenced brokers that a listener's responses still list; none while this broker is fenced."""
        if listener not in self.listeners or not self._listed_until_s or self.broker_id not in self._unfenced:
            return ()
        now_s, brokers = self.now_s(), self.hosted_replicas.image.brokers
        return {key for key, until in self._listed_until_s.items() if until > now_s and key in brokers}
