"""Injects faults into a running cluster and undoes them.

A node's files change only while the node is stopped, and only as a disk may lose them: see `disk`. `Hooks` prepares
nodes for faults that need links, disks or clocks, before they start.
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
TARGET_RETRY_S = 0.2
CLOCK_FILE = "clock-offset"
OFFLINE_LINE = "log directory offline"
"""Line that a broker logs when a log directory has failed."""


T = TypeVar("T")


class PartitionView(NamedTuple):
    """Leader (-1: none), ISR and replicas of a partition, according to metadata."""

    leader: int
    isr: Sequence[int]
    replicas: Sequence[int] = ()
    leader_epoch: int = -1


class View(NamedTuple):
    """Observed state of the cluster: nodes, partitions of the topic, and node ids of the active controller and of the
    group coordinator, -1 if unknown.
    """

    nodes: Sequence[Node]
    partitions: Mapping[int, PartitionView]
    active_controller: int
    coordinator: int = -1


class NoTargetError(ChaosError):
    """No node, or no running node, matches the target at present, for example because the partition has no leader."""


def resolve(target: str, view: View, source: random.Random) -> list[Node]:
    """Return the nodes that a target selects: one, chosen by `source` if several match, or all for a target `all:...`.

    The nodes need not be running. Raises NoTargetError if none matches.
    """
    role, _, selector = target.partition(":")
    name = target

    def with_id(node_id: int) -> list[Node]:
        return [node for node in view.nodes if node.node_id == node_id]

    match role, selector:
        case "leader" | "follower", _:
            number = source.choice(sorted(view.partitions)) if selector == "any" else int(selector)
            state = view.partitions[number]
            if role == "leader":
                name, found = f"leader of partition {number}", with_id(state.leader)
            else:
                followers = [replica for replica in sorted(state.isr) if replica != state.leader]
                name, found = f"in-sync follower of partition {number}", []
                if followers:
                    found = with_id(source.choice(followers))
        case "controller", "active":
            name, found = "active controller", with_id(view.active_controller)
        case "controller", _:
            active = view.active_controller if selector == "other" else -1
            found = [node for node in view.nodes if is_controller(node) and node.node_id != active]
        case "coordinator", _:
            name, found = "coordinator of the group", with_id(view.coordinator)
        case "node", _:
            found = [node for node in view.nodes if node.name == selector]
        case "broker", _:
            found = [node for node in view.nodes if is_broker(node)]
        case _:
            tests = {"nodes": lambda _node: True, "brokers": is_broker, "controllers": is_controller}
            return [node for node in view.nodes if tests[selector](node)]
    if not found:
        raise NoTargetError(f"no {name}")
    return [source.choice(found)]


class ClusterObserver(Protocol):
    """Source of the cluster's observed state, such as `observer.Observer`."""

    async def view(self) -> View:
        """Observe the cluster and return its current state."""

    @property
    def partitions(self) -> Mapping[int, object]:
        """Partitions of the topic by number, as last observed."""


class Hooks:
    """A `Hook` that changes how nodes start if the experiment's faults need it: with links, a second log directory or a
    skewable clock.
    """

    def __init__(self, experiment: Experiment, network: Network | None) -> None:
        self._network = network
        self._clocks = experiment.has(e.ClockJump)
        self._second_log_dir = experiment.has(e.FailedLogDir)

    def properties(self, state: Any, node: Any) -> Mapping[str, str]:
        """Return configuration properties of a node that override those of the cluster; empty if no fault needs any."""
        found = {} if self._network is None else dict(self._network.properties(state.nodes, node))
        if self._second_log_dir and is_broker(node):
            found["log.dirs"] = f"{log_dir(node)},{second_log_dir(node)}"
            # Open files outlive a failed disk. A frequent checkpoint makes the broker detect the failure.
            found["replica.high.watermark.checkpoint.interval.ms"] = "200"
        return found

    def command(self, node: Any, command: list[str]) -> list[str]:
        """Return the command to start a node. If the experiment has clock jumps, `python -m MODULE ...` runs under a
        skewable clock; otherwise the command is unchanged.
        """
        if not self._clocks:
            return command
        file = clock_file(node)
        if not file.exists():
            set_offset(file, 0)
        module = command.index("-m") + 1
        return [*command[:module], "kipmesh_chaos.skewed_clock", str(file), *command[module:]]


