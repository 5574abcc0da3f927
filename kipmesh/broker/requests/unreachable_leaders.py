"""Brokers that have just died, as far as it concerns who asks for metadata (docs/adr/0006-connections-of-brokers.md).

A client whose leader dies asks another broker within a millisecond who leads now, and the controllers need some 0.2 s
to say that. Told the old leader once more, some clients ask again only a second later. So an answer that would name a
leader that is gone waits a moment for the news. Gone is a leader whose fetch stream broke here, until a fetch succeeds
again; and, as the client may ask before that is noticed, one that refuses a connection when it is about to be named to
a client of Kafka's. What is said is always what the metadata says: a broken or refused connection is a reason to wait,
and nothing else.

And a broker that was fenced stays in the list of brokers that Kafka's clients are given, as long as its session may
have lasted: Apache Kafka, which notices only that its session has ended, lists it until then too. librdkafka from 2.10
on takes a broker apart that is listed no more, and where the same answer moves that broker's partitions to their new
leader it may forget the move, and asks again a second later. Such a broker leads nothing, and is in no other answer.
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
"""How long after it was found gone answers that name a leader wait, in all: `broker.connection.loss.timeout.ms` is 200
by default, and then comes what the controllers and this broker need."""
PROBE_TIMEOUT_S = 0.05
"""How long a leader may take to accept or refuse; one that is silent is named as if nothing was."""
FRESH_S = 0.005
"""A leader that accepted so short a time ago is not probed again."""
SLOW_S = 1.0
"""Nor one that was silent so short a time ago: what looks its name up holds a thread until it has an answer."""
PROBES_MAX = 16
"""A response that names more leaders is sent without probing them."""


class LostLeaders:
    """Leaders that seem to be gone, on one broker; belongs to the event loop."""

    def __init__(self, now_s: Callable[[], float], hold_s: float = HOLD_S) -> None:
        self._now_s = now_s
        self._hold_s = hold_s
        self._until: dict[int, float] = {}
        self._news = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._until)

    def reach_changed(self, leader_id: int, is_lost: bool) -> None:
        """The connection to a leader broke, or it has answered again (or nobody follows it here any more)."""
        if is_lost:
            self.lost(leader_id)
        else:
            self.found({leader_id})

    def lost(self, leader_id: int) -> None:
        """It is gone, from the first time on that this is said until it is `found`."""
        self._until.setdefault(leader_id, self._now_s() + self._hold_s)

    def probed(self, broker_id: int, is_gone: bool) -> None:
        """It refused, or did not: then the hold for it is over, and the next loss begins a new one."""
        if is_gone:
            self.lost(broker_id)
        elif broker_id in self._until and self._until[broker_id] < self._now_s():
            del self._until[broker_id]

    def found(self, broker_ids: Collection[int]) -> None:
        """They are there again, or there is other metadata of them."""
        for broker_id in broker_ids & self._until.keys():
            del self._until[broker_id]
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, leaders: Callable[[], AbstractSet[int]], limit_s: float) -> None:
        """Wait while one of the leaders is gone, for `limit_s` at most.

        `leaders` returns those of the requested topics in the current metadata.
        """
        deadline = self._now_s() + limit_s
        while self._until:
            now_s = self._now_s()
            waits = [self._until[leader_id] - now_s for leader_id in leaders() & self._until.keys()]
            left_s = min(max(waits, default=0.0), deadline - now_s)
            if left_s <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._news.wait()


class LeaderProbes:
    """Probes leaders that a response is about to name; belongs to the event loop.

    `address` returns where a broker listens for others; `on_probed` receives the broker and whether it refused.
    """

    def __init__(
        self,
        address: Callable[[int], Address | None],
        on_probed: Callable[[int, bool], None],
        now_s: Callable[[], float],
        refuses: Callable[[Address, float], Awaitable[bool]] | None = None,
    ) -> None:
        self._address = address
        self._on_probed = on_probed
        self._now_s = now_s
        self._prober = LivenessProber()
        self._refuses = refuses or self._prober.refuses
        self._fresh_until: dict[int, float] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    async def probe(self, broker_ids: Collection[int]) -> None:
        """Probe each, once for all concurrent requests; none if they are more than `PROBES_MAX`."""
        if len(broker_ids) > PROBES_MAX:
            return
        now_s = self._now_s()
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
        address, begin_s = self._address(broker_id), self._now_s()
        is_gone = address is not None and await self._refuses(address, PROBE_TIMEOUT_S)
        self._on_probed(broker_id, is_gone)
        now_s = self._now_s()
        if not is_gone:
            self._fresh_until[broker_id] = now_s + (FRESH_S if now_s - begin_s < PROBE_TIMEOUT_S / 2 else SLOW_S)

    async def stop(self) -> None:
        """Cancel the running probes."""
        self._prober.close()
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@dataclass(eq=False, kw_only=True)
class UnreachableLeaderGate:
    """Holds responses that name unreachable leaders, and keeps freshly fenced brokers listed, on one broker."""

    broker_id: int
    hosted_replicas: HostedReplicas
    lost: LostLeaders
    probes: LeaderProbes
    now_s: Callable[[], float]
    linger_s: float
    """How long a broker stays listed after its fencing."""
    listeners: Collection[str]
    """The names of Kafka's: their clients still see fenced brokers, and leaders are probed for them."""

    def __post_init__(self) -> None:
        self._unfenced: AbstractSet[int] = frozenset()
        self._fenced_until: dict[int, float] = {}

    def metadata_changed(self, delta: MetadataDelta) -> None:
        """New metadata is published."""
        if delta.changed_brokers:
            self._note_fenced()
        if self.lost:
            self.lost.found(delta.changed_brokers)

    def _note_fenced(self) -> None:
        """Brokers may have been fenced, or be back; after a controlled shutdown a fenced broker led nothing before."""
        brokers, now_s = self.hosted_replicas.image.brokers, self.now_s()
        unfenced = {broker.broker_id for broker in brokers.values() if not broker.fenced}
        for broker_id in self._unfenced - unfenced:
            if broker_id in brokers and not brokers[broker_id].in_controlled_shutdown:
                self._fenced_until[broker_id] = now_s + self.linger_s
        self._fenced_until = {
            key: until for key, until in self._fenced_until.items() if until > now_s and key not in unfenced
        }
        self._unfenced = unfenced

    async def hold(self, leaders: Callable[[], AbstractSet[int]], listener: str, limit_s: float) -> None:
        """Wait while a leader of the requested topics is gone, for `limit_s` at most."""
        if listener in self.listeners:
            await self.probes.probe(leaders() - {self.broker_id, NO_LEADER})
        if self.lost:
            await self.lost.wait(leaders, limit_s)

    def still_listed(self, listener: str) -> Iterable[int]:
        """Fenced brokers in responses on a listener; none while this broker is fenced itself."""
        if listener not in self.listeners or not self._fenced_until or self.broker_id not in self._unfenced:
            return ()
        now_s, brokers = self.now_s(), self.hosted_replicas.image.brokers
        return {key for key, until in self._fenced_until.items() if until > now_s and key in brokers}
