"""Requests to Docker's engine over its Unix socket: the few that experiments on containers need."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

from kipmesh.chaos.mesh import ChaosError

TIMEOUT_S = 90.0
DEFAULT_SOCKET = "/var/run/docker.sock"
ANSWER_BYTES_MAX = 16 << 20


class EngineError(ChaosError):
    """Docker is not there, or refused; the text is one line."""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


class Engine:
    """One engine, a connection for each request; may be used from several threads."""

    def __init__(self, address: str | None = None) -> None:
        """`unix://PATH`, by default what DOCKER_HOST says. Raises EngineError for another kind."""
        address = address or os.environ.get("DOCKER_HOST") or f"unix://{DEFAULT_SOCKET}"
        if not address.startswith("unix://"):
            raise EngineError(f"Docker at {address} is not reached by a Unix socket: run this where it is")
        self._path = address.removeprefix("unix://")

    def get(self, path: str, **query: object) -> Any:
        """The answer's JSON; raises EngineError."""
        return self._request("GET", path, None, query)

    def post(self, path: str, body: Mapping[str, object] | None, **query: object) -> Any:
        """The same with a body; what is already as it should be is no error."""
        return self._request("POST", path, body, query)

    @contextmanager
    def archive(self, container: str, path: str) -> Iterator[http.client.HTTPResponse]:
        """A tar stream of a folder in a container, running or not."""
        with self._answer("GET", f"/containers/{container}/archive", None, {"path": path}) as response:
            yield response

    def _request(self, method: str, path: str, body: Mapping[str, object] | None, query: Mapping[str, object]) -> Any:
        with self._answer(method, path, body, query) as response:
            data = response.read(ANSWER_BYTES_MAX)
        try:
            return json.loads(data) if data.strip() else None
        except ValueError:
            raise EngineError(f"Docker: {method} {path}: the answer is no JSON") from None

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, object] | None, query: Mapping[str, object]
    ) -> Iterator[http.client.HTTPResponse]:
        values = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in query.items()}
        url = f"{path}?{urlencode(values)}" if values else path
        connection = _Connection(self._path)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, url, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status >= 400:
                raise EngineError(f"Docker: {method} {path}: {_message(response.read(ANSWER_BYTES_MAX))}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"Docker at {self._path} does not answer: {error}") from None
        finally:
            connection.close()


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace").strip()
