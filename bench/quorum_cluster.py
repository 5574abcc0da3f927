"""A cluster of node processes with three controllers or more, whose connections can be cut.

Unlike `LocalCluster`, each node connects to the controllers through its own links (`kipmesh_chaos.links`): its
`controller.quorum.voters` names the ports of the links. Exit codes and the ends of logs are available, and tests may
change directories between two starts of a node. Nodes stop with this process (`--parent-pipe`). Use one thread; links
and clients have an event loop on another thread, which `run` uses.
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
EXIT_TIMEOUT_S = 60.0
WAIT_TIMEOUT_S = 60.0
CLUSTER_ID = "quorum-of-processes"
FIRST_CONTROLLER_ID = 1001
METADATA = "__cluster_metadata-0"
_TAIL_LINES = 12

T = TypeVar("T")


class QuorumError(BenchError):
    """A node or the quorum failed or did not reach a state in time. The message may include the last lines of a node's
    log.
    """


@dataclass(slots=True)
class QuorumNode:
    """One node. `grpc` and `http` are host:port. `process` is None before its first start. `identity` distinguishes the
    process from a later one with the same pid.
    """

    name: str
    node_id: int
    grpc: str
    http: str
    home: Path
    process: subprocess.Popen[bytes] | None = None
    identity: str | None = None

    @property
    def is_controller(self) -> bool:
        """Whether the node is a controller, and thus a voter."""
        return self.node_id >= FIRST_CONTROLLER_ID

    @property
    def data(self) -> Path:
        """Data directory of the node."""
        return self.home / "data"

    @property
    def metadata(self) -> Path:
        """Directory of the node's replica of the metadata log."""
        return self.data / METADATA

    @property
    def log(self) -> Path:
        """File with the standard output and error of all runs of the node."""
        return self.home / "node.log"

    def tail(self) -> str:
        """Return the last 12 lines of the node's log, indented."""
        return "\n".join(f"  {line}" for line in processes.log_tail(self.log, 0, lines=_TAIL_LINES))


