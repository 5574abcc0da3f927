"""A local cluster of processes: `kipmesh local` and `LocalCluster(mode="processes")`.

Each node has a directory with `node.properties`, `data/` and `node.log`.
- A command holds the lock file `.lock`, so that only one command works on a cluster at a time.
- `up` starts stopped nodes on their previous ports, or new ones if these are taken, and returns when all are ready. If
  a node exits, the error quotes its log, and the nodes that this `up` started are stopped.
- Every running process is in cluster.json: a new process waits at a gate until it is stored there, and exits if its
  starter dies. An interrupted `up` or `start` stops the nodes that it started.
- Nodes of an owned cluster (a context manager) have a pipe as standard input and stop when their owner dies.
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
"""Size above which node.log is renamed to node.log.1 when its node starts."""
CONFIG_PREFIX = "KIPMESH_CONFIG_"
GATE = ("/bin/sh", "-c", 'read -r _ || exit 1; exec "$@" </dev/null', "kipmesh-gate")
"""Prefix of a command that waits for a line on standard input before it runs. It exits if the pipe is closed."""

OnEvent = Callable[[str, str], None]
"""Called with a node's name and its new state: starting, ready, stopping or stopped."""


class NodeHook(Protocol):
    """Changes how nodes start, for fault tests. Called in the thread of the command."""

    def properties(self, state: ClusterState, node: NodeInfo) -> Mapping[str, str]:
        """Return settings of a node, which override those of the cluster and its addresses."""

    def command(self, node: NodeInfo, command: list[str]) -> list[str]:
        """Return the command line to run instead of `command`."""


class NodeStatus(NamedTuple):
    """A node and its state: "ready", "not ready" (but running), "paused" or "stopped"."""

    node: NodeInfo
    state: str


class _Started(NamedTuple):
    node: NodeInfo
    log_offset: int


def _ignore(_name: str, _event: str) -> None:
    pass


