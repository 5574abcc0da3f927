"""`kipmesh produce`: lines of files and of standard input as records (`produce_input` reads them).

Rules:
- The last line of stderr says how many records were acknowledged, and how many of those that were read were not:
  also after an error, Ctrl-C and SIGTERM.
- SIGTERM and Ctrl-C end the reading. What was read is delivered within STOP_TIMEOUT_S; a second signal ends that, too.
- On a terminal a line shows how far it is: a bar where all input has a size, of what is read and acknowledged.
- With `--stats` the lines before the last one are the producer's counters (526-10), a name and a number each.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import (
    EXIT_OK,
    EXIT_SIGNAL,
    ClientConfig,
    CommandError,
    Connection,
    Topic,
    explain,
    parse_pairs,
    run,
    separator_bytes,
)
from kipmesh.cli.produce_input import (
    Chunk,
    CsvParser,
    Inputs,
    JsonParser,
    LineCutError,
    LineParser,
    LineTooLongError,
    Parser,
)

if TYPE_CHECKING:
    from kipmesh.client import Producer

WAITING_MAX = 1_000_000
"""Records whose acknowledgement is awaited, in the order of the input."""
PROGRESS_INTERVAL_S = 0.2
STOP_TIMEOUT_S = 5.0
UNKNOWN_S = 5.0
"""For so long records have waited for news of their topic before that is said."""
BAR_COLUMNS = 24

MakeParser = Callable[[int], Parser]
"""Makes the parser of one input; given is how long a row may be."""


class Format(StrEnum):
    """Of the input."""

    LINES = "lines"
    NDJSON = "ndjson"
    CSV = "csv"


def produce(
    topic: Topic,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Files to read, - for standard input.  [default: -]", show_default=False),
    ] = None,
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="Each line is a value; or each line is one JSON value; or CSV with the names of its columns in the "
            "first row, each other row of which becomes a JSON object.",
        ),
    ] = Format.LINES,
    key_column: Annotated[
        str | None, typer.Option("--key-column", help="The column (of NDJSON: the field) that is the key.")
    ] = None,
    delimiter: Annotated[str, typer.Option("--delimiter", help="Between columns of CSV.")] = ",",
    key_separator: Annotated[
        str | None, typer.Option("--key-separator", help="Split each line into key and value there.")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="At the end, write the producer's counters of metadata to stderr.")
    ] = False,
    config: ClientConfig = None,
    *,
    connection: Connection,
) -> None:
    """Write each line of files or standard input as a record. The last line of stderr says what was acknowledged.

    Examples:
    seq 1000 | kipmesh produce flights
    printf 'UA:{"dep":517}\\n' | kipmesh produce flights --key-separator :
    kipmesh produce flights january.csv february.csv --format csv --key-column carrier
    kipmesh produce flights - --format ndjson --key-column id < flights.ndjson
    kipmesh produce flights values.txt --config compression.type=zstd --config linger.ms=20 --stats
    """
    settings = parse_pairs(config or (), "--config")
    make_parser = _parser_maker(form, key_separator, key_column, delimiter)
    code = run(lambda: _produce(connection, topic, files or (), make_parser, settings, stats))
    if code != EXIT_OK:
        raise typer.Exit(code)


def _parser_maker(form: Format, key_separator: str | None, key_column: str | None, delimiter: str) -> MakeParser:
    """Raises typer.BadParameter for options that do not go together."""
    if key_separator is not None and form is not Format.LINES:
        raise typer.BadParameter("is for --format lines; --key-column for the others", param_hint="--key-separator")
    if key_column is not None and form is Format.LINES:
        raise typer.BadParameter("is for --format ndjson and csv", param_hint="--key-column")
    if len(delimiter) != 1 or (not delimiter.isprintable() and delimiter != "\t") or delimiter == '"':
        raise typer.BadParameter("one character, and not a quote", param_hint="--delimiter")
    separator = None if key_separator is None else separator_bytes(key_separator)
    if form is Format.CSV:
        return lambda row_bytes_max: CsvParser(key_column, delimiter, row_bytes_max)
    if form is Format.NDJSON:
        return lambda _: JsonParser(key_column)
    return lambda _: LineParser(separator)


async def _produce(
    connection: Connection,
    topic: str,
    files: Sequence[str],
    make_parser: MakeParser,
    config: dict[str, Any],
    stats: bool,
) -> int:
    """Run to the end of the input, an error or a signal; the exit code."""
    inputs = Inputs(files)
    progress = _Progress(inputs)
    signals: list[signal.Signals] = []
    arrived = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        signals.append(number)
        inputs.stop()
        arrived.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    showing = asyncio.create_task(progress.show_on()) if progress.is_terminal else None
    feeding = asyncio.create_task(_feed(connection, topic, make_parser, config, inputs, progress))
    await _first(feeding, arrived, None)
    if not feeding.done():
        arrived.clear()
        await _first(feeding, arrived, STOP_TIMEOUT_S if progress.read else 0)
        feeding.cancel()
    (result,) = await asyncio.gather(feeding, return_exceptions=True)
    if showing is not None:
        showing.cancel()
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
    connection: Connection,
    topic: str,
    make_parser: MakeParser,
    config: dict[str, Any],
    inputs: Inputs,
    progress: _Progress,
) -> None:
    """Send everything and wait until it is delivered; cancelled, it gives up what is under way."""
    from kipmesh.client import Producer

    producer = Producer(connection.bootstrap, **{**connection.config, **config})
    progress.has_acks = producer.config.acks != 0
    await connection.start(producer, config)
    close_timeout_s: float | None = None
    telling = asyncio.create_task(_tell_unknown(producer, topic, progress))
    try:
        await _Feeder(producer, topic, make_parser, inputs, progress).send_all()
        await producer.flush()
        progress.settle()
    except asyncio.CancelledError:
        close_timeout_s = 0
        raise
    finally:
        telling.cancel()
        progress.counters = producer.metrics()
        try:
            async with asyncio.timeout(close_timeout_s):
                await producer.close()
        except TimeoutError:
            pass
        progress.count_rest()


async def _tell_unknown(producer: Producer, topic: str, progress: _Progress) -> None:
    """Say on stderr, once, that the first records wait for the topic's metadata."""
    await progress.begun.wait()
    await asyncio.sleep(UNKNOWN_S)
    if not producer.has_metadata(topic):
        progress.clear()
        print(f"kipmesh: no broker has told of topic {topic!r} yet; waiting", file=sys.stderr, flush=True)


