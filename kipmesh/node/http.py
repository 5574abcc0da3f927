"""HTTP server for `/metrics` and the probes of a process. Its threads keep scrapes off the event loop.

Serves GET and HEAD, with limits on connections, their duration and the size of a request. A probe returns 200 or 503:

- `/healthz`: the event loop responds;
- `/startedz`: the node has loaded its data and listens;
- `/readyz`: the node is ready;
- `/insyncz`: the node is ready, and each of its replicas is in sync or has been in sync since the start.

With TLS, each handshake runs on its request's thread and uses the current certificates.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kipmesh.transport.tls.contexts import ServerContext

CONNECTIONS_MAX = 16
CONNECTION_TIMEOUT_S = 5.0
LOOP_RESPONSE_TIMEOUT_S = 2.0

TEXT = "text/plain; charset=utf-8"
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HttpAddressError(Exception):
    """Raised if the address of `http.listener` cannot be bound."""


class Page(NamedTuple):
    """An HTTP response."""

    status: int
    content_type: str
    body: bytes


def text_page(status: int, text: str) -> Page:
    """Return a plain-text page of one line."""
    return Page(status, TEXT, text.encode() + b"\n")


class _Handler(BaseHTTPRequestHandler):
    timeout = CONNECTION_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0], _not_found)()
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page.body)

    do_HEAD = do_GET  # noqa: N815 - the standard library's name

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the standard library's name
        """Log nothing: probes and scrapes are too frequent."""

    def version_string(self) -> str:
        return "kipmesh"


def _not_found() -> Page:
    return text_page(404, "not found; see /metrics, /healthz, /startedz, /readyz and /insyncz")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self, address: tuple[str, int], pages: dict[str, Callable[[], Page]], tls: ServerContext | None
    ) -> None:
        self.pages = pages
        self._tls = tls
        self.closing = False
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind the socket without the standard library's reverse DNS lookup, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            with contextlib.suppress(OSError):
                if self._tls is None:
                    request.sendall(_BUSY)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            if self._tls is not None:
                request.settimeout(CONNECTION_TIMEOUT_S)
                try:
                    request = self._tls.current().wrap_socket(request, server_side=True)
                except OSError:  # plaintext, an untrusted or a slow client; the socket is already closed
                    return
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connection errors: the client has disconnected or is too slow."""

    def accept_until_closed(self) -> None:
        """Accept connections until `close`. Unlike `serve_forever`, this does not poll for shutdown."""
        while True:
            try:
                request, address = self.get_request()
            except OSError:
                if self.socket.fileno() < 0 or self.closing:
                    return
                continue
            self.process_request(request, address)

    def close(self) -> None:
        self.closing = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self.server_close()


class Conditions(NamedTuple):
    """Checks behind the probes. `is_in_sync` is called in the event loop, the other two from any thread."""

    is_started: Callable[[], bool]
    is_ready: Callable[[], bool]
    is_in_sync: Callable[[], bool]


@dataclass(eq=False, repr=False)
class ProbeServer:
    """The HTTP server of one node for metrics and probes. `port` is 0 before `start`. Without `tls` it is plaintext."""

    registry: CollectorRegistry
    conditions: Conditions
    loop: asyncio.AbstractEventLoop
    tls: ServerContext | None = None

    def __post_init__(self) -> None:
        self._server: _Server | None = None
        self.port = 0

    def start(self, host: str, port: int) -> int:
        """Serve on threads and return the bound port. Raises HttpAddressError if the address cannot be bound."""
        conditions = self.conditions
        pages = {
            "/metrics": lambda: Page(200, CONTENT_TYPE_LATEST, generate_latest(self.registry)),
            "/healthz": lambda: self._in_loop(lambda: text_page(200, "alive")),
            "/startedz": lambda: _probe_page(conditions.is_started(), "started"),
            "/readyz": lambda: _probe_page(conditions.is_ready(), "ready"),
            "/insyncz": lambda: self._in_loop(lambda: _probe_page(conditions.is_in_sync(), "in sync")),
        }
        try:
            server = _Server((host, port), pages, self.tls)
        except OSError as error:
            raise HttpAddressError(f"cannot listen on {host}:{port} (http.listener): {error.strerror}") from None
        self._server = server
        self.port = server.server_port
        threading.Thread(target=server.accept_until_closed, name="http", daemon=True).start()
        return self.port

    def stop(self) -> None:
        """Stop serving. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _in_loop(self, make: Callable[[], Page]) -> Page:
        async def respond() -> Page:
            return make()

        response = respond()
        try:
            return asyncio.run_coroutine_threadsafe(response, self.loop).result(LOOP_RESPONSE_TIMEOUT_S)
        except FutureTimeoutError:
            return text_page(503, f"the event loop did not respond within {LOOP_RESPONSE_TIMEOUT_S:g} s")
        except RuntimeError:
            response.close()
            return text_page(503, "the event loop is closed")


def _probe_page(condition: bool, name: str) -> Page:
    return text_page(200, name) if condition else text_page(503, f"not {name}")


def data_directories(config: object) -> tuple[str, ...]:
    """Return the distinct directories of `log.dirs` and `metadata.log.dir`, or () for a service without them."""
    configured = (*getattr(config, "log_dirs", ()), getattr(config, "metadata_log_dir", ""))
    return tuple(dict.fromkeys(directory for directory in configured if directory))


class DiskSpaceCollector(Collector):
    """A `Collector` of free space and size, in bytes, of the disks of a node's data directories.

    Reads the file system at each scrape, on the probe server's thread. A directory that cannot be read has no sample;
    `kafka_log_logmanager_logdirectoryoffline` reports it as offline.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        self._directories = directories

    def describe(self) -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
        """Return the metric families without samples and without accessing a disk."""
        labels = ["logdirectory"]
        return (
            GaugeMetricFamily("kipmesh_disk_free_bytes", "Free bytes for this node on the disk.", labels=labels),
            GaugeMetricFamily("kipmesh_disk_size_bytes", "Size of the disk in bytes.", labels=labels),
        )

    def collect(self) -> Iterable[Metric]:
        """Return the free space and the size of each readable directory's disk."""
        free, size = self.describe()
        for directory in self._directories:
            with contextlib.suppress(OSError):
                usage = shutil.disk_usage(directory)
                free.add_metric([directory], usage.free)
                size.add_metric([directory], usage.total)
        return free, size
