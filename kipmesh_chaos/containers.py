"""A mesh of containers that docker-compose started, as an experiment's cluster: `kipmesh chaos run --compose PROJECT`.

It is there before and after a run: `up` looks that it is healthy, `down` stops it to read the replicas' logs, `destroy`
starts it again. Containers are found by the labels of docker-compose. Needs the extra `chaos` (the library `docker`).

- kill is SIGKILL of the container, restart a `docker stop` (SIGTERM, and its exit code has to be 0), pause its freezer.
- cut takes the container off its network: nobody hears it, nor its clients on the host, and its address may be another
  one afterwards. Other cuts, delays, disks and clocks need what only a cluster of processes has: see `unable`.
- What an experiment says of the cluster (counts, config) does not count: the mesh is as it is.
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
from kipmesh_chaos.target_cluster import Calls, ChaosError

if TYPE_CHECKING:
    from docker import APIClient

PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"
SERVICES = ("controller-", "leader-", "follower-", "consumer-")
DATA = "/var/lib/kipmesh/data"
MESH_PORT, HOST_PORT, QUORUM_PORT = 9092, 9094, 9093
ENGINE_TIMEOUT_S = 90
HEALTHY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40
LOOK_INTERVAL_S = 0.25
CALLS_TIMEOUT_S = HEALTHY_TIMEOUT_S + STOP_TIMEOUT_S


class EngineError(ChaosError):
    """Docker is not there, or refused; the text is one line."""


@contextmanager
def _engine_errors() -> Iterator[None]:
    from docker.errors import DockerException
    from requests import RequestException

    try:
        yield
    except (DockerException, RequestException) as error:
        raise EngineError(f"Docker: {' '.join(str(error).split())}") from None


def connect() -> APIClient:
    """The engine that DOCKER_HOST or Docker's context names; may be used from several threads. Raises ChaosError."""
    try:
        import docker
    except ImportError:
        raise ChaosError("the package `docker` is missing: install kipmesh[chaos]") from None
    with _engine_errors():
        return docker.from_env(timeout=ENGINE_TIMEOUT_S).api


@dataclass(frozen=True, slots=True)
class ContainerNode:
    """A container as experiments see a node; `pid` is the host's, None while it does not run."""

    name: str
    node_id: int | None
    rack: str
    pid: int | None
    grpc: str | None
    dir: str
    container: str


