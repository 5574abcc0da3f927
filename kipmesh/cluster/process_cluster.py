"""A local cluster of real processes: what `kipmesh local` and `LocalCluster(mode="processes")` do.

One folder a node: `node.properties`, `data/`, `node.log`. Rules:
- Every command holds `.lock` of the cluster's folder, so two of them never work on one folder at the same time.
- `up` starts what is not running, keeps ports across restarts (new ones when taken) and returns when all are ready.
  A node that dies on the way is an error with its last log lines, and what this `up` started is stopped again.
- No process runs that cluster.json does not name: one that is started waits at a gate until it is written down, and
  ends there if its starter is gone. An interrupted `up` or `start` stops what it had started.
- An owned cluster (a context manager's) gives its nodes a pipe as standard input: they stop when their owner is gone.
"""

from __future__ import annotations

import base64
import fcntl
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from kipmesh.cluster import certificates, ports, processes
from kipmesh.cluster.layout import (
    DEFAULT_COUNTS,
    ClusterError,
    ClusterState,
    Counts,
    NodeInfo,
    Role,
    plan,
    properties,
    read_state,
)
from kipmesh.cluster.processes import ProcessState
from kipmesh.cluster.signals import deferred_signals

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
KILL_TIMEOUT_S = 15.0
PAUSE_TIMEOUT_S = 15.0
LOCK_TIMEOUT_S = 120.0
REAP_TIMEOUT_S = 5.0
LOG_TAIL_LINES = 15
LOG_BYTES_MAX = 64 << 20
"""A larger node.log becomes node.log.1 when its node starts."""
CONFIG_PREFIX = "KIPMESH_CONFIG_"
GATE = ("/bin/sh", "-c", 'read -r _ || exit 1; exec "$@" </dev/null', "kipmesh-gate")
"""Runs what follows, in the same process, after a line came in by the pipe; ends when its other end is closed."""

OnEvent = Callable[[str, str], None]
"""Called with a node's name and what it is now: starting, ready, stopping, stopped."""


class NodeHook(Protocol):
    """What somebody who tests a cluster changes in how its nodes start; called in the thread of the command."""

    def properties(self, state: ClusterState, node: NodeInfo) -> Mapping[str, str]:
        """Configuration that goes before what the cluster itself sets, addresses included."""

    def command(self, node: NodeInfo, command: list[str]) -> list[str]:
        """The command line to use instead of the node's."""


class NodeStatus(NamedTuple):
    """A node and how it is: ready, starting, paused or stopped."""

    node: NodeInfo
    state: str


class _Started(NamedTuple):
    node: NodeInfo
    log_offset: int


def _ignore(_name: str, _event: str) -> None:
    pass


