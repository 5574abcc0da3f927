"""Runs one node as a process: configuration, logs, probes, signals, exit code.

- Exit code 2: invalid configuration, with one line on stderr. 1: failed start or fatal error, with the reason in the
  last line. 0: clean stop after SIGTERM or SIGINT.
- `/healthz` is served as soon as the event loop runs; `kipmesh.node.http` describes the other probes.
- With `--parent-pipe` the process also stops when its standard input ends, so that it does not outlive a test.

Imports are few and late, because they delay the start of every process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kipmesh.core.config.base import Config
    from kipmesh.core.config.node import ServiceConfig
    from kipmesh.node.tls import ProcessTls

LOOP_LAG_INTERVAL_S = 1.0
STOP_MARGIN_S = 20.0
"""Time in addition to `shutdown.grace.ms` to flush data to disk."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


class Node(Protocol):
    """A node that the runtime can run. It is created in the running event loop."""

    @property
    def registry(self) -> CollectorRegistry:
        """The node's metrics."""

    @property
    def ready(self) -> bool:
        """Whether the node serves its clients."""

    @property
    def failed(self) -> asyncio.Future[None]:
        """A future that receives a fatal error as its exception."""

    async def start(self) -> None:
        """Start the node and return once it serves clients. Raises an error whose message is one line for the user."""

    async def stop(self) -> None:
        """Stop cleanly. Idempotent."""


C = TypeVar("C", bound="Config")


class Service(NamedTuple, Generic[C]):
    """One deployable service. `config_type` returns its configuration class, `make` creates its node."""

    module: str
    summary: str
    examples: str
    config_type: Callable[[], type[C]]
    make: Callable[[C], Node]
    has_own_http: bool = False
    """The node serves `/metrics`, `/healthz` and `/readyz` itself."""


def main(service: Service[Any], arguments: Sequence[str] | None = None) -> int:
    """Run a service for `python -m <module>` until it stops, and return the exit code.

    0: clean stop or `--help-config`; 1: failed start, stop or fatal error; 2: invalid configuration. Wrong arguments
    raise SystemExit.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # grpc reads it when it is imported
    # Without this, structlog imports rich for coloured tracebacks, which costs 0.1 s at every start.
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
    options = _parser(service).parse_args(arguments)
    from kipmesh.core.errors import InvalidConfigError
    from kipmesh.node import settings

    config_type = service.config_type()
    if options.help_config:
        with contextlib.suppress(BrokenPipeError):
            _print_keys(config_type)
        return EXIT_OK
    try:
        config = settings.load(
            config_type, file=options.config_file, environment=os.environ, overrides=options.config or ()
        )
    except InvalidConfigError as error:
        _print_error(service, error.message)
        return EXIT_USAGE
    from kipmesh.node import logging

    context = {"service": service.module, "pid": os.getpid()}
    if (node_id := getattr(config, "node_id", None)) is not None:
        context["node_id"] = node_id
    logging.configure(level=config.log_level, form=config.log_format, context=context)
    return asyncio.run(_Process(service, config, parent_pipe=options.parent_pipe).run())


def _parser(service: Service[Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {service.module}",
        description=service.summary,
        epilog=service.examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config-file", metavar="FILE", type=Path, help="properties file: key=value lines")
    parser.add_argument(
        "--config",
        metavar="KEY=VALUE",
        action="append",
        help="set one key; overrides file and environment (repeatable)",
    )
    parser.add_argument("--help-config", action="store_true", help="list the configuration keys and exit")
    parser.add_argument("--parent-pipe", action="store_true", help="stop when standard input ends")
    return parser


def _print_keys(config_type: type[Config]) -> None:
    from kipmesh.core.config.base import dotted

    for name, field in config_type.model_fields.items():
        default = "required" if field.is_required() else f"default {field.default!r}"
        print(f"{dotted(name)}\n    {field.description or ''} ({default})")


def _print_error(service: Service[Any], message: str) -> None:
    line = " ".join(message.split())
    print(f"{service.module}: {line}", file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    """Return the message of an error for the user, or the name of its type if it has none."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    message = getattr(error, "message", None) or str(error)
    return message if message else type(error).__name__


