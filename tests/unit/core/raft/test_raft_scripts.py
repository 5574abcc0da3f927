"""Exchanges between machines as scripts with their expected output.

`scripts/*.txt` contain commands (`> append 1 2`), each followed by its expected output. After an intended change,
`KIPMESH_REWRITE_SCRIPTS=1 pytest tests/unit/core/raft/test_raft_scripts.py` rewrites them; review the diff. Messages
arrive in sending order; there is no randomness.

Commands: `nodes VOTERS [OBSERVERS]`, `advance MS [NODE...]` (advance the clock and fire timers of these or all nodes),
`deliver` (all messages), `cut A B` and `heal`, `append NODE COUNT`, `sync NODE on|off|now`, `resign NODE`,
`restart NODE`, `snapshot NODE OFFSET EPOCH` (create a snapshot and start the log at its end), `fetched NODE` (complete
the snapshot transfer), `state`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kipmesh.core.raft.types import (
    AppendRequested,
    Effect,
    Persisted,
    RequestFailed,
    RequestReceived,
    ResignRequested,
    Respond,
    ResponseReceived,
    Send,
    SnapshotChanged,
)
from kipmesh.messages import SnapshotId
from tests.unit.core.raft.raft_support import Node, batch, format_effect, format_message

SCRIPTS = Path(__file__).parent / "scripts"
MESSAGES_MAX = 200


class Exchange:
    """Machines and the messages between them."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.lines: list[str] = []
        self.sends: list[tuple[int, Send]] = []
        self.cuts: set[frozenset[int]] = set()
        self.pending: dict[int, tuple[int, int]] = {}
        self.now_ms = 0
        self.requests = 0

    def run(self, line: str) -> list[str]:
        self.lines = []
        name, *words = line.split()
        getattr(self, f"do_{name}")(*words)
        return self.lines or ["ok"]

    def note(self, node: Node, effects: list[Effect]) -> None:
        own = node.config.node_id
        for effect in effects:
            if isinstance(effect, Send):
                self.sends.append((own, effect))
            elif isinstance(effect, Respond):
                self.respond(own, effect.request_id)
            elif line := format_effect(effect):
                self.lines.append(f"{own}: {line}")

    def respond(self, own: int, request_id: int) -> None:
        requester, original = self.pending.pop(request_id)
        response = self.nodes[own].responses[request_id]
        self.lines.append(f"{own}->{requester} {format_message(response)}")
        if frozenset((own, requester)) not in self.cuts:
            node = self.nodes[requester]
            self.note(node, node.step(ResponseReceived(original, response)))

    def do_nodes(self, voters: str, observers: str = "0") -> None:
        ids = tuple(range(1, int(voters) + 1))
        for node_id in range(1, int(voters) + int(observers) + 1):
            self.nodes[node_id] = node = Node(node_id, ids)
            self.note(node, node.effects)

    def do_advance(self, ms: str, *only: str) -> None:
        self.now_ms += int(ms)
        for node_id, node in self.nodes.items():
            node.now_ms = self.now_ms
            if not only or str(node_id) in only:
                self.note(node, node.advance(0))

    def do_deliver(self) -> None:
        for _ in range(MESSAGES_MAX):
            if not self.sends:
                return
            source, sent = self.sends.pop(0)
            if frozenset((source, sent.node_id)) in self.cuts:
                self.lines.append(f"{source}->{sent.node_id} {format_message(sent.request)} (lost)")
                self.note(self.nodes[source], self.nodes[source].step(RequestFailed(sent.request_id)))
                continue
            self.lines.append(f"{source}->{sent.node_id} {format_message(sent.request)}")
            self.requests += 1
            self.pending[self.requests] = (source, sent.request_id)
            target = self.nodes[sent.node_id]
            self.note(target, target.step(RequestReceived(self.requests, sent.request)))
        raise AssertionError("the exchange does not end")

    def do_cut(self, first: str, second: str) -> None:
        self.cuts.add(frozenset((int(first), int(second))))

    def do_heal(self) -> None:
        self.cuts.clear()

    def do_append(self, node_id: str, count: str) -> None:
        node = self.nodes[int(node_id)]
        for _ in range(int(count)):
            self.note(node, node.step(AppendRequested(1, batch(), node.machine.epoch)))

    def do_sync(self, node_id: str, mode: str) -> None:
        node = self.nodes[int(node_id)]
        node.flushes = mode != "off"
        if mode == "now":
            self.note(node, node.step(Persisted(node.log.log_end_offset)))

    def do_resign(self, node_id: str) -> None:
        node = self.nodes[int(node_id)]
        self.note(node, node.step(ResignRequested()))

    def do_restart(self, node_id: str) -> None:
        old = self.nodes[int(node_id)]
        machine = old.machine
        node = Node(
            machine.config.node_id,
            machine.config.voters,
            election=old.disk,
            log=old.log,
            snapshot=machine.latest_snapshot,
        )
        self.nodes[int(node_id)] = node
        self.sends = [(source, sent) for source, sent in self.sends if source != int(node_id)]
        self.note(node, node.effects)

    def do_snapshot(self, node_id: str, offset: str, epoch: str) -> None:
        node, snapshot = self.nodes[int(node_id)], SnapshotId(int(offset), int(epoch))
        node.log.log_start_offset = snapshot.end_offset
        node.log.epochs.truncate_from_start(snapshot.end_offset)
        self.note(node, node.step(SnapshotChanged(snapshot)))

    def do_fetched(self, node_id: str) -> None:
        node = self.nodes[int(node_id)]
        wanted = node.machine.fetching_snapshot
        assert wanted is not None
        node.log.replace(wanted)
        self.note(node, node.step(SnapshotChanged(wanted)))

    def do_state(self) -> None:
        for node_id, node in self.nodes.items():
            machine = node.machine
            leader = machine.advertised_election.leader_id
            self.lines.append(
                f"{node_id}: {machine.state.value} epoch={machine.epoch} leader={leader} "
                f"hw={machine.high_watermark} log={node.log.summary().strip()}"
            )


def run_script(text: str) -> str:
    """Run a script and return it with its current output."""
    exchange = Exchange()
    written: list[str] = []
    for line in text.splitlines():
        if line.startswith("> "):
            written += [line, *(f"    {shown_line}" for shown_line in exchange.run(line[2:]))]
        elif not line.startswith("    "):
            written.append(line)
    return "\n".join(written) + "\n"


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.txt")), ids=lambda path: path.stem)
def test_script_output_is_unchanged(path: Path) -> None:
    before = path.read_text()
    now = run_script(before)
    if os.environ.get("KIPMESH_REWRITE_SCRIPTS"):
        path.write_text(now)
    else:
        assert now == before
