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
from pathlib import Path
from typing import Any, Protocol

from kipmesh.chaos import disk, network
from kipmesh.chaos.experiment import (
    BitFlip,
    ClockJump,
    CpuPressure,
    Cut,
    Delay,
    Experiment,
    FailedFolder,
    Fault,
    FullDisk,
    Kill,
    MemoryPressure,
    Pause,
    Restart,
    TornTail,
)
from kipmesh.chaos.mesh import ChaosError, Cluster, Node, Separable, is_broker, is_controller, remote
from kipmesh.chaos.network import Network
from kipmesh.chaos.recorder import Recorder
from kipmesh.chaos.targets import NoTargetError, View, resolve
from kipmesh.testing.history import FaultBegan, FaultEnded, NotRecovered
from kipmesh.testing.skewed_clock import set_offset

TARGET_TIMEOUT_S = 30.0
LOOK_AGAIN_S = 0.2
CLOCK_FILE = "clock-offset"
OFFLINE_LINE = "data folder offline"
"""What a broker logs when a folder has failed."""


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
        return [*command[:place], "kipmesh.testing.skewed_clock", str(file), *command[place:]]


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


class Injector:
    """The faults of one run. One event loop; the cluster's blocking calls are made in threads."""

    def __init__(
        self,
        cluster: Cluster,
        net: Network | None,
        observer: Sight,
        recorder: Recorder,
        source: random.Random,
        topic: str,
    ) -> None:
        self._cluster = cluster
        self._remote = remote(cluster)
        self._network = net
        self._observer = observer
        self._recorder = recorder
        self._random = source
        self._topic = topic
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
        self._recorder.add(FaultBegan(self._recorder.now, number, fault.kind, names, told, fault.halts, fault.settle_s))
        undo = await self._do(number, fault, nodes)
        await self._sleep(for_s)
        await undo()
        self._recorder.add(FaultEnded(self._recorder.now, number))

    async def undo_all(self) -> None:
        """Whatever is left: nodes that do not run are started, what is held goes on, the network is whole."""
        if self._network is not None:
            self._network.heal_all()
        if self._remote is not None:
            await asyncio.to_thread(self._remote.mend_all)
        nodes = self._cluster.nodes()
        await self._start([node for node in nodes if not self._cluster.is_running(node.name)])

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
                nodes = resolve(fault.target, await self._observer.view(), self._random)
                if running := [node for node in nodes if self._cluster.is_running(node.name)]:
                    return running
                raise NoTargetError(f"{fault.target} does not run")
            except NoTargetError as error:
                if self.stop.is_set() or asyncio.get_running_loop().time() > deadline:
                    self._recorder.note(f"{fault.describe()} did not happen: {error}")
                    return []
            await self._sleep(LOOK_AGAIN_S)

    async def _do(self, number: int, fault: Fault, nodes: Sequence[Node]) -> Callable[[], Any]:
        """Begin a fault; gives what undoes it."""
        names = [node.name for node in nodes]
        match fault:
            case Kill():
                await self._end(names, self._cluster.kill)
                return lambda: self._start(nodes)
            case Restart():
                await self._end(names, self._cluster.stop)
                return lambda: self._start(nodes)
            case TornTail() | BitFlip():
                await self._end(names, self._cluster.kill)
                await self._damage(fault, nodes)
                return lambda: self._start(nodes)
            case Pause():
                await asyncio.gather(*(asyncio.to_thread(self._cluster.pause, name) for name in names))
                return lambda: asyncio.gather(*(asyncio.to_thread(self._cluster.resume, name) for name in names))
            case Cut() if isinstance(self._cluster, Separable):
                separable = self._cluster
                await asyncio.gather(*(asyncio.to_thread(separable.disconnect, name) for name in names))
                return lambda: asyncio.gather(*(asyncio.to_thread(separable.reconnect, name) for name in names))
            case Cut() | Delay():
                return self._break_network(number, fault, names)
            case FullDisk() if (far := self._remote) is not None:
                await asyncio.gather(*(asyncio.to_thread(far.fill, name) for name in names))
                return lambda: asyncio.gather(*(asyncio.to_thread(far.empty, name) for name in names))
            case CpuPressure() | MemoryPressure() if (where := self._remote) is not None:
                await asyncio.gather(*(asyncio.to_thread(where.press, name, fault) for name in names))
                return lambda: asyncio.gather(*(asyncio.to_thread(where.relieve, name) for name in names))
            case FullDisk():
                await asyncio.gather(*(asyncio.to_thread(disk.fill, data_folder(node)) for node in nodes))
                return lambda: asyncio.gather(*(asyncio.to_thread(disk.empty, data_folder(node)) for node in nodes))
            case FailedFolder():
                told = [_folders_told_offline(node) for node in nodes]
                await asyncio.gather(*(asyncio.to_thread(disk.fail, second_folder(node)) for node in nodes))
                return lambda: self._repair_disks(nodes, told)
            case ClockJump():
                self._set_clocks(nodes, fault.jump_s)
                return lambda: asyncio.to_thread(self._set_clocks, nodes, 0)
            case _:
                raise ChaosError(f"there is no fault {fault.kind}")

    async def _end(self, names: Sequence[str], how: Callable[[str], None]) -> None:
        self._starts.update(names)
        await asyncio.gather(*(asyncio.to_thread(how, name) for name in names))

    async def _start(self, nodes: Sequence[Node]) -> None:
        """Controllers first: brokers wait for them."""
        for node in sorted(nodes, key=lambda node: not is_controller(node)):
            try:
                await asyncio.to_thread(self._cluster.start, node.name)
            except Exception as error:  # whatever kind of cluster it is
                text = str(error).partition("\n")[0]
                self._recorder.add(NotRecovered(self._recorder.now, f"{node.name} was not started: {text}"))
            self._starts[node.name] += 1

    async def _repair_disks(self, nodes: Sequence[Node], told: Sequence[int]) -> None:
        """The brokers have to have gone on without the folder; they are restarted with it."""
        for node, told_before in zip(nodes, told, strict=True):
            if _folders_told_offline(node) == told_before or not self._cluster.is_running(node.name):
                self._recorder.add(NotRecovered(self._recorder.now, f"{node.name} did not go on without its folder"))
        await self._end([node.name for node in nodes], self._cluster.stop)
        await asyncio.gather(*(asyncio.to_thread(disk.repair, second_folder(node)) for node in nodes))
        await self._start(nodes)

    async def _damage(self, fault: TornTail | BitFlip, nodes: Sequence[Node]) -> None:
        """Of the partition that the target names, or of each."""
        which = fault.target.partition(":")[2]
        partitions = [int(which)] if which.isdigit() else sorted(self._observer.partitions)
        do = disk.tear if isinstance(fault, TornTail) else disk.flip
        for node in nodes:
            for partition in partitions:
                done = await asyncio.to_thread(do, data_folder(node), self._topic, partition, self._random)
                self._recorder.note(
                    f"{node.name}: {done.text}"
                    if done is not None
                    else f"{node.name}: nothing of partition {partition} was unsynced"
                )

    def _break_network(self, number: int, fault: Cut | Delay, names: Sequence[str]) -> Callable[[], Any]:
        net = self._network
        if net is None:
            raise ChaosError("the nodes have no links")
        direction = fault.direction if isinstance(fault, Cut) else "both"
        broken = [
            pair
            for name in names
            for pair in network.pairs(self._cluster.nodes(), name, peers=fault.peers, direction=direction)
        ]
        if isinstance(fault, Cut):
            net.cut(number, broken)
        else:
            net.delay(number, broken, fault.delay_ms / 1000)

        async def heal() -> None:
            net.heal(number)

        return heal

    def _set_clocks(self, nodes: Sequence[Node], offset_s: float) -> None:
        for node in nodes:
            set_offset(clock_file(node), offset_s)
