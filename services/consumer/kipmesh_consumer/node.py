"""Runs the consumer service: its HTTP server and its clients of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from contextlib import suppress

import structlog
import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector

from kipmesh.core.config.node import ConsumerServiceConfig
from kipmesh.node.http import HttpAddressError
from kipmesh.node.tls import ProcessTls
from kipmesh_consumer.app import make_app
from kipmesh_consumer.backend import Backend

BACKLOG = 256
KEEP_ALIVE_TIMEOUT_S = 15
OTHER_CONNECTIONS_MAX = 64
"""Connections beyond `streams.max`, for requests that are not streams."""

log = structlog.get_logger(__name__)


class _Server(uvicorn.Server):
    """Uvicorn without signal handlers and periodic ticks, because it runs in the event loop of the node."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()
        self.must_stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    async def main_loop(self) -> None:
        await self.must_stop.wait()


class ConsumerNode:
    """The consumer service: an HTTP server on `http.listener` and a backend. Create it in a running event loop.

    If the HTTP server fails, its exception is set on the future `failed`.
    """

    def __init__(self, config: ConsumerServiceConfig) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.http_port = 0
        self.tls = ProcessTls(config, self.registry)
        self._config = config
        self._backend = Backend(config, self.registry)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether the node is connected to the cluster and not stopping."""
        return self._backend.ready

    async def start(self) -> None:
        """Start the HTTP server, set `http_port`, and connect to the cluster in the background.

        Returns when the server listens. Raises HttpAddressError if it cannot listen on `http.listener`.
        """
        listener = _bind(self._config)
        self.http_port = listener.getsockname()[1]
        config = uvicorn.Config(
            make_app(self._backend),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            date_header=False,
            server_header=False,
            backlog=BACKLOG,
            limit_concurrency=self._config.streams_max + OTHER_CONNECTIONS_MAX,
            timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
            timeout_graceful_shutdown=max(1, self._config.shutdown_grace_ms // 1000),
        )
        context = self.tls.http(alpn=("http/1.1",))
        config.load()
        config.ssl = None if context is None else context.reloading()
        server = self._server = _Server(config)
        self._serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        self._serving.add_done_callback(self._on_server_end)
        await server.is_up.wait()
        self._connecting = asyncio.create_task(self._backend.connect(), name="connect")
        log.info("http server started", port=self.http_port)

    async def stop(self) -> None:
        """End all streams, stop the HTTP server and close the clients. Idempotent.

        Each stream first sends the records that it has already polled. The server waits for open responses for up to
        `shutdown.grace.ms`, at least 1 s.
        """
        self._backend.streams.stopping.set()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._server is not None:
            self._server.should_exit = True
            self._server.must_stop.set()
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
        await self._backend.close()
        self.tls.close()

    def _on_server_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self.failed.done():
            return
        error = task.exception()
        if error is not None:
            with suppress(asyncio.InvalidStateError):
                self.failed.set_exception(error)


def _bind(config: ConsumerServiceConfig) -> socket.socket:
    endpoint = config.http_endpoint
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((endpoint.host, endpoint.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        text = f"cannot listen on {endpoint.host}:{endpoint.port} (http.listener): {error.strerror}"
        raise HttpAddressError(text) from None
    return listener
