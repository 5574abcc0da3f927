"""What happens to a broker's partitions, for those who would else have to look at all of them again and again.

Fetch sessions and waiting fetches are told at once; the housekeeping finds sets of partitions, so that an idle
partition costs nothing however many there are. Belongs to the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kipmesh.core.fetch_session import Subscriptions

if TYPE_CHECKING:
    from kipmesh.node.broker.replica import Replica


class Changes:
    """One broker's."""

    def __init__(self) -> None:
        self.subscriptions = Subscriptions()
        """Fetch sessions and fetches that wait, by partition."""
        self.behind: dict[Replica, None] = {}
        """Led partitions that followers may lack records of: all others are in sync whatever time it is."""
        self.unflushed: dict[Replica, None] = {}
        """Partitions whose logs may be due for an fsync by time or by size."""
        self.high_watermarks: dict[Replica, None] = {}
        """Partitions whose high watermark moved since the last checkpoint."""

    def forget(self, replica: Replica) -> None:
        """The partition leaves this broker."""
        for table in (self.behind, self.unflushed, self.high_watermarks):
            table.pop(replica, None)
