"""A fake Docker engine: the methods of `docker.APIClient` that experiments call, with state instead of containers."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docker.errors import APIError

NETWORK = "network-1"


@dataclass(slots=True)
class FakeContainer:
    """One container of a Docker Compose project."""

    service: str
    project: str = "mesh"
    environment: dict[str, str] = field(default_factory=dict)
    ports: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    running: bool = True
    paused: bool = False
    exit_code: int = 0
    exit_code_on_stop: int = 0
    health: list[str] = field(default_factory=lambda: ["healthy"])
    """Health of successive inspections. The last value is repeated."""
    networks: dict[str, list[str]] = field(default_factory=lambda: {NETWORK: ["alias-of-docker"]})
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"id-of-{self.service}"

    def inspection(self) -> dict[str, Any]:
        health = self.health.pop(0) if len(self.health) > 1 else self.health[0]
        networks = {name: {"NetworkID": name, "Aliases": aliases} for name, aliases in self.networks.items()}
        state: dict[str, Any] = {
            "Running": self.running,
            "Paused": self.paused,
            "Status": "running" if self.running else "exited",
            "Pid": 4000 if self.running else 0,
            "ExitCode": self.exit_code,
        }
        if health != "none":
            state["Health"] = {"Status": health}
        return {
            "Id": self.id,
            "Config": {"Env": [f"{key}={value}" for key, value in self.environment.items()]},
            "HostConfig": {"PortBindings": self.ports},
            "NetworkSettings": {"Networks": networks},
            "State": state,
        }


class FakeEngine:
    """Engine with `members`, its containers by id. `calls` records the calls that change them."""

    def __init__(self) -> None:
        self.members: dict[str, FakeContainer] = {}
        self.calls: list[str] = []
        self.errors: dict[str, str] = {}
        """Error explanations by `METHOD` and `METHOD SUBJECT`."""

    def add(self, container: FakeContainer) -> FakeContainer:
        self.members[container.id] = container
        return container

    def containers(self, *, all: bool, filters: dict[str, list[str]]) -> list[dict[str, Any]]:  # noqa: A002
        (wanted,) = filters["label"]
        assert all, "stopped containers are nodes, too"
        matches = []
        for container in self.members.values():
            labels = {"com.docker.compose.project": container.project, "com.docker.compose.service": container.service}
            if wanted in [f"{key}={value}" for key, value in labels.items()]:
                matches.append({"Id": container.id, "Labels": labels})
        return matches

    def inspect_container(self, container: str) -> dict[str, Any]:
        self._raise_error("inspect", container)
        return self.members[container].inspection()

    def get_archive(self, container: str, path: str) -> tuple[Iterator[bytes], dict[str, Any]]:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for name, content in self.members[container].files.items():
                entry = tarfile.TarInfo(f"{Path(path).name}/{name}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        data = stream.getvalue()
        return (data[start : start + 1000] for start in range(0, len(data), 1000)), {}

    def kill(self, container: str) -> None:
        container_state = self._record_call("kill", container)
        container_state.running, container_state.exit_code = False, 137

    def stop(self, container: str, *, timeout: int) -> None:
        container_state = self._record_call("stop", container, f" t={timeout}")
        container_state.running, container_state.exit_code = False, container_state.exit_code_on_stop

    def start(self, container: str) -> None:
        container_state = self._record_call("start", container)
        container_state.running, container_state.exit_code = True, 0

    def pause(self, container: str) -> None:
        self._record_call("pause", container).paused = True

    def unpause(self, container: str) -> None:
        self._record_call("unpause", container).paused = False

    def disconnect_container_from_network(self, container: str, net_id: str, *, force: bool) -> None:
        assert force
        self._raise_error("disconnect", net_id)
        self.calls.append(f"disconnect {net_id}")
        del self.members[container].networks[net_id]

    def connect_container_to_network(self, container: str, net_id: str, *, aliases: list[str]) -> None:
        self._raise_error("connect", net_id)
        self.calls.append(f"connect {net_id}")
        self.members[container].networks[net_id] = aliases

    def _record_call(self, method: str, container: str, arguments: str = "") -> FakeContainer:
        self._raise_error(method, container)
        self.calls.append(f"{method} {container.removeprefix('id-of-')}{arguments}")
        return self.members[container]

    def _raise_error(self, method: str, subject: str) -> None:
        for key in (method, f"{method} {subject}"):
            if key in self.errors:
                raise APIError(f"500 Server Error for {key}", explanation=self.errors[key])
