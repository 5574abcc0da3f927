"""Faults of the metadata quorum, drawn from the seed.

A voter's disk is replaced only where Raft tolerates it: the only leader of the latest epoch has committed an offset of
its epoch, and a majority of the other voters follows it and has its whole log durably. Snapshots are corrupted on
observers and on one voter at a time, logs on one voter at a time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from kipmesh.core import record_batch
from kipmesh.core.raft import State
from kipmesh.core.raft.types import ResignRequested
from kipmesh.core.record_batch import HEADER_BYTES, LOG_OVERHEAD_BYTES
from kipmesh.core.snapshot.ids import file_name
from kipmesh.storage.checkpoint import CLEAN_SHUTDOWN
from kipmesh.storage.fs import read_file
from simulation.faults import FaultPlan
from simulation.quorum.host import Host
from simulation.quorum.node import CRASH_POINTS, SNAPSHOT_POINTS, SimNode

_FETCHED_MIN = 4
"""Minimum number of snapshots that a run fetches, if its faults permit a wipe."""


class Faults(FaultPlan[SimNode]):
    """A `FaultPlan` for the metadata quorum (see the module docstring)."""

    KINDS: ClassVar = {
        "kill": 4,
        "cut_power": 4,
        "cut_power_of_all": 1,
        "pause": 3,
        "isolate": 4,
        "split": 3,
        "block_one_way": 3,
        "cut_link": 2,
        "lose_messages": 3,
        "slow_network": 2,
        "fill_disk": 2,
        "fail_disk": 2,
        "wipe": 2,
        "resign": 2,
        "shut_down": 2,
        "crash_at_point": 5,
        "crash_at_snapshot": 4,
        "hit_new_leaders": 4,
        "corrupt_transfers": 2,
        "corrupt_snapshot": 3,
        "damage_log": 2,
        "fail_to_apply": 2,
    }
    FIRST_AFTER_MS = 1500
    LEADER_SHARE = 0.5
    PAUSE_MS = (100, 5000)
    CUT_MS = (300, 7000)
    LINK_CUT_MS = (1000, 9000)
    LINK_CUT_BOTH_SHARE = 1
    LASTING_MS = (500, 5000)
    SLOW_NETWORK: ClassVar = {"delay_max_ms": (20, 800), "flush_max_ms": (10, 400)}
    FULL_DISK_MS = (200, 4000)
    SPARE_BYTES_MAX = 200
    LOSS_MAX = 0.4

    hits_left = 0
    """Number of next leaders to hit."""
    _last_leader = 0

    def begin(self, every_ms: float) -> None:
        """Schedule the first fault and the end of all faults. Also wipes disks so that nodes fetch snapshots."""
        super().begin(every_ms)
        if not self.only:
            self.later(self.rng.uniform(6000, 10_000), self._wipe_for_snapshots)

    def leaders(self, running: list[SimNode]) -> list[SimNode]:
        """Return the running nodes that are leaders in their own view."""
        return [node for node in running if node.is_leader]

    def crash(self, node: SimNode, *, power: bool, restart_max_ms: float = 6000) -> None:
        """End the process without a clean shutdown. It restarts after at most `restart_max_ms`.

        With `power`, the disk also loses unsynced data.
        """
        self.engine.counts["crashes"] += 1
        self.engine.counts["power cuts"] += power
        node.stop(power=power, restart_ms=self.rng.uniform(20, restart_max_ms))

    def state_changed(self, node: SimNode, state: State) -> None:
        """Count elections and leader changes, and hit a new leader while `hit_new_leaders` is in effect."""
        counts = self.engine.counts
        if state is State.CANDIDATE:
            counts["candidacies"] += 1
        if state is State.LEADER:
            counts["elections"] += 1
            if self._last_leader not in (0, node.node_id) or (self._last_leader and len(node.config.voters) == 1):
                counts["leader changes"] += 1
            self._last_leader = node.node_id
            if self.hits_left:
                self.hits_left -= 1
                self.later(self.rng.choice((0.0, self.rng.uniform(0, 30))), lambda: self._hit(node))

    def _wipe_for_snapshots(self) -> None:
        """Wipe disks repeatedly until `_FETCHED_MIN` snapshots were fetched."""
        if self.engine.counts["snapshots fetched"] < _FETCHED_MIN:
            self.later(self.rng.uniform(2000, 6000) if self.wipe() else 150, self._wipe_for_snapshots)

    def heal(self) -> None:
        """End all faults, and restart or resume all processes. Replaces the disks of nodes that refuse to start."""
        super().heal()
        for node in self.nodes.values():
            if node.is_refused:
                self.replace_disks()
            elif node.machine is None:
                node.boot()
            elif node.is_paused:
                node.resume()

    # -- kinds

    def cut_power_of_all(self) -> bool:
        """Cut the power of all nodes at the same time. They restart at random times within 2 s. Always returns True."""
        for node in self.alive():
            self.crash(node, power=True, restart_max_ms=2000)
        return True

    def corrupt_transfers(self) -> bool:
        """Flip bits of snapshots in transit, temporarily. Always returns True."""
        return self.change((1000, 8000), corruption=self.rng.uniform(0.05, 0.5))

    def may_wipe(self, node: SimNode) -> bool:
        """Return whether Raft tolerates the loss of this disk: always for an observer, and for a voter as the module
        docstring says.
        """
        voters = [self.nodes[voter] for voter in node.config.voters]
        if node not in voters:
            return True
        # The node's own later epochs do not count: it was their only candidate and voter. Epochs of observers count,
        # because observers follow no leader of an earlier epoch.
        epoch = max((other.epoch_seen for other in self.nodes.values() if other is not node), default=0)
        leaders = [voter for voter in voters if voter.is_leader and voter.epoch_seen == epoch]
        if len(leaders) != 1 or leaders[0] is node:
            return False
        leader = leaders[0]
        machine = leader.machine
        if machine is None or machine.leadership is None:
            return False
        if machine.high_watermark <= machine.leadership.epoch_start_offset:
            return False
        safe = [voter for voter in voters if voter is not node and self._has_all(voter, leader, epoch)]
        return len(safe) >= node.config.majority

    @staticmethod
    def _has_all(voter: Host, leader: Host, epoch: int) -> bool:
        """Return whether a voter is in the leader's epoch and has durably stored the leader's whole log."""
        machine = voter.machine
        if machine is None or machine.epoch != epoch or machine.state not in (State.LEADER, State.FOLLOWER):
            return False
        return voter.has_log_of(leader) and voter.durable_end() >= leader.end

    def replace_disks(self) -> None:
        """Replace the disks of nodes that refuse to start, as soon as `may_wipe` permits.

        Repeats every 300 ms until then.
        """
        refused = [node for node in self.nodes.values() if node.is_refused]
        for node in refused:
            if self.may_wipe(node):
                self.engine.counts["disks replaced"] += 1
                node.wipe()
            else:
                self._pass_epoch_of_observers()
        if any(node.is_refused for node in refused):
            self.engine.after(300, self.replace_disks)

    def _pass_epoch_of_observers(self) -> None:
        """Let leaders resign if an observer knows a later epoch, whose only candidate lost its disk."""
        epoch = max((node.epoch_seen for node in self.nodes.values() if not node.config.is_voter), default=0)
        for node in self.nodes.values():
            if node.is_leader and not node.is_paused and node.epoch_seen < epoch:
                node.step(ResignRequested())

    def resign(self) -> bool:
        """Let a random leader resign. Returns False if no running node is the leader."""
        leaders = self.leaders(self.running())
        if not leaders:
            return False
        self.rng.choice(leaders).step(ResignRequested())
        return True

    def shut_down(self) -> bool:
        """Stop a random node cleanly: it resigns, syncs and closes its log. It restarts later.

        Returns False if no node runs.
        """
        node = self.victim()
        if node is None:
            return False
        node.step(ResignRequested())
        node.stop(clean=True, restart_ms=self.rng.uniform(50, 3000))
        return True

    def crash_at_point(self) -> bool:
        """Let random nodes crash the next time they pass a random crash point. They restart soon.

        Returns False if no node runs.
        """
        running = self.alive()
        for node in self.rng.sample(running, self.rng.randint(0, len(running))):
            node.crash_point = self.rng.choice(CRASH_POINTS)
        return bool(running)

    def crash_at_snapshot(self) -> bool:
        """Crash every running node the next time it passes a random step of snapshot handling.

        Returns False if no node runs.
        """
        running = self.alive()
        for node in running:
            node.crash_point = self.rng.choice(SNAPSHOT_POINTS)
        return bool(running)

    def corrupt_snapshot(self) -> bool:
        """Kill the process of a random node and flip a bit of one of its snapshots. It restarts within 1 s.

        Returns False if no node runs, the node has no snapshot that may be corrupted, or it is a voter while any
        voter's disk is damaged.
        """
        node = self.victim()
        if node is None:
            return False
        ids = [each for each in node.the_replica.store.snapshot_ids() if each not in node.flipped]
        if not ids or (node.config.is_voter and self._is_voter_damaged()):
            return False
        if len(node.config.voters) == 1 and node.config.is_voter:  # the only replica of committed records
            ids = [each for each in ids if each.end_offset >= node.the_log.log_start_offset][1:]
            if not ids:
                return False
        directory = node.the_log.dir
        node.stop(restart_ms=self.rng.uniform(20, 1000))
        flipped = self.rng.choice((ids[-1], self.rng.choice(ids)))
        node.fs.faults.clear()  # faults apply only to operations of the node
        path = f"{directory}/{file_name(flipped)}"
        position = self.rng.randrange(len(read_file(node.fs, path)))
        node.fs.flip_bit(path, position, self.rng.randrange(8))
        node.flipped.add(flipped)
        return True

    def damage_log(self) -> bool:
        """Stop a voter cleanly, then flip a bit of its log or truncate the log within a batch. It restarts within 1 s.

        The voter must refuse to start, because it lost data that it had acknowledged. Returns False if the random node
        is not a voter or does not run, there are fewer than three voters, or a voter's disk is damaged already.
        """
        node = self.victim()
        if node is None or not node.config.is_voter or len(node.config.voters) < 3 or self._is_voter_damaged():
            return False
        directory, bases = node.the_log.dir, node.the_log.segment_base_offsets
        start = node.the_log.log_start_offset
        node.step(ResignRequested())
        if node.machine is None:
            return True
        node.stop(clean=True, restart_ms=self.rng.uniform(20, 1000))
        fs = node.fs
        fs.faults.clear()  # faults apply only to operations of the node
        paths = [f"{directory}/{base:020d}.log" for base, end in pairwise([*bases, 1 << 62]) if end > start]
        sizes = {path: size for path in paths if fs.exists(path) and (size := len(read_file(fs, path)))}
        if not sizes or not fs.exists(f"{directory.rpartition('/')[0]}/{CLEAN_SHUTDOWN}"):
            return True
        path = self.rng.choice(list(sizes))
        position, bit = self.rng.randrange(sizes[path]), self.rng.randrange(8)
        if self.rng.random() < 0.5:
            # Within a batch, because a snapshot may replace missing whole batches.
            file = fs.open(path)
            file.truncate(sizes[path] - self.rng.randint(1, HEADER_BYTES))
            file.sync()
            file.close()
            node.is_log_damaged = True
        elif not _is_unused(read_file(fs, path), position, start):
            fs.flip_bit(path, position, bit)
            node.is_log_damaged = True
        return True

    def _is_voter_damaged(self) -> bool:
        """Return whether any voter's disk is damaged or about to be replaced."""
        voters = [node for node in self.nodes.values() if node.config.is_voter]
        return any(node.flipped or node.is_log_damaged or node.is_refused for node in voters)

    def fail_to_apply(self) -> bool:
        """Simulate a defect in a random node's state machine: the next records do not fit its image.

        Returns False if no node runs.
        """
        node = self.victim()
        if node is None:
            return False
        node.state.fails_next = True
        return True

    def hit_new_leaders(self) -> bool:
        """Isolate or crash the next 1 to 4 leaders right after their election, and the current one now.

        Always returns True.
        """
        self.hits_left = self.rng.randint(1, 4)
        leaders = self.leaders(self.alive())
        if leaders:
            self._hit(leaders[0])
        return True

    def _hit(self, node: SimNode) -> None:
        if node.machine is None:
            return
        if self.rng.random() < 0.5:
            self.cut([node.node_id], self.others(node), both=True)
        else:
            self.engine.counts["crashes"] += 1
            node.stop(power=self.rng.random() < 0.5, restart_ms=self.rng.uniform(1, 3000))


def _is_unused(data: bytes, position: int, log_start_offset: int) -> bool:
    """Return whether `position` is in the leader epoch of a batch below the log start.

    No CRC covers these bytes, and no reader uses them.
    """
    return any(
        header.base_offset < log_start_offset and 0 <= position - at - LOG_OVERHEAD_BYTES < 4
        for at, header in record_batch.iterate(data)
    )
