"""A mesh of node processes whose controllers reach each other, and brokers them, by links that can be cut.

Unlike `LocalCluster` each node has a `controller.quorum.voters` of its own, which names the links' ports, a node that
ends by itself leaves its exit code and its last lines, and folders may be changed between two starts. Nodes stop with
this process (`--parent-pipe`). For one thread; links and clients have an event loop on another, which `run` uses.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from bench.harness import BenchError
from kipmesh.client.admin import quorum
from kipmesh.client.sync import Portal
from kipmesh.client.types import QuorumDescription
from kipmesh.cluster import ports, processes, settings
from kipmesh.cluster.layout import Role
from kipmesh.cluster.processes import ProcessState
from kipmesh_chaos.links import Links, Pair

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
WAIT_TIMEOUT_S = 60.0
CLUSTER_ID = "quorum-of-processes"
FIRST_CONTROLLER_ID = 1001
METADATA = "__cluster_metadata-0"
_TAIL_LINES = 12

T = TypeVar("T")


class QuorumError(BenchError):
    """A node or the quorum did not do what it should have; the message has the end of the node's log."""


@dataclass(slots=True)
class QuorumNode:
    """One node; its process is None while it does not run."""

    name: str
    node_id: int
    grpc: str
    http: str
    home: Path
    process: subprocess.Popen[bytes] | None = None
    identity: str | None = None

    @property
    def is_controller(self) -> bool:
        """Whether it is a voter."""
        return self.node_id >= FIRST_CONTROLLER_ID

    @property
    def data(self) -> Path:
        """Its data folder."""
        return self.home / "data"

    @property
    def metadata(self) -> Path:
        """The folder of its replica of the metadata log."""
        return self.data / METADATA

    @property
    def log(self) -> Path:
        """What it wrote to its standard output and error, of all its runs."""
        return self.home / "node.log"

    def tail(self) -> str:
        """The end of that, indented."""
        return "\n".join(f"  {line}" for line in processes.log_tail(self.log, 0, lines=_TAIL_LINES))


