"""The network of an experiment: nodes reach each other by links that can be cut and delayed, both ways or one.

Controllers are reached by an address for each who reaches them, in `controller.quorum.voters`. Brokers are told of by
others, under one address each: an ingress before them (`advertised.listeners`), which finds out who connects by the
connection's ports: the process that has the far socket. That takes /proc (Linux); who is no node is a client.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kipmesh.chaos.mesh import ChaosError, Node, is_broker, is_controller
from kipmesh.chaos.owners import Connection, Owners
from kipmesh.testing.links import Links, Pair

CLIENTS = "clients"
LISTENER = "MESH"
_CALL_TIMEOUT_S = 10

T = TypeVar("T")


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
        voters = [
            f"{voter.node_id}@{voter.grpc if voter.name == node.name else self._link(node, voter)}"
            for voter in nodes
            if is_controller(voter)
        ]
        found = {"controller.quorum.voters": ",".join(voters)}
        if is_broker(node):
            found["advertised.listeners"] = f"{LISTENER}://{self._ingress(node)}"
        return found

    def _link(self, node: Node, voter: Node) -> str:
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
