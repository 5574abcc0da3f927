"""Does faults to a running mesh, and undoes them.

Files of a node are touched only while it does not run, and are for what its disk may lose: see `disk`. What a fault
needs beside the cluster (links, disks, clocks) is there from the start: `Hooks` is how nodes get it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from kipmesh_chaos import disk, network
from kipmesh_chaos import experiment as e
from kipmesh_chaos.experiment import Experiment, Fault
from kipmesh_chaos.history import FaultBegan, FaultEnded, NotRecovered
from kipmesh_chaos.network import Network
from kipmesh_chaos.recorder import Recorder
from kipmesh_chaos.skewed_clock import set_offset
from kipmesh_chaos.target_cluster import (
    ChaosError,
    Node,
    RemoteCluster,
    Separable,
    TargetCluster,
    is_broker,
    is_controller,
)

TARGET_TIMEOUT_S = 30.0
LOOK_AGAIN_S = 0.2
CLOCK_FILE = "clock-offset"
OFFLINE_LINE = "data folder offline"
"""What a broker logs when a folder has failed."""


T = TypeVar("T")


class PartitionView(NamedTuple):
    """A partition's leader (-1: none) and in-sync replicas, as metadata says them."""

    leader: int
    isr: Sequence[int]
    replicas: Sequence[int] = ()
    leader_epoch: int = -1


class View(NamedTuple):
    """What is known of the mesh now; -1 when no controller is active, or nobody says who coordinates the group."""

    nodes: Sequence[Node]
    partitions: Mapping[int, PartitionView]
    active_controller: int
    coordinator: int = -1


class NoTargetError(ChaosError):
    """Nobody is it now: the partition has no leader, say."""


def resolve(target: str, view: View, source: random.Random) -> list[Node]:
    """The nodes that a target names; raises NoTargetError."""
    what, _, which = target.partition(":")
    match what:
        case "leader" | "follower":
            number = source.choice(sorted(view.partitions)) if which == "any" else int(which)
            state = view.partitions[number]
            if what == "leader":
                return [_by_id(view, state.leader, f"leader of partition {number}")]
            followers = [replica for replica in sorted(state.isr) if replica != state.leader]
            if not followers:
                raise NoTargetError(f"no follower of partition {number} is in sync")
            return [_by_id(view, source.choice(followers), "follower")]
        case "controller":
            if which == "active":
                return [_by_id(view, view.active_controller, "active controller")]
            others = [node for node in view.nodes if is_controller(node)]
            if which == "other":
                others = [node for node in others if node.node_id != view.active_controller]
            return [_one(others, source, "other controller")]
        case "broker":
            return [_one([node for node in view.nodes if is_broker(node)], source, "broker")]
        case "coordinator":
            return [_by_id(view, view.coordinator, "coordinator of the group")]
        case "node":
            found = [node for node in view.nodes if node.name == which]
            return [_one(found, source, f"node {which}")]
        case _:
            if which == "nodes":
                return list(view.nodes)
            return [node for node in view.nodes if (is_broker if which == "brokers" else is_controller)(node)]


def _by_id(view: View, node_id: int, what: str) -> Node:
    for node in view.nodes:
        if node.node_id == node_id:
            return node
    raise NoTargetError(f"there is no {what}")


def _one(nodes: Sequence[Node], source: random.Random, what: str) -> Node:
    if not nodes:
        raise NoTargetError(f"there is no {what}")
    return source.choice(list(nodes))


class Sight(Protocol):
    """Who sees the mesh: see `observer`."""

    async def view(self) -> View:
        """How it is now."""

    @property
    def partitions(self) -> Mapping[int, object]:
        """Those of the topic."""


class Hooks:
    """How nodes of an experiment start: by links, on a disk and under a clock of their own, where faults need that."""

    def __init__(self, experiment: Experiment, make_network: Callable[[], Network] | None) -> None:
        self.network = make_network() if make_network is not None else None
        self._clocks = experiment.needs_clocks
        self._folders = experiment.needs_folders

    def properties(self, state: Any, node: Any) -> Mapping[str, str]:
        """Configuration over the cluster's own."""
        found = {} if self.network is None else dict(self.network.properties(state.nodes, node))
        if self._folders and is_broker(node):
            found["log.dirs"] = f"{data_folder(node)},{second_folder(node)}"
            # What is open goes on when a disk vanishes: a checkpoint is what finds out, and soon.
            found["replica.high.watermark.checkpoint.interval.ms"] = "200"
        return found

    def command(self, node: Any, command: list[str]) -> list[str]:
        """`python -m MODULE ...` under a clock that can jump."""
        if not self._clocks:
            return command
        file = clock_file(node)
        if not file.exists():
            set_offset(file, 0)
        place = command.index("-m") + 1
        return [*command[:place], "kipmesh_chaos.skewed_clock", str(file), *command[place:]]


