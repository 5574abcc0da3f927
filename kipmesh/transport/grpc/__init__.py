"""The edge to gRPC: `server` serves, `client` calls.

grpc.aio has one poller for all event loops of a process. It wakes every loop for an event of one, so that the others
find nothing to read; and the loop that reads an event of a call whose loop is closed cannot hand it on. Both make
callbacks fail in loops that they do not concern; `handle_exception` drops these failures.
"""

from __future__ import annotations

import asyncio
from typing import Any

_POLLER = "PollerCompletionQueue._handle_events"


def handle_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For `loop.set_exception_handler`."""
    if not is_of_poller(str(context.get("message")), context.get("exception")):
        loop.default_exception_handler(context)


def is_of_poller(message: str, error: BaseException | None) -> bool:
    """Whether what asyncio reports is the poller's business only."""
    is_foreign = isinstance(error, BlockingIOError) or str(error) == "Event loop is closed"
    return is_foreign and _POLLER in message
