"""All nodes of a cluster as objects in this process: `LocalCluster(mode="single")`.

They run in the event loop of one background thread, listen on real ports (no HTTP, but consumers), and keep their
files in a folder that is removed at the end. All nodes, their tasks and the folder belong to that thread; the public
methods hand work over and wait.
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
    """Nodes in a background thread; `up` to `down`, once.

    `properties` says what each node's configuration is beside and over the cluster's own.
    """

    folder: Path
    _: KW_ONLY
    start_timeout_s: float = 30.0
    properties: Callable[[NodeInfo], Mapping[str, str]] | None = None

    def __post_init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._state: ClusterState | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ports = ports.Held()  # as long as the cluster is up: a node that was stopped finds its own again

    def state(self) -> ClusterState:
        """Which nodes there are; raises ClusterError before `up`."""
        if self._state is None:
            raise ClusterError("the cluster was not started")
        return self._state

    def is_running(self, name: str) -> bool:
        """Whether that node runs."""
        return self.state().node(name).name in self._nodes

    def node_object(self, name: str) -> Any:
        """The node itself, to be used from its own event loop only (tests look into it)."""
        try:
            return self._nodes[self.state().node(name).name]
        except KeyError:
            raise ClusterError(f"{name} does not run") from None

    def up(self, counts: Counts, config: Mapping[str, str], *, tls: bool | None = None) -> None:
        """Start all nodes and return when they are ready; raises what a node's start raised."""
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from kipmesh.cluster import settings
        from kipmesh.node.logging import configure_library

        configure_library()
        settings.check_keys(config)
        nodes = plan((), counts, self.folder)
        try:
            self._state = self._placed(nodes, config, has_tls=bool(tls))
            self._start_thread()
            self._call(self._start_nodes(self._state.nodes))
        except BaseException:
            self.down()
            raise

    def _placed(self, nodes: Sequence[NodeInfo], config: Mapping[str, str], *, has_tls: bool) -> ClusterState:
        """The nodes with ports, folders and certificates."""
        addresses = (f"{ports.HOST}:{port}" for port in self._ports.choose(3 * len(nodes)))
        placed = [
            replace(
                node.at(self.folder, has_tls=has_tls).with_addresses(
                    addresses.__next__, has_http=node.role is Role.CONSUMER
                ),
                log=None,
            )
            for node in nodes
        ]
        certificates.ensure(self.folder, placed)
        return ClusterState("single-" + os.urandom(8).hex(), dict(config), tuple(placed))

    def down(self) -> None:
        """Stop all nodes and the thread; idempotent."""
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
        """Start a node that was stopped or killed, on its data and its port, and wait until it is ready.

        A controller is not waited for while too few of them run to elect one: the next one is to be started.
        """
        node = self.state().node(name)
        if name in self._nodes:
            raise ClusterError(f"{name} runs already")
        running = 1 + sum(other.startswith(Role.CONTROLLER) for other in self._nodes)
        may_wait = node.role is not Role.CONTROLLER or has_majority(self.state().nodes, running)
        self._call(self._start_nodes((node,), until_ready=may_wait))

    def stop(self, name: str) -> None:
        """Stop a node cleanly."""
        self.node_object(name)
        self._call(self._nodes.pop(name).stop())

    def kill(self, name: str) -> None:
        """Stop a node abruptly: its files are left as a crash would leave them."""
        self.node_object(name)
        node = self._nodes.pop(name)
        abort = getattr(node, "abort", None)
        self._call(abort() if abort is not None else node.stop())

    # --- within the thread

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
                raise ClusterError(f"not ready after {self.start_timeout_s:g} s") from None
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
                # A service lies above this package: it is looked up by name, as a process would be started.
                service = importlib.import_module(f"{node.role.module}.node")
                return cast("_Node", service.ConsumerNode(config))

    # --- between the threads

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
            raise ClusterError("the cluster was not started, or is down")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(CALL_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise ClusterError(f"the cluster did not answer within {CALL_TIMEOUT_S:g} s") from None
