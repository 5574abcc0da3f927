"""A Docker engine for tests: its HTTP at a Unix socket, as far as experiments speak it, and no containers."""

from __future__ import annotations

import io
import json
import shutil
import socketserver
import tarfile
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

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
    """`with FakeEngine() as engine`: `engine.address` is its DOCKER_HOST; `asked` is what it was told to do."""

    def __init__(self) -> None:
        self.containers: dict[str, FakeContainer] = {}
        self.asked: list[str] = []
        self.refuses: dict[str, tuple[int, bytes]] = {}
        """Status and body, by the end of a path."""
        self._folder = Path(tempfile.mkdtemp(prefix="engine-"))  # short: a socket's path has 108 bytes
        self.address = f"unix://{self._folder / 'docker.sock'}"
        handler = type("Handler", (_Handler,), {"engine": self})
        self._server = socketserver.ThreadingUnixStreamServer(str(self._folder / "docker.sock"), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def add(self, container: FakeContainer) -> FakeContainer:
        self.containers[container.id] = container
        return container

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        shutil.rmtree(self._folder)

    # -- what it answers

    def listed(self, query: Mapping[str, list[str]]) -> list[dict[str, Any]]:
        (wanted,) = json.loads(query["filters"][0])["label"]
        assert query["all"] == ["true"], "those that do not run are nodes as well"
        found = []
        for one in self.containers.values():
            labels = {"com.docker.compose.project": one.project, "com.docker.compose.service": one.service}
            if wanted in [f"{key}={value}" for key, value in labels.items()]:
                found.append({"Id": one.id, "Labels": labels})
        return found

    def archive(self, container: FakeContainer, path: str) -> bytes:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for name, content in container.files.items():
                about = tarfile.TarInfo(f"{Path(path).name}/{name}")
                about.size = len(content)
                archive.addfile(about, io.BytesIO(content))
        return stream.getvalue()

    def change(self, container: FakeContainer, what: str) -> None:
        match what:
            case "kill":
                container.running, container.exit_code = False, 137
            case "stop":
                container.running, container.exit_code = False, container.exit_code_on_stop
            case "start":
                container.running, container.exit_code = True, 0
            case "pause" | "unpause":
                container.paused = what == "pause"
            case _:
                raise AssertionError(what)

    def wire(self, what: str, network: str, body: Mapping[str, Any]) -> None:
        container = self.containers[body["Container"]]
        if what == "disconnect":
            assert body["Force"] is True
            del container.networks[network]
        else:
            container.networks[network] = body["EndpointConfig"]["Aliases"]


class _Handler(BaseHTTPRequestHandler):
    engine: FakeEngine

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def address_string(self) -> str:
        return "socket"

    def log_message(self, *_arguments: object) -> None:
        """Tests are quiet."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        for end, (status, refusal) in self.engine.refuses.items():
            if url.path.endswith(end):
                return self._send(status, refusal)
        parts = url.path.strip("/").split("/")
        if self.command == "POST":
            asked = f"{parts[-1]} {parts[1].removeprefix('id-of-')}"
            self.engine.asked.append(asked + (f" t={query['t'][0]}" if "t" in query else ""))
        if url.path == "/containers/json":
            return self._send(200, json.dumps(self.engine.listed(query)).encode())
        if parts[0] == "networks":
            self.engine.wire(parts[2], parts[1], json.loads(body))
            return self._send(200, b"")
        container = self.engine.containers.get(parts[1])
        if container is None:
            return self._send(404, json.dumps({"message": f"No such container: {parts[1]}"}).encode())
        if parts[2] == "json":
            return self._send(200, json.dumps(container.about()).encode())
        if parts[2] == "archive":
            return self._send(200, self.engine.archive(container, query["path"][0]))
        self.engine.change(container, parts[2])
        return self._send(204, b"")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body:
            with suppress(BrokenPipeError):  # who asked has enough
                self.wfile.write(body)
