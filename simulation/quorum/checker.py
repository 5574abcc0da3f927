"""The invariants of 630-19, checked after every step from outside of the nodes.

What is committed is what any node ever reported below its high watermark: an entry an offset, never changed. The
checker keeps it, and applies it to an image of its own, of which it keeps a capture at each batch's end: what any node
applied, captured or loaded must say the same. It compares only where a node moved, so that a check costs what
happened, not what there is.
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
    """See the module."""

    def __init__(self, engine: Engine, nodes: Mapping[int, Host]) -> None:
        self.engine = engine
        self.fail = engine.fail
        self.nodes = nodes
        self.leaders: dict[int, int] = {}
        self.committed: list[Entry] = []
        self.captures: dict[int, CapturedImage] = {}
        """The state at the end of each committed batch, by the offset after it."""
        self._image = MetadataImage()

    # -- the log

    def stepped(self, node: Host, machine: Machine) -> None:
        """After each step of a node."""
        if machine.epoch < node.epoch_seen:
            self.fail(f"the epoch of node {node.node_id} went back from {node.epoch_seen} to {machine.epoch}")
        node.epoch_seen = machine.epoch
        if machine.state is State.LEADER:
            leader = self.leaders.setdefault(machine.epoch, node.node_id)
            if leader != node.node_id:
                self.fail(f"epoch {machine.epoch} has two leaders: {leader} and {node.node_id}")
            if machine.fetching_snapshot is not None or node.transfer is not None:
                self.fail(f"node {node.node_id} leads and fetches a snapshot")
        self.rose(node, machine.high_watermark)
        self._check_snapshot(node, machine)

    def rose(self, node: Host, high_watermark: int) -> None:
        """A node has that high watermark, or is about to apply up to it."""
        if 0 <= high_watermark < node.checked_high_watermark:
            self.fail(f"the high watermark of node {node.node_id} went back to {high_watermark}")
        if high_watermark > node.checked_high_watermark:
            self._check_committed(node, high_watermark)
            node.checked_high_watermark = high_watermark

    def _check_committed(self, node: Host, high_watermark: int) -> None:
        if high_watermark > node.end:
            self.fail(f"node {node.node_id} has high watermark {high_watermark}, log end {node.end}")
        if len(self.committed) < min(node.base, high_watermark):
            self.fail(f"node {node.node_id} has a snapshot up to {node.base}, committed are {len(self.committed)}")
        for offset in range(max(node.checked_high_watermark, node.base), high_watermark):
            entry = node.entry(offset)
            if offset < len(self.committed):
                if self.committed[offset] != entry:
                    self.fail(
                        f"node {node.node_id} has {entry} at committed offset {offset}, not {self.committed[offset]}"
                    )
            else:
                self._check_majority(node, offset, entry)
                self.committed.append(entry)
        self._replay(node)

    def _replay(self, node: Host) -> None:
        """Apply what is newly committed, from the log of the node that reported it."""
        while self._image.offset + 1 < len(self.committed):
            data = node.the_log.read(self._image.offset + 1, READ_BYTES, len(self.committed), True)
            for position, header in record_batch.iterate(data):
                self._image.replay(data[position : position + header.size_bytes], MetadataDelta())
                self.captures[header.next_offset] = self._image.capture()
            if not data:
                self.fail(f"the high watermark {len(self.committed)} of node {node.node_id} is within a batch")

    def _check_majority(self, node: Host, offset: int, entry: Entry) -> None:
        voters = [self.nodes[voter] for voter in node.config.voters]
        having = [voter.node_id for voter in voters if voter.has_durably(offset, entry)]
        if len(having) < node.config.majority:
            self.fail(f"node {node.node_id} calls offset {offset} committed, which only {having} have durably")

    def truncated(self, node: Host, end: int) -> None:
        """Before the shadow of a log is cut.

        Who follows a leader that has been overtaken and does not know it may cut what a later one committed without
        it: an observer always, a voter when a majority of the others has it.
        """
        others = [self.nodes[voter] for voter in node.config.voters if voter != node.node_id]
        stop = min(node.end, len(self.committed)) if node.config.is_voter else 0
        for offset in range(max(end, node.base), stop):
            entry = self.committed[offset]
            having = sum(voter.has_durably(offset, entry) for voter in others)
            if node.entry(offset) == entry and having < node.config.majority:
                self.fail(f"node {node.node_id} cuts its log at {end}, below committed offset {offset}")
        if end < node.checked_high_watermark:
            self.fail(f"node {node.node_id} cuts its log at {end}, high watermark {node.checked_high_watermark}")

    # -- starting

    def booted(self, node: Host, before: list[Entry], base_before: int) -> None:
        """A process starts: what was durable is there, in the log or in a snapshot."""
        replica = node.the_replica
        if replica.election.epoch < node.epoch_seen:
            self.fail(f"node {node.node_id} forgot epoch {node.epoch_seen}, it has {replica.election.epoch}")
        is_emptied = replica.log.log_end_offset == replica.log.log_start_offset
        durable = min(node.durable_floor, base_before + len(before))
        for offset in range(max(node.base, base_before), durable):
            entry = before[offset - base_before]
            if offset < node.end and node.entry(offset) == entry:
                continue
            is_committed = offset < len(self.committed) and self.committed[offset] == entry
            may_fetch_anew = node.flipped and not node.config.is_voter
            if (is_committed or not is_emptied) and not may_fetch_anew:
                self.fail(f"node {node.node_id} lost durable offset {offset}: ends at {node.end}")
        self._check_files(node)
        node.checked_log_start = 0
        self._check_630_06(node, replica.latest_snapshot.end_offset if replica.latest_snapshot else 0)

    def _check_files(self, node: Host) -> None:
        """630-14: no leftovers, and nothing is set aside that no fault changed."""
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
                self.fail(f"node {node.node_id} starts with {name}")
        node.flipped &= whole

    def refused(self, node: Host, error: KafkaError) -> None:
        """A process refuses to start."""
        if not node.config.is_voter or not (node.is_log_damaged or (node.flipped and "snapshot" in error.message)):
            self.fail(f"node {node.node_id} does not start, though no fault changed its disk: {error.message}")

    def started(self, node: Host) -> None:
        """A process begins with what is on its disk."""
        if node.is_log_damaged:
            self.fail(f"node {node.node_id} starts with a log that is not as it left it")

    # -- snapshots

    def _check_snapshot(self, node: Host, machine: Machine) -> None:
        """630-06 in few words, for each step; what is on disk is looked at when the log start moved."""
        start = node.the_log.log_start_offset
        latest = node.the_replica.latest_snapshot
        if latest != machine.latest_snapshot and machine.latest_snapshot is not None and latest is None:
            self.fail(f"node {node.node_id} forgot its snapshots")
        if start > 0 and (latest is None or not start <= latest.end_offset <= machine.high_watermark):
            self.fail(f"node {node.node_id}: log start {start}, latest snapshot {latest}, {machine.high_watermark}")
        if start != node.checked_log_start:
            if start < node.checked_log_start:
                self.fail(f"the log start of node {node.node_id} went back from {node.checked_log_start} to {start}")
            node.checked_log_start = start
            self._check_630_06(node, machine.high_watermark)

    def _check_630_06(self, node: Host, high_watermark: int) -> None:
        start, ids = node.the_log.log_start_offset, node.the_replica.store.snapshot_ids()
        if start > 0 and not any(start <= each.end_offset <= high_watermark for each in ids):
            self.fail(f"node {node.node_id} starts at {start}, high watermark {high_watermark}, snapshots {ids}")

    def cleaned(self, node: Host) -> None:
        """After cleaning: nothing is left below the log start that is durable."""
        machine = node.machine
        if machine is not None:
            self._check_630_06(node, machine.high_watermark)

    def made(self, node: Host, captured: CapturedImage) -> None:
        """A snapshot was frozen."""
        self._check_capture(node, captured.snapshot_id, "made")
        if captured != self.captures[captured.offset + 1]:
            self.fail(f"the snapshot {captured.snapshot_id} of node {node.node_id} is not the state at its end")

    def _check_capture(self, node: Host, snapshot_id: SnapshotId, what: str) -> None:
        if snapshot_id.end_offset not in self.captures:
            self.fail(f"node {node.node_id} {what} snapshot {snapshot_id}, committed are {len(self.committed)}")
        if self.captures[snapshot_id.end_offset].snapshot_id != snapshot_id:
            self.fail(f"node {node.node_id} {what} snapshot {snapshot_id} of another epoch")

    def loaded(self, node: Host, snapshot_id: SnapshotId) -> None:
        """An image was loaded from a snapshot."""
        self._check_capture(node, snapshot_id, "loaded")
        if not is_same(node.image, self.captures[snapshot_id.end_offset]):
            self.fail(f"what node {node.node_id} loaded of {snapshot_id} is not the state at its end")
        if node.is_leader:
            self.fail(f"node {node.node_id} leads and loads snapshot {snapshot_id}")

    def installing(self, node: Host, snapshot_id: SnapshotId) -> None:
        """A snapshot is about to take the place of a log."""
        if node.is_leader:
            self.fail(f"node {node.node_id} leads and is about to replace its log by {snapshot_id}")
        if snapshot_id.end_offset < node.checked_high_watermark:
            self.fail(f"node {node.node_id} goes back to {snapshot_id}, below {node.checked_high_watermark}")
        self._check_capture(node, snapshot_id, "fetched")

    # -- the metadata

    def applied(self, node: Host) -> None:
        """A state machine applied everything up to an offset."""
        end = node.applied_end
        if node.machine is None or node.image.failed or end > node.checked_high_watermark:
            return  # an active controller's is ahead of what is committed
        if end and (end not in self.captures or not is_same(node.image, self.captures[end])):
            self.fail(f"the state of node {node.node_id} at offset {end} is not that of the others")

    def acknowledged(self, offset: int, entry: Entry) -> None:
        """A client was told that its decision is committed."""
        if offset >= len(self.committed) or self.committed[offset] != entry:
            self.fail(f"the decision acknowledged at offset {offset} is not committed")

    # -- at the end

    def converged(self) -> None:
        """Long after the last fault: one leader, everybody has everything, and the quorum still commits."""
        nodes = self.nodes.values()
        down = [node.node_id for node in nodes if node.machine is None]
        if down:
            self.fail(f"nodes {down} did not come back")
        leaders = [node.node_id for node in nodes if node.is_leader]
        if len(leaders) != 1:
            self.fail(f"leaders at the end: {leaders}")
        leader = self.nodes[leaders[0]]
        for node in nodes:
            ends = (node.checked_high_watermark, node.applied_end)
            if not node.has_log_of(leader) or ends != (leader.end, leader.end):
                self.fail(
                    f"node {node.node_id} ends at {node.end}, high watermark {ends[0]}, state {ends[1]}; "
                    f"leader {leader.node_id} at {leader.end}"
                )
            self.applied(node)
