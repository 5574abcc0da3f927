"""What goes wrong in a run, and when: drawn from the seed.

Faults come every other second, rather at leaders than at others, until the run's last part: then everything is healed,
and the quorum must find together again. A voter's disk is replaced only where Raft can stand it: when everything that
the one leader of the latest epoch has is durable at a majority of the other voters, which follow it, and something of
that epoch is committed. Snapshots are changed on the disks of observers, and of one voter at a time, logs of one voter
at a time.
"""

from __future__ import annotations

from collections.abc import Collection
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
"""Snapshots that a run fetches, if its faults let anybody be wiped."""


class Faults(FaultPlan[SimNode]):
    """See the module."""

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
        "strike_new_leader": 4,
        "corrupt_transfers": 2,
        "flip_snapshot": 3,
        "damage_log": 2,
        "fail_to_apply": 2,
    }
    FIRST_AFTER_MS = 1500
    LEADER_SHARE = 0.5
    PAUSE_MS = (100, 5000)
    CUT_MS = (300, 7000)
    LASTING_MS = (500, 5000)
    FULL_DISK_MS = (200, 4000)
    SPARE_BYTES_MAX = 200
    LOSS_MAX = 0.4

    strikes = 0
    """How many of the next leaders are hit."""
    _last_leader = 0

    def begin(self, every_ms: float) -> None:
        """Also let nodes fetch snapshots."""
        super().begin(every_ms)
        if not self.only:
            self.later(self.rng.uniform(6000, 10_000), self._newcomer)

    def running(self) -> list[SimNode]:
        """See FaultPlan."""
        return [node for node in self._alive() if not node.is_paused]

    def _alive(self) -> list[SimNode]:
        return [node for node in self.nodes.values() if node.machine is not None]

    def leaders(self, running: list[SimNode]) -> list[SimNode]:
        """See FaultPlan."""
        return [node for node in running if node.is_leader]

    def others(self, group: Collection[int]) -> list[int]:
        """See FaultPlan."""
        return [one for one in self.nodes if one not in group]

    def crash(self, node: SimNode, *, power: bool, restart_max_ms: float = 6000) -> None:
        """See FaultPlan."""
        self.engine.counts["crashes"] += 1
        self.engine.counts["power cuts"] += power
        node.stop(power=power, restart_ms=self.rng.uniform(20, restart_max_ms))

    def state_changed(self, node: SimNode, state: State) -> None:
        """See Watcher."""
        counts = self.engine.counts
        if state is State.CANDIDATE:
            counts["candidacies"] += 1
        if state is State.LEADER:
            counts["elections"] += 1
            if self._last_leader not in (0, node.node_id) or (self._last_leader and len(node.config.voters) == 1):
                counts["leader changes"] += 1
            self._last_leader = node.node_id
            if self.strikes:
                self.strikes -= 1
                self.later(self.rng.choice((0.0, self.rng.uniform(0, 30))), lambda: self._strike(node))

    def _newcomer(self) -> None:
        """Somebody comes with an empty disk, as soon as that is possible, until enough snapshots were fetched."""
        if self.engine.counts["snapshots fetched"] < _FETCHED_MIN:
            self.later(self.rng.uniform(2000, 6000) if self.wipe() else 150, self._newcomer)

    def heal(self) -> None:
        """See FaultPlan."""
        super().heal()
        for node in self.nodes.values():
            node.crash_point = ""
            if node.is_refused:
                self.replace_disks()
            elif node.machine is None:
                node.boot()
            elif node.is_paused:
                node.resume()

    # -- kinds

    def cut_power_of_all(self) -> bool:
        """All at once, and back one after the other."""
        for node in self._alive():
            self.crash(node, power=True, restart_max_ms=2000)
        return True

    def split(self) -> bool:
        """Two groups that do not see each other."""
        ids = list(self.nodes)
        if len(ids) < 2:
            return False
        group = self.rng.sample(ids, self.rng.randint(1, len(ids) - 1))
        return self.cut(group, self.others(group), both=True)

    def cut_link(self) -> bool:
        """Two nodes do not see each other, everybody else sees both."""
        if len(self.nodes) < 2:
            return False
        one, other = self.rng.sample(list(self.nodes), 2)
        return self.cut([one], [other], both=True, lasting_ms=(1000, 9000))

    def slow_network(self) -> bool:
        """Messages and flushes take long, and overtake each other."""
        return self.change(delay_max_ms=self.rng.uniform(20, 800), flush_max_ms=self.rng.uniform(10, 400))

    def corrupt_transfers(self) -> bool:
        """Bytes of snapshots change on the way."""
        return self.change((1000, 8000), corruption=self.rng.uniform(0.05, 0.5))

    def may_wipe(self, node: SimNode) -> bool:
        """See FaultPlan."""
        voters = [self.nodes[voter] for voter in node.config.voters]
        if node not in voters:
            return True
        # In an epoch that nobody else knows it stood itself, and nobody else will count that vote. Observers that know
        # it would follow nobody of an earlier one.
        epoch = max((one.epoch_seen for one in self.nodes.values() if one is not node), default=0)
        leaders = [one for one in voters if one.is_leader and one.epoch_seen == epoch]
        if len(leaders) != 1 or leaders[0] is node:
            return False
        leader = leaders[0]
        machine = leader.machine
        if machine is None or machine.leadership is None:
            return False
        if machine.high_watermark <= machine.leadership.epoch_start_offset:
            return False
        safe = [one for one in voters if one is not node and self._has_all(one, leader, epoch)]
        return len(safe) >= node.config.majority

    @staticmethod
    def _has_all(one: Host, leader: Host, epoch: int) -> bool:
        """Whether a voter follows the leader and has durably what that has."""
        machine = one.machine
        if machine is None or machine.epoch != epoch or machine.state not in (State.LEADER, State.FOLLOWER):
            return False
        return one.has_log_of(leader) and one.durable_end() >= leader.end

    def replace_disks(self) -> None:
        """Give new disks to voters that refuse to start, as soon as the others can stand it."""
        refused = [node for node in self.nodes.values() if node.is_refused]
        for node in refused:
            if self.may_wipe(node):
                self.engine.counts["disks replaced"] += 1
                node.wipe()
            else:
                self._pass_observers()
        if any(node.is_refused for node in refused):
            self.engine.after(300, self.replace_disks)

    def _pass_observers(self) -> None:
        """An observer may know an epoch in which none but a voter that is gone stood: let there be a later one."""
        epoch = max((one.epoch_seen for one in self.nodes.values() if not one.config.is_voter), default=0)
        for node in self.nodes.values():
            if node.is_leader and not node.is_paused and node.epoch_seen < epoch:
                node.step(ResignRequested())

    def resign(self) -> bool:
        """A leader is told to stop leading."""
        leaders = self.leaders(self.running())
        if not leaders:
            return False
        self.rng.choice(leaders).step(ResignRequested())
        return True

    def shut_down(self) -> bool:
        """A node is stopped well: it resigns, syncs and closes its log, and comes back."""
        node = self.victim()
        if node is None:
            return False
        node.step(ResignRequested())
        node.stop(clean=True, restart_ms=self.rng.uniform(50, 3000))
        return True

    def crash_at_point(self) -> bool:
        """End processes when they next pass some point; they are back soon."""
        running = self._alive()
        for node in self.rng.sample(running, self.rng.randint(0, len(running))):
            node.crash_point = self.rng.choice(CRASH_POINTS)
        return bool(running)

    def crash_at_snapshot(self) -> bool:
        """The same within what is done with snapshots, for each kind of it at some node."""
        running = self._alive()
        for node in running:
            node.crash_point = self.rng.choice(SNAPSHOT_POINTS)
        return bool(running)

    def flip_snapshot(self) -> bool:
        """A process ends, and a bit of a snapshot on its disk is another when it starts again."""
        node = self.victim()
        if node is None:
            return False
        ids = [each for each in node.the_replica.store.snapshot_ids() if each not in node.flipped]
        if not ids or (node.config.is_voter and self._is_voter_damaged()):
            return False
        if len(node.config.voters) == 1 and node.config.is_voter:  # nobody else has what it has
            ids = [each for each in ids if each.end_offset >= node.the_log.log_start_offset][1:]
            if not ids:
                return False
        folder = node.the_log.dir
        node.stop(restart_ms=self.rng.uniform(20, 1000))
        flipped = self.rng.choice((ids[-1], self.rng.choice(ids)))
        node.fs.faults.clear()  # this change is no operation of the node's
        path = f"{folder}/{file_name(flipped)}"
        position = self.rng.randrange(len(read_file(node.fs, path)))
        node.fs.flip_bit(path, position, self.rng.randrange(8))
        node.flipped.add(flipped)
        return True

    def damage_log(self) -> bool:
        """A voter is stopped well, and when it starts again a bit of its log is another, or the log's end is missing.

        It has to refuse, for it does not have any more what it said that it has.
        """
        node = self.victim()
        if node is None or not node.config.is_voter or len(node.config.voters) < 3 or self._is_voter_damaged():
            return False
        folder, bases = node.the_log.dir, node.the_log.segment_base_offsets
        start = node.the_log.log_start_offset
        node.step(ResignRequested())
        if node.machine is None:
            return True
        node.stop(clean=True, restart_ms=self.rng.uniform(20, 1000))
        fs = node.fs
        fs.faults.clear()  # this change is no operation of the node's
        paths = [f"{folder}/{base:020d}.log" for base, end in pairwise([*bases, 1 << 62]) if end > start]
        sizes = {path: size for path in paths if fs.exists(path) and (size := len(read_file(fs, path)))}
        if not sizes or not fs.exists(f"{folder.rpartition('/')[0]}/{CLEAN_SHUTDOWN}"):
            return True
        path = self.rng.choice(list(sizes))
        position, bit = self.rng.randrange(sizes[path]), self.rng.randrange(8)
        if self.rng.random() < 0.5:
            # Within a batch: where one ends, a snapshot may stand for what is missing.
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
        """Whether some voter's disk was changed, or may be replaced."""
        voters = [node for node in self.nodes.values() if node.config.is_voter]
        return any(node.flipped or node.is_log_damaged or node.is_refused for node in voters)

    def fail_to_apply(self) -> bool:
        """A defect of a state machine: the next records do not fit its image."""
        node = self.victim()
        if node is None:
            return False
        node.state.fails_next = True
        return True

    def strike_new_leader(self) -> bool:
        """Hit the next leaders just after their election."""
        self.strikes = self.rng.randint(1, 4)
        leaders = self.leaders(self._alive())
        if leaders:
            self._strike(leaders[0])
        return True

    def _strike(self, node: SimNode) -> None:
        if node.machine is None:
            return
        if self.rng.random() < 0.5:
            self.cut([node.node_id], self.others([node.node_id]), both=True)
        else:
            self.engine.counts["crashes"] += 1
            node.stop(power=self.rng.random() < 0.5, restart_ms=self.rng.uniform(1, 3000))


def _is_unused(data: bytes, position: int, log_start_offset: int) -> bool:
    """Whether it is in the leader epoch of a batch below the log start: nobody reads it, and no CRC covers it."""
    return any(
        header.base_offset < log_start_offset and 0 <= position - at - LOG_OVERHEAD_BYTES < 4
        for at, header in record_batch.iterate(data)
    )
