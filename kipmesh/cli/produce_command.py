"""`kipmesh produce`: lines of standard input as records.

Rules:
- The last line of stderr says how many records were acknowledged, and how many of those that were read were not:
  also after an error, Ctrl-C and SIGTERM.
- SIGTERM and Ctrl-C end the reading. What was read is delivered within STOP_TIMEOUT_S; a second signal ends that, too.
- No line is held that is longer than `max.request.size`.
- With `--stats` the lines before the last one are the producer's counters (526-10), a name and a number each.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import (
    DEFAULT_DIR,
    EXIT_OK,
    EXIT_SIGNAL,
    Bootstrap,
    ClientConfig,
    CommandError,
    Dir,
    Topic,
    bootstrap_of,
    connect,
    explain,
    parse_pairs,
    run,
    separator_bytes,
)

if TYPE_CHECKING:
    from kipmesh.client import Producer

READ_BYTES = 256 << 10
WAITING_MAX = 1_000_000
"""Records whose acknowledgement is awaited, in the order of the input."""
PROGRESS_INTERVAL_S = 0.2
STOP_TIMEOUT_S = 5.0


def produce(
    topic: Topic,
    key_separator: Annotated[
        str | None, typer.Option("--key-separator", help="Split each line into key and value there.")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="At the end, write the producer's counters of metadata to stderr.")
    ] = False,
    config: ClientConfig = None,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
) -> None:
    """Write each line of standard input as a record. The last line of stderr says how many were acknowledged."""
    settings = parse_pairs(config or (), "--config")
    separator = None if key_separator is None else separator_bytes(key_separator)
    address = bootstrap_of(bootstrap, folder)
    code = run(lambda: _produce(address, topic, separator, settings, stats))
    if code != EXIT_OK:
        raise typer.Exit(code)


async def _produce(bootstrap: str, topic: str, separator: bytes | None, config: dict[str, Any], stats: bool) -> int:
    """Run to the end of the input, an error or a signal; the exit code."""
    progress = _Progress()
    lines = _Lines()
    signals: list[signal.Signals] = []
    arrived = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        signals.append(number)
        lines.stop()
        arrived.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    feeding = asyncio.create_task(_feed(bootstrap, topic, separator, config, lines, progress))
    await _first(feeding, arrived, None)
    if not feeding.done():
        arrived.clear()
        await _first(feeding, arrived, STOP_TIMEOUT_S if progress.read else 0)
        feeding.cancel()
    (result,) = await asyncio.gather(feeding, return_exceptions=True)
    progress.clear()
    code = explain(result) if isinstance(result, Exception) else EXIT_OK
    if signals:
        code = EXIT_SIGNAL + signals[0]
    if stats:
        sys.stderr.writelines(f"{name} {round(value, 3)}\n" for name, value in progress.counters.items())
    progress.finish(f" (stopped by {signals[0].name})" if signals else "")
    return code


async def _first(task: asyncio.Task[None], event: asyncio.Event, timeout_s: float | None) -> None:
    """Wait for the task, the event or the time, whichever is first."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([task, waiting], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _feed(
    bootstrap: str,
    topic: str,
    separator: bytes | None,
    config: dict[str, Any],
    lines: _Lines,
    progress: _Progress,
) -> None:
    """Send everything and wait until it is delivered; cancelled, it gives up what is under way."""
    from kipmesh.client import Producer

    producer = Producer(bootstrap, **config)
    progress.has_acks = producer.config.acks != 0
    await connect(producer, bootstrap, config)
    close_timeout_s: float | None = None
    try:
        await _send_all(producer, topic, separator, lines, progress)
        await producer.flush()
        progress.settle()
    except asyncio.CancelledError:
        close_timeout_s = 0
        raise
    finally:
        progress.counters = producer.metrics()
        try:
            async with asyncio.timeout(close_timeout_s):
                await producer.close()
        except TimeoutError:
            pass
        progress.count_rest()


async def _send_all(
    producer: Producer, topic: str, separator: bytes | None, lines: _Lines, progress: _Progress
) -> None:
    from kipmesh.core.errors import KafkaError

    number = 0
    waiting = progress.waiting
    limit = producer.config.max_request_size
    async for some in lines.read(limit, progress):
        for line in some:
            number += 1
            key, value = (None, line) if separator is None else _split(line, separator, number)
            try:
                waiting.append(await producer.send(topic, value, key=key))
            except KafkaError as error:
                raise KafkaError(error.code, f"line {number}: {error.message}") from None
        if len(waiting) > WAITING_MAX:
            await waiting[0]
        progress.settle()
        progress.show()


