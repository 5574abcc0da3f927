"""Clients of the quorum: propose decisions to active controllers and record the acknowledged ones.

A controller is active if it is leader, has committed an offset of its epoch, and its image contains its whole log,
which may be ahead of the high watermark. A decision is acknowledged if its controller is still leader of the same epoch
and the high watermark has passed the decision. At the end, every log and image must contain each acknowledged decision
exactly once at its offset, and other decisions at most once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kipmesh.core import record_batch
from kipmesh.core.metadata.records import Record, encode_record
from kipmesh.core.raft.types import AppendRequested
from simulation.quorum.checker import Checker
from simulation.quorum.host import Entry
from simulation.quorum.metadata import Model, decide
from simulation.quorum.node import SimNode


class _Pending(NamedTuple):
    node: SimNode
    process: int
    epoch: int
    offset: int
    end: int


class Client:
    """The clients of the quorum, simulated as one object (see the module docstring)."""

    def __init__(self, nodes: Mapping[int, SimNode], checker: Checker, propose_every_ms: float) -> None:
        self.nodes = nodes
        self.checker = checker
        self.engine = checker.engine
        self.propose_every_ms = propose_every_ms
        self.acknowledged: dict[int, tuple[int, Entry]] = {}
        self.last_acknowledged_ms = 0.0
        self.is_done = False
        self._decisions: dict[int, Sequence[Record]] = {}
        self._written: dict[tuple[int, Entry], int] = {}
        """(offset, entry) to the token of the decision written there in some log."""
        self._pending: dict[int, _Pending] = {}
        self._tokens = 0

    def propose(self) -> None:
        """Propose a decision to a random active controller, repeatedly at random times until `is_done`."""
        if self.is_done:
            return
        rng = self.engine.rng
        active = [node for node in self.nodes.values() if node.is_active and not node.is_paused]
        if active:
            node = rng.choice(active)
            if node.machine is not None:
                self._propose(node, node.machine.epoch)
        self.engine.after(rng.expovariate(1 / self.propose_every_ms), self.propose)

    def _propose(self, node: SimNode, epoch: int) -> None:
        self._tokens += 1
        token, process, offset = self._tokens, node.process, node.end
        self._decisions[token] = decisions = decide(node.image, self.engine.rng)
        values = [(None, encode_record(record)) for record in decisions]
        batch = record_batch.build(values, base_offset=0, leader_epoch=0, timestamp_ms=node.wall_ms())
        node.step(AppendRequested(token, batch, epoch))
        if node.end > offset:
            self.engine.counts["appends"] += 1
            self._written[offset, node.entry(offset)] = token
            self._pending[token] = _Pending(node, process, epoch, offset, node.end)
        node.apply_own()

    def acknowledge_committed(self) -> None:
        """Acknowledge committed decisions, and drop those whose leader has changed. Repeats every 25 ms."""
        for token, pending in list(self._pending.items()):
            node, process, epoch, offset, end = pending
            machine = node.machine
            if machine is None or node.process != process or not node.is_leader or machine.epoch != epoch:
                del self._pending[token]
            elif machine.high_watermark >= end:
                del self._pending[token]
                entry = node.entry(offset)
                self.checker.check_acknowledged(offset, entry)
                self.acknowledged[token] = (offset, entry)
                self.engine.counts["acknowledged"] += 1
                self.last_acknowledged_ms = self.engine.now_ms
        self.engine.after(25, self.acknowledge_committed)

    def check(self) -> None:
        """Check at the end that no acknowledged decision is lost or moved, and that the metadata matches the decisions.

        Raises InvariantError.
        """
        checker, fail = self.checker, self.engine.fail
        for token, (offset, entry) in self.acknowledged.items():
            if offset >= len(checker.committed) or checker.committed[offset] != entry:
                fail(f"acknowledged decision {token} at offset {offset} is lost")
        model, decided = Model(), set()
        for offset, entry in enumerate(checker.committed):
            token = self._written.get((offset, entry), 0)
            if not token:
                continue
            if token in decided:
                fail(f"decision {token} is committed twice")
            decided.add(token)
            model.apply(self._decisions[token])
        difference = model.difference(checker.captures[len(checker.committed)])
        if difference:
            fail(f"the metadata does not match the committed decisions: {difference}")
