"""Publishes new metadata on a broker: first to the replicas and their logs, then to waiters.

The metadata loader's task calls `publish` and `idle`, so changes are applied one after the other and the image does not
change meanwhile. The first image is published only once it contains this broker's own registration: a restarted broker
never acts on a leadership that it has lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kipmesh.broker.replication.replica_manager import ReplicaManager
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage


@dataclass(eq=False)
class MetadataPublisher:
    """Applies new metadata images to the replicas of one broker, then makes them visible to waiters.

    Args: on_roles_assigned: receives each delta after the replicas have their roles, before waiters are notified;
    on_published: awaited after waiters have been notified.
    """

    broker_id: int
    replica_manager: ReplicaManager
    on_published: Callable[[], Awaitable[None]]
    on_roles_assigned: Callable[[MetadataDelta], None] = lambda _delta: None

    def __post_init__(self) -> None:
        self.published_offset = -1
        """Metadata offset of the last published image, or -1 before the first."""
        self.idle = self.replica_manager.retry
        """Try again to host partitions whose logs could not be created. Awaited while there is no new metadata."""
        self._broker_epoch = -1
        self._registered = asyncio.Event()
        self._advanced = asyncio.Event()

    @property
    def has_published(self) -> bool:
        """Whether any metadata image has been published."""
        return self.published_offset >= 0

    def published_image(self) -> MetadataImage | None:
        """Return the last published image, or None before the first."""
        return self.replica_manager.hosted_replicas.image if self.has_published else None

    def registered(self, broker_epoch: int) -> None:
        """Set the epoch of this broker's registration, which is the offset of its record. `publish` waits for this."""
        self._broker_epoch = broker_epoch
        self._registered.set()

    async def publish(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """Apply `delta` to the replicas and publish `image`. Waits until `registered` has been called.

        An image that ends before the registration is ignored; the first published image includes its changes.
        """
        await self._registered.wait()
        if image.offset < self._broker_epoch:
            return
        if not self.has_published:  # earlier deltas were not applied
            changed_partitions = set(image.partitions_of_broker(self.broker_id))
            delta = MetadataDelta(changed_partitions=changed_partitions, changed_brokers=set(image.brokers))
        await self.replica_manager.apply(image, delta)
        self.on_roles_assigned(delta)
        self.published_offset = image.offset
        self._advanced.set()
        self._advanced = asyncio.Event()
        await self.on_published()

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `condition` holds, checked after each publication, at most `timeout_s` seconds.

        Returns True if it holds, False after the timeout.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._advanced.wait()
        except TimeoutError:
            return False
        return True
