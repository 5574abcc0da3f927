"""A Docker engine for tests: the methods of `docker.APIClient` that experiments call, and no containers."""

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
    """One container of a project of docker-compose."""

    service: str
    project: str = "mesh"
    environment: dict[str, str] = field(default_factory=dict)
    ports: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    running: bool = True
    paused: bool = False
    exit_code: int = 0
    exit_code_on_stop: int = 0
    health: list[str] = field(default_factory=lambda: ["healthy"])
    """What it says of its health when it is asked; the last one stays."""
    networks: dict[str, list[str]] = field(default_factory=lambda: {NETWORK: ["alias-of-docker"]})
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"id-of-{self.service}"

    def about(self) -> dict[str, Any]:
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
    """`members` are its containers by id; `asked` is what it was told to do."""

    def __init__(self) -> None:
        self.members: dict[str, FakeContainer] = {}
        self.asked: list[str] = []
        self.refuses: dict[str, str] = {}
        """What the engine says, by `METHOD` and `METHOD SUBJECT`."""

    def add(self, container: FakeContainer) -> FakeContainer:
        self.members[container.id] = container
        return container

    def containers(self, *, all: bool, filters: dict[str, list[str]]) -> list[dict[str, Any]]:  # noqa: A002
        (wanted,) = filters["label"]
        assert all, "those that do not run are nodes as well"
        found = []
        for one in self.members.values():
            labels = {"com.docker.compose.project": one.project, "com.docker.compose.service": one.service}
            if wanted in [f"{key}={value}" for key, value in labels.items()]:
                found.append({"Id": one.id, "Labels": labels})
        return found

    def inspect_container(self, container: str) -> dict[str, Any]:
        self._may_refuse("inspect", container)
        return self.members[container].about()

    def get_archive(self, container: str, path: str) -> tuple[Iterator[bytes], dict[str, Any]]:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for name, content in self.members[container].files.items():
                about = tarfile.TarInfo(f"{Path(path).name}/{name}")
                about.size = len(content)
                archive.addfile(about, io.BytesIO(content))
        data = stream.getvalue()
        return (data[place : place + 1000] for place in range(0, len(data), 1000)), {}

    def kill(self, container: str) -> None:
        one = self._asked("kill", container)
        one.running, one.exit_code = False, 137

    def stop(self, container: str, *, timeout: int) -> None:
        one = self._asked("stop", container, f" t={timeout}")
        one.running, one.exit_code = False, one.exit_code_on_stop

    def start(self, container: str) -> None:
        one = self._asked("start", container)
        one.running, one.exit_code = True, 0

    def pause(self, container: str) -> None:
        self._asked("pause", container).paused = True

    def unpause(self, container: str) -> None:
        self._asked("unpause", container).paused = False

    def disconnect_container_from_network(self, container: str, net_id: str, *, force: bool) -> None:
        assert force
        self._may_refuse("disconnect", net_id)
        self.asked.append(f"disconnect {net_id}")
        del self.members[container].networks[net_id]

    def connect_container_to_network(self, container: str, net_id: str, *, aliases: list[str]) -> None:
        self._may_refuse("connect", net_id)
        self.asked.append(f"connect {net_id}")
        self.members[container].networks[net_id] = aliases

    def _asked(self, what: str, container: str, how: str = "") -> FakeContainer:
        self._may_refuse(what, container)
        self.asked.append(f"{what} {container.removeprefix('id-of-')}{how}")
        return self.members[container]

    def _may_refuse(self, what: str, subject: str) -> None:
        for key in (what, f"{what} {subject}"):
            if key in self.refuses:
                raise APIError(f"500 Server Error for {key}", explanation=self.refuses[key])
