"""Whether a broker that has started is back where it was: every replica of its is in its partition's ISR.

Whoever restarts brokers one after the other waits for that before the next: as long as a replica is not in sync, its
partition has one fewer that may fail. Once it has been so it stays so until the process ends: a replica that lags later
is no reason to send clients away.

Left out are partitions without a leader, whose replicas can do nothing about it, and replicas that a reassignment is
adding, which nobody had before.
"""

from __future__ import annotations

from collections.abc import Callable

from kipmesh.core.metadata.image import MetadataImage


class Joining:
    """Looks at the metadata until all is in sync. For the event loop's thread."""

    def __init__(self, node_id: int, image: Callable[[], MetadataImage]) -> None:
        self._node_id = node_id
        self._image = image
        self._is_done = False

    def look(self) -> bool:
        """Whether all replicas are in sync, or have been since the start. The caller knows that the broker is ready."""
        self._is_done = self._is_done or not self.lagging()
        return self._is_done

    def lagging(self) -> int:
        """How many of the broker's replicas are to be in sync and are not; O(replicas)."""
        image, node_id = self._image(), self._node_id
        found = 0
        for topic_id, number in image.partitions_of_broker(node_id):
            state = image.partition(topic_id, number)
            if state is None or state.leader < 0 or node_id in state.adding_replicas:
                continue
            found += node_id not in state.isr
        return found
