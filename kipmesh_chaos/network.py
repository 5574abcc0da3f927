"""Network of an experiment: nodes reach each other through links that can be cut and delayed in each direction.

A controller has one address per source, in `controller.quorum.voters`. A broker has one address for all: the ingress in
its `advertised.listeners`. The ingress identifies the source of a connection by the process that owns the remote
socket, from the tables in /proc (Linux). A process that is not a node counts as a client.

The lookup uses both ports, because Linux reuses a local port for different destinations. Reading the tables is slow
with many connections, and clients that wait too long reconnect. So one lookup in a thread serves all pending requests.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kipmesh_chaos.links import Links, Pair
from kipmesh_chaos.target_cluster import ChaosError, Node, is_broker, is_controller

CLIENTS = "clients"
LISTENER = "MESH"
_CALL_TIMEOUT_S = 10
PROC = Path("/proc")
TIMEOUT_S = 2.0
RETRY_S = 0.05
Connection = tuple[int, int]
"""(source port, destination port)"""
_LOCALHOSTS = {"tcp": "0100007F", "tcp6": "0000000000000000FFFF00000100007F"}
"""127.0.0.1 as in the kernel's tables. gRPC uses IPv6 sockets for IPv4 addresses, too."""
_CLOSED = "0"
"""Inode of a socket that its process has closed."""

T = TypeVar("T")


def owners_of(
    connections: Collection[Connection], pids: Mapping[int, str], proc: Path = PROC
) -> dict[Connection, str | None]:
    """Return the name of the process, among `pids` (pid to name), that owns the source socket of each TCP connection.

    The name is None for a closed socket. A connection is missing if it is not in the tables or none of the processes
    owns it.
    """
    inodes = _inodes(connections, proc)
    found: dict[Connection, str | None] = {one: None for one, inode in inodes.items() if inode == _CLOSED}
    wanted = {f"socket:[{inode}]": one for one, inode in inodes.items() if inode != _CLOSED}
    for pid, name in pids.items():
        if not wanted:
            break
        try:
            with os.scandir(proc / str(pid) / "fd") as entries:
                for entry in entries:
                    one = wanted.pop(_link_target(entry.path), None)
                    if one is not None:
                        found[one] = name
        except OSError:
            continue  # the process has ended
    return found


def _link_target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def _inodes(connections: Collection[Connection], proc: Path) -> dict[Connection, str]:
    found: dict[Connection, str] = {}
    for table, host in _LOCALHOSTS.items():
        wanted = {(f"{host}:{one[0]:04X}", f"{host}:{one[1]:04X}"): one for one in connections}
        try:
            lines = (proc / "net" / table).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            fields = line.split(None, 10)
            if len(fields) > 9 and (one := wanted.get((fields[1], fields[2]))) is not None:
                found[one] = fields[9]
    return found


class _Request(NamedTuple):
    connection: Connection
    owner: asyncio.Future[str | None]
    deadline: float


class Owners:
    """Looks up which process owns a connection. Belongs to one event loop.

    `pids` returns the names of the currently known processes by pid.
    """

    def __init__(self, pids: Callable[[], Mapping[int, str]]) -> None:
        self._pids = pids
        self._requests: list[_Request] = []
        self._searching: asyncio.Task[None] | None = None

    async def of(self, connection: Connection) -> str | None:
        """Return the name of the process that owns the connection's source socket.

        None if the socket is closed or its owner is not found within `TIMEOUT_S`.
        """
        loop = asyncio.get_running_loop()
        request = _Request(connection, loop.create_future(), loop.time() + TIMEOUT_S)
        self._requests.append(request)
        if self._searching is None or self._searching.done():
            self._searching = asyncio.create_task(self._search())
        return await request.owner

    async def _search(self) -> None:
        loop = asyncio.get_running_loop()
        while self._requests:
            requests, self._requests = self._requests, []
            began, connections, late = loop.time(), {one.connection for one in requests}, []
            try:
                found = await asyncio.to_thread(owners_of, connections, self._pids())
            except Exception as error:
                for one in requests:
                    if not one.owner.done():
                        one.owner.set_exception(error)
                continue
            for one in requests:
                if one.owner.done():  # the waiter was cancelled
                    continue
                if one.connection in found or began >= one.deadline:
                    one.owner.set_result(found.get(one.connection))
                else:
                    late.append(one)
            if late:
                await asyncio.sleep(RETRY_S)
                self._requests += late


