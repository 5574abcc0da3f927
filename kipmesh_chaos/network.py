"""The network of an experiment: nodes reach each other by links that can be cut and delayed, both ways or one.

Controllers are reached by an address for each who reaches them, in `controller.quorum.voters`. Brokers are told of by
others, under one address each: an ingress before them (`advertised.listeners`), which finds out who connects by the
connection's ports: the process that has the far socket, by the tables in /proc (Linux). A process that is no node is a
client.

A port alone is not a connection's: the system gives one to as many as go to different places, those that ended a minute
ago included. So both ports are looked for. Reading the tables takes longer the more connections there are, and whoever
waits too long for an answer connects again. So all who ask at the same time are answered by one look, in a thread.
"""

from __future__ import annotations

import asyncio
import os
import re
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
"""The ports that it comes from and goes to."""
_LOCALHOSTS = {"tcp": "0100007F", "tcp6": "0000000000000000FFFF00000100007F"}
"""127.0.0.1 as the kernel's tables have it; gRPC's sockets are IPv6 ones, whatever they connect to."""
_CLOSED = "0"
"""The inode of a socket that no process has any more."""

T = TypeVar("T")


def owners_of(
    connections: Collection[Connection], pids: Mapping[int, str], proc: Path = PROC
) -> dict[Connection, str | None]:
    """The names of those processes among `pids` that have the sockets from which these TCP connections come.

    None for one that was closed; a connection is missing when none of the processes has it.
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
            continue  # it ended
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


class _Asked(NamedTuple):
    connection: Connection
    answer: asyncio.Future[str | None]
    deadline: float


class Owners:
    """Answers whose a connection is; belongs to one event loop."""

    def __init__(self, pids: Callable[[], Mapping[int, str]]) -> None:
        """`pids` gives the processes as they are known now."""
        self._pids = pids
        self._asked: list[_Asked] = []
        self._searching: asyncio.Task[None] | None = None

    async def of(self, connection: Connection) -> str | None:
        """The process's name; None for a socket that is closed, or that none of them has within `TIMEOUT_S`."""
        loop = asyncio.get_running_loop()
        asked = _Asked(connection, loop.create_future(), loop.time() + TIMEOUT_S)
        self._asked.append(asked)
        if self._searching is None or self._searching.done():
            self._searching = asyncio.create_task(self._search())
        return await asked.answer

    async def _search(self) -> None:
        loop = asyncio.get_running_loop()
        while self._asked:
            asked, self._asked = self._asked, []
            began, connections, late = loop.time(), {one.connection for one in asked}, []
            try:
                found = await asyncio.to_thread(owners_of, connections, self._pids())
            except Exception as error:
                for one in asked:
                    if not one.answer.done():
                        one.answer.set_exception(error)
                continue
            for one in asked:
                if one.answer.done():  # nobody waits any more
                    continue
                if one.connection in found or began >= one.deadline:
                    one.answer.set_result(found.get(one.connection))
                else:
                    late.append(one)
            if late:
                await asyncio.sleep(RETRY_S)
                self._asked += late


class Network:
    """Addresses for nodes, and what is wrong between them. Belongs to one event loop but for `properties`."""

    def __init__(self, links: Links, nodes: Callable[[], Sequence[Node]]) -> None:
        """`nodes` gives the cluster's nodes as they are now, with the pids of those that run."""
        if not re.search(r"\S", _read_tcp()):
            raise ChaosError("network faults need /proc/net/tcp (Linux)")
        self._links = links
        self._nodes = nodes
        self._loop = asyncio.get_running_loop()
        self._owners = Owners(self._pids)
        self._ingresses: dict[str, str] = {}
        self._cuts: dict[int, frozenset[Pair]] = {}
        self._delays: dict[int, tuple[frozenset[Pair], float]] = {}

    # -- addresses; in the thread that starts nodes

    def properties(self, nodes: Sequence[Node], node: Node) -> dict[str, str]:
        """What a node's configuration has instead of plain addresses."""
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
        known = self._ingresses.get(node.name)
        if known is None:
            known = self._call(self._links.ingress(node.name, str(node.grpc), self._source_of))
            self._ingresses[node.name] = known
        return known

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_TIMEOUT_S)

    def _pids(self) -> dict[int, str]:
        """Our own process has all clients; it comes last, as it has most sockets."""
        return {**{node.pid: node.name for node in self._nodes() if node.pid is not None}, os.getpid(): CLIENTS}

    async def _source_of(self, connection: Connection) -> str:
        """A node that was just started may not be written down yet: it is waited for."""
        return await self._owners.of(connection) or CLIENTS

    # -- faults

    def cut(self, fault: int, pairs: Iterable[Pair]) -> None:
        """Cut what is not cut already."""
        self._cuts[fault] = frozenset(pairs)
        self._links.cut(self._cuts[fault])

    def delay(self, fault: int, pairs: Iterable[Pair], delay_s: float) -> None:
        """Slow down; of several delays the latest counts."""
        self._delays[fault] = frozenset(pairs), delay_s
        self._links.delay(*self._delays[fault])

    def heal(self, fault: int) -> None:
        """Undo what this fault did, but not what another one does to the same pairs."""
        cut = self._cuts.pop(fault, frozenset())
        self._links.join(cut - frozenset[Pair]().union(*self._cuts.values()))
        slow, _ = self._delays.pop(fault, (frozenset[Pair](), 0.0))
        self._links.delay(slow, 0.0)
        for pairs, delay_s in self._delays.values():
            self._links.delay(pairs, delay_s)

    def heal_all(self) -> None:
        """Nothing is wrong any more."""
        self._cuts.clear()
        self._delays.clear()
        self._links.heal()


def pairs(nodes: Sequence[Node], name: str, *, peers: str, direction: str) -> list[Pair]:
    """What lies between a node and its peers, in the directions that are to be broken."""
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
    match peers:
        case "brokers":
            return is_broker(node)
        case "controllers":
            return is_controller(node)
        case "clients":
            return False
        case _:
            return True


def _read_tcp() -> str:
    try:
        return Path("/proc/net/tcp").read_text()
    except OSError:
        return ""
