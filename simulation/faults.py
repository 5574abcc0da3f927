"""Fault injection of both simulators: the random plan, and the kinds of faults that both have.

Faults occur until the last part of a run, preferably on leaders. Then all faults end, and the cluster must recover.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Mapping
from typing import ClassVar, Generic, Protocol, TypeVar

from simulation.engine import Action, Conditions, Engine
from simulation.faulty_fs import FaultyFileSystem

Range = tuple[float, float]


class Victim(Protocol):
    """A node with a disk and at most one running process."""

    node_id: int
    fs: FaultyFileSystem
    crash_point: str

    @property
    def is_up(self) -> bool:
        """Whether the process runs; it may be paused."""

    @property
    def is_paused(self) -> bool:
        """Whether the process is stopped by SIGSTOP."""

    def pause(self) -> Action:
        """Stop the process as SIGSTOP does. Return the action that resumes it."""

    def wipe(self) -> None:
        """Replace the disk with an empty one, and restart the node."""


Node = TypeVar("Node", bound=Victim)


class FaultPlan(Generic[Node]):
    """Injects faults at random times. Each kind of fault is a method, which returns False if it injected nothing.

    `node_ids` are all nodes of the network, including clients. The faults end at `until_ms`. `only` has the kinds of
    faults to inject; if it is empty, all kinds are injected.
    """

    KINDS: ClassVar[dict[str, int]]
    """Names and weights of the kinds."""
    FIRST_AFTER_MS: ClassVar[float]
    LEADER_SHARE: ClassVar[float]
    """Probability that a fault hits a leader rather than any node."""
    PAUSE_MS: ClassVar[Range]
    CUT_MS: ClassVar[Range]
    LINK_CUT_MS: ClassVar[Range]
    LINK_CUT_BOTH_SHARE: ClassVar[float]
    """Probability that a link between two nodes is cut in both directions."""
    LASTING_MS: ClassVar[Range]
    """Duration of changed conditions."""
    SLOW_NETWORK: ClassVar[dict[str, Range]]
    """Conditions of a slow network."""
    FULL_DISK_MS: ClassVar[Range]
    SPARE_BYTES_MAX: ClassVar[int]
    """Maximum free space when a disk fills up."""
    LOSS_MAX: ClassVar[float]
    SPLIT_WITH: ClassVar[tuple[int, ...]] = ()
    """Other nodes on the second side of a network split."""

    every_ms = 0.0
    """Mean time between two faults."""

    def __init__(
        self,
        engine: Engine,
        nodes: Mapping[int, Node],
        node_ids: Collection[int],
        until_ms: float,
        only: Collection[str],
    ) -> None:
        self.engine = engine
        self.rng = engine.rng
        self.nodes = nodes
        self.node_ids = node_ids
        self.only = only
        self.until_ms = until_ms
        self._kinds = [kind for kind in self.KINDS if not only or kind in only]

    # -- defined by each simulator

    def leaders(self, running: list[Node]) -> list[Node]:
        """Return the running nodes that are leaders."""
        raise NotImplementedError

    def crash(self, node: Node, *, power: bool) -> None:
        """End the process without a clean shutdown. It restarts later.

        With `power`, the disk also loses unsynced data.
        """
        raise NotImplementedError

    def may_wipe(self, node: Node) -> bool:
        """Return whether the replication rules tolerate the loss of this node's disk."""
        raise NotImplementedError

    def heal(self) -> None:
        """End all faults: restore network and disks, and drop crash points. Subclasses also restart processes."""
        self.engine.conditions = Conditions()
        for node in self.nodes.values():
            node.fs.capacity_bytes = None
            node.fs.faults.clear()
            node.crash_point = ""

    # -- the plan

    def begin(self, every_ms: float) -> None:
        """Schedule the first fault and the end of all faults. `every_ms` is the mean time between two faults."""
        self.every_ms = every_ms
        self.later(self.rng.expovariate(1 / self.every_ms) + self.FIRST_AFTER_MS, self._next)
        self.engine.after(self.until_ms, self.heal)

    @property
    def is_over(self) -> bool:
        """Whether all faults have ended."""
        return self.engine.now_ms >= self.until_ms

    def later(self, delay_ms: float, action: Action) -> None:
        """Run `action` after `delay_ms`, unless the faults have ended by then."""
        self.engine.after(delay_ms, lambda: None if self.is_over else action())

    def _next(self) -> None:
        if not self._kinds:
            return
        kind = self.rng.choices(self._kinds, [self.KINDS[name] for name in self._kinds])[0]
        if getattr(self, kind)():
            self.engine.counts["faults"] += 1
            self.engine.counts[f"fault {kind}"] += 1
        self.later(self.rng.expovariate(1 / self.every_ms), self._next)

    def alive(self) -> list[Node]:
        """Return the nodes with a process, paused or not."""
        return [node for node in self.nodes.values() if node.is_up]

    def running(self) -> list[Node]:
        """Return the nodes with a process that is not paused."""
        return [node for node in self.alive() if not node.is_paused]

    def others(self, node: Node) -> list[int]:
        """Return the ids of all other nodes, clients included."""
        return [node_id for node_id in self.node_ids if node_id != node.node_id]

    def victim(self) -> Node | None:
        """Return a random running node, with probability `LEADER_SHARE` a leader. None if no node runs."""
        running = self.running()
        leaders = self.leaders(running)
        if leaders and self.rng.random() < self.LEADER_SHARE:
            return self.rng.choice(leaders)
        return self.rng.choice(running) if running else None

    def cut(
        self, group: Iterable[int], others: Collection[int], *, both: bool, lasting_ms: Range | None = None
    ) -> bool:
        """Block the links between two groups temporarily, in both directions (`both`) or in a random one.

        Returns False if there are no such links.
        """
        outward = {(node_id, other) for node_id in group for other in others}
        inward = {(other, node_id) for node_id, other in outward}
        links = outward | inward if both else self.rng.choice((outward, inward))
        blocked = self.engine.conditions.blocked
        blocked |= links
        self.later(self.rng.uniform(*lasting_ms or self.CUT_MS), lambda: blocked.difference_update(links))
        return bool(links)

    def change(self, lasting_ms: Range | None = None, **values: float) -> bool:
        """Change some conditions temporarily. Always returns True."""
        normal = {name: getattr(Conditions(), name) for name in values}
        self._set(values)
        self.later(self.rng.uniform(*lasting_ms or self.LASTING_MS), lambda: self._set(normal))
        return True

    def _set(self, values: Mapping[str, object]) -> None:
        for name, value in values.items():
            setattr(self.engine.conditions, name, value)

    # -- kinds

    def kill(self) -> bool:
        """Kill the process of a random node. Its written data remains. Returns False if no node runs."""
        return self._crash_one(power=False)

    def cut_power(self) -> bool:
        """Cut the power of a random node, which loses unsynced data. Returns False if no node runs."""
        return self._crash_one(power=True)

    def _crash_one(self, *, power: bool) -> bool:
        node = self.victim()
        if node is not None:
            self.crash(node, power=power)
        return node is not None

    def pause(self) -> bool:
        """Pause the process of a random node temporarily, as SIGSTOP does. Returns False if no node runs."""
        node = self.victim()
        if node is not None:
            self.later(self.rng.uniform(*self.PAUSE_MS), node.pause())
        return node is not None

    def isolate(self) -> bool:
        """Cut all links of a random node temporarily. Returns False if no node runs."""
        return self._isolate(both=True)

    def block_one_way(self) -> bool:
        """Cut all links to a random node, or all links from it, temporarily. Returns False if no node runs."""
        return self._isolate(both=False)

    def _isolate(self, *, both: bool) -> bool:
        node = self.victim()
        return node is not None and self.cut([node.node_id], self.others(node), both=both)

    def split(self) -> bool:
        """Split the nodes into two groups without links between them, temporarily.

        Returns False with fewer than two nodes.
        """
        ids = list(self.nodes)
        if len(ids) < 2:
            return False
        group = self.rng.sample(ids, self.rng.randint(1, len(ids) - 1))
        others = [node_id for node_id in ids if node_id not in group]
        return self.cut(group, [*others, *self.SPLIT_WITH], both=True)

    def cut_link(self) -> bool:
        """Cut the link between two random nodes temporarily, sometimes only in one direction.

        Both can still reach all others. Returns False with fewer than two nodes.
        """
        if len(self.nodes) < 2:
            return False
        node_id, other = self.rng.sample(list(self.nodes), 2)
        both = self.LINK_CUT_BOTH_SHARE >= 1 or self.rng.random() < self.LINK_CUT_BOTH_SHARE
        return self.cut([node_id], [other], both=both, lasting_ms=self.LINK_CUT_MS)

    def lose_messages(self) -> bool:
        """Lose some messages and duplicate others, temporarily. Always returns True."""
        return self.change(loss=self.rng.uniform(0.02, self.LOSS_MAX), duplication=self.rng.uniform(0, 0.3))

    def slow_network(self) -> bool:
        """Delay messages temporarily, so that they also arrive out of order. Always returns True."""
        return self.change(None, **{name: self.rng.uniform(*values) for name, values in self.SLOW_NETWORK.items()})

    def fill_disk(self) -> bool:
        """Fill the disk of a random node temporarily: writes fail with ENOSPC. Returns False if no node runs."""
        node = self.victim()
        if node is None:
            return False
        fs = node.fs
        fs.capacity_bytes = fs.used_bytes + self.rng.randint(0, self.SPARE_BYTES_MAX)
        self.later(self.rng.uniform(*self.FULL_DISK_MS), lambda: setattr(fs, "capacity_bytes", None))
        return True

    def fail_disk(self) -> bool:
        """Make a write (possibly torn), sync or rename on the disk of a random node fail, which ends its process.

        Returns False if no node runs.
        """
        node = self.victim()
        if node is None:
            return False
        operation = self.rng.choice(("write", "sync", "sync_dir", "rename"))
        torn = self.rng.randint(0, 60) if operation == "write" else 0
        node.fs.fail(operation, errno.EIO, skip=self.rng.randint(0, 3), torn_bytes=torn)
        return True

    def wipe(self) -> bool:
        """Replace the disk of a random running node with an empty one.

        Returns False if no node runs or `may_wipe` permits none.
        """
        candidates = [node for node in self.running() if self.may_wipe(node)]
        if not candidates:
            return False
        self.engine.counts["wipes"] += 1
        self.rng.choice(candidates).wipe()
        return True
