"""Runs one experiment: cluster, workload, faults, recovery, final read, replica logs, verdict.

Everything that a run starts ends with it, also after an error. The run's directory then has `history.jsonl`,
`summary.json` and `report.html`, and the cluster's directory if there are anomalies.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kipmesh.client import AdminClient
from kipmesh.client.types import NewTopic
from kipmesh_chaos import disk, dumps, report
from kipmesh_chaos.experiment import Cut, Delay, Experiment, FailedLogDir, Fault
from kipmesh_chaos.faults import Hooks, Injector, log_dir, second_log_dir
from kipmesh_chaos.history import Begin, NotRecovered, Phase, PhaseBegan, read_history
from kipmesh_chaos.history_checker import Verdict, check
from kipmesh_chaos.links import Links
from kipmesh_chaos.network import Network
from kipmesh_chaos.observer import Observer
from kipmesh_chaos.recorder import Recorder, RunClients
from kipmesh_chaos.target_cluster import (
    ChaosError,
    MakeCluster,
    Node,
    RemoteCluster,
    TargetCluster,
    bootstrap,
    is_broker,
)
from kipmesh_chaos.workload import GROUP, Workload, consumer_names, is_exactly_once

TOPIC = "chaos"
WARM_UP_TIMEOUT_S = 120.0
FINAL_TIMEOUT_S = 30.0
TICK_S = 0.1

OnProgress = Callable[[str, float, Recorder], None]
"""Called with the current step, its completed share (0 to 1) and the recorder."""


class Result(NamedTuple):
    """Verdict of a run, and the directory with its files."""

    experiment: Experiment
    seed: int
    verdict: Verdict
    directory: Path


async def run_once(
    experiment: Experiment,
    make_cluster: MakeCluster,
    directory: Path,
    seed: int,
    on_progress: OnProgress,
    client: Mapping[str, str] | None = None,
) -> Result:
    """Run an experiment, check its history, write the report and return the verdict. `directory` is new or empty.

    Anomalies are not raised. Raises ChaosError if the run cannot be done (NotPossibleError if the fault is not
    supported), and errors of clients and of the cluster.

    `client` is client configuration besides the addresses, such as TLS, for a cluster that the run did not create.
    """
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    recorder = Recorder(directory / report.HISTORY)
    run = _Run(experiment, directory, seed, recorder, on_progress, client or {})
    try:
        await run.run(make_cluster)
    finally:
        recorder.close()
    on_progress("checking", 0.0, recorder)
    verdict = await asyncio.to_thread(lambda: check(read_history(directory / report.HISTORY)))
    await asyncio.to_thread(report.write, directory, verdict, experiment, seed)
    if verdict.is_clean:
        await asyncio.to_thread(shutil.rmtree, directory / "cluster", ignore_errors=True)
    return Result(experiment, seed, verdict, directory)


@dataclass(slots=True)
class _Run:
    experiment: Experiment
    directory: Path
    seed: int
    recorder: Recorder
    on_progress: OnProgress
    client: Mapping[str, str] = field(default_factory=dict)
    mounted: list[Path] = field(default_factory=list)
    late_s: float = 0.0
    """Largest delay of a timed fault."""
    to_come: int = field(init=False)

    def __post_init__(self) -> None:
        self.to_come = len(self.experiment.faults)

    async def run(self, make_cluster: MakeCluster) -> None:
        """Run all phases up to the replica logs, and destroy the cluster, even after an error."""
        async with AsyncExitStack() as stack:
            links = await stack.enter_async_context(Links())
            network = Network(links, lambda: cluster.nodes()) if self.experiment.has(Cut, Delay) else None
            hooks = Hooks(self.experiment, network)
            cluster = make_cluster(self.directory / "cluster", self.experiment.cluster, hooks)
            stack.push_async_callback(self._destroy, cluster)
            self._check_possible(cluster)
            is_remote = isinstance(cluster, RemoteCluster)
            # A remote cluster may still have the topic of another, interrupted run.
            topic = f"{TOPIC}-{self.seed}-{int(time.time())}" if is_remote else TOPIC
            if not is_remote:
                self._prepare_disks()
            self.on_progress("starting the cluster", 0.0, self.recorder)
            await cluster.calls.run(cluster.up)
            nodes = cluster.nodes()
            clients = RunClients(bootstrap(nodes), topic, self.recorder, self.client)
            part = self.experiment.workload
            self.recorder.add(
                Begin(
                    self.recorder.now,
                    self.experiment.name,
                    self.seed,
                    part.partitions,
                    self.experiment.steady_state.limits,
                    consumer_names(part),
                    [node.name for node in nodes],
                    is_exactly_once(part),
                )
            )
            async with AdminClient(clients.bootstrap, **clients.config) as admin:
                new = NewTopic(topic, part.partitions, part.replication_factor, dict(part.topic_config))
                await admin.create_topics([new])
            observer = Observer(cluster.nodes, clients, GROUP if part.group is not None else None)
            stack.push_async_callback(observer.pool.close)
            injector = Injector(cluster, network, observer, self.recorder, random.Random(self.seed), topic)
            ends = await self._under_load(cluster, clients, observer, injector)
            if is_remote:
                await self._dump_served(nodes, clients, ends)
            else:
                await self._dump_stopped(cluster, nodes, topic)
            self.recorder.add(PhaseBegan(self.recorder.now, Phase.END))

    def _check_possible(self, cluster: TargetCluster) -> None:
        """Raise NotPossibleError if the cluster does not support a fault of the experiment."""
        checked = [(fault.describe(), cluster.unsupported_reason(fault)) for fault in self.experiment.all_faults]
        if unsupported := [f"{fault}: {reason}" for fault, reason in checked if reason]:
            raise disk.NotPossibleError("; ".join(dict.fromkeys(unsupported)))

    async def _dump_stopped(self, cluster: TargetCluster, nodes: Sequence[Node], topic: str) -> None:
        self.on_progress("stopping the cluster", 0.0, self.recorder)
        await cluster.calls.run(cluster.down)
        self.on_progress("reading the replicas' logs", 0.0, self.recorder)
        for log_dir_of in (log_dir, second_log_dir):
            brokers = {node.node_id: log_dir_of(node) for node in nodes if is_broker(node)}
            await asyncio.to_thread(dumps.record_stopped, self.recorder, brokers, topic)

    async def _dump_served(self, nodes: Sequence[Node], clients: RunClients, ends: Mapping[int, int]) -> None:
        """Record the batches that each replica of a remote cluster serves, instead of its files, and delete
        the topic.
        """
        self.on_progress("reading what each replica serves", 0.0, self.recorder)
        brokers = {node.node_id: node.grpc for node in nodes if is_broker(node) and node.grpc}
        await dumps.record_served(clients, brokers, ends, FINAL_TIMEOUT_S)
        async with AdminClient(clients.bootstrap, **clients.config) as admin:
            await admin.delete_topics([clients.topic])

    async def _destroy(self, cluster: TargetCluster) -> None:
        await asyncio.shield(asyncio.to_thread(cluster.destroy))
        for directory in self.mounted:
            disk.unmount(directory)

    def _prepare_disks(self) -> None:
        """Mount a disk for each log directory, if the experiment needs disks. Raises NotPossibleError."""
        if not self.experiment.needs_disks:
            return
        part = self.experiment.cluster
        roles = {"controller": part.controllers, "leader": part.leaders, "follower": part.followers}
        for role, count in roles.items():
            for number in range(1, count + 1):
                home = self.directory / "cluster" / f"{role}-{number}"
                second = ["data-2"] if self.experiment.has(FailedLogDir) and role != "controller" else []
                for name in ("data", *second):
                    disk.mount(home / name)
                    self.mounted.append(home / name)

    async def _under_load(
        self, cluster: TargetCluster, clients: RunClients, observer: Observer, injector: Injector
    ) -> dict[int, int]:
        """Run all phases that need clients, from warm-up to the final read; return the end offsets by partition."""
        part = self.experiment.workload
        workload = Workload(clients, part, self.seed)
        async with workload, asyncio.TaskGroup() as group:
            watching = [group.create_task(observer.run())]
            if part.probes:
                brokers = [node for node in cluster.nodes() if is_broker(node)]
                watching += [group.create_task(observer.probe(node, injector.starts)) for node in brokers]
            await self._warm_up(workload, observer)
            self.recorder.add(PhaseBegan(self.recorder.now, Phase.FAULTS))
            if workload.members is not None:
                workload.members.start_churning()
            await self._faults(injector, observer, workload)
            if workload.members is not None:
                await workload.members.stop_churning()
            self.recorder.add(PhaseBegan(self.recorder.now, Phase.RECOVERY))
            await injector.undo_all()
            await self._wait_in_sync(observer)
            workload.check()
            self.on_progress("final read", 0.0, self.recorder)
            await workload.stop_producing()
            self.recorder.add(PhaseBegan(self.recorder.now, Phase.FINAL))
            ends = await dumps.final_read(clients, part.partitions, FINAL_TIMEOUT_S)
            await workload.catch_up(ends, FINAL_TIMEOUT_S)
            if workload.members is not None:
                await workload.members.close()
                await workload.members.record_end()
            await observer.poll()
            dumps.record_ends(self.recorder, ends, observer.partitions)
            for task in watching:
                task.cancel()
        return ends

    async def _warm_up(self, workload: Workload, observer: Observer) -> None:
        """Wait until every partition has been written to and read by every consumer, and all replicas are in sync.
        Raises ChaosError after 120 s.
        """
        deadline = asyncio.get_running_loop().time() + WARM_UP_TIMEOUT_S
        partitions = range(self.experiment.workload.partitions)
        while not (
            all(workload.acknowledged.get(partition) for partition in partitions)
            and all(mine.get(partition) for mine in workload.positions.values() for partition in partitions)
            and not observer.out_of_sync()
        ):
            workload.check()
            if asyncio.get_running_loop().time() > deadline:
                reasons = observer.out_of_sync() or ["the workload makes no progress"]
                raise ChaosError(f"no steady state after {WARM_UP_TIMEOUT_S:g} s: {'; '.join(reasons)}")
            self.on_progress("warming up", 0.0, self.recorder)
            await asyncio.sleep(TICK_S)

    async def _faults(self, injector: Injector, observer: Observer, workload: Workload) -> None:
        loop = asyncio.get_running_loop()
        begin, duration_s = loop.time(), self.experiment.duration_s
        async with asyncio.TaskGroup() as group:
            timed: list[tuple[Fault, asyncio.Task[float]]] = []
            for fault in sorted(self.experiment.faults, key=lambda fault: fault.at_s):
                earlier = [(other, task) for other, task in timed if other.at_s + other.for_s <= fault.at_s]
                timed.append((fault, group.create_task(self._timed(injector, fault, earlier))))
            if self.experiment.random is not None:
                group.create_task(self._by_chance(injector, observer))
            while (passed := loop.time() - begin) < duration_s + self.late_s or self.to_come:
                self.on_progress("faults", min(passed / duration_s, 1.0), self.recorder)
                workload.check()
                await asyncio.sleep(TICK_S)
            injector.stop.set()

    async def _timed(
        self, injector: Injector, fault: Fault, earlier: Sequence[tuple[Fault, asyncio.Task[float]]]
    ) -> float:
        """Run one fault at its scheduled time; return the event loop's time at its end.

        `earlier` are the faults that, according to the file, end before this one starts. If they end late on a busy
        machine, this fault starts later too, and the run becomes longer.
        """
        loop = asyncio.get_running_loop()
        due = planned = loop.time() + fault.at_s
        for before, task in earlier:
            due = max(due, await task + fault.at_s - before.at_s - before.for_s)
        self.late_s = max(self.late_s, due - planned)
        await asyncio.sleep(due - loop.time())
        self.to_come -= 1
        await injector.run(fault, fault.for_s)
        return loop.time()

    async def _by_chance(self, injector: Injector, observer: Observer) -> None:
        part = self.experiment.random
        assert part is not None
        for pause_s, fault, for_s in part.plan(self.seed):
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await injector.stop.wait()
            if injector.stop.is_set():
                return
            await injector.run(fault, for_s)
            await self._wait_in_sync(observer, injector.stop)

    async def _wait_in_sync(self, observer: Observer, stop: asyncio.Event | None = None) -> None:
        """Wait until all replicas are in sync or `stop` is set. Records NotRecovered after `recovered_within_s`."""
        loop = asyncio.get_running_loop()
        begin, limit_s = loop.time(), self.experiment.steady_state.recovered_within_s
        await observer.poll()
        while reasons := observer.out_of_sync():
            if stop is not None and stop.is_set():
                return
            passed = loop.time() - begin
            if passed > limit_s:
                self.recorder.add(NotRecovered(self.recorder.now, f"after {limit_s:g} s: {'; '.join(reasons)}"))
                return
            if stop is None:
                self.on_progress("recovering", passed / limit_s, self.recorder)
            await asyncio.sleep(TICK_S)
