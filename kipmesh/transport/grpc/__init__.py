"""gRPC server and client, and an exception handler for event loops that use grpc.aio.

grpc.aio has one poller for all event loops of a process. It wakes every loop for the events of one, so that the others
have nothing to read, and a loop may receive an event for a loop that is closed. Both raise errors in callbacks of
unrelated loops. `handle_exception` drops these errors.
"""

from __future__ import annotations

import asyncio
from typing import Any

_POLLER = "PollerCompletionQueue._handle_events"


def handle_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Drop errors of grpc.aio's poller and pass on all others. Use with `loop.set_exception_handler`."""
    if not is_poller_error(str(context.get("message")), context.get("exception")):
        loop.default_exception_handler(context)


def is_poller_error(message: str, error: BaseException | None) -> bool:
    """Return whether an error reported by asyncio is a harmless error of grpc.aio's poller."""
    is_foreign = isinstance(error, BlockingIOError) or str(error) == "Event loop is closed"
    return is_foreign and _POLLER in message