def wait_for(condition: Callable[[], bool], what: Callable[[], str] | str, timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Until the condition holds; QuorumError when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise QuorumError(f"no {what if isinstance(what, str) else what()} after {timeout_s:g} s")
        time.sleep(processes.POLL_INTERVAL_S)


class QuorumCluster:
    """See the module. `with QuorumCluster(...) as mesh:` starts all nodes, and leaves no process behind."""

    def __init__(
        self, folder: Path, *, controllers: int = 3, brokers: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        """`config` holds keys of controllers and brokers: each goes to those that know it."""
        settings.check_keys(config or {})
        self.folder = folder
        self.config = dict(config or {})
        self.nodes: dict[str, QuorumNode] = {}
        self.portal = Portal("quorum-mesh")
        self.links = self.run(_make_links())
        self._pipe = os.pipe()
        self._ports = ports.PortReservation()
        for number in range(1, controllers + 1):
            self._add(f"controller-{number}", FIRST_CONTROLLER_ID + number - 1)
        for number in range(1, brokers + 1):
            self._add(f"broker-{number}", number)

    def _add(self, name: str, node_id: int) -> QuorumNode:
        grpc, http = (f"{ports.HOST}:{port}" for port in self._ports.choose(2))
        node = self.nodes[name] = QuorumNode(name, node_id, grpc, http, self.folder / name)
        return node

    def __enter__(self) -> Self:
        try:
            self.start(*self.nodes)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the mesh's event loop: for clients of the nodes."""
        return self.portal.call(work)

    # -- who there is

    @property
    def controllers(self) -> list[QuorumNode]:
        """The voters."""
        return [node for node in self.nodes.values() if node.is_controller]

    @property
    def brokers(self) -> list[QuorumNode]:
        """The observers."""
        return [node for node in self.nodes.values() if not node.is_controller]

    @property
    def bootstrap(self) -> str:
        """All brokers."""
        return ",".join(node.grpc for node in self.brokers)

    def is_running(self, name: str) -> bool:
        """Whether its process is there, held or not."""
        return self._state(self.nodes[name]) is not ProcessState.GONE

    def describe(self, timeout_s: float = WAIT_TIMEOUT_S) -> QuorumDescription:
        """The quorum as its leader sees it, asked of the controllers themselves and by no link."""
        addresses = [node.grpc for node in self.controllers]
        return self.run(quorum.describe_quorum(addresses, timeout_s=timeout_s))

    def active(self) -> QuorumNode:
        """The active controller; QuorumError when there is none in time."""
        found = self.describe()
        if found.leader_id < 0:
            raise QuorumError(f"no leader within {WAIT_TIMEOUT_S:g} s")
        return next(node for node in self.controllers if node.node_id == found.leader_id)

    def followers(self) -> list[QuorumNode]:
        """The controllers that run and are not active."""
        active = self.active()
        return [node for node in self.controllers if node is not active and self.is_running(node.name)]

    def wait_caught_up(self, names: Iterable[str] | None = None) -> QuorumDescription:
        """Until the leader has no replica that lags, of these or of all that run; what it then describes."""
        wanted = {
            self.nodes[name].node_id for name in (names or [name for name in self.nodes if self.is_running(name)])
        }
        found = self.describe()

        def caught_up() -> bool:
            nonlocal found
            found = self.describe()
            replicas = {each.replica_id: each.log_end_offset for each in (*found.voters, *found.observers)}
            end = max(replicas.values(), default=-1)
            return found.high_watermark == end and all(replicas.get(node_id) == end for node_id in wanted)

        wait_for(caught_up, lambda: f"quorum that is caught up: {found}")
        return found

    # -- processes

    def add_broker(self, node_id: int | None = None) -> QuorumNode:
        """One more broker, which is not started yet; its id is the next one, or this."""
        number = len(self.brokers) + 1 if node_id is None else node_id
        return self._add(f"broker-{number}", number)

    def start(self, *names: str, wait: bool = True) -> None:
        """Start nodes, all at once; with `wait` return when all are ready."""
        for name in names:
            self._spawn(self.nodes[name])
        if wait:
            self.wait_ready(*names)

    def wait_ready(self, *names: str) -> None:
        """Until these are ready; QuorumError when one ends or time is over."""

        for node in [self.nodes[name] for name in names]:
            self._wait_ready(node)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        self._end(self.nodes[name], signal.SIGKILL)

    def stop(self, name: str) -> int:
        """SIGTERM; gives the exit code."""
        return self._end(self.nodes[name], signal.SIGTERM)

    def pause(self, name: str) -> None:
        """SIGSTOP, and wait until it is held."""
        node = self.nodes[name]
        self._signal(node, signal.SIGSTOP)
        wait_for(lambda: self._state(node) is ProcessState.PAUSED, f"held {name}")

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self._signal(self.nodes[name], signal.SIGCONT)

    def wait_exit(self, name: str) -> int:
        """The exit code of a node that ends by itself."""
        process = self.nodes[name].process
        if process is None:
            raise QuorumError(f"{name} was not started")
        try:
            return process.wait(START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise QuorumError(f"{name} did not end:\n{self.nodes[name].tail()}") from None

    # -- the network

    def pairs(self, name: str, *, to_brokers: bool = True) -> list[Pair]:
        """(name, other) for each other node that has a link with this controller."""
        others = [*self.controllers, *(self.brokers if to_brokers else ())]
        return [(name, other.name) for other in others if other.name != name]

    def isolate(self, name: str, *, sends: bool = False, hears: bool = False, from_brokers: bool = True) -> None:
        """Cut a controller off from the others: what it still `sends` and `hears` is said, else both are cut."""
        mine = self.pairs(name, to_brokers=from_brokers)
        back = [(other, me) for me, other in mine]
        self.run(_do(lambda: self.links.cut([*([] if sends else mine), *([] if hears else back)])))

    def heal(self) -> None:
        """Nothing is cut any more."""
        self.run(_do(self.links.heal))

    # -- inside

    def _wait_ready(self, node: QuorumNode) -> None:
        wait_for(lambda: self._is_ready(node), lambda: f"ready {node.name}:\n{node.tail()}", START_TIMEOUT_S)

    def _is_ready(self, node: QuorumNode) -> bool:
        if not self.is_running(node.name):
            raise QuorumError(f"{node.name} ended while it started:\n{node.tail()}")
        return processes.probe(node.http, "/readyz") == 200

    def _voters(self, node: QuorumNode) -> str:
        def address(voter: QuorumNode) -> str:
            return voter.grpc if voter is node else self.run(self.links.address(node.name, voter.name, voter.grpc))

        return ",".join(f"{voter.node_id}@{address(voter)}" for voter in self.controllers)

    def _properties(self, node: QuorumNode) -> dict[str, str]:
        values = {
            "node.id": str(node.node_id),
            "cluster.id": CLUSTER_ID,
            "controller.quorum.voters": self._voters(node),
            "listeners": f"MESH://{node.grpc}",
            "http.listener": node.http,
            **settings.for_role(self.config, Role.CONTROLLER if node.is_controller else Role.LEADER),
        }
        values["metadata.log.dir" if node.is_controller else "log.dirs"] = str(node.data)
        return values

    def _spawn(self, node: QuorumNode) -> None:
        if self.is_running(node.name):
            raise QuorumError(f"{node.name} runs already")
        node.home.mkdir(parents=True, exist_ok=True)
        file = node.home / "node.properties"
        file.write_text("".join(f"{key}={value}\n" for key, value in self._properties(node).items()))
        module = "kipmesh_metadata_controller" if node.is_controller else "kipmesh_leader"
        command = [sys.executable, "-P", "-m", module, "--config-file", str(file), "--parent-pipe"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KIPMESH_")}
        with node.log.open("ab") as output:
            node.process = subprocess.Popen(
                command,
                cwd=node.home,
                env=environment,
                stdin=self._pipe[0],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        node.identity = processes.identity(node.process.pid)

    def _state(self, node: QuorumNode) -> ProcessState:
        return processes.state_of(node.process.pid if node.process else None, node.identity)

    def _signal(self, node: QuorumNode, number: signal.Signals) -> None:
        if node.process is None or not processes.send(node.process.pid, node.identity, number):
            raise QuorumError(f"{node.name} does not run:\n{node.tail()}")

    def _end(self, node: QuorumNode, number: signal.Signals) -> int:
        self._signal(node, number)
        assert node.process is not None
        try:
            return node.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise QuorumError(f"{node.name} did not end:\n{node.tail()}") from None

    def close(self) -> None:
        """Kill what runs, end the links; idempotent."""
        running = [node for node in self.nodes.values() if self._state(node) is not ProcessState.GONE]
        for node in running:
            assert node.process is not None
            processes.send(node.process.pid, node.identity, signal.SIGKILL)
        for node in self.nodes.values():
            if node.process is not None:
                node.process.wait(STOP_TIMEOUT_S)
        if self._pipe[0] >= 0:
            self.run(self.links.close())
            self.portal.close()
        self._ports.close()
        pipe, self._pipe = self._pipe, (-1, -1)
        for end in pipe:
            if end >= 0:
                os.close(end)


async def _make_links() -> Links:
    return Links()


async def _do(what: Callable[[], None]) -> None:
    what()
