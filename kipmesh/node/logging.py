"""Structured logs of a process: one JSON object or console line per event, on stderr.

A process calls `configure` once; library code only calls `structlog.get_logger`. A line that cannot be written, for
example to a full disk, is dropped, so that logging never stops a node.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Unfailing:
    """A text stream whose writes and flushes never raise. `dropped` counts failed calls."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.dropped = 0

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            self.dropped += 1
            return 0

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self.dropped += 1


class _ToStructlog(logging.Handler):
    """A `logging.Handler` that forwards records of the standard library to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            extra: dict[str, Any] = {"exc_info": record.exc_info} if record.exc_info else {}
            level = min(record.levelno, logging.ERROR)
            structlog.get_logger(record.name).log(level, record.getMessage(), logger=record.name, **extra)
        except Exception:
            self.handleError(record)


def configure(*, level: str, form: str, context: dict[str, Any], stream: TextIO | None = None) -> None:
    """Configure the logging of this process.

    `level` is a key of LEVELS. `form` is `json`; any other value means console lines. `context`: fields added to each
    event. `stream`: the destination, stderr by default.
    """
    level_min = LEVELS[level]
    out: Any = _Unfailing(stream if stream is not None else sys.stderr)

    def add_context(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in context.items():
            event.setdefault(key, value)
        return event

    render: Any
    if form == "json":
        render = structlog.processors.JSONRenderer(default=repr)
    else:
        # Plain tracebacks: the default ones print local variables, which may be gigabytes in a node.
        render = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    processors: list[Any] = [
        structlog.stdlib.add_log_level,
        add_context,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if form == "json":
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, render],
        wrapper_class=structlog.make_filtering_bound_logger(level_min),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,  # loggers that are already in use must follow a later call
    )
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.addHandler(_ToStructlog(level=max(level_min, logging.WARNING)))
    root.setLevel(max(level_min, logging.WARNING))
    logging.captureWarnings(capture=True)


def configure_library() -> None:
    """Log through the standard library, for nodes and clients in a user's process. Keeps an existing configuration.

    Structlog's default prints everything to standard output, which is wrong inside a test run.
    """
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
