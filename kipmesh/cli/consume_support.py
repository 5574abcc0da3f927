"""What `kipmesh consume` does beside reading: it ends its fetch sessions when it is told to stop, and says when nobody
answers, or nobody leads.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from kipmesh.cli.common import EXIT_OK, EXIT_SIGNAL

if TYPE_CHECKING:
    from kipmesh.client import Consumer, ConsumerRecord, TopicMetadata

SILENCE_S = 5.0
"""For so long nobody has answered before that is said."""
LOOK_S = 0.5
POLL_RECORDS_MAX = 5000
IDLE_POLL_MS = 60_000
CONNECT_TIMEOUT_S_MIN = 1.0

ShowAll = Callable[[Sequence["ConsumerRecord"]], None]
"""Prints records."""


def connect_timeout_s(timeout_ms: int | None) -> float | None:
    """How long to wait for a first broker, where the user says how long for records."""
    return None if timeout_ms is None else max(timeout_ms / 1000, CONNECT_TIMEOUT_S_MIN)


async def read(consumer: Consumer, max_messages: int | None, timeout_ms: int | None, show_all: ShowAll) -> bool:
    """Whether there were `max_messages`; False at the end of `timeout_ms`."""
    left = max_messages
    while left is None or left > 0:
        wanted_records = POLL_RECORDS_MAX if left is None else min(left, POLL_RECORDS_MAX)
        records = await consumer.poll(timeout_ms=timeout_ms or IDLE_POLL_MS, max_records=wanted_records)
        if not records and timeout_ms is not None:
            return False
        show_all(records)
        left = None if left is None else left - len(records)
    return True


class Ending:
    """SIGTERM and SIGHUP cancel the work, which closes what it has at the brokers (227-17).

    While records are written the signal ends that, too: nobody may be reading. A signal that is ignored (SIGHUP under
    nohup) stays so; Ctrl-C is asyncio's.
    """

    def __init__(self) -> None:
        self._is_writing = False
        self._number = 0
        self._cancel: Callable[[], object] | None = None

    async def run(self, work: Coroutine[Any, Any, None]) -> int:
        """Do the work; the exit code."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
        numbers = [number for number, handler in before.items() if handler is signal.SIG_DFL]
        for number in numbers:
            signal.signal(number, self._on_signal)
        try:
            await task
        except (asyncio.CancelledError, _StoppedWritingError):
            if not self._number:
                raise
        finally:
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)
        return EXIT_SIGNAL + self._number if self._number else EXIT_OK

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._number = self._number or number
        if self._is_writing:
            raise _StoppedWritingError
        if self._cancel is not None:
            self._cancel()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around what may wait for whoever reads the output."""
        self._is_writing = True
        try:
            yield
        except _StoppedWritingError:
            # What is buffered would be written at the exit, which would wait as well.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise
        finally:
            self._is_writing = False


class _StoppedWritingError(Exception):
    """A signal came while records were written."""


async def tell_silence(consumer: Consumer, bootstrap: str) -> None:
    """Say on stderr, once each time, that no broker has answered for SILENCE_S; until cancelled."""
    is_told = False
    while True:
        await asyncio.sleep(LOOK_S)
        silent_s = consumer.unreachable_s
        if silent_s >= SILENCE_S and not is_told:
            print(f"kipmesh: no broker answers at {bootstrap}; waiting", file=sys.stderr, flush=True)
        is_told = silent_s > 0 and (is_told or silent_s >= SILENCE_S)


def tell_leaderless(topic: TopicMetadata, partitions: Iterable[int]) -> None:
    """Say on stderr which of the partitions have no leader: nobody gives their records."""
    found = [one for one in partitions if one in topic.partitions and topic.partitions[one].leader_id < 0]
    if found:
        numbers = ", ".join(map(str, found))
        what = "partition" if len(found) == 1 else "partitions"
        text = f"no leader for {what} {numbers} of topic {topic.name!r}: records are missing here"
        print(f"kipmesh: {text}", file=sys.stderr, flush=True)
