"""Faults are done to whom they are for, undone at their end, and told in the history."""

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
    """Nodes that are only names; it notes what was done."""

    members: dict[str, FakeNode]
    done: list[str] = field(default_factory=list)
    refuses: str = ""
    calls: Calls = field(default_factory=Calls)

    def unsupported_reason(self, fault: Fault) -> str | None:
        return None

    def nodes(self) -> list[FakeNode]:
        return list(self.members.values())

    def is_running(self, name: str) -> bool:
        return self.members[name].pid is not None

    def _note(self, what: str, name: str, pid: int | None) -> None:
        self.done.append(f"{what} {name}")
        self.members[name] = replace(self.members[name], pid=pid)

    def up(self) -> None: ...

    def down(self) -> None: ...

    def destroy(self) -> None: ...

    def kill(self, name: str) -> None:
        self._note("kill", name, None)

    def stop(self, name: str) -> None:
        self._note("stop", name, None)

    def start(self, name: str) -> None:
        if name == self.refuses:
            raise RuntimeError("it does not want to\nand this is why")
        self._note("start", name, 2)

    def pause(self, name: str) -> None:
        self._note("pause", name, 1)

    def resume(self, name: str) -> None:
        self._note("resume", name, 1)


@dataclass
class FakeSight:
    cluster: FakeCluster
    active: int = 1001
    leader: int = 1

    @property
    def partitions(self) -> Mapping[int, object]:
        return {0: None}

    async def view(self) -> View:
        return View(self.cluster.nodes(), {0: PartitionView(self.leader, (1, 2))}, self.active)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)


class World:
    def __init__(self, folder: Path, links: Links) -> None:
        names = {"controller-1": 1001, "leader-1": 1, "follower-1": 2}
        self.cluster = FakeCluster({name: FakeNode(name, number, str(folder / name)) for name, number in names.items()})
        for name in names:
            (folder / name).mkdir()
        self.sight = FakeSight(self.cluster)
        self.recorder = Recorder(folder / "history.jsonl")
        self.network = Network(links, self.cluster.nodes) if sys.platform.startswith("linux") else None
        self.links = links
        self.injector = Injector(self.cluster, self.network, self.sight, self.recorder, random.Random(1), "chaos")

    def events(self, kind: type[Event]) -> list[Any]:
        self.recorder.close()
        return [event for event in read_history(self.recorder.file) if isinstance(event, kind)]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with Links() as links:
        it = World(tmp_path, links)
        yield it
        it.recorder.close()


def a_fault(**fields: Any) -> Fault:
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
async def test_what_is_done_is_undone_and_told(world: World, fields: dict[str, Any], done: list[str]) -> None:
    await world.injector.run(a_fault(**fields, halts=True, settle_s=2), 0.01)
    assert world.cluster.done == done
    (began,) = world.events(FaultBegan)
    (ended,) = world.events(FaultEnded)
    name = done[0].split()[1]
    assert (began.kind, began.nodes, began.halts, began.settle_s) == (fields["kind"], [name], True, 2)
    assert name in began.text
    assert ended.t - began.t >= 0.01
    restarts = 0 if fields["kind"] == "pause" else 2
    assert world.injector.starts(name) == restarts  # the one that ended, and the new one


async def test_controllers_are_started_first(world: World) -> None:
    await world.injector.run(a_fault(kind="kill", target="all:nodes"), 0)
    started = [one for one in world.cluster.done if one.startswith("start")]
    assert started == ["start controller-1", "start leader-1", "start follower-1"]


async def test_the_end_of_a_run_ends_faults_early(world: World) -> None:
    running = asyncio.create_task(world.injector.run(a_fault(kind="kill", target="leader:0"), 1000))
    async with asyncio.timeout(60):
        await until(lambda: not world.cluster.is_running("leader-1"))
        world.injector.stop.set()
        await running
    assert world.cluster.is_running("leader-1")


async def test_a_node_that_does_not_start_is_told(world: World) -> None:
    world.cluster.refuses = "leader-1"
    await world.injector.run(a_fault(kind="kill", target="leader:0"), 0)
    (told,) = world.events(NotRecovered)
    assert told.text == "leader-1 did not start: it does not want to"


async def test_whoever_does_not_run_is_started_at_the_end(world: World) -> None:
    world.cluster.kill("follower-1")
    await world.injector.undo_all()
    assert world.cluster.done == ["kill follower-1", "start follower-1"]


