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

from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.metadata.records import NO_LEADER
from kipmesh.node.knock import Address, refuses

HOLD_S = 0.5
"""How long after it was found gone answers that name a leader wait, in all: `broker.connection.loss.timeout.ms` is 200
by default, and then comes what the controllers and this broker need."""
KNOCK_TIMEOUT_S = 0.05
"""How long a leader may take to accept or refuse; one that is silent is named as if nothing was."""
FRESH_S = 0.005
"""A leader that accepted so short a time ago is not knocked at again."""
SLOW_S = 1.0
"""Nor one that was silent so short a time ago: what looks its name up holds a thread until it has an answer."""
KNOCKS_MAX = 16
"""An answer that names more leaders than that is given without asking them."""


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

    def knocked(self, broker_id: int, is_gone: bool) -> None:
        """It refused, or did not: then what was held for it once is over, and the next time it is gone is a new one."""
        if is_gone:
            self.lost(broker_id)
        elif broker_id in self._until and self._until[broker_id] < self._now_s():
            del self._until[broker_id]

    def found(self, broker_ids: Collection[int]) -> None:
        """They are there again, or there is other metadata of them."""
        for broker_id in broker_ids & self._until.keys():
            del self._until[broker_id]
        self.news()

    def news(self) -> None:
        """There is other metadata: who waits looks again."""
        self._news.set()
        self._news = asyncio.Event()

    async def settle(self, leaders: Callable[[], AbstractSet[int]], limit_s: float) -> None:
        """Wait while one of those who lead is gone, and for `limit_s` at most.

        `leaders` are those of what is asked for, by the metadata as it is when that is called.
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


class Knocks:
    """Finds out whether leaders are gone, when one is about to be named; belongs to the event loop."""

    def __init__(
        self,
        address: Callable[[int], Address | None],
        answered: Callable[[int, bool], None],
        now_s: Callable[[], float],
        knock: Callable[[Address, float], Awaitable[bool]] = refuses,
    ) -> None:
        """`address` is where a broker listens for others; `answered` is told who was asked, and whether it refused."""
        self._address = address
        self._answered = answered
        self._now_s = now_s
        self._knock = knock
        self._fresh_until: dict[int, float] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    async def at(self, broker_ids: Collection[int]) -> None:
        """Knock at each, once for all who ask at the same time; none where they are more than `KNOCKS_MAX`."""
        if len(broker_ids) > KNOCKS_MAX:
            return
        now_s = self._now_s()
        asked = [each for each in broker_ids if self._fresh_until.get(each, now_s) <= now_s]
        if asked:
            await asyncio.wait([self._task(broker_id) for broker_id in asked])

    def _task(self, broker_id: int) -> asyncio.Task[None]:
        task = self._running.get(broker_id)
        if task is None:
            task = self._running[broker_id] = asyncio.create_task(self._ask(broker_id), name=f"knock-{broker_id}")
            task.add_done_callback(lambda _: self._running.pop(broker_id, None))
        return task

    async def _ask(self, broker_id: int) -> None:
        address, begin_s = self._address(broker_id), self._now_s()
        is_gone = address is not None and await self._knock(address, KNOCK_TIMEOUT_S)
        self._answered(broker_id, is_gone)
        now_s = self._now_s()
        if not is_gone:
            self._fresh_until[broker_id] = now_s + (FRESH_S if now_s - begin_s < KNOCK_TIMEOUT_S / 2 else SLOW_S)

    async def stop(self) -> None:
        """End those under way."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class FreshlyFenced:
    """Brokers that were fenced a moment ago, on one broker."""

    def __init__(
        self,
        broker_id: int,
        image: Callable[[], MetadataImage],
        now_s: Callable[[], float],
        linger_s: float,
    ) -> None:
        """They are listed for `linger_s` after the fencing."""
        self._broker_id = broker_id
        self._image = image
        self._now_s = now_s
        self._linger_s = linger_s
        self._unfenced: AbstractSet[int] = frozenset()
        self._until: dict[int, float] = {}

    def metadata_changed(self, delta: MetadataDelta) -> None:
        """Brokers may have been fenced, or be back; who shut down in order was left by its leaderships before."""
        if not delta.changed_brokers:
            return
        brokers, now_s = self._image().brokers, self._now_s()
        unfenced = {broker.broker_id for broker in brokers.values() if not broker.fenced}
        for broker_id in self._unfenced - unfenced:
            if broker_id in brokers and not brokers[broker_id].in_controlled_shutdown:
                self._until[broker_id] = now_s + self._linger_s
        self._until = {key: until for key, until in self._until.items() if until > now_s and key not in unfenced}
        self._unfenced = unfenced

    def listed(self) -> Collection[int]:
        """Those that clients are still told of; none while this broker is fenced itself."""
        if not self._until or self._broker_id not in self._unfenced:
            return ()
        now_s, brokers = self._now_s(), self._image().brokers
        return {broker_id for broker_id, until in self._until.items() if until > now_s and broker_id in brokers}


class Departures:
    """All of it, for the answers of one broker."""

    def __init__(
        self, broker_id: int, lost: LostLeaders, knocks: Knocks, fenced: FreshlyFenced, listeners: Collection[str]
    ) -> None:
        """`listeners` are the names of Kafka's, whose clients are told of fenced brokers, and knocked for."""
        self._broker_id = broker_id
        self.lost = lost
        self.knocks = knocks
        self._fenced = fenced
        self._listeners = frozenset(listeners)

    def metadata_changed(self, delta: MetadataDelta) -> None:
        """New metadata is published."""
        self._fenced.metadata_changed(delta)
        if self.lost:
            self.lost.found(delta.changed_brokers)

    async def settle(self, leaders: Callable[[], AbstractSet[int]], listener: str, limit_s: float) -> None:
        """Wait while a leader of what is asked for is gone, for `limit_s` at most."""
        if listener in self._listeners:
            await self.knocks.at(leaders() - {self._broker_id, NO_LEADER})
        if self.lost:
            await self.lost.settle(leaders, limit_s)

    def still_listed(self, listener: str) -> Iterable[int]:
        """Fenced brokers that who came by a listener is told of."""
        return self._fenced.listed() if listener in self._listeners else ()
