"""`kipmesh consume`: prints the records of a topic, by itself or as a member of a consumer group.

- It ends its fetch sessions when it is told to stop (227-17), and says when nobody answers, or nobody leads.
- With `--group`, what was printed is committed, by `auto.commit.interval.ms` and at the end. What could not be printed
  (the output was closed, or nobody read it when a signal came) is not committed at the end, and the group reads it
  again.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import (
    AsJson,
    ClientConfig,
    Connection,
    Ending,
    Topic,
    number_of,
    parse_pairs,
    plain_text,
    print_json,
    run,
)
from kipmesh.messages.schema import MAX_INT32, MAX_INT64

if TYPE_CHECKING:
    from kipmesh.client import Consumer, ConsumerRecord, TopicMetadata, TopicPartition

SILENCE_S = 5.0
"""For so long nobody has answered before that is said."""
LOOK_S = 0.5
POLL_RECORDS_MAX = 5000
IDLE_POLL_MS = 60_000
CONNECT_TIMEOUT_S_MIN = 1.0

JOIN_POLL_MS = 500

ShowAll = Callable[[Sequence["ConsumerRecord"]], None]
"""Prints records."""


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
    *,
    connection: Connection,
    as_json: AsJson = False,
) -> None:
    """Print the records of a topic, a value a line, and go on with new ones as they come.

    Examples:
    kipmesh consume flights --from-beginning --max-messages 10
    kipmesh consume flights --partition 3 --offset 1000 --json
    kipmesh consume flights --from-beginning --timeout-ms 1000 --print-key
    kipmesh consume flights --group readers --from-beginning
    """
    if offset is not None and partition is None:
        raise typer.BadParameter("needs --partition", param_hint="--offset")
    if offset is not None and from_beginning:
        raise typer.BadParameter("not together with --from-beginning", param_hint="--offset")
    begin = _begin(offset, from_beginning=from_beginning)
    settings = group_settings(parse_pairs(config or (), "--config"), group, from_beginning=from_beginning)
    if partition is not None and "group.id" in settings:
        raise typer.BadParameter("not together with a group, which gives partitions itself", param_hint="--partition")
    separator = os.fsencode(key_separator) if print_key else None
    ending = Ending()

    def show_all(records: Sequence[ConsumerRecord]) -> None:
        with ending.writing():
            for record in records:
                _print_record(record, separator, as_json=as_json)
            sys.stdout.flush()

    def work() -> Coroutine[Any, Any, int]:
        if "group.id" in settings:
            return ending.run(_consume_in_group(connection, topic, settings, max_messages, timeout_ms, show_all))
        return ending.run(_consume(connection, topic, partition, begin, max_messages, timeout_ms, settings, show_all))

    code = run(work)
    if code:
        raise typer.Exit(code)


def _print_record(record: ConsumerRecord, separator: bytes | None, *, as_json: bool) -> None:
    if as_json:
        from kipmesh.client.json_form import record_object

        print_json(record_object(record))
        return
    key = b"" if separator is None else (b"null" if record.key is None else record.key) + separator
    sys.stdout.buffer.write(key + (b"null" if record.value is None else record.value) + b"\n")


def _begin(offset: str | None, *, from_beginning: bool) -> int | str | None:
    """An offset, earliest or latest; None where no option says it. Raises typer.BadParameter."""
    if offset is None:
        return "earliest" if from_beginning else None
    if offset in ("earliest", "latest"):
        return offset
    if not (offset.isascii() and offset.isdigit()):
        raise typer.BadParameter(f"{offset!r} is no number, earliest or latest", param_hint="--offset")
    return number_of(offset, "--offset", most=MAX_INT64)


def group_settings(config: Mapping[str, str], group: str | None, *, from_beginning: bool) -> dict[str, str]:
    """The client's settings, those of a member where a group is given here or there; raises typer.BadParameter."""
    group_id = config.get("group.id", group)
    if group not in (None, group_id):
        raise typer.BadParameter(f"{group!r}, but group.id is {group_id!r} in --config", param_hint="--group")
    if from_beginning and config.get("auto.offset.reset", "earliest") != "earliest":
        text = "auto.offset.reset says something else than --from-beginning, leave out one of them"
        raise typer.BadParameter(text, param_hint="--config")
    if group_id is None:
        return dict(config)
    reset = "earliest" if from_beginning else "latest"
    return {"auto.offset.reset": reset, **config, "group.id": group_id}


