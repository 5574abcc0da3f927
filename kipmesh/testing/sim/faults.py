"""What goes wrong in a run, and when: drawn from the seed.

Faults come every other second, rather at leaders than at others, until the run's last part: then everything is healed,
and the quorum must find together again. A voter's disk is replaced only where Raft can stand it: when everything that
the one leader of the latest epoch has is durable at a majority of the other voters, which follow it, and something of
that epoch is committed. Snapshots are changed on the disks of observers, and of one voter at a time, logs of one voter
at a time.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

from kipmesh.core import record_batch
from kipmesh.core.raft import State
from kipmesh.core.raft.types import ResignRequested
from kipmesh.core.record_batch import HEADER_BYTES, LOG_OVERHEAD_BYTES
from kipmesh.core.snapshot.ids import file_name
from kipmesh.storage.checkpoint import CLEAN_SHUTDOWN
from kipmesh.storage.fs import read_file
from kipmesh.testing.sim.points import CRASH_POINTS, SNAPSHOT_POINTS

if TYPE_CHECKING:
    from kipmesh.testing.sim.node import SimNode
    from kipmesh.testing.sim.world import World

_CAPACITY_SPARE_BYTES = 200
_FETCHED_MIN = 4
"""Snapshots that a run fetches, if its faults let anybody be wiped."""


class Faults:
    """See the module."""

    def __init__(self, world: World, rng: Random, every_ms: float, until_ms: float, only: tuple[str, ...]) -> None:
        self.world = world
        self.rng = rng
        self.every_ms = every_ms
        self.until_ms = until_ms
        self.strikes = 0
        self._kinds = {
            self.kill: 4,
            self.cut_power: 4,
            self.cut_power_of_all: 1,
            self.pause: 3,
            self.isolate: 4,
            self.split: 3,
            self.block_one_way: 3,
            self.cut_link: 2,
            self.lose_messages: 3,
            self.slow_network: 2,
            self.fill_disk: 2,
            self.fail_disk: 2,
            self.wipe: 2,
            self.resign: 2,
            self.shut_down: 2,
            self.crash_at_point: 5,
            self.crash_at_snapshot: 4,
            self.strike_new_leader: 4,
            self.corrupt_transfers: 2,
            self.flip_snapshot: 3,
            self.damage_log: 2,
            self.fail_to_apply: 2,
        }
        self._is_chosen = bool(only)
        if only:
            self._kinds = {kind: weight for kind, weight in self._kinds.items() if kind.__name__ in only}

    def begin(self) -> None:
        """Plan the first one, and the end of all."""
        self._later(self.rng.expovariate(1 / self.every_ms) + 1500, self._next)
        self.world.scheduler.after(self.until_ms, self.heal)
        if not self._is_chosen:
            self._later(self.rng.uniform(6000, 10_000), self._newcomer)

    def _newcomer(self) -> None:
        """Somebody comes with an empty disk, as soon as that is possible, until enough snapshots were fetched."""
        if self.world.counts["snapshots fetched"] < _FETCHED_MIN:
            self._later(self.rng.uniform(2000, 6000) if self.wipe() else 150, self._newcomer)

    def _later(self, delay_ms: float, action: Callable[[], object]) -> None:
        def act() -> None:
            if self.world.scheduler.now_ms < self.until_ms:
                action()

        self.world.scheduler.after(delay_ms, act)

    def _next(self) -> None:
        kinds = list(self._kinds)
        if not kinds:
            return
        kind = self.rng.choices(kinds, [self._kinds[one] for one in kinds])[0]
        if kind():
            self.world.counts["faults"] += 1
            self.world.counts[f"fault {kind.__name__}"] += 1
        self._later(self.rng.expovariate(1 / self.every_ms), self._next)

    def _victim(self) -> SimNode | None:
        running = [node for node in self.world.nodes.values() if node.machine is not None and not node.is_paused]
        leaders = [node for node in running if node.is_leader]
        if leaders and self.rng.random() < 0.5:
            return self.rng.choice(leaders)
        return self.rng.choice(running) if running else None

    def heal(self) -> None:
        """The last faults end."""
        self.world.network.heal()
        self.world.flush_max_ms = 4.0
        for node in self.world.nodes.values():
            node.fs.capacity_bytes = None
            node.fs.faults.clear()
            node.crash_point = ""
            if node.is_refused:
                self.replace_disks()
            elif node.machine is None:
                node.boot()
            elif node.is_paused:
                node.resume()

    # -- kinds; each says whether it did anything

    def kill(self) -> bool:
        """End a process."""
        node = self._victim()
        if node is not None:
            self.world.counts["crashes"] += 1
            node.stop(restart_ms=self.rng.uniform(20, 6000))
        return node is not None

    def cut_power(self) -> bool:
        """End a process, and its disk forgets."""
        node = self._victim()
        if node is not None:
            self.world.counts["crashes"] += 1
            self.world.counts["power cuts"] += 1
            node.stop(power=True, restart_ms=self.rng.uniform(20, 6000))
        return node is not None

    def cut_power_of_all(self) -> bool:
        """All at once, and back one after the other."""
        for node in self.world.nodes.values():
            if node.machine is not None:
                self.world.counts["crashes"] += 1
                self.world.counts["power cuts"] += 1
                node.stop(power=True, restart_ms=self.rng.uniform(20, 2000))
        return True

    def pause(self) -> bool:
        """Stop a process for a while, as SIGSTOP does."""
        node = self._victim()
        if node is None:
            return False
        node.is_paused = True
        process = node.process

        def resume() -> None:
            if node.process == process and node.is_paused:
                node.resume()

        self._later(self.rng.uniform(100, 5000), resume)
        return True

    def isolate(self) -> bool:
        """Nothing reaches or leaves a node."""
        node = self._victim()
        return node is not None and self._cut([node.node_id], both=True)

    def split(self) -> bool:
        """Two groups that do not see each other."""
        ids = list(self.world.nodes)
        return len(ids) > 1 and self._cut(self.rng.sample(ids, self.rng.randint(1, len(ids) - 1)), both=True)

    def block_one_way(self) -> bool:
        """A node hears nobody, or nobody hears it."""
        node = self._victim()
        return node is not None and self._cut([node.node_id], both=False)

    def cut_link(self) -> bool:
        """Two nodes do not see each other, everybody else sees both."""
        if len(self.world.nodes) < 2:
            return False
        one, other = self.rng.sample(list(self.world.nodes), 2)
        links = {(one, other), (other, one)}
        network = self.world.network
        network.blocked |= links
        self._later(self.rng.uniform(1000, 9000), lambda: network.blocked.difference_update(links))
        return True

    def _cut(self, group: list[int], *, both: bool) -> bool:
        others = [one for one in self.world.nodes if one not in group]
        outward = {(one, other) for one in group for other in others}
        inward = {(other, one) for one, other in outward}
        links = outward | inward if both else self.rng.choice((outward, inward))
        network = self.world.network
        network.blocked |= links
        self._later(self.rng.uniform(300, 7000), lambda: network.blocked.difference_update(links))
        return bool(links)

    def lose_messages(self) -> bool:
        """Some messages get lost, some come twice."""
        network = self.world.network
        network.loss, network.duplication = self.rng.uniform(0.02, 0.4), self.rng.uniform(0, 0.3)

        def end() -> None:
            network.loss = network.duplication = 0.0

        self._later(self.rng.uniform(500, 5000), end)
        return True

    def slow_network(self) -> bool:
        """Messages and flushes take long, and overtake each other."""
        world = self.world
        world.network.delay_max_ms, world.flush_max_ms = self.rng.uniform(20, 800), self.rng.uniform(10, 400)

        def end() -> None:
            world.network.delay_max_ms, world.flush_max_ms = 4.0, 4.0

        self._later(self.rng.uniform(500, 5000), end)
        return True

    def fill_disk(self) -> bool:
        """No room for a while."""
        node = self._victim()
        if node is None:
            return False
        node.fs.capacity_bytes = node.fs.used_bytes + self.rng.randint(0, _CAPACITY_SPARE_BYTES)

        def end() -> None:
            node.fs.capacity_bytes = None

        self._later(self.rng.uniform(200, 4000), end)
        return True

    def fail_disk(self) -> bool:
        """A write, torn or not, or a sync fails; the process ends with it."""
        node = self._victim()
        if node is None:
            return False
        operation = self.rng.choice(("write", "sync", "sync_dir", "rename"))
        torn = self.rng.randint(0, 60) if operation == "write" else 0
        node.fs.fail(operation, errno.EIO, skip=self.rng.randint(0, 3), torn_bytes=torn)
        return True

    def wipe(self) -> bool:
        """Replace a disk by an empty one, where the quorum can stand it."""
        running = [node for node in self.world.nodes.values() if node.machine is not None and not node.is_paused]
        spare = [node for node in running if self._may_wipe(node)]
        if not spare:
            return False
        self.world.counts["wipes"] += 1
        self.rng.choice(spare).wipe()
        return True

    def _may_wipe(self, node: SimNode) -> bool:
        voters = [self.world.nodes[voter] for voter in node.config.voters]
        if node not in voters:
            return True
        # In an epoch that nobody else knows it stood itself, and nobody else will count that vote. Observers that know
        # it would follow nobody of an earlier one.
        epoch = max((one.epoch_seen for one in self.world.nodes.values() if one is not node), default=0)
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
    def _has_all(one: SimNode, leader: SimNode, epoch: int) -> bool:
        """Whether a voter follows the leader and has durably what that has."""
        machine = one.machine
        if machine is None or machine.epoch != epoch or machine.state not in (State.LEADER, State.FOLLOWER):
            return False
        base = max(one.base, leader.base)
        is_equal = one.entries[base - one.base :] == leader.entries[base - leader.base :]
        return one.end == leader.end and is_equal and one.durable_end() >= leader.end

    def replace_disks(self) -> None:
        """Give new disks to voters that refuse to start, as soon as the others can stand it."""
        refused = [node for node in self.world.nodes.values() if node.is_refused]
        for node in refused:
            if self._may_wipe(node):
                self.world.counts["disks replaced"] += 1
                node.wipe()
            else:
                self._pass_observers()
        if any(node.is_refused for node in refused):
            self.world.scheduler.after(300, self.replace_disks)

    def _pass_observers(self) -> None:
        """An observer may know an epoch in which none but a voter that is gone stood: let there be a later one."""
        epoch = max((one.epoch_seen for one in self.world.nodes.values() if not one.config.is_voter), default=0)
        for node in self.world.nodes.values():
            if node.is_leader and not node.is_paused and node.epoch_seen < epoch:
                node.step(ResignRequested())

    def resign(self) -> bool:
        """A leader is told to stop leading."""
        leaders = [node for node in self.world.nodes.values() if node.is_leader and not node.is_paused]
        if not leaders:
            return False
        self.rng.choice(leaders).step(ResignRequested())
        return True

    def shut_down(self) -> bool:
        """A node is stopped well: it resigns, syncs and closes its log, and comes back."""
        node = self._victim()
        if node is None:
            return False
        node.step(ResignRequested())
        node.stop(clean=True, restart_ms=self.rng.uniform(50, 3000))
        return True

    def crash_at_point(self) -> bool:
        """End processes when they next pass some point; they are back soon."""
        running = [node for node in self.world.nodes.values() if node.machine is not None]
        for node in self.rng.sample(running, self.rng.randint(0, len(running))):
            node.crash_point = self.rng.choice(CRASH_POINTS)
        return bool(running)

    def crash_at_snapshot(self) -> bool:
        """The same within what is done with snapshots, for each kind of it at some node."""
        running = [node for node in self.world.nodes.values() if node.machine is not None]
        for node in running:
            node.crash_point = self.rng.choice(SNAPSHOT_POINTS)
        return bool(running)

    def corrupt_transfers(self) -> bool:
        """Bytes of snapshots change on the way."""
        network = self.world.network
        network.corruption = self.rng.uniform(0.05, 0.5)

        def end() -> None:
            network.corruption = 0.0

        self._later(self.rng.uniform(1000, 8000), end)
        return True

    def flip_snapshot(self) -> bool:
        """A process ends, and a bit of a snapshot on its disk is another when it starts again."""
        node = self._victim()
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
        file = node.fs.open(f"{folder}/{file_name(flipped)}")
        position = self.rng.randrange(file.size())
        bit = 1 << self.rng.randrange(8)
        file.write_at(bytes([file.read_at(1, position)[0] ^ bit]), position)
        file.sync()
        file.close()
        node.flipped.add(flipped)
        return True

    def damage_log(self) -> bool:
        """A voter is stopped well, and when it starts again a bit of its log is another, or the log's end is missing.

        It has to refuse, for it does not have any more what it said that it has.
        """
        node = self._victim()
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
        position, bit = self.rng.randrange(sizes[path]), 1 << self.rng.randrange(8)
        file = fs.open(path)
        if self.rng.random() < 0.5:
            # Within a batch: where one ends, a snapshot may stand for what is missing.
            file.truncate(sizes[path] - self.rng.randint(1, HEADER_BYTES))
            node.is_log_damaged = True
        elif not _is_unused(read_file(fs, path), position, start):
            file.write_at(bytes([file.read_at(1, position)[0] ^ bit]), position)
            node.is_log_damaged = True
        file.sync()
        file.close()
        return True

    def _is_voter_damaged(self) -> bool:
        """Whether some voter's disk was changed, or may be replaced."""
        voters = [node for node in self.world.nodes.values() if node.config.is_voter]
        return any(node.flipped or node.is_log_damaged or node.is_refused for node in voters)

    def fail_to_apply(self) -> bool:
        """A defect of a state machine: the next records do not fit its image."""
        node = self._victim()
        if node is None or node.state is None:
            return False
        node.state.fails_next = True
        return True

    def strike_new_leader(self) -> bool:
        """Hit the next leaders just after their election."""
        self.strikes = self.rng.randint(1, 4)
        leader = [node for node in self.world.nodes.values() if node.is_leader]
        if leader:
            self._strike(leader[0])
        return True

    def elected(self, node: SimNode) -> None:
        """A node leads now."""
        if self.strikes:
            self.strikes -= 1
            self._later(self.rng.choice((0.0, self.rng.uniform(0, 30))), lambda: self._strike(node))

    def _strike(self, node: SimNode) -> None:
        if node.machine is None:
            return
        if self.rng.random() < 0.5:
            self._cut([node.node_id], both=True)
        else:
            self.world.counts["crashes"] += 1
            node.stop(power=self.rng.random() < 0.5, restart_ms=self.rng.uniform(1, 3000))


def _is_unused(data: bytes, position: int, log_start_offset: int) -> bool:
    """Whether it is in the leader epoch of a batch below the log start: nobody reads it, and no CRC covers it."""
    return any(
        header.base_offset < log_start_offset and 0 <= position - at - LOG_OVERHEAD_BYTES < 4
        for at, header in record_batch.iterate(data)
    )
