"""One run of an experiment: cluster, workload, faults, recovery, last reads, the replicas' logs, the verdict.

Everything that a run starts ends with it, however it ends. What it leaves in its folder: `history.jsonl`,
`summary.json`, `report.html`, and the cluster's folder when something was found.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from kipmesh.chaos import disk, dumps, report
from kipmesh.chaos.experiment import Experiment, Fault
from kipmesh.chaos.faults import Hooks, Injector, data_folder, second_folder
from kipmesh.chaos.group_workload import GROUP
from kipmesh.chaos.mesh import ChaosError, Cluster, Limited, MakeCluster, Node, bootstrap, is_broker, remote
from kipmesh.chaos.network import Network
from kipmesh.chaos.observer import Observer
from kipmesh.chaos.recorder import Recorder
from kipmesh.chaos.workload import Workload, consumer_names, is_exactly_once
from kipmesh.client import AdminClient
from kipmesh.client.types import NewTopic
from kipmesh.testing.history import Begin, NotRecovered, Phase, PhaseBegan, read_history
from kipmesh.testing.history_checker import Verdict, check
from kipmesh.testing.links import Links

TOPIC = "chaos"
HISTORY = "history.jsonl"
WARM_UP_TIMEOUT_S = 120.0
FINAL_TIMEOUT_S = 30.0
TICK_S = 0.1

OnProgress = Callable[[str, float, Recorder], None]
"""Called with what the run does now, how much of it is done (0 to 1), and the recorder."""


class Result(NamedTuple):
    """How a run ended, and where its files are."""

    experiment: Experiment
    seed: int
    verdict: Verdict
    folder: Path


async def run_once(
    experiment: Experiment,
    make_cluster: MakeCluster,
    folder: Path,
    seed: int,
    on_progress: OnProgress,
    client: Mapping[str, str] | None = None,
) -> Result:
    """One run in an empty folder; raises ChaosError, and what clients and the cluster raise.

    `client`: how clients reach the nodes beside their addresses, where the cluster is not the run's own (TLS).
    """
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    recorder = Recorder(folder / HISTORY)
    run = _Run(experiment, folder, seed, recorder, on_progress, client)
    try:
        await run.run(make_cluster)
    finally:
        recorder.close()
    on_progress("checking", 0.0, recorder)
    verdict = await asyncio.to_thread(lambda: check(read_history(folder / HISTORY)))
    await asyncio.to_thread(report.write, folder, verdict, experiment, seed)
    if verdict.is_clean:
        await asyncio.to_thread(shutil.rmtree, folder / "cluster", ignore_errors=True)
    return Result(experiment, seed, verdict, folder)


_Timed = tuple[Fault, asyncio.Task[float]]


class _Run:
    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        seed: int,
        recorder: Recorder,
        on_progress: OnProgress,
        client: Mapping[str, str] | None = None,
    ) -> None:
        self._experiment = experiment
        self._folder = folder
        self._seed = seed
        self._random = random.Random(seed)
        self._recorder = recorder
        self._on_progress = on_progress
        self._client = client or {}
        self._mounted: list[Path] = []
        self._late_s = 0.0
        """By how much the latest of the timed faults came too late."""
        self._to_come = len(experiment.faults)
        self._topic = TOPIC
        self._ends: dict[int, int] = {}

    async def run(self, make_cluster: MakeCluster) -> None:
        """All of it; the cluster is down at the end."""
        async with AsyncExitStack() as stack:
            links = await stack.enter_async_context(Links())
            made: list[Cluster] = []

            def network() -> Network:
                return Network(links, lambda: made[0].nodes())

            hooks = Hooks(self._experiment, network if self._experiment.needs_network else None)
            cluster = make_cluster(self._folder / "cluster", self._experiment.cluster, hooks)
            made.append(cluster)
            stack.push_async_callback(self._destroy, cluster)
            self._check_possible(cluster)
            is_remote = remote(cluster) is not None
            if is_remote:
                # Others may have run experiments there, and one that was interrupted leaves its topic.
                self._topic = f"{TOPIC}-{self._seed}-{int(time.time())}"
            else:
                self._prepare_disks()
            self._on_progress("starting the cluster", 0.0, self._recorder)
            await asyncio.to_thread(cluster.up)
            nodes = cluster.nodes()
            part = self._experiment.workload
            self._recorder.add(
                Begin(
                    self._recorder.now,
                    self._experiment.name,
                    self._seed,
                    part.partitions,
                    self._experiment.steady_state.limits,
                    consumer_names(part),
                    [node.name for node in nodes],
                    is_exactly_once(part),
                )
            )
            await self._create_topic(bootstrap(nodes))
            group = GROUP if part.group is not None else None
            observer = Observer(cluster.nodes, self._topic, self._recorder, group, self._client)
            stack.push_async_callback(observer.close)
            injector = Injector(cluster, hooks.network, observer, self._recorder, self._random, self._topic)
            await self._under_load(cluster, observer, injector)
            if is_remote:
                await self._dump_served(nodes)
            else:
                await self._dump_stopped(cluster, nodes)
            self._recorder.add(PhaseBegan(self._recorder.now, Phase.END))

    def _check_possible(self, cluster: Cluster) -> None:
        """Raise NotPossibleError when the cluster cannot do what the experiment says."""
        if not isinstance(cluster, Limited):
            return
        said = [(fault.describe(), cluster.unable(fault)) for fault in self._experiment.all_faults]
        if reasons := [f"{told}: {why}" for told, why in said if why]:
            raise disk.NotPossibleError("; ".join(dict.fromkeys(reasons)))

    async def _dump_stopped(self, cluster: Cluster, nodes: Sequence[Node]) -> None:
        self._on_progress("stopping the cluster", 0.0, self._recorder)
        await asyncio.to_thread(cluster.down)
        self._on_progress("reading the replicas' logs", 0.0, self._recorder)
        for folder in (data_folder, second_folder):
            brokers = {node.node_id: folder(node) for node in nodes if is_broker(node)}
            await asyncio.to_thread(dumps.record, self._recorder, brokers, self._topic)

    async def _dump_served(self, nodes: Sequence[Node]) -> None:
        """Its files are elsewhere: what each replica serves is compared, and the topic is taken away."""
        self._on_progress("reading what each replica serves", 0.0, self._recorder)
        brokers = {node.node_id: node.grpc for node in nodes if is_broker(node) and node.grpc}
        await dumps.record_served(self._recorder, brokers, self._topic, self._ends, FINAL_TIMEOUT_S, self._client)
        async with AdminClient(bootstrap(nodes), **self._client) as admin:
            await admin.delete_topics([self._topic])

    async def _destroy(self, cluster: Cluster) -> None:
        await asyncio.shield(asyncio.to_thread(cluster.destroy))
        for folder in self._mounted:
            disk.unmount(folder)

    def _prepare_disks(self) -> None:
        """Before the cluster makes its folders: a disk for each node's data."""
        if not self._experiment.needs_disks:
            return
        part = self._experiment.cluster
        roles = {"controller": part.controllers, "leader": part.leaders, "follower": part.followers}
        for role, count in roles.items():
            for number in range(1, count + 1):
                home = self._folder / "cluster" / f"{role}-{number}"
                second = ["data-2"] if self._experiment.needs_folders and role != "controller" else []
                for name in ("data", *second):
                    disk.mount(home / name)
                    self._mounted.append(home / name)

    async def _create_topic(self, address: str) -> None:
        part = self._experiment.workload
        async with AdminClient(address, **self._client) as admin:
            topic = NewTopic(self._topic, part.partitions, part.replication_factor, dict(part.topic_config))
            await admin.create_topics([topic])

    async def _under_load(self, cluster: Cluster, observer: Observer, injector: Injector) -> None:
        part, address = self._experiment.workload, bootstrap(cluster.nodes())
        workload = Workload(address, self._topic, part, self._recorder, self._seed, self._client)
        async with workload, asyncio.TaskGroup() as group:
            watching = [group.create_task(observer.run())]
            if part.probes:
                brokers = [node for node in cluster.nodes() if is_broker(node)]
                watching += [group.create_task(observer.probe(node, injector.starts)) for node in brokers]
            await self._warm_up(workload, observer)
            self._recorder.add(PhaseBegan(self._recorder.now, Phase.FAULTS))
            workload.start_churning()
            await self._faults(injector, observer, workload)
            await workload.stop_churning()
            self._recorder.add(PhaseBegan(self._recorder.now, Phase.RECOVERY))
            await self._recover(injector, observer, workload)
            self._on_progress("reading everything once more", 0.0, self._recorder)
            await workload.stop_producing()
            self._recorder.add(PhaseBegan(self._recorder.now, Phase.FINAL))
            ends = self._ends = await dumps.final_read(
                address, self._topic, part.partitions, self._recorder, FINAL_TIMEOUT_S, self._client
            )
            await workload.catch_up(ends, FINAL_TIMEOUT_S)
            await workload.end_group()
            await observer.look()
            dumps.record_ends(self._recorder, ends, observer.partitions)
            for task in watching:
                task.cancel()

    async def _warm_up(self, workload: Workload, observer: Observer) -> None:
        """Until every partition is written to and read by everybody, and all replicas are in sync."""
        deadline = asyncio.get_running_loop().time() + WARM_UP_TIMEOUT_S
        partitions = range(self._experiment.workload.partitions)
        while not (
            all(workload.acknowledged.get(partition) for partition in partitions)
            and all(mine.get(partition) for mine in workload.positions.values() for partition in partitions)
            and not observer.out_of_sync()
        ):
            workload.check()
            if asyncio.get_running_loop().time() > deadline:
                told = observer.out_of_sync() or ["the workload does not run"]
                raise ChaosError(f"no steady state after {WARM_UP_TIMEOUT_S:g} s: {'; '.join(told)}")
            self._on_progress("warming up", 0.0, self._recorder)
            await asyncio.sleep(TICK_S)

    async def _faults(self, injector: Injector, observer: Observer, workload: Workload) -> None:
        loop = asyncio.get_running_loop()
        begin, duration_s = loop.time(), self._experiment.duration_s
        async with asyncio.TaskGroup() as group:
            timed: list[_Timed] = []
            for fault in sorted(self._experiment.faults, key=lambda fault: fault.at_s):
                over = [(one, task) for one, task in timed if one.at_s + one.for_s <= fault.at_s]
                timed.append((fault, group.create_task(self._timed(injector, fault, over))))
            if self._experiment.random is not None:
                group.create_task(self._by_chance(injector, observer))
            while (passed := loop.time() - begin) < duration_s + self._late_s or self._to_come:
                self._on_progress("faults", min(passed / duration_s, 1.0), self._recorder)
                workload.check()
                await asyncio.sleep(TICK_S)
            injector.stop.set()

    async def _timed(
        self, injector: Injector, fault: Fault, over: Sequence[tuple[Fault, asyncio.Task[float]]]
    ) -> float:
        """One fault at its time; gives when it had ended.

        Those that the file has `over` by then may be late: a node of a busy machine takes long to start. The fault
        comes as long after their end as the file says, and the whole run lasts longer by that.
        """
        loop = asyncio.get_running_loop()
        due = planned = loop.time() + fault.at_s
        for before, task in over:
            due = max(due, await task + fault.at_s - before.at_s - before.for_s)
        self._late_s = max(self._late_s, due - planned)
        await asyncio.sleep(due - loop.time())
        self._to_come -= 1
        await injector.run(fault, fault.for_s)
        return loop.time()

    async def _by_chance(self, injector: Injector, observer: Observer) -> None:
        part = self._experiment.random
        assert part is not None
        for pause_s, fault, for_s in part.plan(self._seed):
            await self._pause(injector, pause_s)
            if injector.stop.is_set():
                return
            await injector.run(fault, for_s)
            await self._wait_in_sync(observer, injector.stop)

    async def _pause(self, injector: Injector, for_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                await injector.stop.wait()

    async def _wait_in_sync(self, observer: Observer, stop: asyncio.Event | None = None) -> None:
        """Until all replicas are in sync; told when that takes too long."""
        loop = asyncio.get_running_loop()
        begin, limit_s = loop.time(), self._experiment.steady_state.recovered_within_s
        await observer.look()
        while told := observer.out_of_sync():
            if stop is not None and stop.is_set():
                return
            passed = loop.time() - begin
            if passed > limit_s:
                self._recorder.add(NotRecovered(self._recorder.now, f"after {limit_s:g} s: {'; '.join(told)}"))
                return
            if stop is None:
                self._on_progress("recovering", passed / limit_s, self._recorder)
            await asyncio.sleep(TICK_S)

    async def _recover(self, injector: Injector, observer: Observer, workload: Workload) -> None:
        await injector.undo_all()
        await self._wait_in_sync(observer)
        workload.check()