class Network:
    """Addresses of nodes, and the cuts and delays between nodes. Belongs to one event loop, except `properties`.

    `nodes` returns the current nodes, with the pids of running ones. The constructor raises ChaosError if /proc/net/tcp
    does not exist.
    """

    def __init__(self, links: Links, nodes: Callable[[], Sequence[Node]]) -> None:
        if not (PROC / "net" / "tcp").exists():
            raise ChaosError("network faults need /proc/net/tcp (Linux)")
        self._links = links
        self._nodes = nodes
        self._loop = asyncio.get_running_loop()
        self._owners = Owners(self._pids)
        self._ingresses: dict[str, str] = {}
        self._cuts: dict[int, frozenset[Pair]] = {}
        self._delays: dict[int, tuple[frozenset[Pair], float]] = {}

    # -- addresses

    def properties(self, nodes: Sequence[Node], node: Node) -> dict[str, str]:
        """Return the configuration properties of a node that replace direct addresses with links.

        Called in the thread that starts nodes; blocks until the event loop has opened the links. Raises OSError, and
        TimeoutError after 10 s.
        """
        voters = [f"{voter.node_id}@{self._address(node, voter)}" for voter in nodes if is_controller(voter)]
        found = {"controller.quorum.voters": ",".join(voters)}
        if is_broker(node):
            found["advertised.listeners"] = f"{LISTENER}://{self._ingress(node)}"
        return found

    def _address(self, node: Node, voter: Node) -> str:
        if voter.name == node.name:
            return str(voter.grpc)
        return self._call(self._links.address(node.name, voter.name, str(voter.grpc)))

    def _ingress(self, node: Node) -> str:
        address = self._ingresses.get(node.name)
        if address is None:
            address = self._call(self._links.ingress(node.name, str(node.grpc), self._source_of))
            self._ingresses[node.name] = address
        return address

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_TIMEOUT_S)

    def _pids(self) -> dict[int, str]:
        """Return all running nodes (pid to name), then this process, which owns all client sockets and is slowest to
        search.
        """
        return {**{node.pid: node.name for node in self._nodes() if node.pid is not None}, os.getpid(): CLIENTS}

    async def _source_of(self, connection: Connection) -> str:
        """Return the node that opened a connection, or `CLIENTS`. Waits for a node that was just started and is not in
        the tables yet.
        """
        return await self._owners.of(connection) or CLIENTS

    # -- faults

    def cut(self, fault: int, pairs: Iterable[Pair]) -> None:
        """Cut these pairs on behalf of the fault with this number."""
        self._cuts[fault] = frozenset(pairs)
        self._links.cut(self._cuts[fault])

    def delay(self, fault: int, pairs: Iterable[Pair], delay_s: float) -> None:
        """Delay these pairs by `delay_s` seconds on behalf of the fault with this number. The latest of several delays
        applies.
        """
        self._delays[fault] = frozenset(pairs), delay_s
        self._links.delay(*self._delays[fault])

    def heal(self, fault: int) -> None:
        """Undo the cuts and delays of a fault, except those that another fault still needs. Ignores an
        unknown fault.
        """
        cut = self._cuts.pop(fault, frozenset())
        self._links.join(cut - frozenset[Pair]().union(*self._cuts.values()))
        slow, _ = self._delays.pop(fault, (frozenset[Pair](), 0.0))
        self._links.delay(slow, 0.0)
        for pairs, delay_s in self._delays.values():
            self._links.delay(pairs, delay_s)

    def heal_all(self) -> None:
        """Undo all cuts and delays."""
        self._cuts.clear()
        self._delays.clear()
        self._links.heal()


def pairs(nodes: Sequence[Node], name: str, *, peers: str, direction: str) -> list[Pair]:
    """Return the (source, target) pairs between a node and its peers. `direction` is `in`, `out` or `both`, as seen
    from the node; `peers` is one of `experiment.Peers`.
    """
    chosen = [node.name for node in nodes if node.name != name and _is_peer(node, peers)]
    if peers in ("clients", "everybody"):
        chosen.append(CLIENTS)
    found: list[Pair] = []
    if direction in ("both", "out"):
        found += [(name, peer) for peer in chosen]
    if direction in ("both", "in"):
        found += [(peer, name) for peer in chosen]
    return found


def _is_peer(node: Node, peers: str) -> bool:
    if peers == "clients":
        return False
    return {"brokers": is_broker, "controllers": is_controller}.get(peers, lambda _node: True)(node)
