"""The clients of the quorum: they let active controllers decide, and remember what they were promised.

A controller is active when it leads, something of its own epoch is committed, and its image has everything in its log;
the image then runs ahead of the high watermark. A decision is acknowledged when the node that made it still leads the
same epoch and its high watermark is past it. An acknowledged decision is in the log of all at the end, once, where it
was said to be, and in every image; others are there at most once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kipmesh.core import record_batch
from kipmesh.core.metadata.records import Record, encode_record
from kipmesh.core.raft.types import AppendRequested
from kipmesh.testing.sim.metadata import Model, decide

if TYPE_CHECKING:
    from kipmesh.testing.sim.node import Entry, SimNode
    from kipmesh.testing.sim.world import World


class _Pending(NamedTuple):
    node: SimNode
    process: int
    epoch: int
    offset: int
    end: int


class Client:
    """See the module."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.acknowledged: dict[int, tuple[int, Entry]] = {}
        self.last_acknowledged_ms = 0.0
        self.is_done = False
        self._decisions: dict[int, Sequence[Record]] = {}
        self._written: dict[tuple[int, Entry], int] = {}
        """(offset, entry) -> token of what some log had there."""
        self._pending: dict[int, _Pending] = {}
        self._tokens = 0

    def propose(self) -> None:
        """Ask one that takes itself for the active controller, and come again."""
        if self.is_done:
            return
        rng = self.world.rng
        active = [node for node in self.world.nodes.values() if node.is_active and not node.is_paused]
        if active:
            node = rng.choice(active)
            state, machine = node.state, node.machine
            if state is not None and machine is not None:
                self._tokens += 1
                self._decisions[self._tokens] = decisions = decide(state.image, rng)
                values = [(None, encode_record(one)) for one in decisions]
                batch = record_batch.build(values, base_offset=0, leader_epoch=0, timestamp_ms=node.wall_ms())
                node.step(AppendRequested(self._tokens, batch, machine.epoch))
                node.apply_own(state)
        self.world.scheduler.after(rng.expovariate(1 / self.world.propose_every_ms), self.propose)

    def refused(self, token: int) -> None:
        """Somebody was not the leader after all."""
        self.world.counts["appends refused"] += 1

    def appended(self, node: SimNode, token: int, offset: int, epoch: int) -> None:
        """The leader has it."""
        self.world.counts["appends"] += 1
        self._written[offset, node.entry(offset)] = token
        self._pending[token] = _Pending(node, node.process, epoch, offset, node.end)

    def look(self) -> None:
        """Acknowledge what is committed; forget what its leader cannot promise any more."""
        for token, asked in list(self._pending.items()):
            node = asked.node
            machine = node.machine
            if machine is None or node.process != asked.process or not node.is_leader or machine.epoch != asked.epoch:
                del self._pending[token]
            elif machine.high_watermark >= asked.end:
                del self._pending[token]
                entry = node.entry(asked.offset)
                self.world.checker.acknowledged(asked.offset, entry)
                self.acknowledged[token] = (asked.offset, entry)
                self.world.counts["acknowledged"] += 1
                self.last_acknowledged_ms = self.world.scheduler.now_ms
        self.world.scheduler.after(25, self.look)

    def check(self) -> None:
        """At the end: nothing acknowledged is lost or moved, and the metadata is what was decided."""
        checker = self.world.checker
        for token, (offset, entry) in self.acknowledged.items():
            if offset >= len(checker.committed) or checker.committed[offset] != entry:
                checker.fail(f"acknowledged decision {token} at offset {offset} is lost")
        model, decided = Model(), set()
        for offset, entry in enumerate(checker.committed):
            token = self._written.get((offset, entry), 0)
            if not token:
                continue
            if token in decided:
                checker.fail(f"decision {token} is committed twice")
            decided.add(token)
            model.apply(self._decisions[token])
        wrong = model.difference(checker.captures[len(checker.committed)])
        if wrong:
            checker.fail(f"the metadata is not what was decided: {wrong}")
