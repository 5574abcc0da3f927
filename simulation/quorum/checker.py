"""Checks the invariants of 630-19 after every step, from outside of the nodes.

An entry is committed when any node reported it below its high watermark. The checker stores the committed entry of each
offset, which must never change. It also applies them to its own image and keeps a capture at the end of each batch;
applied, captured and loaded images of all nodes must match. It compares only nodes that advanced, so that the cost
depends on the changes.
"""

from __future__ import annotations

from collections.abc import Mapping

from kipmesh.core import record_batch
from kipmesh.core.errors import KafkaError
from kipmesh.core.metadata.image import CapturedImage, MetadataDelta, MetadataImage
from kipmesh.core.raft import Machine, State
from kipmesh.core.snapshot.ids import FileKind, parse_file_name
from kipmesh.messages import SnapshotId
from simulation.engine import Engine
from simulation.quorum.host import READ_BYTES, Entry, Host
from simulation.quorum.metadata import is_same


class Checker:
    """Checks the invariants of 630-19 (see the module docstring). `check_` methods raise InvariantError."""

    def __init__(self, engine: Engine, nodes: Mapping[int, Host]) -> None:
        self.engine = engine
        self.fail = engine.fail
        self.nodes = nodes
        self.leaders: dict[int, int] = {}
        self.committed: list[Entry] = []
        self.captures: dict[int, CapturedImage] = {}
        """Metadata at the end of each committed batch, by the offset after the batch."""
        self._image = MetadataImage()

    # -- the log

    def check_step(self, node: Host, machine: Machine) -> None:
        """Check a node after a step: its epoch, leader, high watermark, log start and snapshots."""
        if machine.epoch < node.epoch_seen:
            self.fail(f"epoch of node {node.node_id} decreased from {node.epoch_seen} to {machine.epoch}")
        node.epoch_seen = machine.epoch
        if machine.state is State.LEADER:
            leader = self.leaders.setdefault(machine.epoch, node.node_id)
            if leader != node.node_id:
                self.fail(f"epoch {machine.epoch} has two leaders: {leader} and {node.node_id}")
            if machine.fetching_snapshot is not None or node.transfer is not None:
                self.fail(f"leader {node.node_id} fetches a snapshot")
        self.check_high_watermark(node, machine.high_watermark)
        self._check_snapshot(node, machine)

    def check_high_watermark(self, node: Host, high_watermark: int) -> None:
        """Check a new high watermark of a node, before the node applies the records below it.

        It must not decrease, and the records must match the committed ones.
        """
        if 0 <= high_watermark < node.checked_high_watermark:
            self.fail(f"high watermark of node {node.node_id} decreased to {high_watermark}")
        if high_watermark > node.checked_high_watermark:
            self._check_committed(node, high_watermark)
            node.checked_high_watermark = high_watermark

    def _check_committed(self, node: Host, high_watermark: int) -> None:
        if high_watermark > node.end:
            self.fail(f"high watermark {high_watermark} of node {node.node_id} exceeds its log end {node.end}")
        if len(self.committed) < min(node.base, high_watermark):
            self.fail(
                f"snapshot end {node.base} of node {node.node_id} exceeds the committed end {len(self.committed)}"
            )
        for offset in range(max(node.checked_high_watermark, node.base), high_watermark):
            entry = node.entry(offset)
            if offset < len(self.committed):
                if self.committed[offset] != entry:
                    self.fail(
                        f"offset {offset} is {entry} on node {node.node_id}, but {self.committed[offset]} is committed"
                    )
            else:
                self._check_majority(node, offset, entry)
                self.committed.append(entry)
        self._replay(node)

    def _replay(self, node: Host) -> None:
        """Apply newly committed records to the checker's image, from the log of the node that reported them."""
        while self._image.offset + 1 < len(self.committed):
            data = node.the_log.read(self._image.offset + 1, READ_BYTES, len(self.committed), True)
            for position, header in record_batch.iterate(data):
                self._image.replay(data[position : position + header.size_bytes], MetadataDelta())
                self.captures[header.next_offset] = self._image.capture()
            if not data:
                self.fail(f"high watermark {len(self.committed)} of node {node.node_id} is within a batch")

    def _check_majority(self, node: Host, offset: int, entry: Entry) -> None:
        voters = [self.nodes[voter] for voter in node.config.voters]
        replicas = [voter.node_id for voter in voters if voter.has_durably(offset, entry)]
        if len(replicas) < node.config.majority:
            self.fail(f"node {node.node_id} committed offset {offset}, which is durable only on {replicas}")

    def check_truncation(self, node: Host, end: int) -> None:
        """Check a truncation to `end`, before the shadow is truncated.

        A replica that follows an outdated leader may truncate records that a later leader committed without it: an
        observer always, a voter if a majority of the other voters has them.
        """
        others = [self.nodes[voter] for voter in node.config.voters if voter != node.node_id]
        stop = min(node.end, len(self.committed)) if node.config.is_voter else 0
        for offset in range(max(end, node.base), stop):
            entry = self.committed[offset]
            replicas = sum(voter.has_durably(offset, entry) for voter in others)
            if node.entry(offset) == entry and replicas < node.config.majority:
                self.fail(f"node {node.node_id} truncates its log to {end}, below committed offset {offset}")
        if end < node.checked_high_watermark:
            self.fail(f"node {node.node_id} truncates to {end}, below its high watermark {node.checked_high_watermark}")

    # -- starting

    def check_loaded_log(self, node: Host, before: list[Entry], base_before: int) -> None:
        """Check that every entry that was durable before a log was loaded is in the log or in a snapshot.

        `before` has the shadow entries of the previous process, from offset `base_before`.
        """
        replica = node.the_replica
        if replica.election.epoch < node.epoch_seen:
            self.fail(f"node {node.node_id} forgot epoch {node.epoch_seen}, it starts with {replica.election.epoch}")
        is_emptied = replica.log.log_end_offset == replica.log.log_start_offset
        durable = min(node.durable_floor, base_before + len(before))
        for offset in range(max(node.base, base_before), durable):
            entry = before[offset - base_before]
            if offset < node.end and node.entry(offset) == entry:
                continue
            is_committed = offset < len(self.committed) and self.committed[offset] == entry
            may_fetch_all = node.flipped and not node.config.is_voter
            if (is_committed or not is_emptied) and not may_fetch_all:
                self.fail(f"node {node.node_id} lost durable offset {offset}, its log ends at {node.end}")
        self._check_files(node)
        node.checked_log_start = 0
        self._check_630_06(node, replica.latest_snapshot.end_offset if replica.latest_snapshot else 0)

    def _check_files(self, node: Host) -> None:
        """Check 630-14: no leftover files, and only snapshots that a fault corrupted are set aside."""
        whole = set()
        for name in node.fs.list_dir(node.the_log.dir):
            found = parse_file_name(name)
            if found is None:
                continue
            if found.kind is FileKind.COMPLETE:
                whole.add(found.snapshot_id)
            elif found.kind is FileKind.CORRUPT and found.snapshot_id in (node.flipped | node.set_aside):
                node.set_aside.add(found.snapshot_id)
            else:
                self.fail(f"node {node.node_id} has the unexpected file {name} after its start")
        node.flipped &= whole

    def check_refused(self, node: Host, error: KafkaError) -> None:
        """Check that a node that refuses to start is a voter with a damaged log or snapshot."""
        if not node.config.is_voter or not (node.is_log_damaged or (node.flipped and "snapshot" in error.message)):
            self.fail(f"node {node.node_id} refuses to start with an undamaged disk: {error.message}")

    def check_start(self, node: Host) -> None:
        """Check that a process does not start with a damaged log."""
        if node.is_log_damaged:
            self.fail(f"node {node.node_id} starts with a damaged log")

    # -- snapshots

    def _check_snapshot(self, node: Host, machine: Machine) -> None:
        """Check the log start and the latest snapshot (630-06) after a step. Checks the files on disk only if the log
        start moved.
        """
        start = node.the_log.log_start_offset
        latest = node.the_replica.latest_snapshot
        if latest != machine.latest_snapshot and machine.latest_snapshot is not None and latest is None:
            self.fail(f"node {node.node_id} forgot its snapshots")
        if start > 0 and (latest is None or not start <= latest.end_offset <= machine.high_watermark):
            self.fail(
                f"node {node.node_id} has log start {start}, snapshot {latest}, high watermark {machine.high_watermark}"
            )
        if start != node.checked_log_start:
            if start < node.checked_log_start:
                self.fail(f"log start of node {node.node_id} decreased from {node.checked_log_start} to {start}")
            node.checked_log_start = start
            self._check_630_06(node, machine.high_watermark)

    def _check_630_06(self, node: Host, high_watermark: int) -> None:
        start, ids = node.the_log.log_start_offset, node.the_replica.store.snapshot_ids()
        if start > 0 and not any(start <= each.end_offset <= high_watermark for each in ids):
            self.fail(f"node {node.node_id} has log start {start}, high watermark {high_watermark}, snapshots {ids}")

    def check_cleaned(self, node: Host) -> None:
        """Check that a node still has a snapshot between its log start and high watermark after cleaning (630-06)."""
        machine = node.machine
        if machine is not None:
            self._check_630_06(node, machine.high_watermark)

    def check_frozen_snapshot(self, node: Host, captured: CapturedImage) -> None:
        """Check that a frozen snapshot matches the committed state at its end."""
        self._check_capture(node, captured.snapshot_id, "froze")
        if captured != self.captures[captured.offset + 1]:
            self.fail(f"snapshot {captured.snapshot_id} of node {node.node_id} does not match the state at its end")

    def _check_capture(self, node: Host, snapshot_id: SnapshotId, verb: str) -> None:
        if snapshot_id.end_offset not in self.captures:
            self.fail(f"node {node.node_id} {verb} snapshot {snapshot_id}, the committed end is {len(self.committed)}")
        if self.captures[snapshot_id.end_offset].snapshot_id != snapshot_id:
            self.fail(f"node {node.node_id} {verb} snapshot {snapshot_id} of another epoch")

    def check_loaded_snapshot(self, node: Host, snapshot_id: SnapshotId) -> None:
        """Check that an image loaded from a snapshot matches the committed state and its node is not the leader."""
        self._check_capture(node, snapshot_id, "loaded")
        if not is_same(node.image, self.captures[snapshot_id.end_offset]):
            self.fail(f"image that node {node.node_id} loaded from {snapshot_id} does not match the state at its end")
        if node.is_leader:
            self.fail(f"leader {node.node_id} loads snapshot {snapshot_id}")

    def check_install(self, node: Host, snapshot_id: SnapshotId) -> None:
        """Check that a fetched snapshot that will replace the log is committed and not below the high watermark."""
        if node.is_leader:
            self.fail(f"leader {node.node_id} replaces its log by {snapshot_id}")
        if snapshot_id.end_offset < node.checked_high_watermark:
            self.fail(
                f"node {node.node_id} installs {snapshot_id}, below its high watermark {node.checked_high_watermark}"
            )
        self._check_capture(node, snapshot_id, "fetched")

    # -- the metadata

    def check_image(self, node: Host) -> None:
        """Check that a node's image matches the committed state at its offset.

        Ignores failed images and those ahead of the high watermark.
        """
        end = node.applied_end
        if node.machine is None or node.image.failed or end > node.checked_high_watermark:
            return  # the image of an active controller is ahead of the high watermark
        if end and (end not in self.captures or not is_same(node.image, self.captures[end])):
            self.fail(f"image of node {node.node_id} at offset {end} differs from the committed state")

    def check_acknowledged(self, offset: int, entry: Entry) -> None:
        """Check that a decision that is acknowledged as `entry` at `offset` is committed there."""
        if offset >= len(self.committed) or self.committed[offset] != entry:
            self.fail(f"acknowledged decision at offset {offset} is not committed")

    # -- at the end

    def check_converged(self) -> None:
        """Check at the end of a run that all nodes run, with one leader, equal logs and images, and everything
        committed.
        """
        nodes = self.nodes.values()
        down = [node.node_id for node in nodes if node.machine is None]
        if down:
            self.fail(f"nodes {down} did not restart")
        leaders = [node.node_id for node in nodes if node.is_leader]
        if len(leaders) != 1:
            self.fail(f"there must be one leader at the end, got {leaders}")
        leader = self.nodes[leaders[0]]
        for node in nodes:
            ends = (node.checked_high_watermark, node.applied_end)
            if not node.has_log_of(leader) or ends != (leader.end, leader.end):
                self.fail(
                    f"node {node.node_id} has log end {node.end}, high watermark {ends[0]}, image end {ends[1]}, "
                    f"but the log end of leader {leader.node_id} is {leader.end}"
                )
            self.check_image(node)
