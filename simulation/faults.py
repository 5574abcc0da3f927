"""Faults of a run, drawn from the seed: the plan, and the kinds of faults that both simulators have.

Faults come until the last part of a run, rather at leaders than at others; then everything is healed, and the cluster
must recover.
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

    def pause(self) -> Action:
        """Stop the process, as SIGSTOP does; call the result to resume it."""

    def wipe(self) -> None:
        """Replace the disk by an empty one."""


Node = TypeVar("Node", bound=Victim)


class FaultPlan(Generic[Node]):
    """Injects faults at random times. A kind is a method that returns whether it did anything."""

    KINDS: ClassVar[dict[str, int]]
    """Names of the kinds, with their weights."""
    FIRST_AFTER_MS: ClassVar[float]
    LEADER_SHARE: ClassVar[float]
    """Probability that a fault hits a leader rather than any node."""
    PAUSE_MS: ClassVar[Range]
    CUT_MS: ClassVar[Range]
    LASTING_MS: ClassVar[Range]
    """Duration of changed conditions."""
    FULL_DISK_MS: ClassVar[Range]
    SPARE_BYTES_MAX: ClassVar[int]
    """Room on a disk that is about to be full."""
    LOSS_MAX: ClassVar[float]

    every_ms = 0.0
    """Mean time between two faults."""

    def __init__(self, engine: Engine, nodes: Mapping[int, Node], until_ms: float, only: Collection[str]) -> None:
        self.engine = engine
        self.rng = engine.rng
        self.nodes = nodes
        self.only = only
        self.until_ms = until_ms
        self._kinds = [kind for kind in self.KINDS if not only or kind in only]

    # -- what a simulator defines

    def running(self) -> list[Node]:
        """Nodes whose process runs and is not paused."""
        raise NotImplementedError

    def leaders(self, running: list[Node]) -> list[Node]:
        """Those of them that lead."""
        raise NotImplementedError

    def crash(self, node: Node, *, power: bool) -> None:
        """End the process, which restarts later; without power the disk forgets what was not synced."""
        raise NotImplementedError

    def others(self, group: Collection[int]) -> list[int]:
        """Ids of all other nodes, clients included."""
        raise NotImplementedError

    def may_wipe(self, node: Node) -> bool:
        """Whether the rules allow that this disk is lost."""
        raise NotImplementedError

    def heal(self) -> None:
        """End all faults."""
        self.engine.conditions = Conditions()
        for node in self.nodes.values():
            node.fs.capacity_bytes = None
            node.fs.faults.clear()

    # -- the plan

    def begin(self, every_ms: float) -> None:
        """Schedule the first fault, and the end of all."""
        self.every_ms = every_ms
        self.later(self.rng.expovariate(1 / self.every_ms) + self.FIRST_AFTER_MS, self._next)
        self.engine.after(self.until_ms, self.heal)

    @property
    def is_over(self) -> bool:
        """Whether there are no more faults."""
        return self.engine.now_ms >= self.until_ms

    def later(self, delay_ms: float, action: Action) -> None:
        """Run `action` after that time, unless the faults are over."""
        self.engine.after(delay_ms, lambda: None if self.is_over else action())

    def _next(self) -> None:
        if not self._kinds:
            return
        kind = self.rng.choices(self._kinds, [self.KINDS[one] for one in self._kinds])[0]
        if getattr(self, kind)():
            self.engine.counts["faults"] += 1
            self.engine.counts[f"fault {kind}"] += 1
        self.later(self.rng.expovariate(1 / self.every_ms), self._next)

    def victim(self) -> Node | None:
        """A running node, if there is one."""
        running = self.running()
        leaders = self.leaders(running)
        if leaders and self.rng.random() < self.LEADER_SHARE:
            return self.rng.choice(leaders)
        return self.rng.choice(running) if running else None

    def cut(
        self, group: Iterable[int], others: Collection[int], *, both: bool, lasting_ms: Range | None = None
    ) -> bool:
        """Block the links between two groups for a while, in both directions or in one of them."""
        outward = {(one, other) for one in group for other in others}
        inward = {(other, one) for one, other in outward}
        links = outward | inward if both else self.rng.choice((outward, inward))
        blocked = self.engine.conditions.blocked
        blocked |= links
        self.later(self.rng.uniform(*lasting_ms or self.CUT_MS), lambda: blocked.difference_update(links))
        return bool(links)

    def change(self, lasting_ms: Range | None = None, **values: float) -> bool:
        """Change some conditions for a while."""
        normal = {name: getattr(Conditions(), name) for name in values}
        self._set(values)
        self.later(self.rng.uniform(*lasting_ms or self.LASTING_MS), lambda: self._set(normal))
        return True

    def _set(self, values: Mapping[str, object]) -> None:
        for name, value in values.items():
            setattr(self.engine.conditions, name, value)

    # -- kinds

    def kill(self) -> bool:
        """End a process."""
        return self._crash_one(power=False)

    def cut_power(self) -> bool:
        """End a process, and its disk forgets."""
        return self._crash_one(power=True)

    def _crash_one(self, *, power: bool) -> bool:
        node = self.victim()
        if node is not None:
            self.crash(node, power=power)
        return node is not None

    def pause(self) -> bool:
        """Stop a process for a while, as SIGSTOP does."""
        node = self.victim()
        if node is not None:
            self.later(self.rng.uniform(*self.PAUSE_MS), node.pause())
        return node is not None

    def isolate(self) -> bool:
        """Nothing reaches or leaves a node."""
        node = self.victim()
        return node is not None and self.cut([node.node_id], self.others([node.node_id]), both=True)

    def block_one_way(self) -> bool:
        """A node receives nothing, or nothing that it sends arrives."""
        node = self.victim()
        return node is not None and self.cut([node.node_id], self.others([node.node_id]), both=False)

    def lose_messages(self) -> bool:
        """Some messages are lost, some arrive twice."""
        return self.change(loss=self.rng.uniform(0.02, self.LOSS_MAX), duplication=self.rng.uniform(0, 0.3))

    def fill_disk(self) -> bool:
        """No room for a while."""
        node = self.victim()
        if node is None:
            return False
        fs = node.fs
        fs.capacity_bytes = fs.used_bytes + self.rng.randint(0, self.SPARE_BYTES_MAX)
        self.later(self.rng.uniform(*self.FULL_DISK_MS), lambda: setattr(fs, "capacity_bytes", None))
        return True

    def fail_disk(self) -> bool:
        """A write, torn or not, or a sync fails; the process ends with it."""
        node = self.victim()
        if node is None:
            return False
        operation = self.rng.choice(("write", "sync", "sync_dir", "rename"))
        torn = self.rng.randint(0, 60) if operation == "write" else 0
        node.fs.fail(operation, errno.EIO, skip=self.rng.randint(0, 3), torn_bytes=torn)
        return True

    def wipe(self) -> bool:
        """Replace a disk by an empty one, where the rules allow that."""
        spare = [node for node in self.running() if self.may_wipe(node)]
        if not spare:
            return False
        self.engine.counts["wipes"] += 1
        self.rng.choice(spare).wipe()
        return True
