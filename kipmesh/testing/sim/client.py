"""The clients of the quorum: they let leaders append, and remember what they were promised.

A record is acknowledged when the node that appended it still leads the same epoch and its high watermark is past it.
An acknowledged record is in the log of all at the end, once, where it was said to be; others are there at most once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kipmesh.core import record_batch
from kipmesh.core.raft.types import AppendRequested

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
        self._pending: dict[int, _Pending] = {}
        self._tokens = 0
        self.is_done = False

    def propose(self) -> None:
        """Ask one that takes itself for the leader, and come again."""
        if self.is_done:
            return
        rng = self.world.rng
        leaders = [node for node in self.world.nodes.values() if node.is_leader and not node.is_paused]
        if leaders:
            node = rng.choice(leaders)
            machine = node.machine
            if machine is not None:
                self._tokens += 1
                token = self._tokens
                records = [(b"%d" % rng.randrange(5), b"%d:%d" % (token, n)) for n in range(rng.choice((1, 1, 1, 3)))]
                batch = record_batch.build(records, base_offset=0, leader_epoch=0, timestamp_ms=node.local_ms())
                node.step(AppendRequested(token, batch, machine.epoch))
        self.world.scheduler.after(rng.expovariate(1 / self.world.propose_every_ms), self.propose)

    def refused(self, token: int) -> None:
        """Somebody was not the leader after all."""
        self.world.counts["appends refused"] += 1

    def appended(self, node: SimNode, token: int, offset: int, epoch: int) -> None:
        """The leader has it."""
        self.world.counts["appends"] += 1
        self._pending[token] = _Pending(node, node.process, epoch, offset, len(node.entries))

    def look(self) -> None:
        """Acknowledge what is committed; forget what its leader cannot promise any more."""
        for token, asked in list(self._pending.items()):
            node = asked.node
            machine = node.machine
            if machine is None or node.process != asked.process or not node.is_leader or machine.epoch != asked.epoch:
                del self._pending[token]
            elif machine.high_watermark >= asked.end:
                del self._pending[token]
                entry = node.entries[asked.offset]
                self.world.checker.acknowledged(asked.offset, entry)
                self.acknowledged[token] = (asked.offset, entry)
                self.world.counts["acknowledged"] += 1
                self.last_acknowledged_ms = self.world.scheduler.now_ms
        self.world.scheduler.after(25, self.look)

    def check(self, entries: list[Entry]) -> None:
        """At the end: nothing acknowledged is lost or moved."""
        for token, (offset, entry) in self.acknowledged.items():
            if offset >= len(entries) or entries[offset] != entry:
                self.world.checker.fail(f"acknowledged record {token} at offset {offset} is lost")