class ProcessCluster:
    """The cluster of one folder; each method is one command."""

    def __init__(
        self,
        folder: Path,
        *,
        owned: bool = False,
        defaults: Counts = DEFAULT_COUNTS,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        on_event: OnEvent | None = None,
        hook: NodeHook | None = None,
    ) -> None:
        self.folder = folder.absolute()
        self._hook = hook
        self._defaults = defaults
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._on_event = on_event or _ignore
        self._children: list[subprocess.Popen[bytes]] = []
        self._pipe = os.pipe() if owned else None
        self._ports = ports.Held()  # by who owns a cluster as long as it is up, else until its nodes are

    # --- what commands do

    def state(self) -> ClusterState:
        """The cluster as it is written down; raises ClusterError when there is none."""
        state = read_state(self.folder)
        if state is None:
            raise ClusterError(f"there is no cluster in {self.folder} (no cluster.json): start one with `local up`")
        return state

    def up(self, counts: Counts, config: Mapping[str, str], *, tls: bool | None = None) -> bool:
        """Start what is not running; False when everything ran already. Nodes that run keep their configuration.

        `tls` is for a new cluster; None leaves it as it is.
        """
        if not self.folder.exists():
            self._check_new(counts, config, tls)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ClusterError(f"cannot make the folder {self.folder}: {error.strerror}") from None
        with self._locked():
            known = read_state(self.folder)
            running = {node.name for node in known.nodes if processes.is_alive(node)} if known is not None else set()
            if known is not None:
                known.check_tls(tls)
            if known is not None and running:
                known.check_unchanged(config)
            if known is not None and running and len(running) == len(known.nodes):
                plan(known.nodes, counts, self.folder)  # refuses what it cannot become
                if all(counts.of(role) in (None, _count(known, role)) for role in Role):
                    return False
            state = self._planned(known, counts, config, tls)
            for attempt in (1, 2):
                state = self._with_ports(state, running, fresh=attempt > 1)
                try:
                    self._start_all(state, [node for node in state.nodes if node.name not in running])
                except ClusterError as error:
                    if attempt == 1 and not running and "cannot listen" in str(error):
                        continue  # somebody took a port between our look and the node's
                    raise
                break
            return True

    def down(self) -> bool:
        """Stop everything: clients of the cluster first, controllers last; False when nothing ran."""
        with self._locked():
            state = self.state()
            alive = [node for node in state.nodes if processes.is_alive(node)]
            for node in alive:  # brokers hand over to an active controller, which may be a paused one
                processes.send(node.pid, node.process, signal.SIGCONT)
            self._stop_nodes([node for node in alive if node.role is not Role.CONTROLLER])
            self._stop_nodes([node for node in alive if node.role is Role.CONTROLLER])
            self._write_stopped(replace(state, nodes=tuple(processes.without_process(node) for node in state.nodes)))
            return bool(alive)

    def start(self, name: str, *, wait: bool = True) -> NodeStatus:
        """Start one node that does not run, and wait until it is ready, if wanted.

        A controller is not waited for while too few of them run to elect one: the next one is to be started.
        """
        with self._locked():
            state = self.state()
            node = state.node(name)
            if processes.is_alive(node):
                raise ClusterError(f"{name} runs already (pid {node.pid})")
            running = {other.name for other in state.nodes if other.name != name}
            state = self._with_ports(state, running, fresh=False)
            up_to = processes.is_ready if processes.may_become_ready(state, node) else processes.is_listening
            self._start_all(state, [state.node(name)], up_to if wait else processes.is_alive)
            started = self.state().node(name)
            return NodeStatus(started, processes.status_of(started))

    def kill(self, name: str) -> None:
        """SIGKILL one node."""
        self._end(name, signal.SIGKILL)

    def stop(self, name: str) -> None:
        """SIGTERM one node and wait until it is gone; SIGKILL after the time limit."""
        self._end(name, signal.SIGTERM)

    def pause(self, name: str) -> None:
        """SIGSTOP one node, and wait until it is held: it keeps its connections and answers nothing."""
        self._signal(name, signal.SIGSTOP)
        node = self.state().node(name)
        deadline = time.monotonic() + PAUSE_TIMEOUT_S
        while processes.state_of(node.pid, node.process) is ProcessState.RUNNING:
            if time.monotonic() > deadline:
                raise ClusterError(f"{name} still runs {PAUSE_TIMEOUT_S:g} s after it was told to pause")
            time.sleep(processes.POLL_INTERVAL_S)

    def resume(self, name: str) -> None:
        """SIGCONT one node."""
        node = self.state().node(name)
        if processes.state_of(node.pid, node.process) is ProcessState.RUNNING:
            raise ClusterError(f"{name} is not paused")
        self._signal(name, signal.SIGCONT)

    def status(self) -> list[NodeStatus]:
        """How each node is; asks all at the same time."""
        nodes = self.state().nodes
        with ThreadPoolExecutor(max_workers=min(len(nodes), 16)) as pool:
            return [
                NodeStatus(node, how) for node, how in zip(nodes, pool.map(processes.status_of, nodes), strict=True)
            ]

    def close(self) -> None:
        """Give up the pipe of an owned cluster: its nodes stop by themselves if they still run."""
        self._ports.close()
        if self._pipe is not None:
            for end in self._pipe:
                os.close(end)
            self._pipe = None

    # --- starting

    def _check_new(self, counts: Counts, config: Mapping[str, str], tls: bool | None) -> None:
        """Raises what a new cluster would be refused for, before there is a folder."""
        state = self._planned(None, counts, config, tls)
        addresses = (f"{ports.HOST}:{number}" for number in range(1, 3 * len(state.nodes) + 1))
        placed = [node.with_addresses(addresses.__next__, has_http=True) for node in state.nodes]
        state = replace(state, nodes=tuple(placed))
        for node in state.nodes:
            _properties_text(state, node, {})

    def _planned(
        self, known: ClusterState | None, counts: Counts, config: Mapping[str, str], tls: bool | None
    ) -> ClusterState:
        merged = {**(known.config if known is not None else {}), **config}
        nodes = plan(known.nodes if known is not None else (), counts, self.folder, self._defaults)
        has_tls = bool(tls) if known is None else known.has_tls
        # A cluster's folder may have been moved since the last time.
        nodes = tuple(node.at(self.folder, has_tls=has_tls) for node in nodes)
        return ClusterState(known.cluster_id if known is not None else _new_cluster_id(), merged, nodes)

    def _with_ports(self, state: ClusterState, running: set[str], *, fresh: bool) -> ClusterState:
        """Every node that does not run gets ports that are free now, its old ones if possible."""
        used = (one for node in state.nodes for one in (node.grpc, node.kafka, node.http))
        taken = {ports.port_of(one) for one in used if one is not None}
        others_run = any(node.name in running and processes.is_alive(node) for node in state.nodes)
        for node in state.nodes:
            if node.name in running:
                continue
            before = (None, None, None) if fresh else (node.grpc, node.kafka, node.http)
            grpc, kafka, http = (
                one if one is not None and ports.is_free(ports.port_of(one)) else None for one in before
            )
            if node.role is Role.CONTROLLER and node.grpc is not None and grpc is None and others_run:
                raise ClusterError(
                    f"{node.name}: {node.grpc} is in use by another program, and the running nodes know it by that "
                    "address: free it, or take everything down and up again"
                )
            if node.role is not Role.CONSUMER:
                grpc = grpc or self._new_address(taken)
            if node.role.is_broker:
                kafka = kafka or self._new_address(taken)
            http = http or self._new_address(taken)
            state = state.with_node(replace(node, grpc=grpc, kafka=kafka, http=http))
        return state

    def _new_address(self, taken: set[int]) -> str:
        """One at a port that is not taken; it is then."""
        (port,) = self._ports.choose(1, taken)
        taken.add(port)
        return f"{ports.HOST}:{port}"

    def _start_all(
        self, state: ClusterState, nodes: Sequence[NodeInfo], is_up: Callable[[NodeInfo], bool] | None = None
    ) -> None:
        certificates.ensure(self.folder, state.nodes)
        hooked = {node.name: self._hook.properties(state, node) if self._hook is not None else {} for node in nodes}
        files = {node.name: _properties_text(state, node, hooked[node.name]) for node in nodes}
        started: list[_Started] = []
        try:
            with deferred_signals(), _gate() as (gate, opening):
                for node in nodes:
                    one = self._spawn(node, files[node.name], gate)
                    started.append(one)
                    state = state.with_node(one.node)
                state.write(self.folder)
                os.write(opening, b"\n" * len(started))
            for one in started:
                self._on_event(one.node.name, "starting")
            self._wait_for(started, is_up or processes.is_ready)
        except BaseException:
            with deferred_signals():
                for one in started:
                    processes.send(one.node.pid, one.node.process, signal.SIGKILL)
                processes.wait_gone([(one.node.pid, one.node.process) for one in started], KILL_TIMEOUT_S)
                for one in started:
                    state = state.with_node(processes.without_process(one.node))
                self._write_stopped(state)
            raise

    def _spawn(self, node: NodeInfo, properties_text: str, gate: int) -> _Started:
        home = Path(node.dir)
        home.mkdir(parents=True, exist_ok=True)
        file = home / "node.properties"
        file.write_text(properties_text)
        log = home / "node.log"
        with suppress(FileNotFoundError):
            if log.stat().st_size > LOG_BYTES_MAX:
                log.replace(log.with_suffix(".log.1"))
        command = [sys.executable, "-P", "-m", node.role.module, "--config-file", str(file)]
        if self._pipe is not None:
            command.append("--parent-pipe")
        if self._hook is not None:
            command = self._hook.command(node, command)
        if self._pipe is None:  # the nodes of an owned cluster end with their owner anyway
            command = [*GATE, *command]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(CONFIG_PREFIX)}
        with log.open("ab") as output:
            offset = output.tell()
            child = subprocess.Popen(  # noqa: S603 - our own module
                command,
                cwd=home,
                env=environment,
                stdin=self._pipe[0] if self._pipe is not None else gate,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children.append(child)
        return _Started(replace(node, pid=child.pid, process=processes.identity(child.pid)), offset)

    def _wait_for(self, started: Sequence[_Started], is_up: Callable[[NodeInfo], bool]) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        waiting = list(started)
        while waiting:
            for one in list(waiting):
                node = one.node
                if not processes.is_alive(node):
                    raise ClusterError(f"{node.name} ended while it started{_tail(one)}")
                if is_up(node):
                    waiting.remove(one)
                    self._on_event(node.name, "ready")
            if waiting and time.monotonic() > deadline:
                names = ", ".join(one.node.name for one in waiting)
                raise ClusterError(f"not ready after {self._start_timeout_s:g} s: {names}{_tail(waiting[0])}")
            if waiting:
                time.sleep(processes.POLL_INTERVAL_S)

    # --- stopping

    def _stop_nodes(self, nodes: Sequence[NodeInfo]) -> None:
        for node in nodes:
            self._on_event(node.name, "stopping")
            processes.send(node.pid, node.process, signal.SIGTERM)
            processes.send(node.pid, node.process, signal.SIGCONT)  # a paused one cannot stop
        if not processes.wait_gone([(node.pid, node.process) for node in nodes], self._stop_timeout_s):
            for node in nodes:
                processes.send(node.pid, node.process, signal.SIGKILL)
            processes.wait_gone([(node.pid, node.process) for node in nodes], KILL_TIMEOUT_S)
        for node in nodes:
            self._on_event(node.name, "stopped")

    def _end(self, name: str, number: signal.Signals) -> None:
        with self._locked():
            state = self.state()
            node = state.node(name)
            if not processes.is_alive(node):
                raise ClusterError(f"{name} does not run")
            if number is signal.SIGKILL:
                processes.send(node.pid, node.process, number)
                processes.wait_gone([(node.pid, node.process)], KILL_TIMEOUT_S)
                self._on_event(name, "stopped")
            else:
                self._stop_nodes([node])
            self._write_stopped(state.with_node(processes.without_process(node)))

    def _write_stopped(self, state: ClusterState) -> None:
        """Nodes are stopped also where that cannot be written, as on a full disk: a pid alone is no process."""
        with suppress(ClusterError):
            state.write(self.folder)
        self._reap()

    def _signal(self, name: str, number: signal.Signals) -> None:
        node = self.state().node(name)
        if not processes.send(node.pid, node.process, number):
            raise ClusterError(f"{name} does not run")

    def _reap(self) -> None:
        """Collect the exit codes of children that ended."""
        for child in self._children:
            if processes.identity(child.pid) is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(REAP_TIMEOUT_S)
        self._children = [child for child in self._children if child.returncode is None]

    def detach(self) -> None:
        """Forget the children: they run on after this process."""
        for child in self._children:
            child.returncode = 0  # what Popen's finalizer would warn of
        self._children = []

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self.folder.is_dir():
            what = "is not a folder" if self.folder.exists() else "does not exist"
            raise ClusterError(f"the folder of the cluster, {self.folder}, {what}")
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        try:
            handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ClusterError(f"cannot write in the folder {self.folder}: {error.strerror}") from None
        try:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > deadline:
                    raise ClusterError(f"another command has been at work in {self.folder} for {LOCK_TIMEOUT_S:g} s")
                time.sleep(processes.POLL_INTERVAL_S)
            yield
        finally:
            os.close(handle)
            if self._pipe is None:
                self._ports.close()


def _properties_text(state: ClusterState, node: NodeInfo, hooked: Mapping[str, str]) -> str:
    if state.config:
        from kipmesh.cluster import settings  # pydantic: only when there is something to check

        settings.check_keys(state.config)
        settings.parsed(state, node)
        mine = settings.for_role(state.config, node.role)
    else:
        mine = {}
    lines = [f"{key}={value}" for key, value in ({**properties(state, node, mine), **hooked}).items()]
    return f"# {node.name}: written by each `kipmesh local up` and `start`\n" + "\n".join(lines) + "\n"


def _new_cluster_id() -> str:
    """As Kafka's: 16 random bytes in URL-safe base 64, without a leading dash."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        if not text.startswith("-"):
            return text


def _count(state: ClusterState, role: Role) -> int:
    return sum(node.role is role for node in state.nodes)


@contextmanager
def _gate() -> Iterator[tuple[int, int]]:
    """The two ends of a pipe that started processes wait at."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def _tail(started: _Started) -> str:
    log = Path(started.node.log or "")
    lines = processes.log_tail(log, started.log_offset, lines=LOG_TAIL_LINES)
    if not lines:
        return f" ({log} is empty)"
    return f"; the end of {log}:\n" + "\n".join(f"  {line}" for line in lines)
