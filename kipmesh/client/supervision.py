"""What becomes of a background task of a client that ends by an error nobody expected.

Invariant: such an end is logged with its traceback and becomes a KafkaError that the client's calls raise from then on;
none of them waits for a task that is gone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from kipmesh.core.errors import ErrorCode, KafkaError

log = logging.getLogger(__name__)


def task_failure(task: asyncio.Future[Any], what: str) -> KafkaError | None:
    """For a done-callback: why the task failed; None for one that was cancelled or did its work."""
    error = None if task.cancelled() else task.exception()
    if error is None:
        return None
    log.error("%s failed", what, exc_info=error)
    failure = KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"{what} failed: {error!r}")
    failure.__cause__ = error
    return failure


def raise_failure(failure: KafkaError | None) -> None:
    """Raise it, if there is one."""
    if failure is not None:
        raise failure.with_traceback(None)
