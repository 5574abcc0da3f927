"""What the loader, the snapshot maker and the metrics use of the driver."""

from __future__ import annotations

from typing import Protocol

from kipmesh.core.raft import Machine
from kipmesh.core.raft.types import SnapshotChanged
from kipmesh.storage.quorum_replica import QuorumReplica


class Quorum(Protocol):
    """`kipmesh.node.quorum.driver.QuorumDriver`, or less in tests."""

    @property
    def machine(self) -> Machine:
        """To read."""
        ...

    @property
    def replica(self) -> QuorumReplica:
        """Log and snapshots; its calls as that module says."""
        ...

    @property
    def high_watermark(self) -> int:
        """At least 0."""
        ...

    @property
    def corrupt_snapshots(self) -> int:
        """How many came from a leader and were none."""
        ...

    def post(self, event: SnapshotChanged) -> None:
        """Tell the machine."""
        ...