class ProcessCluster:
    """The cluster in one directory. Each public method except `close` and `detach` is one command.

    `directory` contains cluster.json and the nodes' directories. With `owned`, the nodes stop when this process dies.
    `defaults` are the counts of a new cluster. All nodes must be ready within `start_timeout_s`. A node that is being
    stopped receives SIGKILL `stop_timeout_s` after SIGTERM. `on_event` is called for each change of a node's state.
    `hook` changes how nodes start.

    All commands raise ClusterError if cluster.json is invalid or, except `up`, missing. `up`, `down`, `start`, `stop`
    and `kill` also raise it after waiting LOCK_TIMEOUT_S for another command.
    """

    def __init__(
        self,
        directory: Path,
        *,
        owned: bool = False,
        defaults: Counts = DEFAULT_COUNTS,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        on_event: OnEvent | None = None,
        hook: NodeHook | None = None,
    ) -> None:
        self.directory = directory.absolute()
        self._hook = hook
        self._defaults = defaults
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._on_event = on_event or _ignore
        self._children: list[subprocess.Popen[bytes]] = []
        self._pipe = os.pipe() if owned else None
        self._ports = ports.PortReservation()  # until `close` if owned, else until the command ends

    # --- commands

    def state(self) -> ClusterState:
        """Return the content of cluster.json. Raises ClusterError if it does not exist or is invalid."""
        state = read_state(self.directory)
        if state is None:
            raise ClusterError(f"no cluster in {self.directory} (no cluster.json); start one with: kipmesh local up")
        return state

    def up(self, counts: Counts, config: Mapping[str, str], *, tls: bool | None = None) -> bool:
        """Start the nodes that are not running, including those that `counts` adds, and wait until they are ready.

        Returns False if there were none. `config` is added to the stored configuration; `tls` applies to a new cluster,
        and None accepts the setting of an existing one.

        Raises InvalidConfigError for a bad setting. Raises ClusterError if `tls` differs from the existing cluster's
        setting, `config` would change while nodes are running, the counts are impossible, or a node exits or is not
        ready after `start_timeout_s`. In that case, the nodes that this call started are stopped.
        """
        if not self.directory.exists():
            self._check_new(counts, config, tls)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ClusterError(f"cannot create the directory {self.directory}: {error.strerror}") from None
        with self._locked():
            known = read_state(self.directory)
            running = {node.name for node in known.nodes if processes.is_alive(node)} if known is not None else set()
            if known is not None:
                known.check_tls(tls)
            if known is not None and running:
                known.check_unchanged(config)
            if known is not None and running and len(running) == len(known.nodes):
                plan(known.nodes, counts, self.directory)  # raises for impossible counts
                if all(counts.of(role) in (None, _count(known, role)) for role in Role):
                    return False
            state = self._planned(known, counts, config, tls)
            for attempt in (1, 2):
                state = self._with_ports(state, running, fresh=attempt > 1)
                try:
                    self._start_all(state, [node for node in state.nodes if node.name not in running])
                except ClusterError as error:
                    if attempt == 1 and not running and "cannot listen" in str(error):
                        continue  # another process took a port between our check and the node's start
                    raise
                break
            return True

    def down(self) -> bool:
        """Stop all nodes, controllers last, and kill those that are still running after `stop_timeout_s`.

        Returns whether any node was running or paused. Raises ClusterError as described in the class.
        """
        with self._locked():
            state = self.state()
            alive = [node for node in state.nodes if processes.is_alive(node)]
            for node in alive:  # resume paused nodes: brokers need an active controller for their shutdown
                processes.send(node.pid, node.process, signal.SIGCONT)
            self._stop_nodes([node for node in alive if node.role is not Role.CONTROLLER])
            self._stop_nodes([node for node in alive if node.role is Role.CONTROLLER])
            self._write_stopped(replace(state, nodes=tuple(processes.without_process(node) for node in state.nodes)))
            return bool(alive)

    def start(self, name: str, *, wait: bool = True) -> NodeStatus:
        """Start a stopped node, wait until it is ready if `wait`, and return its status.

        If too few controllers are running to elect a quorum leader, a controller only has to listen. Raises
        ClusterError if the node is unknown, is already running, exits, or is not ready after `start_timeout_s`.
        """
        with self._locked():
            state = self.state()
            node = state.node(name)
            if processes.is_alive(node):
                raise ClusterError(f"{name} is already running (pid {node.pid})")
            running = {other.name for other in state.nodes if other.name != name}
            state = self._with_ports(state, running, fresh=False)
            up_to = processes.is_ready if processes.may_become_ready(state, node) else processes.is_listening
            self._start_all(state, [state.node(name)], up_to if wait else processes.is_alive)
            started = self.state().node(name)
            return NodeStatus(started, processes.status_of(started))

    def kill(self, name: str) -> None:
        """Kill a node (SIGKILL) and wait until it is gone. Raises ClusterError if it is unknown or not running."""
        self._end(name, signal.SIGKILL)

    def stop(self, name: str) -> None:
        """Stop a node (SIGTERM) and wait until it is gone; kill it after `stop_timeout_s`.

        Raises ClusterError if it is unknown or not running.
        """
        self._end(name, signal.SIGTERM)

    def pause(self, name: str) -> None:
        """Pause a node (SIGSTOP) and wait until it is paused. It keeps its connections but does not respond.

        Raises ClusterError if it is unknown, not running, or not paused after PAUSE_TIMEOUT_S.
        """
        self._signal(name, signal.SIGSTOP)
        node = self.state().node(name)
        deadline = time.monotonic() + PAUSE_TIMEOUT_S
        while processes.state_of(node.pid, node.process) is ProcessState.RUNNING:
            if time.monotonic() > deadline:
                raise ClusterError(f"{name} still runs {PAUSE_TIMEOUT_S:g} s after SIGSTOP")
            time.sleep(processes.POLL_INTERVAL_S)

    def resume(self, name: str) -> None:
        """Resume a paused node (SIGCONT). Raises ClusterError if it is unknown, not paused or not running."""
        node = self.state().node(name)
        if processes.state_of(node.pid, node.process) is ProcessState.RUNNING:
            raise ClusterError(f"{name} is not paused")
        self._signal(name, signal.SIGCONT)

    def status(self) -> list[NodeStatus]:
        """Return the status of all nodes. Probes `/readyz` of running nodes in parallel."""
        nodes = self.state().nodes
        with ThreadPoolExecutor(max_workers=min(len(nodes), 16)) as pool:
            return [
                NodeStatus(node, state) for node, state in zip(nodes, pool.map(processes.status_of, nodes), strict=True)
            ]

    def close(self) -> None:
        """Release the ports, and close the pipe of an owned cluster, which stops its nodes. Idempotent."""
        self._ports.close()
        if self._pipe is not None:
            for end in self._pipe:
                os.close(end)
            self._pipe = None

    # --- starting

    def _check_new(self, counts: Counts, config: Mapping[str, str], tls: bool | None) -> None:
        """Check the arguments of a new cluster before it has a directory. Raises ClusterError or InvalidConfigError."""
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
        nodes = plan(known.nodes if known is not None else (), counts, self.directory, self._defaults)
        has_tls = bool(tls) if known is None else known.has_tls
        # The directory may have been moved since the last command.
        nodes = tuple(node.at(self.directory, has_tls=has_tls) for node in nodes)
        return ClusterState(known.cluster_id if known is not None else _new_cluster_id(), merged, nodes)

    def _with_ports(self, state: ClusterState, running: set[str], *, fresh: bool) -> ClusterState:
        """Return the state with a free port for each listener of the stopped nodes: new ones if `fresh`.

        Otherwise nodes keep their previous ports if these are free. Raises ClusterError if a controller would have to
        change its port while other nodes run, or if too few ports are free.
        """
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
                    f"{node.name}: another program uses {node.grpc}, the address that running nodes have for it: stop "
                    "that program, or run `kipmesh local down` and `kipmesh local up`"
                )
            if node.role is not Role.CONSUMER:
                grpc = grpc or self._new_address(taken)
            if node.role.is_broker:
                kafka = kafka or self._new_address(taken)
            http = http or self._new_address(taken)
            state = state.with_node(replace(node, grpc=grpc, kafka=kafka, http=http))
        return state

    def _new_address(self, taken: set[int]) -> str:
        """Return an address with a port that is not in `taken`, and add the port to it."""
        (port,) = self._ports.choose(1, taken)
        taken.add(port)
        return f"{ports.HOST}:{port}"

    def _start_all(
        self, state: ClusterState, nodes: Sequence[NodeInfo], is_up: Callable[[NodeInfo], bool] | None = None
    ) -> None:
        certificates.ensure(self.directory, state.nodes)
        hooked = {node.name: self._hook.properties(state, node) if self._hook is not None else {} for node in nodes}
        files = {node.name: _properties_text(state, node, hooked[node.name]) for node in nodes}
        started: list[_Started] = []
        try:
            with deferred_signals(), _gate() as (gate, opening):
                for node in nodes:
                    one = self._spawn(node, files[node.name], gate)
                    started.append(one)
                    state = state.with_node(one.node)
                state.write(self.directory)
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
        if self._pipe is None:  # nodes of an owned cluster stop with their owner
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
                    raise ClusterError(f"{node.name} exited during its start{_tail(one)}")
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
            processes.send(node.pid, node.process, signal.SIGCONT)  # a paused process cannot handle SIGTERM
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
                raise ClusterError(f"{name} is not running")
            if number is signal.SIGKILL:
                processes.send(node.pid, node.process, number)
                processes.wait_gone([(node.pid, node.process)], KILL_TIMEOUT_S)
                self._on_event(name, "stopped")
            else:
                self._stop_nodes([node])
            self._write_stopped(state.with_node(processes.without_process(node)))

    def _write_stopped(self, state: ClusterState) -> None:
        """Store the state after nodes stopped. A write error is ignored, because stale pids have no valid identity."""
        with suppress(ClusterError):
            state.write(self.directory)
        self._reap()

    def _signal(self, name: str, number: signal.Signals) -> None:
        node = self.state().node(name)
        if not processes.send(node.pid, node.process, number):
            raise ClusterError(f"{name} is not running")

    def _reap(self) -> None:
        """Reap children that have exited, so that they do not remain zombies. Does not wait for running ones."""
        for child in self._children:
            if processes.identity(child.pid) is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(REAP_TIMEOUT_S)
        self._children = [child for child in self._children if child.returncode is None]

    def detach(self) -> None:
        """Forget the child processes, so that this process can exit without a warning or waiting for them."""
        for child in self._children:
            child.returncode = 0  # avoids the warning of Popen's finalizer
        self._children = []

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self.directory.is_dir():
            problem = "is not a directory" if self.directory.exists() else "does not exist"
            raise ClusterError(f"cluster directory {self.directory} {problem}; start a cluster with: kipmesh local up")
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        try:
            handle = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ClusterError(f"cannot write to the directory {self.directory}: {error.strerror}") from None
        try:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"another command has locked {self.directory} for {LOCK_TIMEOUT_S:g} s: wait for it or stop it"
                    )
                time.sleep(processes.POLL_INTERVAL_S)
            yield
        finally:
            os.close(handle)
            if self._pipe is None:
                self._ports.close()


def _properties_text(state: ClusterState, node: NodeInfo, hooked: Mapping[str, str]) -> str:
    if state.config:
        from kipmesh.cluster import settings  # imports pydantic, so only if needed

        settings.check_keys(state.config)
        settings.parsed(state, node)
        mine = settings.for_role(state.config, node.role)
    else:
        mine = {}
    lines = [f"{key}={value}" for key, value in ({**properties(state, node, mine), **hooked}).items()]
    return f"# {node.name}: written by each `kipmesh local up` and `start`\n" + "\n".join(lines) + "\n"


def _new_cluster_id() -> str:
    """Return a random cluster id in Kafka's form: 16 bytes in URL-safe base64, without a leading dash."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        if not text.startswith("-"):
            return text


def _count(state: ClusterState, role: Role) -> int:
    return sum(node.role is role for node in state.nodes)


@contextmanager
def _gate() -> Iterator[tuple[int, int]]:
    """Yield the read and write ends of the pipe on which started processes wait."""
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
    return f"; last lines of {log}:\n" + "\n".join(f"  {line}" for line in lines)
