"""Flushes of the metadata log on a thread, one at a time: those that are asked for while one runs are one more.

A flush that wants for room passes and is tried again; any other failure is for good (`Log.failed`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

import structlog

from kipmesh.storage.errors import StorageError
from kipmesh.storage.quorum_replica import QuorumReplica

log = structlog.get_logger(__name__)

RETRY_S = 0.1


class Flusher:
    """See the module."""

    def __init__(
        self,
        replica: QuorumReplica,
        executor: Executor,
        on_flushed: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_flushed`: the recovery point moved as far as it could, read it now."""
        self._replica = replica
        self._executor = executor
        self._on_flushed = on_flushed
        self._on_failure = on_failure
        self._is_wanted = False
        self._has_ended = False
        self._task: asyncio.Task[None] | None = None

    def flush(self) -> None:
        """Everything that is in the log now is to be durable."""
        self._is_wanted = True
        if self._task is None and not self._has_ended:
            self._task = asyncio.create_task(self._flush_all())

    async def _flush_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._is_wanted and not self._has_ended:
                self._is_wanted = False
                try:
                    await loop.run_in_executor(self._executor, self._replica.flush)
                except StorageError as error:
                    if self._replica.log.failed is not None:
                        raise
                    log.error("the metadata log is not flushed, trying again", error=error.message)
                    self._is_wanted = True
                    await asyncio.sleep(RETRY_S)
                else:
                    self._on_flushed()
        except Exception as error:
            self._on_failure(error)
        finally:
            self._task = None

    def end(self) -> None:
        """Begin no other flush."""
        self._has_ended = True

    async def ended(self) -> None:
        """Wait for the flush that runs."""
        if self._task is not None:
            await asyncio.wait([self._task])