def wait_for(condition: Callable[[], bool], name: Callable[[], str] | str, timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Poll a condition until it holds. Raises QuorumError with the `name` of the condition after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise QuorumError(f"no {name if isinstance(name, str) else name()} after {timeout_s:g} s")
        time.sleep(processes.POLL_INTERVAL_S)


class QuorumCluster:
    """A cluster of processes with links. A `with` block starts all nodes and waits until they are ready; its end kills
    them.
    """

    def __init__(
        self, directory: Path, *, controllers: int = 3, brokers: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        """Choose addresses without starting any node.

        `config` has keys of controllers and of brokers. Each node gets those of its role. Raises InvalidConfigError for
        an unknown key.
        """
        settings.check_keys(config or {})
        self.directory = directory
        self.config = dict(config or {})
        self.nodes: dict[str, QuorumNode] = {}
        self.portal = Portal("quorum-cluster")
        self.links = self.run(_make_links())
        self._pipe = os.pipe()
        self._ports = ports.PortReservation()
        for number in range(1, controllers + 1):
            self._add(f"controller-{number}", FIRST_CONTROLLER_ID + number - 1)
        for number in range(1, brokers + 1):
            self._add(f"broker-{number}", number)

    def _add(self, name: str, node_id: int) -> QuorumNode:
        grpc, http = (f"{ports.HOST}:{port}" for port in self._ports.choose(2))
        node = self.nodes[name] = QuorumNode(name, node_id, grpc, http, self.directory / name)
        return node

    def __enter__(self) -> Self:
        try:
            self.start(*self.nodes)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of links and clients, and return its result or raise its error."""
        return self.portal.call(work)

    # -- members

    @property
    def controllers(self) -> list[QuorumNode]:
        """Controllers, in the order of their ids."""
        return [node for node in self.nodes.values() if node.is_controller]

    @property
    def brokers(self) -> list[QuorumNode]:
        """Brokers, in the order in which they were added."""
        return [node for node in self.nodes.values() if not node.is_controller]

    @property
    def bootstrap(self) -> str:
        """Bootstrap addresses of all brokers, separated by commas."""
        return ",".join(node.grpc for node in self.brokers)

    def is_running(self, name: str) -> bool:
        """Whether the node's process exists, paused or not."""
        return self._state(self.nodes[name]) is not ProcessState.GONE

    def describe(self, timeout_s: float = WAIT_TIMEOUT_S) -> QuorumDescription:
        """Describe the quorum by sending requests directly to the controllers, not through links. Raises KafkaError if
        none responds within `timeout_s`.
        """
        addresses = [node.grpc for node in self.controllers]
        return self.run(quorum.describe_quorum(addresses, timeout_s=timeout_s))

    def active(self) -> QuorumNode:
        """Return the active controller. Raises QuorumError if the quorum has no leader, or KafkaError if no controller
        responds within 60 s.
        """
        found = self.describe()
        if found.leader_id < 0:
            raise QuorumError(f"no leader within {WAIT_TIMEOUT_S:g} s")
        return next(node for node in self.controllers if node.node_id == found.leader_id)

    def followers(self) -> list[QuorumNode]:
        """Return the running controllers that are not active. Raises KafkaError, or QuorumError if no controller is
        active.
        """
        active = self.active()
        return [node for node in self.controllers if node is not active and self.is_running(node.name)]

    def wait_caught_up(self, names: Iterable[str] | None = None) -> QuorumDescription:
        """Wait until the named nodes (default: all running ones) have the whole metadata log and all of it is
        committed. Raises KafkaError, or QuorumError after 60 s.

        Returns the quorum's description at that time.
        """
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

        wait_for(caught_up, lambda: f"caught-up quorum: {found}")
        return found

    # -- processes

    def add_broker(self, node_id: int | None = None) -> QuorumNode:
        """Add a broker without starting it. Its id is `node_id`, or the next number."""
        number = len(self.brokers) + 1 if node_id is None else node_id
        return self._add(f"broker-{number}", number)

    def start(self, *names: str, wait: bool = True) -> None:
        """Start nodes in parallel and, with `wait`, wait until all are ready. Raises QuorumError if a node is running,
        ends or is not ready in time.
        """
        for name in names:
            self._spawn(self.nodes[name])
        if wait:
            self.wait_ready(*names)

    def wait_ready(self, *names: str) -> None:
        """Wait until the nodes are ready. Raises QuorumError if one exits or is not ready within 60 s."""
        for node in [self.nodes[name] for name in names]:
            self._wait_ready(node)

    def kill(self, name: str) -> None:
        """Send SIGKILL to a node and wait for it to exit. Raises QuorumError if it is not running or does not end
        within 60 s.
        """
        self._end(self.nodes[name], signal.SIGKILL)

    def stop(self, name: str) -> int:
        """Send SIGTERM to a node, wait for it to exit and return the exit code. Raises QuorumError if it is not running
        or does not end within 60 s.
        """
        return self._end(self.nodes[name], signal.SIGTERM)

    def pause(self, name: str) -> None:
        """Send SIGSTOP to a node and wait until it is stopped. Raises QuorumError."""
        node = self.nodes[name]
        self._signal(node, signal.SIGSTOP)
        wait_for(lambda: self._state(node) is ProcessState.PAUSED, f"paused {name}")

    def resume(self, name: str) -> None:
        """Send SIGCONT to a paused node. Raises QuorumError if it is not running."""
        self._signal(self.nodes[name], signal.SIGCONT)

    def wait_exit(self, name: str) -> int:
        """Wait until a node exits on its own, and return its exit code. Raises QuorumError after 60 s."""
        return self._wait_exit(self.nodes[name])

    # -- the network

    def pairs(self, name: str, *, to_brokers: bool = True) -> list[Pair]:
        """Return (name, other) for each other controller and, with `to_brokers`, for each broker."""
        others = [*self.controllers, *(self.brokers if to_brokers else ())]
        return [(name, other.name) for other in others if other.name != name]

    def isolate(self, name: str, *, sends: bool = False, receives: bool = False, from_brokers: bool = True) -> None:
        """Cut the links of a controller to the other controllers and, unless `from_brokers` is False, to the brokers.

        With `sends` or `receives`, that direction stays open.
        """
        outgoing = self.pairs(name, to_brokers=from_brokers)
        incoming = [(other, me) for me, other in outgoing]
        self.run(_call(lambda: self.links.cut([*([] if sends else outgoing), *([] if receives else incoming)])))

    def heal(self) -> None:
        """Restore all links and deliver the bytes that they held back."""
        self.run(_call(self.links.heal))

    # -- internals

    def _wait_ready(self, node: QuorumNode) -> None:
        wait_for(lambda: self._is_ready(node), lambda: f"ready {node.name}:\n{node.tail()}", START_TIMEOUT_S)

    def _is_ready(self, node: QuorumNode) -> bool:
        if not self.is_running(node.name):
            raise QuorumError(f"{node.name} exited before it was ready:\n{node.tail()}")
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
            raise QuorumError(f"{node.name} is already running")
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
            raise QuorumError(f"{node.name} is not running:\n{node.tail()}")

    def _end(self, node: QuorumNode, number: signal.Signals) -> int:
        self._signal(node, number)
        return self._wait_exit(node)

    def _wait_exit(self, node: QuorumNode) -> int:
        if node.process is None:
            raise QuorumError(f"{node.name} was not started")
        try:
            return node.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise QuorumError(f"{node.name} did not exit within {EXIT_TIMEOUT_S:g} s:\n{node.tail()}") from None

    def close(self) -> None:
        """Send SIGKILL to all nodes, wait for them to exit and close the links. Idempotent."""
        started = [(node.process, node.identity) for node in self.nodes.values() if node.process is not None]
        for process, identity in started:
            processes.send(process.pid, identity, signal.SIGKILL)
        for process, _ in started:
            process.wait(EXIT_TIMEOUT_S)
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


async def _call(function: Callable[[], None]) -> None:
    function()