class _Process:
    """Runs one node in the main task, with its probes and signal handlers, and determines the exit code."""

    def __init__(self, service: Service[Any], config: ServiceConfig, *, parent_pipe: bool) -> None:
        import structlog

        self._service = service
        self._config = config
        self._parent_pipe = parent_pipe
        self._stop = asyncio.Event()
        self._is_started = False
        self._log = structlog.get_logger("kipmesh.node.runtime")

    async def run(self) -> int:
        self._catch_signals()
        try:
            node = self._service.make(self._config)
        except Exception as error:
            return self._fail("start", error)
        probes = None
        try:
            if not self._service.has_own_http:
                probes = self._start_probes(node)
            lag = asyncio.create_task(_measure_loop_lag(node.registry), name="event-loop-lag")
        except Exception as error:
            return self._fail("start", error)
        try:
            return await self._run_node(node)
        finally:
            lag.cancel()
            if probes is not None:
                probes.stop()

    def _start_probes(self, node: Node) -> Any:
        from prometheus_client import ProcessCollector

        from kipmesh.core.config.node import parse_http_listener
        from kipmesh.node.http import Conditions, DiskSpaceCollector, ProbeServer, data_directories

        ProcessCollector(registry=node.registry)
        if directories := data_directories(self._config):
            node.registry.register(DiskSpaceCollector(directories))
        endpoint = parse_http_listener(self._config.http_listener)
        tls: ProcessTls | None = getattr(node, "tls", None)
        context = None if tls is None else tls.http()
        if context is None and endpoint.name == "HTTPS":
            raise RuntimeError(f"{self._service.module} does not support https:// in http.listener")
        conditions = Conditions(
            lambda: self._is_started, lambda: node.ready, lambda: bool(getattr(node, "in_sync", node.ready))
        )
        probes = ProbeServer(node.registry, conditions, asyncio.get_running_loop(), context)
        bound = probes.start(endpoint.host, endpoint.port)
        self._log.info("probe server started", host=endpoint.host, port=bound, tls=context is not None)
        return probes

    async def _run_node(self, node: Node) -> int:
        stop = asyncio.create_task(self._stop.wait(), name="stop-signal")
        failure = asyncio.create_task(_failure_of(node), name="failure")
        start = asyncio.create_task(node.start(), name="node-start")
        try:
            await _first_of(stop, start, failure)
            if not start.done():
                start.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await start
            elif (error := start.exception()) is not None:
                with contextlib.suppress(Exception):
                    await node.stop()
                return self._fail("start", error)
            else:
                self._is_started = True
                self._log.info("started")
                # Collections need not traverse objects that live until the process ends.
                gc.collect()
                gc.freeze()
            await _first_of(stop, failure)
            return await (self._abandon(node, failure.result()) if failure.done() else self._stop_node(node))
        finally:
            for task in (stop, failure):
                task.cancel()

    async def _stop_node(self, node: Node) -> int:
        self._log.info("stopping", grace_ms=self._config.shutdown_grace_ms)
        limit_s = self._config.shutdown_grace_ms / 1000 + STOP_MARGIN_S
        try:
            async with asyncio.timeout(limit_s):
                await node.stop()
        except TimeoutError:
            return self._fail("stop", TimeoutError(f"not finished after {limit_s:g} s"))
        except Exception as error:
            return self._fail("stop", error)
        self._log.info("stopped")
        return EXIT_OK

    async def _abandon(self, node: Node, failure: BaseException) -> int:
        """Abort the node after a fatal error, without a clean shutdown, and return the exit code.

        A node without `abort` ends the process immediately.
        """
        abort = getattr(node, "abort", None)
        if abort is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(5):
                    await abort()
        code = self._fail("continue", failure)
        if abort is None:
            sys.stderr.flush()
            os._exit(code)
        return code

    def _fail(self, action: str, error: BaseException) -> int:
        expected = type(error).__module__.startswith("kipmesh.") or isinstance(error, OSError)
        if not expected:
            self._log.error("unexpected error", action=action, trace="".join(traceback.format_exception(error)))
        _print_error(self._service, f"cannot {action}: {one_line(error)}")
        return EXIT_FAILED

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._parent_pipe:
            os.set_blocking(0, False)
            loop.add_reader(0, self._on_parent_pipe)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set() and number == signal.SIGINT:
            _print_error(self._service, "interrupted while stopping")
            os._exit(EXIT_FAILED)
        self._stop.set()

    def _on_parent_pipe(self) -> None:
        try:
            data = os.read(0, 4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(0)
            self._stop.set()


async def _failure_of(node: Node) -> BaseException:
    """Wait for `node.failed` and return its exception, or a RuntimeError if it completes without an exception.

    Waits forever if the future is cancelled, because that is a clean stop.
    """
    try:
        await asyncio.shield(node.failed)
    except asyncio.CancelledError:
        if not node.failed.cancelled():
            raise
        await asyncio.Event().wait()
    except Exception as error:
        return error
    return RuntimeError("the node ended unexpectedly")


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _measure_loop_lag(registry: CollectorRegistry) -> None:
    """Export how late a timer of the event loop fires, measured every `LOOP_LAG_INTERVAL_S`, until cancelled."""
    from prometheus_client import Histogram

    histogram = Histogram(
        "kipmesh_runtime_event_loop_lag_seconds",
        "Delay of a timer of the event loop",
        buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
        registry=registry,
    )
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LOOP_LAG_INTERVAL_S
        await asyncio.sleep(LOOP_LAG_INTERVAL_S)
        histogram.observe(max(0.0, loop.time() - due))
