"""`kipmesh consume --group`: a member of a consumer group on the command line, as Kafka's console consumer is one.

What was printed is committed, by `auto.commit.interval.ms` and at the end; what could not be printed (the output was
closed, or nobody read it when a signal came) is not committed at the end, and the group reads it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from kipmesh.cli.common import client_config_of, connect
from kipmesh.cli.consume_support import (
    POLL_RECORDS_MAX,
    ShowAll,
    connect_timeout_s,
    read,
    tell_leaderless,
    tell_silence,
)

if TYPE_CHECKING:
    from kipmesh.client import ConsumerRecord, TopicPartition

JOIN_POLL_MS = 500


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


async def consume_in_group(
    bootstrap: str,
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

    consumer = Consumer(bootstrap, **{**client_config_of(bootstrap), **config})
    await connect(consumer, bootstrap, config, timeout_s=connect_timeout_s(timeout_ms))
    telling = asyncio.create_task(tell_silence(consumer, bootstrap))
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
        if not await read(consumer, left, timeout_ms, show):
            mine = [where.partition for where in consumer.assignment()]
            tell_leaderless(await consumer.partitions_for(topic), mine)
    finally:
        telling.cancel()
        await consumer.close(commit=printed)