def clock_file(node: Node) -> Path:
    """Return the path of the file with the offset of a node's clock."""
    return Path(node.dir) / CLOCK_FILE


def log_dir(node: Node) -> Path:
    """Return the path of a node's first log directory."""
    return Path(node.dir) / "data"


def second_log_dir(node: Node) -> Path:
    """Return the path of a broker's second log directory. The directory is in use only if the experiment has the fault
    `FailedLogDir`.
    """
    return Path(node.dir) / "data-2"


def _count_offline_lines(node: Node) -> int:
    """Return how often the node has logged a failed log directory."""
    return (Path(node.dir) / "node.log").read_text().count(OFFLINE_LINE)


@dataclass(eq=False)
class Injector:
    """Injects the faults of one run and undoes them. Belongs to one event loop; blocking calls run in threads."""

    cluster: TargetCluster
    net: Network | None
    observer: ClusterObserver
    recorder: Recorder
    source: random.Random
    topic: str

    def __post_init__(self) -> None:
        self._remote = self.cluster if isinstance(self.cluster, RemoteCluster) else None
        self._count = 0
        self._starts: Counter[str] = Counter()
        self.stop = asyncio.Event()
        """Set to undo all faults immediately."""

    def starts(self, name: str) -> int:
        """Return how often this object has started or stopped a node. If the number changes, the process is a different
        one.
        """
        return self._starts[name]

    async def run(self, fault: Fault, for_s: float) -> None:
        """Inject one fault for `for_s` seconds or until `stop` is set, then undo it.

        Waits up to `TARGET_TIMEOUT_S` for a running target. Without one, the fault is skipped with a note. A node that
        does not start again is recorded as NotRecovered. Raises ChaosError if the cluster does not support the fault,
        and errors of the cluster.
        """
        nodes = await self._targets(fault)
        if not nodes:
            return
        self._count += 1
        number, names = self._count, [node.name for node in nodes]
        text = f"{fault.describe()} ({', '.join(names)})"
        self.recorder.add(FaultBegan(self.recorder.now, number, fault.kind, names, text, fault.halts, fault.settle_s))
        undo = await self._do(number, fault, nodes)
        await self._sleep(for_s)
        await undo()
        self.recorder.add(FaultEnded(self.recorder.now, number))

    async def undo_all(self) -> None:
        """Undo all remaining network faults and faults of a remote cluster, and start all stopped nodes. A node that
        does not start is recorded as NotRecovered.
        """
        if self.net is not None:
            self.net.heal_all()
        if self._remote is not None:
            await self.cluster.calls.run(self._remote.undo_faults)
        nodes = self.cluster.nodes()
        await self._start([node for node in nodes if not self.cluster.is_running(node.name)])

    # -- inside

    async def _sleep(self, for_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                await self.stop.wait()

    async def _targets(self, fault: Fault) -> list[Node]:
        """Return the running nodes that a fault selects. Adds a note and returns no nodes if none is found within
        `TARGET_TIMEOUT_S` or before `stop` is set.
        """
        deadline = asyncio.get_running_loop().time() + TARGET_TIMEOUT_S
        while True:
            try:
                nodes = resolve(fault.target, await self.observer.view(), self.source)
                if running := [node for node in nodes if self.cluster.is_running(node.name)]:
                    return running
                raise NoTargetError(f"{fault.target} is not running")
            except NoTargetError as error:
                if self.stop.is_set() or asyncio.get_running_loop().time() > deadline:
                    self.recorder.note(f"{fault.describe()} did not happen: {error}")
                    return []
            await self._sleep(TARGET_RETRY_S)

    async def _do(self, number: int, fault: Fault, nodes: Sequence[Node]) -> Callable[[], Any]:
        """Begin a fault; return the function that undoes it. Raises ChaosError if the cluster does not support it."""
        names = [node.name for node in nodes]
        cluster, remote = self.cluster, self._remote
        log_dirs = [log_dir(node) for node in nodes]
        match fault:
            case e.Kill() | e.Restart() | e.TornTail() | e.BitFlip():
                await self._stop(names, cluster.stop if isinstance(fault, e.Restart) else cluster.kill)
                if isinstance(fault, e.TornTail | e.BitFlip):
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
                await self._each(disk.fill, log_dirs)
                return lambda: self._each(disk.empty, log_dirs)
            case e.FailedLogDir():
                offline_lines = [_count_offline_lines(node) for node in nodes]
                await self._each(disk.fail, [second_log_dir(node) for node in nodes])
                return lambda: self._repair_disks(nodes, offline_lines)
            case e.ClockJump():
                self._set_clocks(nodes, fault.jump_s)
                return lambda: asyncio.to_thread(self._set_clocks, nodes, 0)
            case _:
                raise ChaosError(f"this cluster does not support the fault {fault.kind}")

    async def _each(self, do: Callable[[T], object], places: Sequence[T]) -> None:
        """Call `do` for all places concurrently in threads. Raises the first error."""
        await asyncio.gather(*(self.cluster.calls.run(do, place) for place in places))

    async def _stop(self, names: Sequence[str], how: Callable[[str], object]) -> None:
        self._starts.update(names)
        await self._each(how, names)

    async def _start(self, nodes: Sequence[Node]) -> None:
        """Start controllers before brokers, which wait for them. A node that does not start is recorded as
        NotRecovered.
        """
        for node in sorted(nodes, key=lambda node: not is_controller(node)):
            try:
                await self.cluster.calls.run(self.cluster.start, node.name)
            except Exception as error:  # each kind of cluster has its own errors
                text = str(error).partition("\n")[0]
                self.recorder.add(NotRecovered(self.recorder.now, f"{node.name} did not start: {text}"))
            self._starts[node.name] += 1

    async def _repair_disks(self, nodes: Sequence[Node], offline_lines: Sequence[int]) -> None:
        """Restart brokers with the repaired second log directory. Records NotRecovered for each broker that has ended
        or has not noticed the failure.
        """
        for node, before in zip(nodes, offline_lines, strict=True):
            if _count_offline_lines(node) == before or not self.cluster.is_running(node.name):
                text = f"{node.name} did not keep running without its failed log directory"
                self.recorder.add(NotRecovered(self.recorder.now, text))
        await self._stop([node.name for node in nodes], self.cluster.stop)
        await self._each(disk.repair, [second_log_dir(node) for node in nodes])
        await self._start(nodes)

    async def _damage(self, fault: e.TornTail | e.BitFlip, nodes: Sequence[Node]) -> None:
        """Damage the log of the partition that the target names, or of each partition, on each node. Adds a note of
        what was damaged.
        """
        selector = fault.target.partition(":")[2]
        partitions = [int(selector)] if selector.isdigit() else sorted(self.observer.partitions)
        damage = disk.tear if isinstance(fault, e.TornTail) else disk.flip
        for node in nodes:
            for partition in partitions:
                text = await asyncio.to_thread(damage, log_dir(node), self.topic, partition, self.source)
                self.recorder.note(f"{node.name}: {text or f'partition {partition} has no unsynced bytes'}")

    def _break_network(self, number: int, fault: e.Cut | e.Delay, names: Sequence[str]) -> Callable[[], Any]:
        net = self.net
        if net is None:
            raise ChaosError("network faults need links between the nodes, which this cluster does not have")
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