class ContainerCluster:
    """The containers of one project. Calls may come from several threads, and `destroy` waits for them."""

    def __init__(
        self,
        engine: APIClient,
        project: str,
        folder: Path,
        topic: str,
        *,
        inside: bool = False,
        client: Mapping[str, str] | None = None,
    ) -> None:
        """`inside`: the experiment runs within the containers' network, and does not need published ports.

        `client`: how clients reach the brokers, beside their addresses (TLS).
        """
        self._engine = engine
        self._project = project
        self._folder = folder
        self._topic = topic
        self._inside = inside
        self._client = client or {}
        self.calls = Calls()
        self._lock = threading.Lock()
        self._nodes: dict[str, ContainerNode] = {}
        self._networks: dict[str, dict[str, list[str]]] = {}
        """Of those that are cut off: the networks, and their names there."""

    def unable(self, fault: Fault) -> str | None:
        """Why a fault cannot be done to containers."""
        if not isinstance(fault, Kill | Pause | Restart | Cut):
            return "not on containers, which have kill, restart, pause and cut"
        if isinstance(fault, Cut) and not fault.is_total:
            return "a container is cut off from everybody, in both directions"
        return None

    def up(self) -> None:
        """Find the containers, and wait until they are healthy. Raises ChaosError."""
        found = {}
        with _engine_errors():
            for one in self._engine.containers(all=True, filters={"label": [f"{PROJECT_LABEL}={self._project}"]}):
                name = one["Labels"].get(SERVICE_LABEL, "")
                if name.startswith(SERVICES):
                    found[name] = self._node(name, self._engine.inspect_container(one["Id"]))
        if not any(node.node_id is not None for node in found.values()):
            raise ChaosError(f"there are no containers of a mesh in the project {self._project!r} of docker-compose")
        with self._lock:
            self._nodes = dict(sorted(found.items()))
        for name in self._nodes:
            self._wait_healthy(name)
        self._forget_topic()

    def nodes(self) -> Sequence[ContainerNode]:
        """All of them, whether they run or not, as this object left them."""
        with self._lock:
            return list(self._nodes.values())

    def is_running(self, name: str) -> bool:
        """Whether its process is there, held or not."""
        return bool(self._inspect(name)["State"]["Running"])

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self._do(self._engine.kill, name)
        self._set_pid(name, None)

    def stop(self, name: str) -> None:
        """SIGTERM, and wait; raises ChaosError when the process did not end cleanly."""
        self._do(self._engine.stop, name, timeout=STOP_TIMEOUT_S)
        self._set_pid(name, None)
        code = self._inspect(name)["State"]["ExitCode"]
        if code:
            raise ChaosError(f"{name} ended with {code} on SIGTERM")

    def start(self, name: str) -> None:
        """Start it, and return when it is healthy."""
        self._do(self._engine.start, name)
        self._wait_healthy(name)

    def pause(self, name: str) -> None:
        """Freeze its processes."""
        self._do(self._engine.pause, name)

    def resume(self, name: str) -> None:
        """Let them go on."""
        self._do(self._engine.unpause, name)

    def disconnect(self, name: str) -> None:
        """Take it off its networks."""
        networks = self._inspect(name)["NetworkSettings"]["Networks"]
        aliases = {one["NetworkID"]: [*(one.get("Aliases") or []), name] for one in networks.values()}
        with self._lock:
            self._networks[name] = {**self._networks.get(name, {}), **aliases}
        for network in aliases:
            self._do(self._engine.disconnect_container_from_network, name, network, force=True)

    def reconnect(self, name: str) -> None:
        """Put it on its networks again, by its old names; idempotent, and may be asked again after an error."""
        with self._lock:
            aliases = self._networks.get(name, {})
        if not aliases:
            return
        # It is refused to connect it twice: an earlier call may have done a part of this.
        known = {one["NetworkID"] for one in self._inspect(name)["NetworkSettings"]["Networks"].values()}
        for network, names in aliases.items():
            if network not in known:
                self._do(self._engine.connect_container_to_network, name, network, aliases=sorted(set(names)))
        with self._lock:
            self._networks.pop(name, None)

    def down(self) -> None:
        """Stop everything, brokers before controllers, and copy the topic's logs to where experiments look."""
        order = sorted(self.nodes(), key=lambda node: node.name.startswith("controller-"))
        for node in order:
            with self.calls.under_way():
                self.reconnect(node.name)
                self._unpause(node.name)
                if self.is_running(node.name):
                    self.stop(node.name)
        for node in order:
            if node.node_id is not None and not node.name.startswith("controller-"):
                self._copy_logs(node)

    def destroy(self) -> None:
        """Everything runs again, as it did before; idempotent. Raises ChaosError at the end, when all was tried."""
        have_ended = self.calls.end(CALLS_TIMEOUT_S)
        errors = [] if have_ended else [f"a fault was still being done after {CALLS_TIMEOUT_S:g} s, and may be left"]
        for node in self.nodes():
            for mend in (self.reconnect, self._go_on):
                try:
                    mend(node.name)
                except EngineError as error:
                    errors.append(f"{node.name}: {error}")
        if errors:
            raise ChaosError("; ".join(errors))

    # -- inside

    def _unpause(self, name: str) -> None:
        if self._inspect(name)["State"]["Paused"]:
            self.resume(name)

    def _go_on(self, name: str) -> None:
        self._unpause(name)
        if not self.is_running(name):
            self._do(self._engine.start, name)

    def _node(self, name: str, about: Mapping[str, Any]) -> ContainerNode:
        environment = dict(text.partition("=")[::2] for text in about["Config"]["Env"] or [])
        node_id = environment.get("KIPMESH_CONFIG_NODE_ID", "")
        return ContainerNode(
            name=name,
            node_id=int(node_id) if node_id.isdecimal() else None,
            rack=environment.get("KIPMESH_CONFIG_BROKER_RACK", ""),
            pid=about["State"]["Pid"] or None,
            grpc=self._address(name, about["HostConfig"]["PortBindings"] or {}) if node_id else None,
            dir=str(self._folder / name),
            container=about["Id"],
        )

    def _address(self, name: str, ports: Mapping[str, Any]) -> str | None:
        is_controller = name.startswith("controller-")
        if self._inside:
            return f"{name}:{QUORUM_PORT if is_controller else MESH_PORT}"
        bound = ports.get(f"{QUORUM_PORT if is_controller else HOST_PORT}/tcp") or []
        return f"{bound[0]['HostIp'] or '127.0.0.1'}:{bound[0]['HostPort']}" if bound else None

    def _forget_topic(self) -> None:
        """What an earlier run left."""
        from kipmesh.client.sync import AdminClient
        from kipmesh.core.errors import ErrorCode, KafkaError

        bootstrap = ",".join(node.grpc for node in self.nodes() if node.grpc and "controller-" not in node.name)
        try:
            with AdminClient(bootstrap, **self._client) as admin:
                admin.delete_topics([self._topic])
        except KafkaError as error:
            if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise ChaosError(f"topic {self._topic} of an earlier run cannot be removed: {error}") from None

    def _wait_healthy(self, name: str) -> None:
        deadline = time.monotonic() + HEALTHY_TIMEOUT_S
        while True:
            state = self._inspect(name)["State"]
            health = (state.get("Health") or {}).get("Status", "none")
            if state["Running"] and health in ("healthy", "none"):
                self._set_pid(name, state["Pid"])
                return
            if time.monotonic() > deadline:
                raise ChaosError(f"{name} is {state['Status']}, {health} after {HEALTHY_TIMEOUT_S:g} s")
            time.sleep(LOOK_INTERVAL_S)

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
        return self._do(self._engine.inspect_container, name)

    def _do(self, method: Callable[..., Any], name: str, *given: object, **named: object) -> Any:
        """Call a method of the engine whose first argument is a container."""
        with self._lock:
            container = self._nodes[name].container
        with _engine_errors():
            return method(container, *given, **named)


def _files_of_topic(archive: tarfile.TarFile, topic: str) -> Iterator[tuple[Path, IO[bytes]]]:
    """Files `data/TOPIC-N/...` alone: a broker may have much else. One at a time, as they come."""
    for member in archive:
        path = Path(member.name)
        is_plain = member.isreg() and not path.is_absolute() and ".." not in path.parts
        content = archive.extractfile(member) if is_plain else None
        if content is not None and len(path.parts) > 2 and path.parts[1].rpartition("-")[0] == topic:
            yield path, content


def maker(
    project: str, topic: str, *, inside: bool, client: Mapping[str, str]
) -> Callable[[Path, object, object], ContainerCluster]:
    """What `runner.run_once` makes its cluster with."""

    def make(folder: Path, _part: object, _hook: object) -> ContainerCluster:
        return ContainerCluster(connect(), project, folder, topic, inside=inside, client=client)

    return make
