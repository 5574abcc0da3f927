"""What goes wrong in a run, and when: drawn from the seed.

Faults come every other second, rather at leaders than at others, until the run's last part: then everything is healed,
and the quorum must find together again. A wipe is done only where Raft can stand it: when everything that the node has
is durable at a majority of the other voters, which all follow the one leader of the latest epoch.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from kipmesh.core.raft import State
from kipmesh.core.raft.types import ResignRequested
from kipmesh.testing.sim.node import CRASH_POINTS

if TYPE_CHECKING:
    from kipmesh.testing.sim.node import SimNode
    from kipmesh.testing.sim.world import World

_CAPACITY_SPARE_BYTES = 200


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
            self.crash_at_point: 5,
            self.strike_new_leader: 4,
        }

        if only:
            self._kinds = {kind: weight for kind, weight in self._kinds.items() if kind.__name__ in only}

    def begin(self) -> None:
        """Plan the first one, and the end of all."""
        self._later(self.rng.expovariate(1 / self.every_ms) + 1500, self._next)
        self.world.scheduler.after(self.until_ms, self.heal)

    def _later(self, delay_ms: float, action: Callable[[], object]) -> None:
        def act() -> None:
            if self.world.scheduler.now_ms < self.until_ms:
                action()

        self.world.scheduler.after(delay_ms, act)

    def _next(self) -> None:
        kinds = list(self._kinds)
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
            if node.machine is None:
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
        node = self._victim()
        if node is None or not self._may_wipe(node):
            return False
        self.world.counts["wipes"] += 1
        node.wipe()
        return True

    def _may_wipe(self, node: SimNode) -> bool:
        voters = [self.world.nodes[voter] for voter in node.config.voters]
        if node not in voters:
            return True
        epoch = max(one.epoch_seen for one in voters)
        safe = [
            one
            for one in voters
            if one is not node
            and one.machine is not None
            and one.machine.epoch == epoch
            and one.machine.state in (State.LEADER, State.FOLLOWER)
            and one.entries[: len(node.entries)] == node.entries
            and one.durable_end() >= len(node.entries)
        ]
        return len(safe) >= node.config.majority and any(one.is_leader for one in safe)

    def resign(self) -> bool:
        """A leader is told to stop leading."""
        leaders = [node for node in self.world.nodes.values() if node.is_leader and not node.is_paused]
        if not leaders:
            return False
        self.rng.choice(leaders).step(ResignRequested())
        return True

    def crash_at_point(self) -> bool:
        """End processes just after their next effect of a kind; they are back soon."""
        running = [node for node in self.world.nodes.values() if node.machine is not None]
        for node in self.rng.sample(running, self.rng.randint(0, len(running))):
            node.crash_point = self.rng.choice(list(CRASH_POINTS))
        return bool(running)

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
