"""`kipmesh produce`: write the lines of files and standard input as records. `produce_input` parses them.

- The last line of stderr counts the records that were acknowledged and, of those read, the records that were not. This
  also holds after an error, Ctrl-C or SIGTERM.
- SIGTERM and Ctrl-C stop reading. Records already read are delivered within STOP_TIMEOUT_S; a second signal drops them.
- A terminal shows the progress, with a bar if the size of the input is known.
- `--stats` prints the producer's metadata counters (526-10) before the last line, one name and number per line.
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
    counted,
    create_command,
    option,
    parse_pairs,
    report_error,
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
from kipmesh.core.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from kipmesh.client import Producer

UNACKNOWLEDGED_RECORDS_MAX = 1_000_000
"""Limit of records sent and not yet acknowledged."""
PROGRESS_INTERVAL_S = 0.2
STOP_TIMEOUT_S = 5.0
METADATA_WARNING_S = 5.0
"""Time without metadata of the topic after which a warning is printed."""
BAR_COLUMNS = 24

MakeParser = Callable[[int], Parser]
"""Creates the parser of one input. The argument is the maximum size of a row in bytes."""


class Format(StrEnum):
    """Format of the input."""

    LINES = "lines"
    NDJSON = "ndjson"
    CSV = "csv"


def produce(
    topic: Topic,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Files to read; - is standard input.  [default: -]", show_default=False),
    ] = None,
    form: Annotated[
        Format,
        option(
            "--format",
            "lines: each line is a value. ndjson: each line is a JSON value. csv: the first row has the columns, "
            "and each other row becomes a JSON object.",
        ),
    ] = Format.LINES,
    key_column: Annotated[str | None, option("--key-column", "Column (CSV) or field (NDJSON) that is the key.")] = None,
    delimiter: Annotated[str, option("--delimiter", "Separator of CSV columns.")] = ",",
    key_separator: Annotated[str | None, option("--key-separator", "Separator of key and value in each line.")] = None,
    stats: Annotated[bool, option("--stats", "Print the producer's metadata counters to stderr at the end.")] = False,
    config: ClientConfig = None,
    *,
    connection: Connection,
) -> None:
    """Write each line of files or standard input as a record. The last line of stderr counts acknowledged records.

    Examples:
    seq 1000 | kipmesh produce flights
    printf 'UA:{"dep":517}\\n' | kipmesh produce flights --key-separator :
    kipmesh produce flights january.csv february.csv --format csv --key-column carrier
    kipmesh produce flights - --format ndjson --key-column id < flights.ndjson
    kipmesh produce flights values.txt --config compression.type=zstd --config linger.ms=20 --stats
    """
    settings = parse_pairs(config, "--config")
    make_parser = _parser_maker(form, key_separator, key_column, delimiter)
    code = run(lambda: _produce(connection, topic, files or (), make_parser, settings, stats))
    if code != EXIT_OK:
        raise typer.Exit(code)


def _parser_maker(form: Format, key_separator: str | None, key_column: str | None, delimiter: str) -> MakeParser:
    """Return the factory of parsers for these options.

    Raises typer.BadParameter if an option does not fit the format, or for an invalid delimiter or separator.
    """
    if key_separator is not None and form is not Format.LINES:
        raise typer.BadParameter(f"needs --format lines; use --key-column for {form}", param_hint="--key-separator")
    if key_column is not None and form is Format.LINES:
        raise typer.BadParameter("needs --format ndjson or --format csv", param_hint="--key-column")
    if len(delimiter) != 1 or (not delimiter.isprintable() and delimiter != "\t") or delimiter == '"':
        raise typer.BadParameter(
            f"must be one character other than a quote, got {delimiter!r}", param_hint="--delimiter"
        )
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
    """Write records until the end of the input, an error or a signal.

    Returns the exit code: 0, 1 after an error, which is reported on stderr, or 128 + the first signal.
    """
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
    showing = asyncio.create_task(progress.show()) if progress.is_terminal else None
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
    code = report_error(result) if isinstance(result, Exception) else EXIT_OK
    if signals:
        code = EXIT_SIGNAL + signals[0]
    if stats:
        sys.stderr.writelines(f"{name} {round(value, 3)}\n" for name, value in progress.counters.items())
    progress.finish(f" (stopped by {signals[0].name})" if signals else "")
    return code


async def _first(task: asyncio.Task[None], event: asyncio.Event, timeout_s: float | None) -> None:
    """Wait for the task, the event or `timeout_s` seconds (None: no limit), whichever comes first.

    Does not cancel the task.
    """
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
    """Send all records and wait for their acknowledgement, counted in `progress`. Cancellation drops pending records.

    Raises KafkaError if no broker responds, InvalidConfigError for a bad setting, or the errors of `_Feeder.send_all`.
    """
    from kipmesh.client import Producer

    producer = Producer(connection.bootstrap, **{**connection.config, **config})
    progress.has_acks = producer.config.acks != 0
    await connection.start(producer, config)
    close_timeout_s: float | None = None
    warning = asyncio.create_task(_warn_missing_metadata(producer, topic, progress))
    try:
        await _Feeder(producer, topic, make_parser, inputs, progress).send_all()
        await producer.flush()
        progress.count_acknowledged()
    except asyncio.CancelledError:
        close_timeout_s = 0
        raise
    finally:
        warning.cancel()
        progress.counters = producer.metrics()
        try:
            async with asyncio.timeout(close_timeout_s):
                await producer.close()
        except TimeoutError:
            pass
        progress.count_rest()


async def _warn_missing_metadata(producer: Producer, topic: str, progress: _Progress) -> None:
    """Warn once on stderr if the first records wait for metadata of the topic."""
    await progress.started.wait()
    await asyncio.sleep(METADATA_WARNING_S)
    if not producer.has_metadata(topic):
        progress.clear()
        text = f"no metadata for topic {topic!r} yet; waiting. If it does not exist, {create_command(topic)}"
        print(f"kipmesh: {text}", file=sys.stderr, flush=True)


@dataclass(eq=False)
class _Feeder:
    """Sends the records of the inputs.

    Errors in reading, parsing or sending a line name the input and the line; delivery errors do not.
    """

    producer: Producer
    topic: str
    make_parser: MakeParser
    inputs: Inputs
    progress: _Progress

    def __post_init__(self) -> None:
        self._row_bytes_max = self.producer.config.max_request_size
        self._parser = self.make_parser(self._row_bytes_max)
        self._input_index = 0
        self._line_number = 0  # in the current input, from 1

    async def send_all(self) -> None:
        """Send records until the inputs end or are stopped. The last acknowledgements may still be pending.

        Raises CommandError for a line that cannot be parsed; KafkaError for a line that is too long
        (MESSAGE_TOO_LARGE), a record that cannot be sent, or an earlier one that was not delivered; OSError if an input
        cannot be read.
        """
        progress = self.progress
        try:
            async for chunk in self.inputs.read(self._row_bytes_max):
                await self._send(chunk)
                if len(progress.pending) > UNACKNOWLEDGED_RECORDS_MAX:
                    await progress.pending[0]
                progress.count_acknowledged()
        except LineCutError:
            progress.read += 1
        except LineTooLongError as error:
            progress.read += 1
            self._switch_input(error.input_index)
            self._line_number += 1
            text = f"{self._position()} is longer than max.request.size ({self._row_bytes_max} bytes)"
            raise KafkaError(ErrorCode.MESSAGE_TOO_LARGE, text) from None

    def _switch_input(self, index: int) -> None:
        if index != self._input_index:
            self._parser, self._input_index, self._line_number = self.make_parser(self._row_bytes_max), index, 0

    def _position(self) -> str:
        return f"{self.inputs.label(self._input_index)}line {self._line_number}"

    async def _send(self, chunk: Chunk) -> None:
        self._switch_input(chunk.input_index)
        progress = self.progress
        progress.read += len(chunk.lines)
        progress.started.set()
        try:
            for line in chunk.lines:
                self._line_number += 1
                pair = self._parser.parse(line)
                if pair is None:
                    progress.read -= 1
                else:
                    progress.pending.append(await self.producer.send(self.topic, pair.value, key=pair.key))
            if chunk.is_end:
                self._parser.end()
        except CommandError as error:
            raise CommandError(f"{self._position()}: {error}") from None
        except KafkaError as error:
            raise KafkaError(error.code, f"{self._position()}: {error.message}") from None


class _Progress:
    """Counts of records read and acknowledged. Shown on a terminal while the command runs, and always at the end."""

    def __init__(self, inputs: Inputs) -> None:
        self.read = 0
        self.started = asyncio.Event()
        """Set when the first record is read."""
        self.acknowledged = 0
        self.has_acks = True
        self.pending: deque[Any] = deque()
        """Futures of records sent and not yet counted as acknowledged, in the order of the input."""
        self.counters: dict[str, int | float] = {}
        self.is_terminal = sys.stderr.isatty()
        self._inputs = inputs
        self._begin = time.monotonic()

    def count_acknowledged(self) -> None:
        """Count the acknowledged records up to the first pending one, in the order of the input.

        Raises the KafkaError of a record that was not delivered.
        """
        pending = self.pending
        while pending and pending[0].done():
            pending.popleft().result()
            self.acknowledged += 1

    def count_rest(self) -> None:
        """Count the acknowledged records among all pending ones. Called once, at the end."""
        rest, self.pending = self.pending, deque()
        self.acknowledged += sum(one.done() and not one.cancelled() and one.exception() is None for one in rest)

    async def show(self) -> None:
        """Refresh the progress line on a terminal until cancelled."""
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            while self.pending and self.pending[0].done() and self.pending[0].exception() is None:
                self.pending.popleft()
                self.acknowledged += 1
            sys.stderr.write(f"\r{self._bar()}{self._line()}\x1b[K")
            sys.stderr.flush()

    def clear(self) -> None:
        """Erase the progress line of a terminal, to print something else."""
        if self.is_terminal:
            sys.stderr.write("\r\x1b[K")

    def finish(self, why: str) -> None:
        """Print the last line, followed by the reason `why` if the command was stopped."""
        missing = self.read - self.acknowledged
        text = ""
        if missing:
            text = f"; {missing:,} not" + ("" if self.has_acks else " sent")
        sys.stderr.write(f"{self._line()}{text}{why}\n")

    def _bar(self) -> str:
        """Return a bar of the approximate share of input bytes acknowledged; "" if the input size is unknown."""
        total = self._inputs.total_bytes
        if not total:
            return ""
        share = min(self._inputs.read_bytes / total, 1) * self.acknowledged / max(self.read, 1)
        return f"[{'#' * int(share * BAR_COLUMNS):<{BAR_COLUMNS}}] {share:4.0%}  "

    def _line(self) -> str:
        count = self.acknowledged
        records = counted(count, "record")
        done = "acknowledged" if self.has_acks else "sent (acks=0: not acknowledged)"
        return f"{records} {done}, {count / max(time.monotonic() - self._begin, 0.001):,.0f} a second"
