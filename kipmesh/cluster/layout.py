"""Which nodes a local cluster has, and `cluster.json`, where that is written down.

Rules:
- Names are role and number (`leader-1`), racks are given out in turn within brokers, controllers and consumers.
- Node ids are unique in the cluster and never change: brokers count from 1, controllers from 1001. A later `up` may
  add brokers and consumers; it takes none away, and leaves the controllers as they are.
- `cluster.json` is replaced as a whole, never half written. A `pid` counts only together with `process`, which tells
  the process from a later one of the same pid.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, get_type_hints

FILE_NAME = "cluster.json"
RACKS = ("rack-a", "rack-b", "rack-c")
FIRST_CONTROLLER_ID = 1001
NODES_MAX = 64
CONTROLLERS = (1, 3, 5)
"""Voters of a metadata quorum: an even number survives no more failures than one less."""
LISTENER = "MESH"
NODE_NAME = "kipmesh://node"
"""What certificates of brokers and controllers have, and others not, in a local cluster with TLS."""
KAFKA_LISTENER = "KAFKA"


class ClusterError(Exception):
    """A cluster cannot do what was asked; the first line of the text says why, further lines show a node's log."""


class Role(StrEnum):
    """What a node is; the value is the first part of its name."""

    CONTROLLER = "controller"
    LEADER = "leader"
    FOLLOWER = "follower"
    CONSUMER = "consumer"

    @property
    def is_broker(self) -> bool:
        """Whether it has partitions."""
        return self in (Role.LEADER, Role.FOLLOWER)

    @property
    def module(self) -> str:
        """What `python -m` starts."""
        return "kipmesh_metadata_controller" if self is Role.CONTROLLER else f"kipmesh_{self.value}"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node as `cluster.json` shows it; addresses are `host:port`, None where there is nothing."""

    name: str
    role: Role
    node_id: int | None
    rack: str
    pid: int | None = None
    process: str | None = None
    grpc: str | None = None
    kafka: str | None = None
    http: str | None = None
    dir: str = ""
    log: str | None = None
    certs: str | None = None
    """Folder of its certificate, None without TLS."""

    def at(self, folder: Path, *, has_tls: bool) -> NodeInfo:
        """The same node in a cluster's folder."""
        home = folder / self.name
        certs = str(folder / "certs" / self.name) if has_tls else None
        return replace(self, dir=str(home), log=str(home / "node.log"), certs=certs)

    def with_addresses(self, new: Callable[[], str], *, has_http: bool) -> NodeInfo:
        """The same node, with a new address for each of its listeners."""
        return replace(
            self,
            grpc=None if self.role is Role.CONSUMER else new(),
            kafka=new() if self.role.is_broker else None,
            http=new() if has_http else None,
        )


class Counts(NamedTuple):
    """How many nodes of each role, in the order of `Role`.

    None leaves the number as it is, or at its default in a new cluster.
    """

    controllers: int | None = None
    leaders: int | None = None
    followers: int | None = None
    consumers: int | None = None

    def of(self, role: Role) -> int | None:
        """The number for a role."""
        return self[list(Role).index(role)]


