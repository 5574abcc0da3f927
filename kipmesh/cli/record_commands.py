"""`kipmesh produce` and `kipmesh consume`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import (
    DEFAULT_DIR,
    AsJson,
    Bootstrap,
    CommandError,
    Dir,
    bootstrap_of,
    examples,
    parse_pairs,
    print_json,
    run,
)

if TYPE_CHECKING:
    from kipmesh.client import ConsumerRecord

READ_BYTES = 256 << 10
LINE_BYTES_MAX = 64 << 20
WAITING_MAX = 1_000_000
"""Records whose acknowledgement is awaited, in the order of the input."""
PROGRESS_INTERVAL_S = 0.2
POLL_RECORDS_MAX = 5000
IDLE_POLL_MS = 60_000

Topic = Annotated[str, typer.Argument(metavar="TOPIC")]
ClientConfig = Annotated[
    list[str] | None, typer.Option("--config", metavar="KEY=VALUE", help="A client setting, for example acks=1.")
]


def register(app: typer.Typer) -> None:
    """Add the two commands."""
    app.command(
        epilog=examples(
            """
            seq 1000 | kipmesh produce flights
            printf 'UA:{"dep":517}\\n' | kipmesh produce flights --key-separator :
            kipmesh produce flights --config compression.type=zstd --config linger.ms=20 < values.txt
            """
        )
    )(produce)
    app.command(
        epilog=examples(
            """
            kipmesh consume flights --from-beginning --max-messages 10
            kipmesh consume flights --partition 3 --offset 1000 --json
            kipmesh consume flights --from-beginning --timeout-ms 1000 --print-key
            """
        )
    )(consume)


def produce(
    topic: Topic,
    key_separator: Annotated[
        str | None, typer.Option("--key-separator", help="Split each line into key and value there.")
    ] = None,
    config: ClientConfig = None,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
) -> None:
    """Write each line of standard input as a record. The last line of stderr says how many were acknowledged."""
    settings = parse_pairs(config or (), "--config")
    address = bootstrap_of(bootstrap, folder)
    separator = key_separator.encode() if key_separator else None
    run(lambda: _produce(address, topic, separator, settings))


async def _produce(bootstrap: str, topic: str, separator: bytes | None, config: dict[str, Any]) -> None:
    from kipmesh.client import Producer

    progress = _Progress()
    waiting: deque[Any] = deque()
    async with Producer(bootstrap, **config) as producer:
        async for lines in _input_lines():
            for line in lines:
                key, value = _split(line, separator)
                waiting.append(await producer.send(topic, value, key=key))
            if len(waiting) > WAITING_MAX:
                await waiting[0]
            progress.show(_settle(waiting, progress.acknowledged))
        await producer.flush()
        progress.acknowledged = _settle(waiting, progress.acknowledged)
    progress.finish()


def _settle(waiting: deque[Any], acknowledged: int) -> int:
    """Count what was acknowledged; raises the KafkaError of the first record that was not."""
    while waiting and waiting[0].done():
        waiting.popleft().result()
        acknowledged += 1
    return acknowledged


def _split(line: bytes, separator: bytes | None) -> tuple[bytes | None, bytes]:
    if separator is None:
        return None, line
    key, found, value = line.partition(separator)
    if not found:
        raise CommandError(f"no key separator {separator.decode()!r} in line {line[:80].decode(errors='replace')!r}")
    return key, value


async def _input_lines() -> AsyncIterator[list[bytes]]:
    """Lines of standard input as they come, without their ends."""
    rest = b""
    source = sys.stdin.fileno()
    while True:
        await _readable(source)
        chunk = os.read(source, READ_BYTES)
        if not chunk:
            break
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        if len(rest) > LINE_BYTES_MAX:
            raise CommandError(f"a line is longer than {LINE_BYTES_MAX} bytes")
        if lines:
            yield lines
    if rest:
        yield [rest]


async def _readable(source: int) -> None:
    """Wait until there is input; a plain file always has some. (A thread in `read` would outlive Ctrl-C.)"""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    try:
        loop.add_reader(source, event.set)
    except (PermissionError, ValueError):
        await asyncio.sleep(0)
        return
    try:
        await event.wait()
    finally:
        loop.remove_reader(source)


class _Progress:
    """How many records are acknowledged: on a terminal while it runs, everywhere at the end."""

    def __init__(self) -> None:
        self.acknowledged = 0
        self._begin = self._shown = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def show(self, acknowledged: int) -> None:
        self.acknowledged = acknowledged
        now = time.monotonic()
        if self._is_terminal and now - self._shown >= PROGRESS_INTERVAL_S:
            self._shown = now
            sys.stderr.write(f"\r{self._line()}\x1b[K")
            sys.stderr.flush()

    def finish(self) -> None:
        sys.stderr.write(("\r" if self._is_terminal else "") + self._line() + "\n")

    def _line(self) -> str:
        rate = self.acknowledged / max(time.monotonic() - self._begin, 0.001)
        return f"{self.acknowledged:,} records acknowledged, {rate:,.0f} a second"


def consume(
    topic: Topic,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="Begin with the first record instead of the next one.")
    ] = False,
    max_messages: Annotated[
        int | None, typer.Option("--max-messages", min=1, help="End after so many records.")
    ] = None,
    partition: Annotated[int | None, typer.Option("--partition", min=0, help="Only this partition.")] = None,
    offset: Annotated[
        str | None, typer.Option("--offset", help="Where to begin in --partition: a number, earliest or latest.")
    ] = None,
    timeout_ms: Annotated[
        int | None, typer.Option("--timeout-ms", min=1, help="End when there is no record for this long.")
    ] = None,
    print_key: Annotated[bool, typer.Option("--print-key", help="Print the key before the value.")] = False,
    key_separator: Annotated[str, typer.Option("--key-separator", help="Between key and value.")] = "\t",
    config: ClientConfig = None,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    as_json: AsJson = False,
) -> None:
    """Print the records of a topic, a value a line, and go on with new ones as they come."""
    if offset is not None and partition is None:
        raise typer.BadParameter("needs --partition", param_hint="--offset")
    if offset is not None and not (offset in ("earliest", "latest") or (offset.isascii() and offset.isdigit())):
        raise typer.BadParameter(f"{offset!r} is no number, earliest or latest", param_hint="--offset")
    begin = offset or ("earliest" if from_beginning else "latest")
    settings = parse_pairs(config or (), "--config")
    address = bootstrap_of(bootstrap, folder)
    separator = key_separator.encode() if print_key else None

    def show(record: ConsumerRecord) -> None:
        if as_json:
            from kipmesh.core.json_form import record_object

            print_json(record_object(record))
            return
        key = b"" if separator is None else (b"null" if record.key is None else record.key) + separator
        sys.stdout.buffer.write(key + (b"null" if record.value is None else record.value) + b"\n")

    run(lambda: _consume(address, topic, partition, begin, max_messages, timeout_ms, settings, show))


async def _consume(
    bootstrap: str,
    topic: str,
    partition: int | None,
    begin: str,
    max_messages: int | None,
    timeout_ms: int | None,
    config: dict[str, Any],
    show: Any,
) -> None:
    from kipmesh.client import Consumer, TopicPartition
    from kipmesh.core.errors import ErrorCode, KafkaError

    async with Consumer(bootstrap, **{"auto.offset.reset": "none", **config}) as consumer:
        known = await consumer.partitions_for(topic)
        wanted = sorted(known.partitions) if partition is None else [partition]
        if partition is not None and partition not in known.partitions:
            text = f"topic {topic!r} has no partition {partition}"
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text)
        places = [TopicPartition(topic, one) for one in wanted]
        consumer.assign(places)
        if begin == "earliest":
            consumer.seek_to_beginning(places)
        elif begin == "latest":
            consumer.seek_to_end(places)
        else:
            consumer.seek(places[0], int(begin))
        left = max_messages
        while left is None or left > 0:
            wanted_records = POLL_RECORDS_MAX if left is None else min(left, POLL_RECORDS_MAX)
            records = await consumer.poll(timeout_ms=timeout_ms or IDLE_POLL_MS, max_records=wanted_records)
            if not records and timeout_ms is not None:
                return
            for record in records:
                show(record)
            sys.stdout.flush()
            left = None if left is None else left - len(records)