def clock_file(node: Node) -> Path:
    """Where a node's clock has its offset."""
    return Path(node.dir) / CLOCK_FILE


def data_folder(node: Node) -> Path:
    """Where a node has its logs."""
    return Path(node.dir) / "data"


def second_folder(node: Node) -> Path:
    """Where a broker has the other part of its logs, if it has two folders."""
    return Path(node.dir) / "data-2"


def _folders_told_offline(node: Node) -> int:
    """How often the broker has said that a folder failed."""
    return (Path(node.dir) / "node.log").read_text().count(OFFLINE_LINE)


@dataclass(eq=False)
class Injector:
    """The faults of one run. One event loop; the cluster's blocking calls are made in threads."""

    cluster: TargetCluster
    net: Network | None
    observer: Sight
    recorder: Recorder
    source: random.Random
    topic: str

    def __post_init__(self) -> None:
        self._remote = self.cluster if isinstance(self.cluster, RemoteCluster) else None
        self._count = 0
        self._starts: Counter[str] = Counter()
        self.stop = asyncio.Event()
        """Set to undo what is done, now."""

    def starts(self, name: str) -> int:
        """How often a node was started or stopped: another number, another process."""
        return self._starts[name]

    async def run(self, fault: Fault, for_s: float) -> None:
        """One fault from its beginning to its end."""
        nodes = await self._targets(fault)
        if not nodes:
            return
        self._count += 1
        number, names = self._count, [node.name for node in nodes]
        told = f"{fault.describe()} ({', '.join(names)})"
        self.recorder.add(FaultBegan(self.recorder.now, number, fault.kind, names, told, fault.halts, fault.settle_s))
        undo = await self._do(number, fault, nodes)
        await self._sleep(for_s)
        await undo()
        self.recorder.add(FaultEnded(self.recorder.now, number))

    async def undo_all(self) -> None:
        """Whatever is left: nodes that do not run are started, what is held goes on, the network is whole."""
        if self.net is not None:
            self.net.heal_all()
        if self._remote is not None:
            await self.cluster.calls.run(self._remote.mend_all)
        nodes = self.cluster.nodes()
        await self._start([node for node in nodes if not self.cluster.is_running(node.name)])

    # -- inside

    async def _sleep(self, for_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                await self.stop.wait()

    async def _targets(self, fault: Fault) -> list[Node]:
        """Who it meets, of those that run; waits a while when there is nobody."""
        deadline = asyncio.get_running_loop().time() + TARGET_TIMEOUT_S
        while True:
            try:
                nodes = resolve(fault.target, await self.observer.view(), self.source)
                if running := [node for node in nodes if self.cluster.is_running(node.name)]:
                    return running
                raise NoTargetError(f"{fault.target} does not run")
            except NoTargetError as error:
                if self.stop.is_set() or asyncio.get_running_loop().time() > deadline:
                    self.recorder.note(f"{fault.describe()} did not happen: {error}")
                    return []
            await self._sleep(LOOK_AGAIN_S)

    async def _do(self, number: int, fault: Fault, nodes: Sequence[Node]) -> Callable[[], Any]:
        """Begin a fault; gives what undoes it."""
        names = [node.name for node in nodes]
        cluster, remote = self.cluster, self._remote
        folders = [data_folder(node) for node in nodes]
        match fault:
            case e.Kill():
                await self._end(names, cluster.kill)
                return lambda: self._start(nodes)
            case e.Restart():
                await self._end(names, cluster.stop)
                return lambda: self._start(nodes)
            case e.TornTail() | e.BitFlip():
                await self._end(names, cluster.kill)
                await self._damage(fault, nodes)
                return lambda: self._start(nodes)
            case e.Pause():
                await self._each(cluster.pause, names)
                return lambda: self._each(cluster.resume, names)
            case e.Cut() if isinstance(cluster, Separable):
                await self._each(cluster.disconnect, names)
                return lambda: self._each(cluster.reconnect, names)
            case e.Cut() | e.Delay():
                return self._break_network(number, fault, names)
            case e.FullDisk() if remote is not None:
                await self._each(remote.fill, names)
                return lambda: self._each(remote.empty, names)
            case e.CpuPressure() if remote is not None:
                await self._each(lambda name: remote.press(name, workers=fault.workers), names)
                return lambda: self._each(remote.relieve, names)
            case e.MemoryPressure() if remote is not None:
                await self._each(lambda name: remote.press(name, memory_share=fault.share), names)
                return lambda: self._each(remote.relieve, names)
            case e.FullDisk():
                await self._each(disk.fill, folders)
                return lambda: self._each(disk.empty, folders)
            case e.FailedFolder():
                told = [_folders_told_offline(node) for node in nodes]
                await self._each(disk.fail, [second_folder(node) for node in nodes])
                return lambda: self._repair_disks(nodes, told)
            case e.ClockJump():
                self._set_clocks(nodes, fault.jump_s)
                return lambda: asyncio.to_thread(self._set_clocks, nodes, 0)
            case _:
                raise ChaosError(f"there is no fault {fault.kind}")

    async def _each(self, do: Callable[[T], object], places: Sequence[T]) -> None:
        """At all places at the same time."""
        await asyncio.gather(*(self.cluster.calls.run(do, place) for place in places))

    async def _end(self, names: Sequence[str], how: Callable[[str], object]) -> None:
        self._starts.update(names)
        await self._each(how, names)

    async def _start(self, nodes: Sequence[Node]) -> None:
        """Controllers first: brokers wait for them."""
        for node in sorted(nodes, key=lambda node: not is_controller(node)):
            try:
                await self.cluster.calls.run(self.cluster.start, node.name)
            except Exception as error:  # whatever kind of cluster it is
                text = str(error).partition("\n")[0]
                self.recorder.add(NotRecovered(self.recorder.now, f"{node.name} was not started: {text}"))
            self._starts[node.name] += 1

    async def _repair_disks(self, nodes: Sequence[Node], told: Sequence[int]) -> None:
        """The brokers have to have gone on without the folder; they are restarted with it."""
        for node, told_before in zip(nodes, told, strict=True):
            if _folders_told_offline(node) == told_before or not self.cluster.is_running(node.name):
                self.recorder.add(NotRecovered(self.recorder.now, f"{node.name} did not go on without its folder"))
        await self._end([node.name for node in nodes], self.cluster.stop)
        await self._each(disk.repair, [second_folder(node) for node in nodes])
        await self._start(nodes)

    async def _damage(self, fault: e.TornTail | e.BitFlip, nodes: Sequence[Node]) -> None:
        """Of the partition that the target names, or of each."""
        which = fault.target.partition(":")[2]
        partitions = [int(which)] if which.isdigit() else sorted(self.observer.partitions)
        do = disk.tear if isinstance(fault, e.TornTail) else disk.flip
        for node in nodes:
            for partition in partitions:
                done = await asyncio.to_thread(do, data_folder(node), self.topic, partition, self.source)
                self.recorder.note(
                    f"{node.name}: {done.text}"
                    if done is not None
                    else f"{node.name}: nothing of partition {partition} was unsynced"
                )

    def _break_network(self, number: int, fault: e.Cut | e.Delay, names: Sequence[str]) -> Callable[[], Any]:
        net = self.net
        if net is None:
            raise ChaosError("the nodes have no links")
        direction = fault.direction if isinstance(fault, e.Cut) else "both"
        broken = [
            pair
            for name in names
            for pair in network.pairs(self.cluster.nodes(), name, peers=fault.peers, direction=direction)
        ]
        if isinstance(fault, e.Cut):
            net.cut(number, broken)
        else:
            net.delay(number, broken, fault.delay_ms / 1000)

        async def heal() -> None:
            net.heal(number)

        return heal

    def _set_clocks(self, nodes: Sequence[Node], offset_s: float) -> None:
        for node in nodes:
            set_offset(clock_file(node), offset_s)
