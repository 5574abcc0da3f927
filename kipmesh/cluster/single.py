"""Backend of `LocalCluster(mode="single")`: all nodes of a cluster as objects in this process.

The nodes run in the event loop of one background thread and listen on real ports; only consumers have HTTP. Only that
thread touches the nodes and their files. Public methods submit work to it and wait.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from kipmesh.cluster import certificates, ports
from kipmesh.cluster.layout import ClusterError, ClusterState, Counts, NodeInfo, Role, has_majority, plan
from kipmesh.transport.grpc import handle_exception

READY_INTERVAL_S = 0.005
CALL_TIMEOUT_S = 60.0

T = TypeVar("T")


class _Node(Protocol):
    @property
    def ready(self) -> bool: ...
    @property
    def failed(self) -> asyncio.Future[None]: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...


@dataclass(eq=False)
class SingleCluster:
    """A cluster whose nodes all run in one background thread. `up` can be called once.

    `directory` contains the nodes' data. `start_timeout_s` limits the time for starting nodes. `properties` returns
    settings of a node, which override those of the cluster.

    Methods that take a node's name raise ClusterError for an unknown one, and before `up`.
    """

    directory: Path
    _: KW_ONLY
    start_timeout_s: float = 30.0
    properties: Callable[[NodeInfo], Mapping[str, str]] | None = None

    def __post_init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._state: ClusterState | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ports = ports.PortReservation()  # until `down`, so that a stopped node can restart on its port

    def state(self) -> ClusterState:
        """Return the cluster's id, configuration and nodes, running or not. Raises ClusterError before `up`."""
        if self._state is None:
            raise ClusterError("the cluster is not started: call up() first")
        return self._state

    def is_running(self, name: str) -> bool:
        """Return whether a node was started and not stopped. Raises ClusterError for an unknown name."""
        return self.state().node(name).name in self._nodes

    def node_object(self, name: str) -> Any:
        """Return the node (ControllerNode, BrokerNode or ConsumerNode), for tests.

        It may only be used in the event loop of the cluster's thread. Raises ClusterError if the node is unknown or not
        running.
        """
        try:
            return self._nodes[self.state().node(name).name]
        except KeyError:
            raise ClusterError(f"{name} is not running") from None

    def up(self, counts: Counts, config: Mapping[str, str], *, tls: bool | None = None) -> None:
        """Start all nodes and return when they are ready. After an error, all are stopped.

        Raises ClusterError for impossible counts or a timeout, InvalidConfigError for a bad setting, or the error of a
        node that failed to start. `tls` None means no TLS.
        """
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from kipmesh.cluster import settings
        from kipmesh.node.logging import configure_library

        configure_library()
        settings.check_keys(config)
        nodes = plan((), counts, self.directory)
        try:
            self._state = self._placed(nodes, config, has_tls=bool(tls))
            self._start_thread()
            self._call(self._start_nodes(self._state.nodes))
        except BaseException:
            self.down()
            raise

    def _placed(self, nodes: Sequence[NodeInfo], config: Mapping[str, str], *, has_tls: bool) -> ClusterState:
        """Return the new cluster's state, with ports, directories and certificates for the nodes.

        Raises ClusterError if there are too few free ports, or a certificate cannot be created.
        """
        addresses = (f"{ports.HOST}:{port}" for port in self._ports.choose(3 * len(nodes)))
        placed = [
            replace(
                node.at(self.directory, has_tls=has_tls).with_addresses(
                    addresses.__next__, has_http=node.role is Role.CONSUMER
                ),
                log=None,
            )
            for node in nodes
        ]
        certificates.ensure(self.directory, placed)
        return ClusterState("single-" + os.urandom(8).hex(), dict(config), tuple(placed))

    def down(self) -> None:
        """Stop all nodes and the thread. Idempotent. Errors of nodes are ignored.

        Raises ClusterError if the nodes have not stopped after CALL_TIMEOUT_S.
        """
        loop, thread = self._loop, self._thread
        try:
            if loop is not None:
                self._call(self._stop_nodes())
        finally:
            self._loop = self._thread = None
            if loop is not None and thread is not None:
                loop.call_soon_threadsafe(loop.stop)
                thread.join(CALL_TIMEOUT_S)
            self._ports.close()

    def start(self, name: str) -> None:
        """Start a stopped node with its data and ports, and wait until it is ready.

        Does not wait for a controller if too few controllers are running to elect a quorum leader. Raises ClusterError
        if the node is unknown, already running or not ready in time. If the node fails to start, raises its error.
        """
        node = self.state().node(name)
        if name in self._nodes:
            raise ClusterError(f"{name} is already running")
        running = 1 + sum(other.startswith(Role.CONTROLLER) for other in self._nodes)
        can_be_ready = node.role is not Role.CONTROLLER or has_majority(self.state().nodes, running)
        self._call(self._start_nodes((node,), until_ready=can_be_ready))

    def stop(self, name: str) -> None:
        """Shut down a node gracefully. Raises ClusterError if the node is unknown or not running."""
        self.node_object(name)
        self._call(self._nodes.pop(name).stop())

    def kill(self, name: str) -> None:
        """Stop a node as in a crash, without flushing its files. A consumer is shut down gracefully.

        Raises ClusterError if the node is unknown or not running.
        """
        self.node_object(name)
        node = self._nodes.pop(name)
        abort = getattr(node, "abort", None)
        self._call(abort() if abort is not None else node.stop())

    # --- in the thread of the nodes

    async def _start_nodes(self, nodes: tuple[NodeInfo, ...], *, until_ready: bool = True) -> None:
        for node in nodes:
            self._nodes[node.name] = self._make(node)
        starting = [asyncio.create_task(self._nodes[node.name].start(), name=node.name) for node in nodes]
        try:
            async with asyncio.timeout(self.start_timeout_s):
                await asyncio.gather(*starting)
                if until_ready:
                    await self._until_ready(nodes)
        except BaseException as error:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            for node in nodes:
                with suppress(Exception):
                    await self._nodes.pop(node.name).stop()
            if isinstance(error, TimeoutError):
                raise ClusterError(f"nodes not ready after {self.start_timeout_s:g} s") from None
            raise

    async def _until_ready(self, nodes: tuple[NodeInfo, ...]) -> None:
        while True:
            running = [self._nodes[node.name] for node in nodes]
            for node in running:
                if node.failed.done():
                    node.failed.result()
            if all(node.ready for node in running):
                return
            await asyncio.sleep(READY_INTERVAL_S)

    async def _stop_nodes(self) -> None:
        order = [node.name for node in reversed(self.state().nodes) if node.name in self._nodes]
        running = [(name, self._nodes.pop(name)) for name in order]
        controllers = [node for name, node in running if name.startswith(Role.CONTROLLER)]
        others = [node for name, node in running if not name.startswith(Role.CONTROLLER)]
        for group in (others, controllers):
            await asyncio.gather(*(node.stop() for node in group), return_exceptions=True)

    def _make(self, node: NodeInfo) -> _Node:
        from kipmesh.cluster import settings

        over = self.properties(node) if self.properties is not None else None
        config: Any = settings.parsed(self.state(), node, over)
        match node.role:
            case Role.CONTROLLER:
                from kipmesh.controller import ControllerNode

                return ControllerNode(config)
            case Role.LEADER | Role.FOLLOWER:
                from kipmesh.broker import BrokerNode

                return BrokerNode(config, is_leader_role=node.role is Role.LEADER)
            case Role.CONSUMER:
                # Services may not be imported from here; import by name, as `python -m` does.
                service = importlib.import_module(f"{node.role.module}.node")
                return cast("_Node", service.ConsumerNode(config))

    # --- in the thread of the caller

    def _start_thread(self) -> None:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(handle_exception)

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.get_loop().run_forever()

        self._loop = loop
        self._thread = threading.Thread(target=run, name="kipmesh-cluster", daemon=True)
        self._thread.start()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise ClusterError("the cluster is not running: call up() first")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(CALL_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise ClusterError(f"the cluster did not respond within {CALL_TIMEOUT_S:g} s") from None
