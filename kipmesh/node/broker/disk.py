"""What of a broker's disk work leaves the event loop.

One worker thread runs it in order, so that the log manager is never used from two threads at once. Appends and reads
stay on the loop: they are one `pwrite` or `pread` of the page cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kipmesh.storage.log import Log

Result = TypeVar("Result")


class Disk:
    """Runs blocking work in order on one thread."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-disk")

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def flush(self, log: Log) -> None:
        """Fsync one log; raises KafkaError when that failed or the log is closed."""
        await self.run(log.flush)

    def close(self) -> None:
        """Wait for what runs and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
