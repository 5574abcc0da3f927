"""Nodes of a local cluster, their configuration, and `cluster.json`, which stores them.

- A name is role and number (`leader-1`). Racks are assigned round-robin within brokers, controllers and consumers.
- Node ids are unique and never change: brokers count from 1, controllers from 1001. A later `up` may add brokers and
  consumers; it removes no node and never changes the controllers.
- `cluster.json` is replaced atomically. A `pid` is valid only together with `process`, the identity of the process.
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
"""Allowed numbers of voters. An even number tolerates no more failures than the next smaller odd one."""
LISTENER = "MESH"
NODE_NAME = "kipmesh://node"
"""Name that only certificates of brokers and controllers contain, in a local cluster with TLS."""
KAFKA_LISTENER = "KAFKA"


class ClusterError(Exception):
    """A cluster operation failed. The first line of the message gives the reason; further lines quote a node's log."""


class Role(StrEnum):
    """Role of a node. The value is the first part of its name."""

    CONTROLLER = "controller"
    LEADER = "leader"
    FOLLOWER = "follower"
    CONSUMER = "consumer"

    @property
    def is_broker(self) -> bool:
        """Whether nodes of this role host partitions."""
        return self in (Role.LEADER, Role.FOLLOWER)

    @property
    def module(self) -> str:
        """Name of the module that `python -m` runs."""
        return "kipmesh_metadata_controller" if self is Role.CONTROLLER else f"kipmesh_{self.value}"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node as stored in `cluster.json`.

    `node_id` is None for consumers. `grpc`, `kafka` and `http` are the listeners' addresses (host:port), None without
    such a listener. `pid` and `process` (the identity of the process) are None if the node is not running, or runs in
    this process. `dir` is the node's directory; `log` is its log file, None if it runs in this process.
    """

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
    """Directory of the node's certificate, None without TLS."""

    def at(self, directory: Path, *, has_tls: bool) -> NodeInfo:
        """Return the node with `dir`, `log` and, if `has_tls`, `certs` below the cluster's `directory`."""
        home = directory / self.name
        certs = str(directory / "certs" / self.name) if has_tls else None
        return replace(self, dir=str(home), log=str(home / "node.log"), certs=certs)

    def with_addresses(self, new: Callable[[], str], *, has_http: bool) -> NodeInfo:
        """Return the node with an address from `new` for each of its listeners.

        Controllers have a gRPC listener, brokers gRPC and Kafka listeners, consumers neither. Every node also has an
        HTTP listener if `has_http`.
        """
        return replace(
            self,
            grpc=None if self.role is Role.CONSUMER else new(),
            kafka=new() if self.role.is_broker else None,
            http=new() if has_http else None,
        )


class Counts(NamedTuple):
    """Number of nodes of each role, in the order of `Role`. None: unchanged, or the default in a new cluster."""

    controllers: int | None = None
    leaders: int | None = None
    followers: int | None = None
    consumers: int | None = None

    def of(self, role: Role) -> int | None:
        """Return the number of nodes of a role, or None if it is not set."""
        return self[list(Role).index(role)]


