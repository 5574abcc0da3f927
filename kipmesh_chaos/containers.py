"""A cluster of docker-compose containers, for `kipmesh chaos run --compose PROJECT`.

The cluster outlives the run: `up` waits until it is healthy, `down` stops it to read the replicas' logs, `destroy`
starts it again. Containers are found by the labels of docker-compose. Needs the extra `chaos` (the library `docker`).

- kill sends SIGKILL, restart is `docker stop` (SIGTERM, exit code 0 required), pause freezes the container.
- cut disconnects a container from its network, also from clients on the host. Its address may change.
- The experiment's `cluster` section is ignored.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kipmesh_chaos.experiment import Cut, Fault, Kill, Pause, Restart
from kipmesh_chaos.target_cluster import CONTROLLER, Calls, ChaosError, bootstrap, is_broker, is_controller

if TYPE_CHECKING:
    from docker import APIClient

PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"
SERVICES = (CONTROLLER, "leader-", "follower-", "consumer-")
DATA = "/var/lib/kipmesh/data"
INTERNAL_PORT, HOST_PORT, QUORUM_PORT = 9092, 9094, 9093
ENGINE_TIMEOUT_S = 90
HEALTHY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40
HEALTH_INTERVAL_S = 0.25
CALLS_TIMEOUT_S = HEALTHY_TIMEOUT_S + STOP_TIMEOUT_S


class EngineError(ChaosError):
    """Docker is unavailable or refused a request. The message is one line."""


@contextmanager
def _engine_errors() -> Iterator[None]:
    from docker.errors import DockerException
    from requests import RequestException

    try:
        yield
    except (DockerException, RequestException) as error:
        raise EngineError(f"Docker: {' '.join(str(error).split())}") from None


def connect() -> APIClient:
    """Connect to the Docker engine of DOCKER_HOST or the current Docker context. Raises ChaosError if the package
    docker is missing, EngineError if Docker is unavailable.

    The client may be used by several threads.
    """
    try:
        import docker
    except ImportError:
        raise ChaosError("the package docker is missing; install it with: pip install 'kipmesh[chaos]'") from None
    with _engine_errors():
        return docker.from_env(timeout=ENGINE_TIMEOUT_S).api


@dataclass(frozen=True, slots=True)
class ContainerNode:
    """A container as a node. `pid` is the host's process id, None after a kill or stop. `grpc` is `host:port` for
    clients, None if the container publishes no port. `dir` is the directory for copied logs.
    """

    name: str
    node_id: int | None
    rack: str
    pid: int | None
    grpc: str | None
    dir: str
    container: str


class ContainerCluster:
    """The containers of one docker-compose project as a target cluster. Thread-safe; `destroy` waits for other calls.

    Args:
        directory: directory for copied logs.
        topic: topic of the run.
        inside: whether the run is inside the containers' network and does not need published ports.
        client: client configuration besides the addresses, such as TLS.
    """

    def __init__(
        self,
        engine: APIClient,
        project: str,
        directory: Path,
        topic: str,
        *,
        inside: bool = False,
        client: Mapping[str, str] | None = None,
    ) -> None:
        self._engine = engine
        self._project = project
        self._directory = directory
        self._topic = topic
        self._inside = inside
        self._client = client or {}
        self.calls = Calls()
        self._lock = threading.Lock()
        self._nodes: dict[str, ContainerNode] = {}
        self._networks: dict[str, dict[str, list[str]]] = {}
        """Networks of disconnected containers, with their aliases there."""

    def unsupported_reason(self, fault: Fault) -> str | None:
        """Return the reason why containers do not support a fault, or None if they do."""
        if not isinstance(fault, Kill | Pause | Restart | Cut):
            return "containers support only kill, restart, pause and cut"
        if isinstance(fault, Cut) and not fault.is_total:
            return "containers support only cuts with peers everybody and direction both"
        return None

    def up(self) -> None:
        """Find the containers, wait until they are healthy and delete the topic of an earlier run.

        Raises ChaosError if there are no containers, one is not healthy within 120 s, or Docker or the deletion fails.
        """
        found = {}
        with _engine_errors():
            for one in self._engine.containers(all=True, filters={"label": [f"{PROJECT_LABEL}={self._project}"]}):
                name = one["Labels"].get(SERVICE_LABEL, "")
                if name.startswith(SERVICES):
                    found[name] = self._node(name, self._engine.inspect_container(one["Id"]))
        if not any(node.node_id is not None for node in found.values()):
            raise ChaosError(f"docker-compose project {self._project!r} has no containers of a kipmesh cluster")
        with self._lock:
            self._nodes = dict(sorted(found.items()))
        for name in self._nodes:
            self._wait_healthy(name)
        self._delete_topic()

    def nodes(self) -> Sequence[ContainerNode]:
        """Return all nodes. Their `pid` is as of the last call of this object; the container may have changed."""
        with self._lock:
            return list(self._nodes.values())

    def is_running(self, name: str) -> bool:
        """Whether Docker reports a container as running, which includes paused ones. Raises EngineError."""
        return bool(self._inspect(name)["State"]["Running"])

    def kill(self, name: str) -> None:
        """Send SIGKILL to a container. Raises EngineError, including if the container is not running."""
        self._call(self._engine.kill, name)
        self._set_pid(name, None)

    def stop(self, name: str) -> None:
        """Send SIGTERM to a container, SIGKILL after 40 s, and wait until it has ended. Raises EngineError; ChaosError
        if the exit code is not 0.
        """
        self._call(self._engine.stop, name, timeout=STOP_TIMEOUT_S)
        self._set_pid(name, None)
        code = self._inspect(name)["State"]["ExitCode"]
        if code:
            raise ChaosError(f"{name} must exit with 0 on SIGTERM, got {code}")

    def start(self, name: str) -> None:
        """Start a container and wait until it is healthy. Raises EngineError; ChaosError if it is not healthy within
        120 s.
        """
        self._call(self._engine.start, name)
        self._wait_healthy(name)

    def pause(self, name: str) -> None:
        """Freeze the processes of a container. Raises EngineError."""
        self._call(self._engine.pause, name)

    def resume(self, name: str) -> None:
        """Thaw the processes of a container. Raises EngineError."""
        self._call(self._engine.unpause, name)

    def disconnect(self, name: str) -> None:
        """Disconnect a container from all its networks and remember its aliases there for `reconnect`. Raises
        EngineError.
        """
        networks = self._inspect(name)["NetworkSettings"]["Networks"]
        aliases = {one["NetworkID"]: [*(one.get("Aliases") or []), name] for one in networks.values()}
        with self._lock:
            self._networks[name] = {**self._networks.get(name, {}), **aliases}
        for network in aliases:
            self._call(self._engine.disconnect_container_from_network, name, network, force=True)

    def reconnect(self, name: str) -> None:
        """Reconnect a container to the networks that `disconnect` removed, under its aliases. Does nothing if there are
        none, so it can be repeated after an error.

        Raises EngineError.
        """
        with self._lock:
            aliases = self._networks.get(name, {})
        if not aliases:
            return
        # Docker refuses to connect a container twice, and an earlier call may have connected some networks.
        known = {one["NetworkID"] for one in self._inspect(name)["NetworkSettings"]["Networks"].values()}
        for network, names in aliases.items():
            if network not in known:
                self._call(self._engine.connect_container_to_network, name, network, aliases=sorted(set(names)))
        with self._lock:
            self._networks.pop(name, None)

    def down(self) -> None:
        """Reconnect, resume and stop all containers, brokers before controllers, then copy the brokers' logs of the
        topic.

        Raises EngineError; ChaosError if an exit code is not 0 or `destroy` was called.
        """
        order = sorted(self.nodes(), key=is_controller)
        for node in order:
            with self.calls.under_way():
                self.reconnect(node.name)
                self._unpause(node.name)
                if self.is_running(node.name):
                    self.stop(node.name)
        for node in order:
            if is_broker(node):
                self._copy_logs(node)

    def destroy(self) -> None:
        """Refuse further calls, undo all faults and start all containers; idempotent. Does not wait until they are
        healthy.

        Tries each container before it raises ChaosError.
        """
        have_ended = self.calls.end(CALLS_TIMEOUT_S)
        errors = [] if have_ended else [f"a fault was still in progress after {CALLS_TIMEOUT_S:g} s and may remain"]
        for node in self.nodes():
            for restore in (self.reconnect, self._ensure_running):
                try:
                    restore(node.name)
                except EngineError as error:
                    errors.append(f"{node.name}: {error}")
        if errors:
            raise ChaosError("; ".join(errors))

    # -- inside

    def _unpause(self, name: str) -> None:
        if self._inspect(name)["State"]["Paused"]:
            self.resume(name)

    def _ensure_running(self, name: str) -> None:
        self._unpause(name)
        if not self.is_running(name):
            self._call(self._engine.start, name)

    def _node(self, name: str, details: Mapping[str, Any]) -> ContainerNode:
        environment = dict(text.partition("=")[::2] for text in details["Config"]["Env"] or [])
        node_id = environment.get("KIPMESH_CONFIG_NODE_ID", "")
        return ContainerNode(
            name=name,
            node_id=int(node_id) if node_id.isdecimal() else None,
            rack=environment.get("KIPMESH_CONFIG_BROKER_RACK", ""),
            pid=details["State"]["Pid"] or None,
            grpc=self._address(name, details["HostConfig"]["PortBindings"] or {}) if node_id else None,
            dir=str(self._directory / name),
            container=details["Id"],
        )

    def _address(self, name: str, ports: Mapping[str, Any]) -> str | None:
        is_voter = name.startswith(CONTROLLER)
        if self._inside:
            return f"{name}:{QUORUM_PORT if is_voter else INTERNAL_PORT}"
        bound = ports.get(f"{QUORUM_PORT if is_voter else HOST_PORT}/tcp") or []
        return f"{bound[0]['HostIp'] or '127.0.0.1'}:{bound[0]['HostPort']}" if bound else None

    def _delete_topic(self) -> None:
        """Delete the topic that an earlier run left, if it exists. Raises ChaosError."""
        from kipmesh.client.sync import AdminClient
        from kipmesh.core.errors import ErrorCode, KafkaError

        try:
            with AdminClient(bootstrap(self.nodes()), **self._client) as admin:
                admin.delete_topics([self._topic])
        except KafkaError as error:
            if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise ChaosError(f"cannot delete topic {self._topic} of an earlier run: {error}") from None

    def _wait_healthy(self, name: str) -> None:
        deadline = time.monotonic() + HEALTHY_TIMEOUT_S
        while True:
            state = self._inspect(name)["State"]
            health = (state.get("Health") or {}).get("Status", "none")
            if state["Running"] and health in ("healthy", "none"):
                self._set_pid(name, state["Pid"])
                return
            if time.monotonic() > deadline:
                raise ChaosError(
                    f"{name} must be healthy within {HEALTHY_TIMEOUT_S:g} s, got {state['Status']}, {health}"
                )
            time.sleep(HEALTH_INTERVAL_S)

    def _copy_logs(self, node: ContainerNode) -> None:
        target = Path(node.dir)
        target.mkdir(parents=True, exist_ok=True)
        with _engine_errors(), tempfile.TemporaryFile() as stream:
            chunks, _about = self._engine.get_archive(node.container, DATA)
            stream.writelines(chunks)
            stream.seek(0)
            with tarfile.open(fileobj=stream) as archive:
                for path, content in _files_of_topic(archive, self._topic):
                    (target / path).parent.mkdir(parents=True, exist_ok=True)
                    with (target / path).open("wb") as file:
                        shutil.copyfileobj(content, file)

    def _set_pid(self, name: str, pid: int | None) -> None:
        with self._lock:
            self._nodes[name] = replace(self._nodes[name], pid=pid)

    def _inspect(self, name: str) -> Any:
        return self._call(self._engine.inspect_container, name)

    def _call(self, method: Callable[..., Any], name: str, *args: object, **kwargs: object) -> Any:
        """Call a method of the engine with the container of node `name` as its first argument. Raises EngineError."""
        with self._lock:
            container = self._nodes[name].container
        with _engine_errors():
            return method(container, *args, **kwargs)


def _files_of_topic(archive: tarfile.TarFile, topic: str) -> Iterator[tuple[Path, IO[bytes]]]:
    """Yield (path, content) of each regular file `data/TOPIC-N/...` of an archive. Read each content before advancing
    the iterator.
    """
    for member in archive:
        path = Path(member.name)
        is_plain = member.isreg() and not path.is_absolute() and ".." not in path.parts
        content = archive.extractfile(member) if is_plain else None
        if content is not None and len(path.parts) > 2 and path.parts[1].rpartition("-")[0] == topic:
            yield path, content


def maker(
    project: str, topic: str, *, inside: bool, client: Mapping[str, str]
) -> Callable[[Path, object, object], ContainerCluster]:
    """Return a function for `runner.run_once` that creates a `ContainerCluster` with these arguments. The function
    connects to Docker and may raise ChaosError.
    """

    def make(directory: Path, _part: object, _hook: object) -> ContainerCluster:
        return ContainerCluster(connect(), project, directory, topic, inside=inside, client=client)

    return make
