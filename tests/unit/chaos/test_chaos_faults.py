"""Fault injection: targets, reverts and the events of the history."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kipmesh_chaos.experiment import Experiment, Fault
from kipmesh_chaos.faults import Hooks, Injector, PartitionView, View, clock_file
from kipmesh_chaos.history import Event, FaultBegan, FaultEnded, Note, NotRecovered, read_history
from kipmesh_chaos.links import Links
from kipmesh_chaos.network import Network
from kipmesh_chaos.recorder import Recorder
from kipmesh_chaos.target_cluster import Calls


@dataclass(frozen=True)
class FakeNode:
    name: str
    node_id: int
    dir: str
    rack: str = "rack-a"
    pid: int | None = 1
    grpc: str | None = "127.0.0.1:1"


@dataclass
class FakeCluster:
    """Cluster without processes. Records the calls that change its nodes."""

    members: dict[str, FakeNode]
    done: list[str] = field(default_factory=list)
    failing_start: str = ""
    calls: Calls = field(default_factory=Calls)

    def unsupported_reason(self, fault: Fault) -> str | None:
        return None

    def nodes(self) -> list[FakeNode]:
        return list(self.members.values())

    def is_running(self, name: str) -> bool:
        return self.members[name].pid is not None

    def _note(self, action: str, name: str, pid: int | None) -> None:
        self.done.append(f"{action} {name}")
        self.members[name] = replace(self.members[name], pid=pid)

    def up(self) -> None: ...

    def down(self) -> None: ...

    def destroy(self) -> None: ...

    def kill(self, name: str) -> None:
        self._note("kill", name, None)

    def stop(self, name: str) -> None:
        self._note("stop", name, None)

    def start(self, name: str) -> None:
        if name == self.failing_start:
            raise RuntimeError("the port is in use\nsecond line")
        self._note("start", name, 2)

    def pause(self, name: str) -> None:
        self._note("pause", name, 1)

    def resume(self, name: str) -> None:
        self._note("resume", name, 1)


@dataclass
class FakeObserver:
    cluster: FakeCluster
    active: int = 1001
    leader: int = 1

    @property
    def partitions(self) -> Mapping[int, object]:
        return {0: None}

    async def view(self) -> View:
        return View(self.cluster.nodes(), {0: PartitionView(self.leader, (1, 2))}, self.active)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the conditions have no event
        await asyncio.sleep(0)


class Harness:
    def __init__(self, directory: Path, links: Links) -> None:
        names = {"controller-1": 1001, "leader-1": 1, "follower-1": 2}
        self.cluster = FakeCluster(
            {name: FakeNode(name, number, str(directory / name)) for name, number in names.items()}
        )
        for name in names:
            (directory / name).mkdir()
        self.observer = FakeObserver(self.cluster)
        self.recorder = Recorder(directory / "history.jsonl")
        self.network = Network(links, self.cluster.nodes) if sys.platform.startswith("linux") else None
        self.links = links
        self.injector = Injector(self.cluster, self.network, self.observer, self.recorder, random.Random(1), "chaos")

    def events(self, kind: type[Event]) -> list[Any]:
        self.recorder.close()
        return [event for event in read_history(self.recorder.file) if isinstance(event, kind)]


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    async with Links() as links:
        injector_harness = Harness(tmp_path, links)
        yield injector_harness
        injector_harness.recorder.close()


def make_fault(**fields: Any) -> Fault:
    document = {"name": "test", "hypothesis": "It holds.", "duration_s": 100, "faults": [{"at_s": 0, **fields}]}
    return Experiment.model_validate(document).faults[0]


@pytest.mark.parametrize(
    ("fields", "done"),
    [
        ({"kind": "kill", "target": "leader:0"}, ["kill leader-1", "start leader-1"]),
        ({"kind": "restart", "target": "follower:0"}, ["stop follower-1", "start follower-1"]),
        ({"kind": "pause", "target": "controller:active"}, ["pause controller-1", "resume controller-1"]),
        ({"kind": "torn-tail", "target": "leader:0"}, ["kill leader-1", "start leader-1"]),
    ],
)
async def test_fault_is_injected_reverted_and_recorded(
    harness: Harness, fields: dict[str, Any], done: list[str]
) -> None:
    await harness.injector.run(make_fault(**fields, halts=True, settle_s=2), 0.01)
    assert harness.cluster.done == done
    (began,) = harness.events(FaultBegan)
    (ended,) = harness.events(FaultEnded)
    name = done[0].split()[1]
    assert (began.kind, began.nodes, began.halts, began.settle_s) == (fields["kind"], [name], True, 2)
    assert name in began.text
    assert ended.t - began.t >= 0.01
    restarts = 0 if fields["kind"] == "pause" else 2
    assert harness.injector.starts(name) == restarts  # one stop and one start


async def test_controllers_start_before_brokers(harness: Harness) -> None:
    await harness.injector.run(make_fault(kind="kill", target="all:nodes"), 0)
    started = [call for call in harness.cluster.done if call.startswith("start")]
    assert started == ["start controller-1", "start leader-1", "start follower-1"]


async def test_end_of_run_reverts_active_fault(harness: Harness) -> None:
    running = asyncio.create_task(harness.injector.run(make_fault(kind="kill", target="leader:0"), 1000))
    async with asyncio.timeout(60):
        await until(lambda: not harness.cluster.is_running("leader-1"))
        harness.injector.stop.set()
        await running
    assert harness.cluster.is_running("leader-1")


async def test_node_that_fails_to_start_is_recorded_as_not_recovered(harness: Harness) -> None:
    harness.cluster.failing_start = "leader-1"
    await harness.injector.run(make_fault(kind="kill", target="leader:0"), 0)
    (recorded,) = harness.events(NotRecovered)
    assert recorded.text == "leader-1 did not start: the port is in use"


async def test_undo_all_starts_stopped_nodes(harness: Harness) -> None:
    harness.cluster.kill("follower-1")
    await harness.injector.undo_all()
    assert harness.cluster.done == ["kill follower-1", "start follower-1"]


async def test_fault_without_target_is_noted_and_not_injected(harness: Harness) -> None:
    harness.observer.leader = -1
    harness.injector.stop.set()  # do not wait for a leader
    await harness.injector.run(make_fault(kind="kill", target="leader:0"), 0)
    assert harness.cluster.done == []
    (note,) = harness.events(Note)
    assert "no leader of partition 0" in note.text
    assert not harness.events(FaultBegan)


async def test_clock_jump_is_reverted(harness: Harness) -> None:
    node = harness.cluster.members["leader-1"]
    offsets: list[bytes] = []

    async def observe_offset() -> None:
        await until(clock_file(node).exists)
        offsets.append(clock_file(node).read_bytes())
        harness.injector.stop.set()

    await asyncio.gather(
        harness.injector.run(make_fault(kind="clock-jump", target="leader:0", jump_s=-5), 100), observe_offset()
    )
    assert int.from_bytes(offsets[0], sys.byteorder, signed=True) == -5_000_000_000
    assert int.from_bytes(clock_file(node).read_bytes(), sys.byteorder, signed=True) == 0


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="links between nodes need /proc")


class _Cuts:
    """Tells whether the link between two nodes is cut."""

    def __init__(self, links: Links) -> None:
        self._passages = links._passages

    def is_cut(self, source: str, target: str) -> bool:
        return not self._passages[source, target].open.is_set()


@linux
async def test_overlapping_cuts_heal_independently(harness: Harness) -> None:
    assert harness.network is not None
    cuts = _Cuts(harness.links)
    harness.network.cut(1, [("a", "b"), ("b", "a")])
    harness.network.cut(2, [("a", "b"), ("a", "c")])
    harness.network.heal(1)
    assert (cuts.is_cut("a", "b"), cuts.is_cut("b", "a"), cuts.is_cut("a", "c")) == (True, False, True)
    harness.network.heal(2)
    assert not cuts.is_cut("a", "b")
    assert not cuts.is_cut("a", "c")
    harness.network.heal(3)


@linux
async def test_cut_separates_node_from_its_peers_in_one_direction(harness: Harness) -> None:
    cuts = _Cuts(harness.links)
    fault = make_fault(kind="cut", target="leader:0", direction="in", peers="brokers")
    running = asyncio.create_task(harness.injector.run(fault, 1000))
    async with asyncio.timeout(60):
        await until(lambda: cuts.is_cut("follower-1", "leader-1"))
        assert not cuts.is_cut("leader-1", "follower-1")
        assert not cuts.is_cut("controller-1", "leader-1")
        harness.injector.stop.set()
        await running
    assert not cuts.is_cut("follower-1", "leader-1")


@linux
async def test_nodes_receive_addresses_of_links(harness: Harness) -> None:
    assert harness.network is not None
    nodes = [replace(node, grpc=f"127.0.0.1:{port}") for port, node in enumerate(harness.cluster.nodes(), 1)]
    network = harness.network

    def properties_of(name: str) -> dict[str, str]:
        return network.properties(nodes, next(node for node in nodes if node.name == name))

    controller = await asyncio.to_thread(properties_of, "controller-1")
    leader = await asyncio.to_thread(properties_of, "leader-1")
    assert controller == {"controller.quorum.voters": "1001@127.0.0.1:1"}
    assert leader["controller.quorum.voters"].startswith("1001@127.0.0.1:")
    assert leader["controller.quorum.voters"] != "1001@127.0.0.1:1"
    assert leader["advertised.listeners"].startswith("MESH://127.0.0.1:")
    assert await asyncio.to_thread(properties_of, "leader-1") == leader


@pytest.mark.parametrize("skewed", [True, False])
async def test_nodes_run_under_skewed_clock_only_with_clock_jump_faults(harness: Harness, skewed: bool) -> None:
    kind = "clock-jump" if skewed else "kill"
    document = {"name": "a", "hypothesis": "b", "duration_s": 9, "faults": [{"kind": kind, "target": "leader:0"}]}
    hooks = Hooks(Experiment.model_validate(document), None)
    node = harness.cluster.members["leader-1"]

    command = hooks.command(node, ["python", "-P", "-m", "kipmesh_leader", "--one"])
    if skewed:
        file = str(clock_file(node))
        assert command == ["python", "-P", "-m", "kipmesh_chaos.skewed_clock", file, "kipmesh_leader", "--one"]
        assert clock_file(node).read_bytes() == bytes(8)
    else:
        assert command == ["python", "-P", "-m", "kipmesh_leader", "--one"]
    assert hooks.properties(None, node) == {}