DEFAULT_COUNTS = Counts(1, 1, 2, 0)
"""Defaults of a new cluster in tests. One controller starts faster than three."""
LOCAL_UP_COUNTS = DEFAULT_COUNTS._replace(controllers=3)
"""Defaults of a new cluster of `kipmesh local up`, which tolerates the failure of any node."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Content of `cluster.json`: cluster id, the user's settings by dotted key, and the nodes."""

    cluster_id: str
    config: Mapping[str, str]
    nodes: tuple[NodeInfo, ...]

    @property
    def bootstrap(self) -> str:
        """Comma-separated gRPC addresses (host:port) of all brokers, running or not; empty if none has one."""
        return ",".join(node.grpc for node in self.nodes if node.role.is_broker and node.grpc)

    @property
    def kafka_bootstrap(self) -> str | None:
        """Comma-separated Kafka addresses (host:port) of all brokers, or None if no broker has a Kafka listener."""
        return ",".join(node.kafka for node in self.nodes if node.role.is_broker and node.kafka) or None

    @property
    def has_tls(self) -> bool:
        """Whether the listeners use TLS."""
        return any(node.certs is not None for node in self.nodes)

    def check_tls(self, wanted: bool | None) -> None:
        """Raise ClusterError if `wanted` differs from the setting that the cluster was created with. None: no check."""
        if wanted is not None and wanted is not self.has_tls:
            has = "has" if self.has_tls else "does not have"
            raise ClusterError(f"the cluster {has} TLS, which cannot be changed: use another directory")

    def node(self, name: str) -> NodeInfo:
        """Return the node of that name. Raises ClusterError for an unknown name."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise ClusterError(f"unknown node {name!r}; the nodes are {', '.join(node.name for node in self.nodes)}")

    def check_unchanged(self, config: Mapping[str, str]) -> None:
        """Raise ClusterError if a value in `config` differs from the cluster's, or its key is not set there.

        Keys that are missing from `config` are not compared.
        """
        changed = sorted(key for key, value in config.items() if self.config.get(key) != value)
        if changed:
            current = ", ".join(f"{key} ({self.config.get(key, 'not set')})" for key in changed)
            raise ClusterError(f"running nodes use another {current}: run `kipmesh local down`, then up with --config")

    def with_node(self, changed: NodeInfo) -> ClusterState:
        """Return the state with the node of the same name replaced by `changed`; unchanged if there is none."""
        return replace(self, nodes=tuple(changed if node.name == changed.name else node for node in self.nodes))

    def write(self, directory: Path) -> None:
        """Replace `cluster.json` in `directory` atomically. Raises ClusterError if it cannot be written."""
        document = {
            "bootstrap": self.bootstrap,
            "kafka_bootstrap": self.kafka_bootstrap,
            "cluster_id": self.cluster_id,
            "config": dict(self.config),
            "nodes": [asdict(node) for node in self.nodes],
        }
        temporary = directory / f"{FILE_NAME}.tmp"
        try:
            temporary.write_text(json.dumps(document, indent=2) + "\n")
            os.replace(temporary, directory / FILE_NAME)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise ClusterError(f"cannot write {directory / FILE_NAME}: {error.strerror}") from None


def read_state(directory: Path) -> ClusterState | None:
    """Read `cluster.json` in a directory; None if it does not exist.

    Raises ClusterError if the file is invalid or cannot be read, or `directory` is not a directory.
    """
    file = directory / FILE_NAME
    try:
        document = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise ClusterError(f"{directory} is not a directory") from None
    except OSError as error:
        raise ClusterError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{file} is not JSON: {error}") from None
    try:
        return _state_from(document)
    except ValueError as error:
        raise ClusterError(f"{file} is not a valid cluster file: {error}") from None


_FIELD_TYPES = {**get_type_hints(NodeInfo), "role": str}


def _state_from(document: object) -> ClusterState:
    values = document if isinstance(document, dict) else {}
    config = values.get("config", {})
    nodes = values.get("nodes")
    if not isinstance(values.get("cluster_id"), str) or not isinstance(nodes, list):
        raise ValueError("cluster_id or nodes is missing")
    if not isinstance(config, dict) or not all(isinstance(value, str) for value in config.values()):
        raise ValueError("values of config must be strings")
    return ClusterState(values["cluster_id"], config, tuple(_node_from(node) for node in nodes))


def _node_from(values: object) -> NodeInfo:
    if not isinstance(values, dict) or not {"name", "role", "node_id", "rack"} <= set(values) <= set(_FIELD_TYPES):
        raise ValueError("a node lacks fields or has unknown ones")
    for name, value in values.items():
        if not isinstance(value, _FIELD_TYPES[name]):
            raise ValueError(f"invalid {name} of a node: {value!r}")
    for name in ("grpc", "kafka", "http"):
        address = values.get(name)
        if address is not None and not address.rpartition(":")[2].isdecimal():
            raise ValueError(f"{name} of a node must be host:port, got {address!r}")
    return NodeInfo(**{**values, "role": Role(values["role"])})


def plan(
    known: Sequence[NodeInfo], counts: Counts, directory: Path, defaults: Counts = DEFAULT_COUNTS
) -> tuple[NodeInfo, ...]:
    """Return the nodes of a cluster: `known` and those that `counts` adds, sorted by role.

    `counts` are totals. An unset count is the number of known nodes or, if `known` is empty, the one in `defaults`.
    Raises ClusterError if a role would lose nodes, the number of controllers of an existing cluster would change, the
    total exceeds NODES_MAX, a new cluster would not have 1, 3 or 5 controllers, or there is no broker.
    """
    nodes = list(known)
    for role in Role:
        have = sum(node.role is role for node in known)
        want = counts.of(role)
        if want is None:
            want = have if known else defaults.of(role) or 0
        if want < have or (known and role is Role.CONTROLLER and want != have):
            raise ClusterError(
                f"{directory} has {have} {role}(s), not {want}: use another directory, or omit the number"
            )
        if len(nodes) + want - have > NODES_MAX:
            raise ClusterError(f"a local cluster can have at most {NODES_MAX} nodes, got {len(nodes) + want - have}")
        nodes.extend(_new_node(nodes, role, number, directory) for number in range(have + 1, want + 1))
    if not any(node.role is Role.CONTROLLER for node in nodes) or not any(node.role.is_broker for node in nodes):
        raise ClusterError("a cluster needs at least one controller and one broker")
    controllers = sum(node.role is Role.CONTROLLER for node in nodes)
    if not known and controllers not in CONTROLLERS:
        raise ClusterError(f"a cluster must have 1, 3 or 5 controllers, got {controllers}")
    order = list(Role)
    return tuple(sorted(nodes, key=lambda node: order.index(node.role)))


def _new_node(nodes: Sequence[NodeInfo], role: Role, number: int, directory: Path) -> NodeInfo:
    brokers = [node for node in nodes if node.role.is_broker]
    node_id: int | None
    if role.is_broker:
        node_id = 1 + max((node.node_id or 0 for node in brokers), default=0)
        index = node_id - 1
    else:
        node_id = FIRST_CONTROLLER_ID + number - 1 if role is Role.CONTROLLER else None
        index = number - 1
    name = f"{role}-{number}"
    home = directory / name
    return NodeInfo(name, role, node_id, RACKS[index % len(RACKS)], dir=str(home), log=str(home / "node.log"))


def has_majority(nodes: Sequence[NodeInfo], running: int) -> bool:
    """Return whether `running` controllers are more than half of the controllers in `nodes`."""
    return running > sum(node.role is Role.CONTROLLER for node in nodes) // 2


def properties(state: ClusterState, node: NodeInfo, config: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of a node's configuration file, by key.

    `config` contains the user's settings for this role and takes precedence.
    """
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
