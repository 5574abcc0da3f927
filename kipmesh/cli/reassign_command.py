"""`kipmesh topic reassign`: partitions get other replicas."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kipmesh.cli.common import (
    DEFAULT_DIR,
    EXIT_FAILED,
    AsJson,
    Bootstrap,
    CommandError,
    Dir,
    admin_client,
    bootstrap_of,
    comma_list,
    examples,
    number_of,
    plain_text,
    print_json,
    print_table,
    run,
)
from kipmesh.cli.moving import Deadline, Throttle, WaitTimeout, call_timeout_s, moved, stoppable, throttled
from kipmesh.messages.limits import MAX_INT32

if TYPE_CHECKING:
    from collections.abc import Collection

    from kipmesh.client import AdminClient, TopicPartition
    from kipmesh.client.reassignments import NewReplicas, PartitionReassignment
    from kipmesh.core.errors import KafkaError

    Results = Mapping[TopicPartition, KafkaError | None]


def register(app: typer.Typer) -> None:
    """Add the command to `kipmesh topic`."""
    app.command(
        epilog=examples(
            """
            kipmesh topic reassign flights --replicas 0:1,2,3 --replicas 1:2,3,4 --wait
            kipmesh topic reassign --file plan.json --throttle 10000000 --wait
            kipmesh topic reassign --list
            kipmesh topic reassign flights --cancel
            cat plan.json  # as kafka-reassign-partitions.sh takes it
            {"version": 1, "partitions": [{"topic": "flights", "partition": 0, "replicas": [1, 2, 3]}]}
            """
        )
    )(reassign)


def reassign(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", callback=plain_text, help="With --list, --cancel: only of it.")
    ] = None,
    replicas: Annotated[
        list[str] | None,
        typer.Option("--replicas", metavar="PARTITION:ID,ID,...", help="The preferred leader comes first; repeatable."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A plan in JSON, in Kafka's form.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show what is being moved.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Back to the replicas from before.")] = False,
    throttle: Throttle = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when all has moved.")] = False,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: WaitTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Give partitions other replicas, while they are read and written.

    New replicas fetch all records from the leader; when all of them are in sync, the old ones leave and their files are
    deleted. Exit code 1 when a partition was refused.
    """
    if [bool(replicas), file is not None, list_, cancel].count(True) != 1:
        raise typer.BadParameter("give one of --replicas, --file, --list, --cancel")
    if (throttle or wait) and (list_ or cancel):
        raise typer.BadParameter("--throttle and --wait are for --replicas and --file")
    if replicas and topic is None:
        raise typer.BadParameter("whose partitions? Name the topic")
    wanted = _read_plan(file, topic) if file is not None else [_parse(topic or "", text) for text in replicas or ()]
    if replicas and len(dict(wanted)) != len(wanted):
        raise typer.BadParameter("a partition is named twice", param_hint="--replicas")
    address, call_s = bootstrap_of(bootstrap, folder), call_timeout_s(timeout_s)
    if list_:
        _show_running(run(lambda: _running(address, call_s, topic)), as_json=as_json)
        return

    async def work() -> tuple[Results, Collection[TopicPartition]]:
        deadline = Deadline(timeout_s)
        async with admin_client(address, call_s) as admin:
            if cancel:
                running = await _running_of(admin, topic)
                return await admin.alter_partition_reassignments(dict.fromkeys(running)) if running else {}, ()
            async with throttled(admin, throttle, lift=wait):
                return await _begin(admin, dict(wanted), deadline if wait else None)

    results, moving = stoppable(work)
    _show_results(results, moving, "cancelled" if cancel else "moved", as_json=as_json)