async def _consume(
    connection: Connection,
    topic: str,
    partition: int | None,
    begin: int | str | None,
    max_messages: int | None,
    timeout_ms: int | None,
    config: dict[str, Any],
    show_all: ShowAll,
) -> None:
    from kipmesh.client import Consumer, TopicPartition
    from kipmesh.core.errors import ErrorCode, KafkaError

    consumer = Consumer(connection.bootstrap, **{"auto.offset.reset": "none", **connection.config, **config})
    await connection.start(consumer, config, timeout_s=_connect_timeout_s(timeout_ms))
    telling = asyncio.create_task(_tell_silence(consumer, connection.bootstrap))
    try:
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
        if not await _read(consumer, max_messages, timeout_ms, show_all):
            _tell_leaderless(await consumer.partitions_for(topic), wanted)
    finally:
        telling.cancel()
        await consumer.close()


async def _consume_in_group(
    connection: Connection,
    topic: str,
    config: Mapping[str, Any],
    max_messages: int | None,
    timeout_ms: int | None,
    show_all: ShowAll,
) -> None:
    """Read as a member until told to stop; raises KafkaError."""
    from kipmesh.client import Consumer, RebalanceListener
    from kipmesh.core.errors import ErrorCode, KafkaError

    printed, joined = True, False

    class Joined(RebalanceListener):
        def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
            nonlocal joined
            joined = True

    def show(records: Sequence[ConsumerRecord]) -> None:
        nonlocal printed
        printed = False
        show_all(records)
        printed = True

    consumer = Consumer(connection.bootstrap, **{**connection.config, **config})
    await connection.start(consumer, config, timeout_s=_connect_timeout_s(timeout_ms))
    telling = asyncio.create_task(_tell_silence(consumer, connection.bootstrap))
    try:
        await consumer.partitions_for(topic)
        consumer.subscribe([topic], Joined())
        # The time without a record begins when the group has let this one in, which takes what it takes.
        deadline = time.monotonic() + consumer.config.default_api_timeout_ms / 1000
        left = max_messages
        while timeout_ms is not None and not joined and (left is None or left > 0):
            records = await consumer.poll(JOIN_POLL_MS, max_records=min(left or POLL_RECORDS_MAX, POLL_RECORDS_MAX))
            show(records)
            left = None if left is None else left - len(records)
            if not joined and time.monotonic() > deadline:
                raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"group {consumer.config.group_id!r} lets nobody in")
        if not await _read(consumer, left, timeout_ms, show):
            mine = [where.partition for where in consumer.assignment()]
            _tell_leaderless(await consumer.partitions_for(topic), mine)
    finally:
        telling.cancel()
        await consumer.close(commit=printed)


def _connect_timeout_s(timeout_ms: int | None) -> float | None:
    """How long to wait for a first broker, where the user says how long for records."""
    return None if timeout_ms is None else max(timeout_ms / 1000, CONNECT_TIMEOUT_S_MIN)


async def _read(consumer: Consumer, max_messages: int | None, timeout_ms: int | None, show_all: ShowAll) -> bool:
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


async def _tell_silence(consumer: Consumer, bootstrap: str) -> None:
    """Say on stderr, once each time, that no broker has answered for SILENCE_S; until cancelled."""
    is_told = False
    while True:
        await asyncio.sleep(LOOK_S)
        silent_s = consumer.unreachable_s
        if silent_s >= SILENCE_S and not is_told:
            print(f"kipmesh: no broker answers at {bootstrap}; waiting", file=sys.stderr, flush=True)
        is_told = silent_s > 0 and (is_told or silent_s >= SILENCE_S)


def _tell_leaderless(topic: TopicMetadata, partitions: Iterable[int]) -> None:
    """Say on stderr which of the partitions have no leader: nobody gives their records."""
    found = [one for one in partitions if one in topic.partitions and topic.partitions[one].leader_id < 0]
    if found:
        numbers = ", ".join(map(str, found))
        what = "partition" if len(found) == 1 else "partitions"
        text = f"no leader for {what} {numbers} of topic {topic.name!r}: records are missing here"
        print(f"kipmesh: {text}", file=sys.stderr, flush=True)
