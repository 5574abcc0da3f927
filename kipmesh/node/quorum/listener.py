"""Who is told of what the quorum decides: the loader of the metadata, the owner of an active controller."""

from __future__ import annotations

from typing import Protocol

from kipmesh.core.raft import State
from kipmesh.messages import SnapshotId


class QuorumListener(Protocol):
    """Told of what happens, in the event loop, within a step: it must be quick, and must not call `append`."""

    def state_changed(self, state: State, epoch: int, leader_id: int) -> None:
        """Another state, epoch or leader (-1 unknown); also once at the start."""
        ...

    def committed(self, high_watermark: int) -> None:
        """The high watermark rose."""
        ...

    def truncated(self, offset: int) -> None:
        """The log was cut, it ends at `offset`."""
        ...

    def snapshot_installed(self, snapshot_id: SnapshotId) -> None:
        """A fetched snapshot took the log's place (630-12)."""
        ...
