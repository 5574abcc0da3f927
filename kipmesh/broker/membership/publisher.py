"""What becomes of new metadata on a broker: replicas, logs and roles, then those who wait for it.

The metadata loader's task calls `publish` and `idle`, so that one change is carried out after the other and the image
does not go on meanwhile. The first is published only when the image has this broker's own registration, by the log or
by a snapshot: a restarted broker never acts on a leadership that it has lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kipmesh.broker.replication.replica_manager import ReplicaManager
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage


class MetadataPublisher:
    """One broker's."""

    def __init__(
        self, broker_id: int, replica_manager: ReplicaManager, on_published: Callable[[], Awaitable[None]]
    ) -> None:
        self.published_offset = -1
        """The offset of the last record whose effects are published, -1 before the first."""
        self._broker_id = broker_id
        self._replica_manager = replica_manager
        self._on_published = on_published
        self.on_roles_given: Callable[[MetadataDelta], None] = lambda _delta: None
        """Receives each change once its replicas have their roles, before waiters are notified."""
        self.idle = replica_manager.retry
        """Retries what the disk refused."""
        self._broker_epoch = -1
        self._registered = asyncio.Event()
        self._news = asyncio.Event()

    @property
    def has_published(self) -> bool:
        """Whether this broker acts on metadata yet."""
        return self.published_offset >= 0

    def published_image(self) -> MetadataImage | None:
        """The metadata that this broker acts on; None before the first."""
        return self._replica_manager.hosted_replicas.image if self.has_published else None

    def registered(self, broker_epoch: int) -> None:
        """The offset of our registration's record is known."""
        self._broker_epoch = broker_epoch
        self._registered.set()

    async def publish(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """Follow what changed; before the registration is known the loader waits here."""
        await self._registered.wait()
        if image.offset < self._broker_epoch:
            return
        if not self.has_published:  # all of ours: deltas that were withheld are in it
            changed_partitions = set(image.partitions_of_broker(self._broker_id))
            delta = MetadataDelta(changed_partitions=changed_partitions, changed_brokers=set(image.brokers))
        await self._replica_manager.apply(image, delta)
        self.on_roles_given(delta)
        self.published_offset = image.offset
        self._news.set()
        self._news = asyncio.Event()
        await self._on_published()

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the published metadata meets the condition, for at most `timeout_s`; whether it does."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._news.wait()
        except TimeoutError:
            return False
        return True