@dataclass(eq=False)
class _Feeder:
    """Sends the lines of the inputs, and says of which line an error is."""

    producer: Producer
    topic: str
    make_parser: MakeParser
    inputs: Inputs
    progress: _Progress

    def __post_init__(self) -> None:
        self._row_bytes_max = self.producer.config.max_request_size
        self._parser = self.make_parser(self._row_bytes_max)
        self._place = 0  # of the input
        self._number = 0  # of the line in it, from 1

    async def send_all(self) -> None:
        """Raises CommandError or KafkaError at the first record that cannot be made, sent or delivered."""
        progress = self.progress
        try:
            async for chunk in self.inputs.read(self._row_bytes_max):
                await self._send(chunk)
                if len(progress.waiting) > WAITING_MAX:
                    await progress.waiting[0]
                progress.settle()
        except LineCutError:
            progress.read += 1
        except LineTooLongError as error:
            progress.read += 1
            self._begin(error.place)
            self._number += 1
            text = f"{self._where()} is longer than max.request.size ({self._row_bytes_max} bytes)"
            raise _too_large(text) from None

    def _begin(self, place: int) -> None:
        if place != self._place:
            self._parser, self._place, self._number = self.make_parser(self._row_bytes_max), place, 0

    def _where(self) -> str:
        return f"{self.inputs.label(self._place)}line {self._number}"

    async def _send(self, chunk: Chunk) -> None:
        from kipmesh.core.errors import KafkaError

        self._begin(chunk.place)
        progress = self.progress
        progress.read += len(chunk.lines)
        progress.begun.set()
        try:
            for line in chunk.lines:
                self._number += 1
                pair = self._parser.parse(line)
                if pair is None:
                    progress.read -= 1
                else:
                    progress.waiting.append(await self.producer.send(self.topic, pair.value, key=pair.key))
            if chunk.is_end:
                self._parser.end()
        except CommandError as error:
            raise CommandError(f"{self._where()}: {error}") from None
        except KafkaError as error:
            raise KafkaError(error.code, f"{self._where()}: {error.message}") from None


def _too_large(text: str) -> Exception:
    from kipmesh.core.errors import ErrorCode, KafkaError

    return KafkaError(ErrorCode.MESSAGE_TOO_LARGE, text)


class _Progress:
    """How many records were read and acknowledged: on a terminal while it runs, everywhere at the end."""

    def __init__(self, inputs: Inputs) -> None:
        self.read = 0
        self.begun = asyncio.Event()
        """Set with the first record."""
        self.acknowledged = 0
        self.has_acks = True
        self.waiting: deque[Any] = deque()
        self.counters: dict[str, int | float] = {}
        self.is_terminal = sys.stderr.isatty()
        self._inputs = inputs
        self._begin = time.monotonic()

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

    async def show_on(self) -> None:
        """On a terminal: how far it is, again and again until cancelled."""
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            while self.waiting and self.waiting[0].done() and self.waiting[0].exception() is None:
                self.waiting.popleft()
                self.acknowledged += 1
            sys.stderr.write(f"\r{self._bar()}{self._line()}\x1b[K")
            sys.stderr.flush()

    def clear(self) -> None:
        """Make room for a line about something else."""
        if self.is_terminal:
            sys.stderr.write("\r\x1b[K")

    def finish(self, why: str) -> None:
        """The last line."""
        missing = self.read - self.acknowledged
        text = ""
        if missing:
            text = f"; {missing:,} not" + ("" if self.has_acks else " sent")
        sys.stderr.write(f"{self._line()}{text}{why}\n")

    def _bar(self) -> str:
        """Of the bytes of the input, those whose records are acknowledged, about; nothing where no size is known."""
        total = self._inputs.total_bytes
        if not total:
            return ""
        share = min(self._inputs.read_bytes / total, 1) * self.acknowledged / max(self.read, 1)
        return f"[{'#' * int(share * BAR_COLUMNS):<{BAR_COLUMNS}}] {share:4.0%}  "

    def _line(self) -> str:
        count = self.acknowledged
        records = f"{count:,} record{'' if count == 1 else 's'}"
        done = "acknowledged" if self.has_acks else "sent (acks=0: not acknowledged)"
        return f"{records} {done}, {count / max(time.monotonic() - self._begin, 0.001):,.0f} a second"
