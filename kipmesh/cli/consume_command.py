"""`kipmesh consume`: print the records of a topic, alone or as a member of a consumer group.

- Closes its fetch sessions when stopped (227-17), and warns if no broker responds or a partition has no leader.
- With `--group`, commits the offsets of printed records every `auto.commit.interval.ms` and at the end. Records that
  could not be printed (closed or blocked output) are not committed at the end, so the group reads them again.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import (
    AsJson,
    Connection,
    GracefulStop,
    Topic,
    check_utf8,
    option,
    parse_number,
    parse_pairs,
    print_json,
    run,
    suggest_create,
)
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages.schema import MAX_INT32, MAX_INT64

if TYPE_CHECKING:
    from kipmesh.client import Consumer, ConsumerRecord, TopicMetadata, TopicPartition

SILENCE_S = 5.0
"""Time without a response of any broker after which a warning is printed."""
CHECK_INTERVAL_S = 0.5
POLL_RECORDS_MAX = 5000
IDLE_POLL_MS = 60_000
CONNECT_TIMEOUT_S_MIN = 1.0

JOIN_POLL_MS = 500

ShowAll = Callable[[Sequence["ConsumerRecord"]], None]
"""Prints records."""


def consume(
    topic: Topic,
    from_beginning: Annotated[
        bool, option("--from-beginning", "Start at the first record instead of the end of the log.")
    ] = False,
    group: Annotated[
        str | None,
        option(
            "--group",
            "Join this consumer group, continue at its committed offsets, and commit. --from-beginning then "
            "applies to partitions without a committed offset.",
            callback=check_utf8,
        ),
    ] = None,
    max_messages: Annotated[int | None, option("--max-messages", "Exit after this number of records.", min=1)] = None,
    partition: Annotated[int | None, option("--partition", "Only this partition.", min=0)] = None,
    offset: Annotated[
        str | None, option("--offset", "Offset in --partition to start at: a number, earliest or latest.")
    ] = None,
    timeout_ms: Annotated[
        int | None, option("--timeout-ms", "Exit after this time without a record or a broker.", min=1, max=MAX_INT32)
    ] = None,
    print_key: Annotated[bool, option("--print-key", "Print the key before the value.")] = False,
    key_separator: Annotated[
        str, option("--key-separator", "Separator of key and value.  [default: \\t]", show_default=False)
    ] = "\t",
    config: Annotated[
        list[str] | None,
        option("--config", "A consumer setting, e.g. fetch.min.bytes=1000; repeatable.", metavar="KEY=VALUE"),
    ] = None,
    *,
    connection: Connection,
    as_json: AsJson = False,
) -> None:
    """Print the records of a topic, one value per line, and continue with new records until stopped.

    Examples:
    kipmesh consume flights --from-beginning --max-messages 10
    kipmesh consume flights --partition 3 --offset 1000 --json
    kipmesh consume flights --from-beginning --timeout-ms 1000 --print-key
    kipmesh consume flights --group readers --from-beginning
    """
    if offset is not None and partition is None:
        raise typer.BadParameter("needs --partition", param_hint="--offset")
    if offset is not None and from_beginning:
        raise typer.BadParameter("conflicts with --from-beginning: give only one", param_hint="--offset")
    begin = _start_offset(offset, from_beginning=from_beginning)
    settings = group_settings(parse_pairs(config, "--config"), group, from_beginning=from_beginning)
    if partition is not None and "group.id" in settings:
        raise typer.BadParameter("conflicts with a group, which assigns the partitions", param_hint="--partition")
    separator = os.fsencode(key_separator) if print_key else None
    stop = GracefulStop()

    def show_all(records: Sequence[ConsumerRecord]) -> None:
        with stop.writing():
            for record in records:
                _print_record(record, separator, as_json=as_json)
            sys.stdout.flush()

    def work() -> Coroutine[Any, Any, int]:
        if "group.id" in settings:
            return stop.run(_consume_in_group(connection, topic, settings, max_messages, timeout_ms, show_all))
        return stop.run(_consume(connection, topic, partition, begin, max_messages, timeout_ms, settings, show_all))

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


def _start_offset(offset: str | None, *, from_beginning: bool) -> int | str | None:
    """Return a number, "earliest" or "latest", from --offset or --from-beginning; None without either.

    Raises typer.BadParameter for any other value.
    """
    if offset is None:
        return "earliest" if from_beginning else None
    if offset in ("earliest", "latest"):
        return offset
    if not (offset.isascii() and offset.isdigit()):
        raise typer.BadParameter(f"must be a number, earliest or latest, got {offset!r}", param_hint="--offset")
    return parse_number(offset, "--offset", most=MAX_INT64)


def group_settings(config: Mapping[str, str], group: str | None, *, from_beginning: bool) -> dict[str, str]:
    """Return the consumer's settings from --config (`config`), --group and --from-beginning.

    With a group, sets `group.id` and, unless `config` does, `auto.offset.reset`; without one, returns a copy of
    `config`. Raises typer.BadParameter for settings that contradict an option.
    """
    group_id = config.get("group.id", group)
    if group not in (None, group_id):
        raise typer.BadParameter(
            f"{group!r} contradicts group.id={group_id!r} in --config: give only one", param_hint="--group"
        )
    if from_beginning and config.get("auto.offset.reset", "earliest") != "earliest":
        text = f"auto.offset.reset={config['auto.offset.reset']} contradicts --from-beginning: give only one"
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

    consumer = Consumer(connection.bootstrap, **{"auto.offset.reset": "none", **connection.config, **config})
    async with _started(connection, consumer, topic, config, timeout_ms) as known:
        wanted = sorted(known.partitions) if partition is None else [partition]
        if partition is not None and partition not in known.partitions:
            text = f"topic {topic!r} has no partition {partition}; its partitions are 0 to {len(known.partitions) - 1}"
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text)
        assigned = [TopicPartition(topic, one) for one in wanted]
        consumer.assign(assigned)
        if isinstance(begin, int):
            consumer.seek(assigned[0], begin)
        elif begin == "earliest":
            consumer.seek_to_beginning(assigned)
        elif begin == "latest" or "auto.offset.reset" not in config:
            consumer.seek_to_end(assigned)
        try:
            is_complete = await _print_records(consumer, max_messages, timeout_ms, show_all)
        except KafkaError as error:
            if error.code is ErrorCode.OFFSET_OUT_OF_RANGE and isinstance(begin, int):
                await _check_offset(consumer, assigned[0], begin)
            raise
        if not is_complete:
            _warn_leaderless(await consumer.partitions_for(topic), wanted)


async def _check_offset(consumer: Consumer, where: TopicPartition, offset: int) -> None:
    """Raise KafkaError (OFFSET_OUT_OF_RANGE), which states the range, if `--offset` is outside the log."""
    first = (await consumer.beginning_offsets([where]))[where]
    end = (await consumer.end_offsets([where]))[where]
    if not first <= offset <= end:
        text = f"partition {where.partition} of topic {where.topic!r} has no offset {offset}; give --offset {first}"
        raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, text if first == end else f"{text} to {end}") from None


@asynccontextmanager
async def _started(
    connection: Connection,
    consumer: Consumer,
    topic: str,
    config: Mapping[str, Any],
    timeout_ms: int | None,
    may_commit: Callable[[], bool] = lambda: True,
) -> AsyncIterator[TopicMetadata]:
    """Start the consumer, yield the topic's metadata, and close it, with a last commit if `may_commit` returns True.

    Raises KafkaError if no broker responds in time (NETWORK_EXCEPTION) or the topic is unknown
    (UNKNOWN_TOPIC_OR_PARTITION).
    """
    timeout_s = None if timeout_ms is None else max(timeout_ms / 1000, CONNECT_TIMEOUT_S_MIN)
    await connection.start(consumer, config, timeout_s=timeout_s)
    warning = asyncio.create_task(_warn_unreachable(consumer, connection.bootstrap))
    try:
        with suggest_create(topic):
            known = await consumer.partitions_for(topic)
        yield known
    finally:
        warning.cancel()
        await consumer.close(commit=may_commit())


async def _consume_in_group(
    connection: Connection,
    topic: str,
    config: Mapping[str, Any],
    max_messages: int | None,
    timeout_ms: int | None,
    show_all: ShowAll,
) -> None:
    """Print records as a member of a group until cancelled, or until `max_messages` or `timeout_ms`.

    With `timeout_ms`, raises KafkaError (REQUEST_TIMED_OUT) if the consumer cannot join the group within
    `default.api.timeout.ms`.
    """
    from kipmesh.client import Consumer, RebalanceListener

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
    async with _started(connection, consumer, topic, config, timeout_ms, lambda: printed):
        consumer.subscribe([topic], Joined())
        # `timeout_ms` starts when this member has joined the group.
        deadline = time.monotonic() + consumer.config.default_api_timeout_ms / 1000
        left = max_messages
        while timeout_ms is not None and not joined and (left is None or left > 0):
            records = await consumer.poll(JOIN_POLL_MS, max_records=min(left or POLL_RECORDS_MAX, POLL_RECORDS_MAX))
            show(records)
            left = None if left is None else left - len(records)
            if not joined and time.monotonic() > deadline:
                raise KafkaError(
                    ErrorCode.REQUEST_TIMED_OUT, f"could not join group {consumer.config.group_id!r} in time"
                )
        if not await _print_records(consumer, left, timeout_ms, show):
            assigned = [where.partition for where in consumer.assignment()]
            _warn_leaderless(await consumer.partitions_for(topic), assigned)


async def _print_records(
    consumer: Consumer, max_messages: int | None, timeout_ms: int | None, show_all: ShowAll
) -> bool:
    """Print records until `max_messages` (return True) or until none arrived for `timeout_ms` (return False).

    None means no limit. Raises the KafkaErrors of `Consumer.poll`.
    """
    left = max_messages
    while left is None or left > 0:
        max_records = POLL_RECORDS_MAX if left is None else min(left, POLL_RECORDS_MAX)
        records = await consumer.poll(timeout_ms=timeout_ms or IDLE_POLL_MS, max_records=max_records)
        if not records and timeout_ms is not None:
            return False
        show_all(records)
        left = None if left is None else left - len(records)
    return True


async def _warn_unreachable(consumer: Consumer, bootstrap: str) -> None:
    """Warn on stderr each time that no broker has responded for SILENCE_S, until cancelled."""
    is_reported = False
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        silent_s = consumer.unreachable_s
        if silent_s >= SILENCE_S and not is_reported:
            print(f"kipmesh: no broker responds at {bootstrap}; waiting", file=sys.stderr, flush=True)
        is_reported = silent_s > 0 and (is_reported or silent_s >= SILENCE_S)


def _warn_leaderless(topic: TopicMetadata, partitions: Iterable[int]) -> None:
    """Warn on stderr about partitions without a leader, whose records are not printed."""
    found = [one for one in partitions if one in topic.partitions and topic.partitions[one].leader_id < 0]
    if found:
        numbers = ", ".join(map(str, found))
        noun = "partition" if len(found) == 1 else "partitions"
        text = f"no leader for {noun} {numbers} of topic {topic.name!r}: their records are missing"
        print(f"kipmesh: {text}", file=sys.stderr, flush=True)
