"""The invariants of 630-19 that concern the log, checked after every step from outside of the nodes.

What is committed is what any node ever reported below its high watermark: an entry an offset, never changed. The
checker keeps it and the checksum of all records up to each offset, and compares every node with that only where the
node moved, so that a check costs what happened, not what there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kipmesh.core.raft import ElectionState, Machine, State

if TYPE_CHECKING:
    from kipmesh.testing.sim.node import Entry, SimNode
    from kipmesh.testing.sim.world import World


class InvariantError(AssertionError):
    """What must never happen did."""


class Checker:
    """See the module."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.leaders: dict[int, int] = {}
        self.committed: list[Entry] = []
        self.checksums: dict[int, int] = {}

    def fail(self, what: str) -> None:
        """Stop the run."""
        raise InvariantError(f"at {self.world.scheduler.now_ms:.1f} ms: {what}")

    # -- what happened

    def stepped(self, node: SimNode, machine: Machine) -> None:
        """After each step of a node."""
        if machine.epoch < node.epoch_seen:
            self.fail(f"the epoch of node {node.node_id} went back from {node.epoch_seen} to {machine.epoch}")
        node.epoch_seen = machine.epoch
        if machine.state is State.LEADER:
            leader = self.leaders.setdefault(machine.epoch, node.node_id)
            if leader != node.node_id:
                self.fail(f"epoch {machine.epoch} has two leaders: {leader} and {node.node_id}")
        high_watermark = machine.high_watermark
        if high_watermark < node.checked_high_watermark and high_watermark >= 0:
            self.fail(f"the high watermark of node {node.node_id} went back to {high_watermark}")
        if high_watermark > node.checked_high_watermark:
            self._check_committed(node, high_watermark)
            node.checked_high_watermark = high_watermark

    def _check_committed(self, node: SimNode, high_watermark: int) -> None:
        if high_watermark > len(node.entries):
            self.fail(f"node {node.node_id} has high watermark {high_watermark}, log end {len(node.entries)}")
        for offset in range(node.checked_high_watermark, high_watermark):
            entry = node.entries[offset]
            if offset < len(self.committed):
                if self.committed[offset] != entry:
                    self.fail(
                        f"node {node.node_id} has {entry} at committed offset {offset}, not {self.committed[offset]}"
                    )
            else:
                self._check_majority(node, offset, entry)
                self.committed.append(entry)

    def _check_majority(self, node: SimNode, offset: int, entry: Entry) -> None:
        voters = [self.world.nodes[voter] for voter in node.config.voters]
        having = [voter.node_id for voter in voters if self._has(voter, offset, entry)]
        if len(having) < node.config.majority:
            self.fail(f"node {node.node_id} calls offset {offset} committed, which only {having} have durably")

    @staticmethod
    def _has(node: SimNode, offset: int, entry: Entry) -> bool:
        return offset < node.durable_end() and node.entries[offset] == entry

    def truncated(self, node: SimNode, end: int) -> None:
        """Before the shadow of a log is cut."""
        for offset in range(end, min(len(node.entries), len(self.committed))):
            if node.entries[offset] == self.committed[offset]:
                self.fail(f"node {node.node_id} cuts its log at {end}, below committed offset {offset}")
        if end < node.checked_high_watermark:
            self.fail(f"node {node.node_id} cuts its log at {end}, high watermark {node.checked_high_watermark}")

    def recovered(self, node: SimNode, before: list[Entry]) -> None:
        """A log was loaded: what was durable is there."""
        durable = min(node.durable_floor, len(before))
        if node.entries[:durable] != before[:durable]:
            self.fail(f"node {node.node_id} lost durable records below {durable}: ends at {len(node.entries)}")

    def booted(self, node: SimNode, election: ElectionState) -> None:
        """A process starts with what `quorum-state` has."""
        if election.epoch < node.epoch_seen:
            self.fail(f"node {node.node_id} forgot epoch {node.epoch_seen}, it has {election.epoch}")

    def applied(self, node: SimNode) -> None:
        """A state machine applied everything up to an offset."""
        known = self.checksums.setdefault(node.applied, node.checksum)
        if known != node.checksum:
            self.fail(f"the state of node {node.node_id} at offset {node.applied} is not that of the others")

    def acknowledged(self, offset: int, entry: Entry) -> None:
        """A client was told that its record is committed."""
        if offset >= len(self.committed) or self.committed[offset] != entry:
            self.fail(f"the record acknowledged at offset {offset} is not committed")

    # -- at the end

    def converged(self) -> None:
        """Long after the last fault: one leader, everybody has everything, and the quorum still commits."""
        nodes = list(self.world.nodes.values())
        down = [node.node_id for node in nodes if node.machine is None]
        if down:
            self.fail(f"nodes {down} did not come back")
        leaders = [node.node_id for node in nodes if node.is_leader]
        if len(leaders) != 1:
            self.fail(f"leaders at the end: {leaders}")
        leader = self.world.nodes[leaders[0]]
        for node in nodes:
            if node.entries != leader.entries or node.checked_high_watermark != len(leader.entries):
                self.fail(
                    f"node {node.node_id} ends at {len(node.entries)}, high watermark {node.checked_high_watermark}; "
                    f"leader {leader.node_id} at {len(leader.entries)}"
                )