def _split(line: bytes, separator: bytes, number: int) -> tuple[bytes, bytes]:
    key, found, value = line.partition(separator)
    if not found:
        begin = line[:80].decode(errors="replace")
        text = separator.decode(errors="backslashreplace")
        raise CommandError(f"line {number}: no key separator {text!r} in {begin!r}")
    return key, value


class _Lines:
    """Lines of standard input as they come, without their ends."""

    def __init__(self) -> None:
        self._stopped = False
        self._readable = asyncio.Event()

    def stop(self) -> None:
        """Read no more."""
        self._stopped = True
        self._readable.set()

    async def read(self, line_bytes_max: int, progress: _Progress) -> AsyncIterator[list[bytes]]:
        """Some lines at a time, counted as read; raises KafkaError(MESSAGE_TOO_LARGE)."""
        from kipmesh.core.errors import ErrorCode, KafkaError

        if sys.stdin is None:
            raise CommandError("there is no standard input")
        source = sys.stdin.fileno()
        begin: list[bytes] = []  # of a line whose end is yet to come
        size = 0
        while True:
            await self._wait_readable(source)
            if self._stopped:
                progress.read += bool(begin)
                return
            chunk = os.read(source, READ_BYTES)
            if not chunk:
                break
            first, *others = chunk.split(b"\n")
            begin.append(first)
            size += len(first)
            if others:
                lines = [b"".join(begin), *others[:-1]]
                begin, size = ([others[-1]], len(others[-1])) if others[-1] else ([], 0)
                progress.read += len(lines)
                yield lines
            if size > line_bytes_max:
                progress.read += 1
                text = f"line {progress.read} is longer than max.request.size ({line_bytes_max} bytes)"
                raise KafkaError(ErrorCode.MESSAGE_TOO_LARGE, text)
        if begin:
            progress.read += 1
            yield [b"".join(begin)]

    async def _wait_readable(self, source: int) -> None:
        """Wait for input; a plain file always has some. (A thread in `read` would outlive Ctrl-C.)"""
        loop = asyncio.get_running_loop()
        try:
            loop.add_reader(source, self._readable.set)
        except (PermissionError, ValueError):
            await asyncio.sleep(0)
            return
        try:
            await self._readable.wait()
        finally:
            loop.remove_reader(source)
            if not self._stopped:
                self._readable.clear()


class _Progress:
    """How many records were read and acknowledged: on a terminal while it runs, everywhere at the end."""

    def __init__(self) -> None:
        self.read = 0
        self.acknowledged = 0
        self.has_acks = True
        self.waiting: deque[Any] = deque()
        self.counters: dict[str, int | float] = {}
        self._begin = self._shown = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def settle(self) -> None:
        """Count what was acknowledged; raises the KafkaError of the first record that was not."""
        waiting = self.waiting
        while waiting and waiting[0].done():
            waiting.popleft().result()
            self.acknowledged += 1

    def count_rest(self) -> None:
        """Count what was acknowledged among the rest; to be called once, at the end."""
        rest, self.waiting = self.waiting, deque()
        self.acknowledged += sum(one.done() and not one.cancelled() and one.exception() is None for one in rest)

    def show(self) -> None:
        """On a terminal, from time to time: how far it is."""
        now = time.monotonic()
        if self._is_terminal and now - self._shown >= PROGRESS_INTERVAL_S:
            self._shown = now
            sys.stderr.write(f"\r{self._line()}\x1b[K")
            sys.stderr.flush()

    def clear(self) -> None:
        """Make room for a line about something else."""
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")

    def finish(self, why: str) -> None:
        """The last line."""
        missing = self.read - self.acknowledged
        text = ""
        if missing:
            text = f"; {missing:,} not" + ("" if self.has_acks else " sent")
        sys.stderr.write(f"{self._line()}{text}{why}\n")

    def _line(self) -> str:
        count = self.acknowledged
        records = f"{count:,} record{'' if count == 1 else 's'}"
        done = "acknowledged" if self.has_acks else "sent (acks=0: not acknowledged)"
        return f"{records} {done}, {count / max(time.monotonic() - self._begin, 0.001):,.0f} a second"