async def _begin(
    admin: AdminClient, wanted: NewReplicas, deadline: Deadline | None
) -> tuple[Results, Collection[TopicPartition]]:
    """Begin, and wait if there is a deadline; the results, and what is being moved after that."""
    from kipmesh.core.errors import KafkaError

    results = await admin.alter_partition_reassignments(wanted)
    begun = [where for where, error in results.items() if error is None]
    if not begun:
        return results, ()
    if deadline is None:
        try:
            return results, await admin.list_partition_reassignments(begun)
        except KafkaError:
            return results, begun
    await moved(
        admin,
        "partitions",
        lambda where, _: where in begun,
        lambda on_moved: admin.wait_reassigned(begun, on_moved),
        deadline,
    )
    return results, ()


def _parse(topic: str, text: str) -> tuple[TopicPartition, list[int]]:
    from kipmesh.client import TopicPartition

    partition, colon, ids = text.partition(":")
    parts = [part.strip() for part in ids.split(",")]
    if not colon or not partition.strip().isdecimal() or not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is not PARTITION:ID,ID,...", param_hint="--replicas")
    number, *brokers = (number_of(one, "--replicas") for one in (partition, *parts))
    return TopicPartition(topic, number), brokers


def _read_plan(file: Path, topic: str | None) -> list[tuple[TopicPartition, list[int]]]:
    from kipmesh.client import TopicPartition

    try:
        partitions = json.loads(file.read_text())["partitions"]
        if not isinstance(partitions, list):
            raise CommandError(f"{file}: partitions must be a list")
        plan = [(TopicPartition(str(one["topic"]), int(one["partition"])), one["replicas"]) for one in partitions]
        if not all(isinstance(ids, list) and all(type(one) is int for one in ids) for _, ids in plan):
            raise TypeError
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise CommandError(f"{file} is not a plan, see `kipmesh topic reassign --help`") from None
    out = [one for where, ids in plan for one in (where.partition, *ids) if not 0 <= one <= MAX_INT32]
    if out:
        raise CommandError(f"{file}: {out[0]} is no partition or broker")
    names = {where.topic for where, _ in plan}
    if topic is not None and names - {topic}:
        raise CommandError(f"{file} is also for topic {min(names - {topic})!r}")
    if len(dict(plan)) != len(plan) or not plan:
        raise CommandError(f"{file} names a partition twice, or none")
    return plan


async def _running(address: str, timeout_s: float, topic: str | None) -> Mapping[TopicPartition, PartitionReassignment]:
    async with admin_client(address, timeout_s) as admin:
        return await _running_of(admin, topic)


async def _running_of(admin: AdminClient, topic: str | None) -> Mapping[TopicPartition, PartitionReassignment]:
    if topic is not None:
        await admin.describe_topics([topic])  # an unknown one is said so
    running = await admin.list_partition_reassignments()
    return {where: one for where, one in running.items() if topic in (None, where.topic)}


def _show_running(running: Mapping[TopicPartition, PartitionReassignment], *, as_json: bool) -> None:
    if as_json:
        for where, one in sorted(running.items()):
            print_json({**where._asdict(), **{key: list(value) for key, value in one._asdict().items()}})
    elif running:
        rows = [(*where, *map(comma_list, one)) for where, one in sorted(running.items())]
        print_table(("TOPIC", "PARTITION", "REPLICAS", "ADDING", "REMOVING"), rows)
    else:
        sys.stdout.write("nothing is being moved\n")


def _show_results(results: Results, moving: Collection[TopicPartition], done: str, *, as_json: bool) -> None:
    if as_json:
        for where, error in sorted(results.items(), key=lambda item: item[0]):
            code, message = (0, None) if error is None else (int(error.code), error.message)
            name = "NONE" if error is None else error.code.name
            print_json({**where._asdict(), "error_code": code, "error": name, "message": message})
    elif results:
        said = {where: "moving" if where in moving else done for where in results}
        rows = [
            (*where, said[where] if error is None else f"{error.code.name}: {error.message}")
            for where, error in sorted(results.items(), key=lambda item: item[0])
        ]
        print_table(("TOPIC", "PARTITION", "RESULT"), rows)
    else:
        sys.stdout.write("nothing is being moved\n")
    if any(results.values()):
        raise typer.Exit(EXIT_FAILED)
