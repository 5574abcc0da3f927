"""`kipmesh consume`, and the place of the two commands of records."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import (
    DEFAULT_DIR,
    AsJson,
    Bootstrap,
    ClientConfig,
    Dir,
    Topic,
    bootstrap_of,
    client_config_of,
    connected,
    examples,
    number_of,
    parse_pairs,
    plain_text,
    print_json,
    run,
)
from kipmesh.cli.consume_group import consume_in_group, group_settings
from kipmesh.cli.consume_support import Ending, connect_timeout_s, read, tell_leaderless, tell_silence
from kipmesh.cli.produce_command import produce
from kipmesh.messages.limits import MAX_INT32, MAX_INT64

if TYPE_CHECKING:
    from kipmesh.client import ConsumerRecord


def register(app: typer.Typer) -> None:
    """Add the two commands."""
    app.command(
        epilog=examples(
            """
            seq 1000 | kipmesh produce flights
            printf 'UA:{"dep":517}\\n' | kipmesh produce flights --key-separator :
            kipmesh produce flights january.csv february.csv --format csv --key-column carrier
            kipmesh produce flights - --format ndjson --key-column id < flights.ndjson
            kipmesh produce flights values.txt --config compression.type=zstd --config linger.ms=20 --stats
            """
        )
    )(produce)
    app.command(
        epilog=examples(
            """
            kipmesh consume flights --from-beginning --max-messages 10
            kipmesh consume flights --partition 3 --offset 1000 --json
            kipmesh consume flights --from-beginning --timeout-ms 1000 --print-key
            kipmesh consume flights --group readers --from-beginning
            """
        )
    )(consume)


def consume(
    topic: Topic,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="Begin with the first record instead of the next one.")
    ] = False,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            callback=plain_text,
            help="Share the topic with the other members of this group, go on where it is, and commit what was read. "
            "--from-beginning is then for partitions without a committed offset.",
        ),
    ] = None,
    max_messages: Annotated[
        int | None, typer.Option("--max-messages", min=1, help="End after so many records.")
    ] = None,
    partition: Annotated[int | None, typer.Option("--partition", min=0, help="Only this partition.")] = None,
    offset: Annotated[
        str | None, typer.Option("--offset", help="Where to begin in --partition: a number, earliest or latest.")
    ] = None,
    timeout_ms: Annotated[
        int | None,
        typer.Option("--timeout-ms", min=1, max=MAX_INT32, help="End without a record (or a broker) for this long."),
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
    if offset is not None and from_beginning:
        raise typer.BadParameter("not together with --from-beginning", param_hint="--offset")
    begin = _begin(offset, from_beginning=from_beginning)
    settings = group_settings(parse_pairs(config or (), "--config"), group, from_beginning=from_beginning)
    if partition is not None and "group.id" in settings:
        raise typer.BadParameter("not together with a group, which gives partitions itself", param_hint="--partition")
    separator = os.fsencode(key_separator) if print_key else None
    address = bootstrap_of(bootstrap, folder)

    def show(record: ConsumerRecord) -> None:
        if as_json:
            from kipmesh.core.json_form import record_object

            print_json(record_object(record))
            return
        key = b"" if separator is None else (b"null" if record.key is None else record.key) + separator
        sys.stdout.buffer.write(key + (b"null" if record.value is None else record.value) + b"\n")

    ending = Ending()

    def show_all(records: Sequence[ConsumerRecord]) -> None:
        with ending.writing():
            for record in records:
                show(record)
            sys.stdout.flush()

    def work() -> Coroutine[Any, Any, int]:
        if "group.id" in settings:
            return ending.run(consume_in_group(address, topic, settings, max_messages, timeout_ms, show_all))
        return ending.run(_consume(address, topic, partition, begin, max_messages, timeout_ms, settings, show_all))

    code = run(work)
    if code:
        raise typer.Exit(code)


def _begin(offset: str | None, *, from_beginning: bool) -> int | str | None:
    """An offset, earliest or latest; None where no option says it. Raises typer.BadParameter."""
    if offset is None:
        return "earliest" if from_beginning else None
    if offset in ("earliest", "latest"):
        return offset
    if not (offset.isascii() and offset.isdigit()):
        raise typer.BadParameter(f"{offset!r} is no number, earliest or latest", param_hint="--offset")
    return number_of(offset, "--offset", most=MAX_INT64)


async def _consume(
    bootstrap: str,
    topic: str,
    partition: int | None,
    begin: int | str | None,
    max_messages: int | None,
    timeout_ms: int | None,
    config: dict[str, Any],
    show_all: Callable[[Sequence[ConsumerRecord]], None],
) -> None:
    from kipmesh.client import Consumer, TopicPartition
    from kipmesh.core.errors import ErrorCode, KafkaError

    client = Consumer(bootstrap, **{"auto.offset.reset": "none", **client_config_of(bootstrap), **config})
    async with connected(client, bootstrap, config, timeout_s=connect_timeout_s(timeout_ms)) as consumer:
        known = await consumer.partitions_for(topic)
        wanted = sorted(known.partitions) if partition is None else [partition]
        if partition is not None and partition not in known.partitions:
            text = f"topic {topic!r} has no partition {partition}"
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text)
        places = [TopicPartition(topic, one) for one in wanted]
        consumer.assign(places)
        if isinstance(begin, int):
            consumer.seek(places[0], begin)
        elif begin == "earliest":
            consumer.seek_to_beginning(places)
        elif begin == "latest" or "auto.offset.reset" not in config:  # which says it where no option does
            consumer.seek_to_end(places)
        telling = asyncio.create_task(tell_silence(consumer, bootstrap))
        try:
            if not await read(consumer, max_messages, timeout_ms, show_all):
                tell_leaderless(await consumer.partitions_for(topic), wanted)
        finally:
            telling.cancel()
