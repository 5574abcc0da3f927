"""How a node of a local cluster is, seen from outside: its process, its port, its probes."""

from __future__ import annotations

from dataclasses import replace

from kipmesh.cluster import ports, processes
from kipmesh.cluster.layout import ClusterState, NodeInfo, Role, has_majority
from kipmesh.cluster.processes import ProcessState


def is_alive(node: NodeInfo) -> bool:
    """Whether its process is there, paused or not."""
    return processes.state_of(node.pid, node.process) is not ProcessState.GONE


def is_ready(node: NodeInfo) -> bool:
    """Whether it says so."""
    return node.http is not None and processes.probe(node.http, "/readyz", certs=node.certs) == 200


def is_listening(node: NodeInfo) -> bool:
    """Whether somebody accepts connections where it should."""
    return node.grpc is not None and processes.listens(node.grpc)


def without_process(node: NodeInfo) -> NodeInfo:
    """The node after it was ended; one that survived even SIGKILL so far stays written down."""
    return node if is_alive(node) else replace(node, pid=None, process=None)


def may_become_ready(state: ClusterState, node: NodeInfo) -> bool:
    """Whether a node that is started alone needs no other for that; of controllers a majority is needed."""
    if node.role is not Role.CONTROLLER:
        return True
    running = sum(
        processes.state_of(one.pid, one.process) is ProcessState.RUNNING
        for one in state.nodes
        if one.role is Role.CONTROLLER and one.name != node.name
    )
    return has_majority(state.nodes, running + 1)


def if_free(address: str | None) -> str | None:
    """The address, None when it is taken."""
    return address if address is not None and ports.is_free(ports.port_of(address)) else None


def describe(node: NodeInfo) -> str:
    """In one word or two."""
    match processes.state_of(node.pid, node.process):
        case ProcessState.GONE:
            return "stopped"
        case ProcessState.PAUSED:
            return "paused"
        case ProcessState.RUNNING:
            return "ready" if is_ready(node) else "not ready"