DEFAULT_COUNTS = Counts(1, 1, 2, 0)
"""A new cluster in a test: one controller, to be light."""
LOCAL_UP_COUNTS = DEFAULT_COUNTS._replace(controllers=3)
"""A new cluster of `kipmesh local up`: any of its nodes may fail."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What is known of a cluster between two commands."""

    cluster_id: str
    config: Mapping[str, str]
    nodes: tuple[NodeInfo, ...]

    @property
    def bootstrap(self) -> str:
        """gRPC addresses of all brokers."""
        return ",".join(node.grpc for node in self.nodes if node.role.is_broker and node.grpc)

    @property
    def kafka_bootstrap(self) -> str | None:
        """Addresses of all brokers for clients of Kafka's protocol; None where no broker listens for them."""
        return ",".join(node.kafka for node in self.nodes if node.role.is_broker and node.kafka) or None

    @property
    def has_tls(self) -> bool:
        """Whether its listeners have TLS."""
        return any(node.certs is not None for node in self.nodes)

    def check_tls(self, wanted: bool | None) -> None:
        """Raise ClusterError if `wanted` is something else than what the cluster was made with."""
        if wanted is not None and wanted is not self.has_tls:
            has = "has" if self.has_tls else "does not have"
            raise ClusterError(f"the cluster {has} TLS, which cannot be changed: use another folder")

    def node(self, name: str) -> NodeInfo:
        """The node of that name; raises ClusterError."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise ClusterError(f"there is no node {name!r}; there are {', '.join(node.name for node in self.nodes)}")

    def check_unchanged(self, config: Mapping[str, str]) -> None:
        """Raise ClusterError if `config` asks for something else than the nodes that run were started with."""
        other = sorted(key for key, value in config.items() if self.config.get(key) != value)
        if other:
            told = ", ".join(f"{key} ({self.config.get(key, 'not set')})" for key in other)
            raise ClusterError(f"nodes run with another {told}: take the cluster down, and up again with --config")

    def with_node(self, changed: NodeInfo) -> ClusterState:
        """The same cluster with one node changed."""
        return replace(self, nodes=tuple(changed if node.name == changed.name else node for node in self.nodes))

    def write(self, folder: Path) -> None:
        """Replace `cluster.json`."""
        document = {
            "bootstrap": self.bootstrap,
            "kafka_bootstrap": self.kafka_bootstrap,
            "cluster_id": self.cluster_id,
            "config": dict(self.config),
            "nodes": [asdict(node) for node in self.nodes],
        }
        temporary = folder / f"{FILE_NAME}.tmp"
        try:
            temporary.write_text(json.dumps(document, indent=2) + "\n")
            os.replace(temporary, folder / FILE_NAME)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise ClusterError(f"{folder / FILE_NAME} cannot be written: {error.strerror}") from None


def read_state(folder: Path) -> ClusterState | None:
    """The cluster of a folder, None when there is none; raises ClusterError for a broken file."""
    file = folder / FILE_NAME
    try:
        document = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise ClusterError(f"{folder} is not a folder") from None
    except OSError as error:
        raise ClusterError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{file} is not JSON: {error}") from None
    try:
        return _state_from(document)
    except ValueError as error:
        raise ClusterError(f"{file} is not what `local up` writes: {error}") from None


_FIELD_TYPES = {**get_type_hints(NodeInfo), "role": str}


def _state_from(document: object) -> ClusterState:
    values = document if isinstance(document, dict) else {}
    config = values.get("config", {})
    nodes = values.get("nodes")
    if not isinstance(values.get("cluster_id"), str) or not isinstance(nodes, list):
        raise ValueError("no cluster_id or nodes")
    if not isinstance(config, dict) or not all(isinstance(value, str) for value in config.values()):
        raise ValueError("config holds something else than texts")
    return ClusterState(values["cluster_id"], config, tuple(_node_from(node) for node in nodes))


def _node_from(values: object) -> NodeInfo:
    if not isinstance(values, dict) or not {"name", "role", "node_id", "rack"} <= set(values) <= set(_FIELD_TYPES):
        raise ValueError("a node has other fields")
    for name, value in values.items():
        if not isinstance(value, _FIELD_TYPES[name]):
            raise ValueError(f"the {name} of a node is {value!r}")
    for name in ("grpc", "kafka", "http"):
        address = values.get(name)
        if address is not None and not address.rpartition(":")[2].isdecimal():
            raise ValueError(f"the {name} of a node is {address!r}, not host:port")
    return NodeInfo(**{**values, "role": Role(values["role"])})


def plan(
    known: Sequence[NodeInfo], counts: Counts, folder: Path, defaults: Counts = DEFAULT_COUNTS
) -> tuple[NodeInfo, ...]:
    """The nodes of a cluster: the known ones and what `counts` adds; raises ClusterError.

    `defaults` are for a new cluster, where `counts` say nothing.
    """
    nodes = list(known)
    for role in Role:
        have = sum(node.role is role for node in known)
        want = counts.of(role)
        if want is None:
            want = have if known else defaults.of(role) or 0
        if want < have or (known and role is Role.CONTROLLER and want != have):
            raise ClusterError(
                f"{folder} has {have} {role}(s), not {want}: use another folder, or leave the number out"
            )
        if len(nodes) + want - have > NODES_MAX:
            raise ClusterError(f"these are more than the {NODES_MAX} nodes that a local cluster can have")
        nodes.extend(_new_node(nodes, role, number, folder) for number in range(have + 1, want + 1))
    if not any(node.role is Role.CONTROLLER for node in nodes) or not any(node.role.is_broker for node in nodes):
        raise ClusterError("a cluster needs a controller and a broker")
    controllers = sum(node.role is Role.CONTROLLER for node in nodes)
    if not known and controllers not in CONTROLLERS:
        raise ClusterError(f"a cluster has 1, 3 or 5 controllers, not {controllers}")
    order = list(Role)
    return tuple(sorted(nodes, key=lambda node: order.index(node.role)))


def _new_node(nodes: Sequence[NodeInfo], role: Role, number: int, folder: Path) -> NodeInfo:
    brokers = [node for node in nodes if node.role.is_broker]
    node_id: int | None
    if role.is_broker:
        node_id = 1 + max((node.node_id or 0 for node in brokers), default=0)
        turn = node_id - 1
    else:
        node_id = FIRST_CONTROLLER_ID + number - 1 if role is Role.CONTROLLER else None
        turn = number - 1
    name = f"{role}-{number}"
    home = folder / name
    return NodeInfo(name, role, node_id, RACKS[turn % len(RACKS)], dir=str(home), log=str(home / "node.log"))


def has_majority(nodes: Sequence[NodeInfo], running: int) -> bool:
    """Whether so many controllers are enough to elect the active one."""
    return running > sum(node.role is Role.CONTROLLER for node in nodes) // 2


def properties(state: ClusterState, node: NodeInfo, config: Mapping[str, str]) -> dict[str, str]:
    """A node's configuration; `config` is what the user set for this node's role."""
    if node.role is Role.CONSUMER:
        return {
            "bootstrap.servers": state.bootstrap,
            "client.id": node.name,
            "client.rack": node.rack,
            "http.listener": str(node.http),
            **_tls_properties(node),
            **config,
        }
    controllers = [one for one in state.nodes if one.role is Role.CONTROLLER]
    values = {
        "node.id": str(node.node_id),
        "cluster.id": state.cluster_id,
        "controller.quorum.voters": ",".join(f"{one.node_id}@{one.grpc}" for one in controllers),
        "listeners": f"{LISTENER}://{node.grpc}",
    }
    if node.http is not None:
        values["http.listener"] = node.http
    data = str(Path(node.dir) / "data")
    if node.role.is_broker:
        values |= {"log.dirs": data, "broker.rack": node.rack}
        if node.kafka is not None:
            values["listeners"] += f",{KAFKA_LISTENER}://{node.kafka}"
    else:
        values["metadata.log.dir"] = data
    return {**values, **_tls_properties(node), **config}


def _tls_properties(node: NodeInfo) -> dict[str, str]:
    if node.certs is None:
        return {}
    values = {"ssl.certificate.dir": node.certs}
    if node.http is not None:
        values["http.listener"] = f"https://{node.http}"
    if node.role is Role.CONSUMER:
        return {**values, "security.protocol": "SSL"}
    names = [LISTENER] if node.kafka is None else [LISTENER, KAFKA_LISTENER]
    protocols = ",".join(f"{name}:SSL" for name in names)
    return {**values, "listener.security.protocol.map": protocols, "ssl.node.names": NODE_NAME}