async def test_a_fault_without_anybody_is_noted_and_nothing_else(world: World) -> None:
    world.sight.leader = -1
    world.injector.stop.set()  # it would wait for a leader
    await world.injector.run(a_fault(kind="kill", target="leader:0"), 0)
    assert world.cluster.done == []
    (note,) = world.events(Note)
    assert "no leader of partition 0" in note.text
    assert not world.events(FaultBegan)


async def test_a_clock_jumps_and_back(world: World) -> None:
    node = world.cluster.members["leader-1"]
    seen: list[bytes] = []

    async def look() -> None:
        await until(clock_file(node).exists)
        seen.append(clock_file(node).read_bytes())
        world.injector.stop.set()

    await asyncio.gather(world.injector.run(a_fault(kind="clock-jump", target="leader:0", jump_s=-5), 100), look())
    assert int.from_bytes(seen[0], sys.byteorder, signed=True) == -5_000_000_000
    assert int.from_bytes(clock_file(node).read_bytes(), sys.byteorder, signed=True) == 0


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="links between nodes need /proc")


class _Cuts:
    """Which pairs are cut now, by what passes an ingress of each."""

    def __init__(self, links: Links) -> None:
        self._passages = links._passages

    def is_cut(self, source: str, target: str) -> bool:
        return not self._passages[source, target].open.is_set()


@linux
async def test_overlapping_cuts_are_healed_one_by_one(world: World) -> None:
    assert world.network is not None
    cuts = _Cuts(world.links)
    world.network.cut(1, [("a", "b"), ("b", "a")])
    world.network.cut(2, [("a", "b"), ("a", "c")])
    world.network.heal(1)
    assert (cuts.is_cut("a", "b"), cuts.is_cut("b", "a"), cuts.is_cut("a", "c")) == (True, False, True)
    world.network.heal(2)
    assert not cuts.is_cut("a", "b")
    assert not cuts.is_cut("a", "c")
    world.network.heal(3)


@linux
async def test_a_cut_is_between_the_node_and_its_peers_in_its_direction(world: World) -> None:
    cuts = _Cuts(world.links)
    fault = a_fault(kind="cut", target="leader:0", direction="in", peers="brokers")
    running = asyncio.create_task(world.injector.run(fault, 1000))
    async with asyncio.timeout(60):
        await until(lambda: cuts.is_cut("follower-1", "leader-1"))
        assert not cuts.is_cut("leader-1", "follower-1")
        assert not cuts.is_cut("controller-1", "leader-1")
        world.injector.stop.set()
        await running
    assert not cuts.is_cut("follower-1", "leader-1")


@linux
async def test_nodes_are_told_addresses_of_links(world: World) -> None:
    assert world.network is not None
    nodes = [replace(node, grpc=f"127.0.0.1:{place}") for place, node in enumerate(world.cluster.nodes(), 1)]
    network = world.network

    def ask(name: str) -> dict[str, str]:
        return network.properties(nodes, next(node for node in nodes if node.name == name))

    controller = await asyncio.to_thread(ask, "controller-1")
    leader = await asyncio.to_thread(ask, "leader-1")
    assert controller == {"controller.quorum.voters": "1001@127.0.0.1:1"}
    assert leader["controller.quorum.voters"].startswith("1001@127.0.0.1:")
    assert leader["controller.quorum.voters"] != "1001@127.0.0.1:1"
    assert leader["advertised.listeners"].startswith("MESH://127.0.0.1:")
    assert await asyncio.to_thread(ask, "leader-1") == leader


@pytest.mark.parametrize("skewed", [True, False])
async def test_commands_of_nodes_run_under_a_clock_only_if_one_jumps(world: World, skewed: bool) -> None:
    kind = "clock-jump" if skewed else "kill"
    document = {"name": "a", "hypothesis": "b", "duration_s": 9, "faults": [{"kind": kind, "target": "leader:0"}]}
    hooks = Hooks(Experiment.model_validate(document), None)
    node = world.cluster.members["leader-1"]

    found = hooks.command(node, ["python", "-P", "-m", "kipmesh_leader", "--one"])
    if skewed:
        file = str(clock_file(node))
        assert found == ["python", "-P", "-m", "kipmesh_chaos.skewed_clock", file, "kipmesh_leader", "--one"]
        assert clock_file(node).read_bytes() == bytes(8)
    else:
        assert found == ["python", "-P", "-m", "kipmesh_leader", "--one"]
    assert hooks.properties(None, node) == {}
