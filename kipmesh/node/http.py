"""`/metrics` and the probes of a process, on threads of their own.

Large registries are rendered without holding up the event loop. GET and HEAD only; connections, their time and the
request's size are limited. These are 200, or else 503:

- `/healthz`: the event loop answers;
- `/startedz`: it has started: what it has on its disk is loaded, and it listens;
- `/readyz`: the node is ready;
- `/insyncz`: it is ready, and all that it replicates is in sync or has been since it started.

With TLS each handshake takes the certificates as they are then, on the request's own thread.
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
LOOP_ANSWER_TIMEOUT_S = 2.0

TEXT = "text/plain; charset=utf-8"
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HttpAddressError(Exception):
    """The address of `http.listener` cannot be bound."""


class Page(NamedTuple):
    """A response: status, content type, body."""

    status: int
    content_type: str
    body: bytes


def text_page(status: int, text: str) -> Page:
    """A page of one line."""
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
        """Requests of probes and scrapes are not worth a line."""

    def version_string(self) -> str:
        return "kipmesh"


def _not_found() -> Page:
    return text_page(404, "/metrics, /healthz, /startedz, /readyz and /insyncz are here")


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
        """Without the reverse name look-up of the standard library's, which can take seconds."""
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
                except OSError:  # plaintext, a stranger, or somebody too slow; the socket is closed by now
                    return
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away or was too slow is no error of ours."""

    def accept_until_closed(self) -> None:
        """Like `serve_forever`, which would wake up to look whether it should end."""
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
    """What is asked of a node; `is_in_sync` within its event loop, the others from any thread."""

    is_started: Callable[[], bool]
    is_ready: Callable[[], bool]
    is_in_sync: Callable[[], bool]


@dataclass(eq=False, repr=False)
class ProbeServer:
    """Serves the paths for one node."""

    registry: CollectorRegistry
    conditions: Conditions
    loop: asyncio.AbstractEventLoop
    tls: ServerContext | None = None

    def __post_init__(self) -> None:
        self._server: _Server | None = None
        self.port = 0

    def start(self, host: str, port: int) -> int:
        """Bind and serve; returns the port. Raises HttpAddressError."""
        pages = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/startedz": lambda: _told(self.conditions.is_started(), "started"),
            "/readyz": lambda: _told(self.conditions.is_ready(), "ready"),
            "/insyncz": self._insyncz,
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
        """Stop serving; idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _metrics(self) -> Page:
        return Page(200, CONTENT_TYPE_LATEST, generate_latest(self.registry))

    def _healthz(self) -> Page:
        return self._in_loop(lambda: text_page(200, "alive"))

    def _insyncz(self) -> Page:
        return self._in_loop(lambda: _told(self.conditions.is_in_sync(), "in sync"))

    def _in_loop(self, make: Callable[[], Page]) -> Page:
        async def respond() -> Page:
            return make()

        response = respond()
        try:
            return asyncio.run_coroutine_threadsafe(response, self.loop).result(LOOP_ANSWER_TIMEOUT_S)
        except FutureTimeoutError:
            return text_page(503, f"the event loop did not answer within {LOOP_ANSWER_TIMEOUT_S:g} s")
        except RuntimeError:
            response.close()
            return text_page(503, "the event loop is closed")


def _told(is_so: bool, what: str) -> Page:
    return text_page(200, what) if is_so else text_page(503, f"not {what}")


def data_folders(config: object) -> tuple[str, ...]:
    """The folders that a service's configuration names: `log.dirs` and `metadata.log.dir`; () for others."""
    named = (*getattr(config, "log_dirs", ()), getattr(config, "metadata_log_dir", ""))
    return tuple(dict.fromkeys(folder for folder in named if folder))


class DiskSpaceCollector(Collector):
    """Free space and size of the disks of a node's data directories, by `logdirectory` as in `LogDirectoryOffline`.

    Reads the file system at each scrape, on the probe server's thread. A directory that cannot be read, as one whose
    disk was taken away, has no value; `kafka_log_logmanager_logdirectoryoffline` says that it is offline.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders

    def describe(self) -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
        """The names, without touching a disk."""
        labels = ["logdirectory"]
        return (
            GaugeMetricFamily("kipmesh_disk_free_bytes", "Bytes that this node may still write there.", labels=labels),
            GaugeMetricFamily("kipmesh_disk_size_bytes", "Bytes of that disk.", labels=labels),
        )

    def collect(self) -> Iterable[Metric]:
        """O(folders)."""
        free, size = self.describe()
        for folder in self._folders:
            with contextlib.suppress(OSError):
                usage = shutil.disk_usage(folder)
                free.add_metric([folder], usage.free)
                size.add_metric([folder], usage.total)
        return free, size
