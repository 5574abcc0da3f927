"""`kipmesh topic reassign`, and the parts shared by all commands that wait for replicas to move.

| event                      | effect                                                                                  |
| -------------------------- | --------------------------------------------------------------------------------------- |
| every REPORT_INTERVAL_S    | print the number of pending moves and the fenced brokers that block them                |
| `--timeout` expires        | exit code 1 and a line that says how to wait again or cancel; the moves continue        |
| Ctrl-C, SIGTERM or SIGHUP  | end the command; the throttle stays, and a line says how to remove it                   |
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kipmesh.cli.common import (
    EXIT_FAILED,
    AdminConnection,
    AsJson,
    CommandError,
    check_utf8,
    comma_list,
    option,
    parse_number,
    print_results,
    print_values,
    seconds_option,
)
from kipmesh.core.errors import KafkaError
from kipmesh.messages.schema import MAX_INT32, MAX_INT64

if TYPE_CHECKING:
    from kipmesh.client import AdminClient, TopicPartition
    from kipmesh.client.admin.reassignments import NewReplicas, PartitionReassignment

    Matches = Callable[[TopicPartition, PartitionReassignment], bool]
    Results = Mapping[TopicPartition, KafkaError | None]

REPORT_INTERVAL_S = 10.0
"""Interval of the reports about pending moves."""
LAST_REPORT_S = 2.0
"""Time limit of the report after the timeout."""

NOTHING_MOVES = "no replicas are being moved"

T = TypeVar("T")
OnMoved = Callable[[int, int], None]
"""Receives the number of completed moves and the total."""

Throttle = Annotated[
    int | None,
    option(
        "--throttle",
        "Maximum bytes per second that each broker fetches for new replicas. --wait restores the previous value "
        "at the end; otherwise the throttle stays.",
        metavar="BYTES",
        min=1,
        max=MAX_INT64,
    ),
]

WaitTimeout = Annotated[
    float | None,
    seconds_option(
        "--timeout",
        "Seconds for the whole command. Default: 30 for each response of a broker, no limit for moving the replicas.",
        show_default=False,
    ),
]


@asynccontextmanager
async def throttled(admin: AdminClient, rate: int | None, *, lift: bool) -> AsyncIterator[None]:
    """Throttle reassignments on all brokers to `rate` bytes per second within the block; None changes nothing.

    Restores the previous throttle at the end if `lift`. After an exception or an interruption the throttle stays,
    because the moves continue. Raises KafkaError if the throttle cannot be set.
    """
    if rate is None:
        yield
        return
    from kipmesh.client.types import AlterOperation, ConfigAlteration, ConfigResource, ResourceType
    from kipmesh.core.config.base import FOLLOWER_THROTTLED_RATE

    all_brokers = ConfigResource(ResourceType.BROKER, "")
    previous = (await admin.describe_configs([all_brokers]))[all_brokers].get(FOLLOWER_THROTTLED_RATE)
    await admin.alter_configs({all_brokers: [ConfigAlteration(FOLLOWER_THROTTLED_RATE, str(rate))]})
    try:
        yield
    except BaseException:
        _report_throttle()
        raise
    if lift:
        restore = ConfigAlteration(FOLLOWER_THROTTLED_RATE, None, AlterOperation.DELETE)
        if previous is not None and previous.value is not None:
            restore = ConfigAlteration(FOLLOWER_THROTTLED_RATE, previous.value)
        await admin.alter_configs({all_brokers: [restore]})
    else:
        _report_throttle()


def _report_throttle() -> None:
    from kipmesh.core.config.base import FOLLOWER_THROTTLED_RATE

    remove = f"kipmesh config alter broker all --delete {FOLLOWER_THROTTLED_RATE}"
    print(f"the throttle stays; remove it with: {remove}", file=sys.stderr)


class Deadline:
    """The deadline set by `--timeout`: `timeout_s` seconds after construction, or none if it is None."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._at = None if timeout_s is None else time.monotonic() + timeout_s  # the clock of event loops

    def limit(self) -> asyncio.Timeout:
        """Return an async context manager that raises TimeoutError at the deadline."""
        return asyncio.timeout_at(self._at)

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed. False without a limit."""
        return self._at is not None and time.monotonic() >= self._at


async def wait_moved(
    admin: AdminClient, noun: str, matches: Matches, work: Callable[[OnMoved], Awaitable[T]], deadline: Deadline
) -> T:
    """Await `work`, which waits for replicas to move, and report the pending moves meanwhile. Return its result.

    Args: noun: names the moves after a number, as in "3 replicas of broker 1"; matches: selects the reassignments that
    `work` waits for; work: must call its argument with the completed and total number of moves.

    Raises CommandError at the deadline, and the errors of `work`.
    """
    left: list[int] = []
    with _progress_bar(noun) as bar:

        def on_moved(done: int, total: int) -> None:
            left[:] = [total - done, total]
            bar(done, total)

        reporting = asyncio.create_task(_report_pending(admin, noun, matches, left))
        try:
            async with deadline.limit() as limit:
                return await work(on_moved)
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            reporting.cancel()
    pending = "; ".join(filter(None, await _pending(admin, noun, matches, left, LAST_REPORT_S)))
    raise CommandError(
        f"timed out after {deadline.timeout_s:g} s: {pending}. The moves continue in the background: run the same "
        "command to wait again, `kipmesh topic reassign --list` to see them, or `kipmesh topic reassign --cancel` to "
        "cancel them"
    )


async def _report_pending(admin: AdminClient, noun: str, matches: Matches, left: Collection[int]) -> None:
    while True:
        await asyncio.sleep(REPORT_INTERVAL_S)
        count, why = await _pending(admin, noun, matches, left, REPORT_INTERVAL_S)
        if why:
            print(f"kipmesh: {count}; {why}", file=sys.stderr, flush=True)
        elif not sys.stderr.isatty():  # a terminal has the bar
            print(f"kipmesh: {count}", file=sys.stderr, flush=True)


async def _pending(
    admin: AdminClient, noun: str, matches: Matches, left: Collection[int], timeout_s: float
) -> tuple[str, str]:
    """Return two messages: the number of pending moves, and what blocks them.

    The second is "" if records are being copied, or says that no active controller responds.
    """
    count = "{} of {} {} left to move".format(*left, noun) if left else f"unknown number of {noun} left to move"
    try:
        async with asyncio.timeout(timeout_s):
            running = await admin.list_partition_reassignments()
            alive = {node.node_id for node in (await admin.describe_cluster()).brokers}
    except (KafkaError, TimeoutError):
        return count, "no active controller responds, so the reason is unknown"
    targets = Counter(broker for where, one in running.items() if matches(where, one) for broker in one.adding_replicas)
    fenced = sorted(targets.keys() - alive)
    return count, ", ".join(f"broker {broker} is fenced and blocks {targets[broker]}" for broker in fenced)


@contextmanager
def _progress_bar(title: str) -> Iterator[OnMoved]:
    """Yield a callback that updates a progress bar, or does nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns: tuple[Any, ...] = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(title, total=1)
        yield lambda done, total: bars.update(bar, completed=done, total=max(total, 1))


def reassign(
    topic: Annotated[
        str | None,
        typer.Argument(metavar="[TOPIC]", callback=check_utf8, help="With --list and --cancel: only this topic."),
    ] = None,
    replicas: Annotated[
        list[str] | None,
        option("--replicas", "New replicas, preferred leader first; repeatable.", metavar="PARTITION:ID,ID,..."),
    ] = None,
    file: Annotated[Path | None, option("--file", "A plan in Kafka's JSON format.")] = None,
    list_: Annotated[bool, option("--list", "List running reassignments.")] = False,
    cancel: Annotated[bool, option("--cancel", "Cancel: restore the previous replicas.")] = False,
    throttle: Throttle = None,
    wait: Annotated[bool, option("--wait/--no-wait", "Return when all replicas have moved.")] = False,
    *,
    connection: AdminConnection,
    timeout_s: WaitTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Move partitions to other replicas while clients read and write.

    New replicas fetch all records from the leader. When all of them are in sync, the old replicas are removed and their
    files deleted. Exit code 1 if the reassignment of a partition was refused.

    Examples:
    kipmesh topic reassign flights --replicas 0:1,2,3 --replicas 1:2,3,4 --wait
    kipmesh topic reassign --file plan.json --throttle 10000000 --wait
    kipmesh topic reassign --list
    kipmesh topic reassign flights --cancel
    cat plan.json  # the format of kafka-reassign-partitions.sh
    {"version": 1, "partitions": [{"topic": "flights", "partition": 0, "replicas": [1, 2, 3]}]}
    """
    if [bool(replicas), file is not None, list_, cancel].count(True) != 1:
        raise typer.BadParameter("give exactly one of --replicas, --file, --list, --cancel")
    if (throttle or wait) and (list_ or cancel):
        raise typer.BadParameter("--throttle and --wait need --replicas or --file")
    if replicas and topic is None:
        raise typer.BadParameter("--replicas needs the name of a topic")
    wanted = _read_plan(file, topic) if file is not None else [_parse(topic or "", text) for text in replicas or ()]
    if replicas and len(dict(wanted)) != len(wanted):
        raise typer.BadParameter("contains a partition twice", param_hint="--replicas")
    if list_:
        print_values(
            sorted(connection.run(lambda admin: _running(admin, topic)).items()),
            ("TOPIC", "PARTITION", "REPLICAS", "ADDING", "REMOVING"),
            lambda found: (*found[0], *map(comma_list, found[1])),
            lambda found: {**found[0]._asdict(), **{key: list(value) for key, value in found[1]._asdict().items()}},
            as_json=as_json,
            none=NOTHING_MOVES,
        )
        return
    deadline = Deadline(timeout_s)

    async def work(admin: AdminClient) -> tuple[Results, Collection[TopicPartition]]:
        if cancel:
            running = await _running(admin, topic)
            return await admin.alter_partition_reassignments(dict.fromkeys(running)) if running else {}, ()
        async with throttled(admin, throttle, lift=wait):
            return await _reassign(admin, dict(wanted), deadline if wait else None)

    results, moving = connection.run_stoppable(work)
    done = "cancelled" if cancel else "moved"
    print_results(results, lambda where: "moving" if where in moving else done, as_json=as_json, none=NOTHING_MOVES)
    if any(results.values()):
        raise typer.Exit(EXIT_FAILED)


async def _reassign(
    admin: AdminClient, wanted: NewReplicas, deadline: Deadline | None
) -> tuple[Results, Collection[TopicPartition]]:
    """Start reassignments, and wait for them if there is a deadline.

    Returns the result of each partition (None if it was started), and the partitions whose replicas still move. Raises
    CommandError at the deadline.
    """
    results = await admin.alter_partition_reassignments(wanted)
    started = [where for where, error in results.items() if error is None]
    if not started:
        return results, ()
    if deadline is None:
        try:
            return results, await admin.list_partition_reassignments(started)
        except KafkaError:
            return results, started
    await wait_moved(
        admin,
        "partitions",
        lambda where, _: where in started,
        lambda on_moved: admin.wait_reassigned(started, on_moved),
        deadline,
    )
    return results, ()


def _parse(topic: str, text: str) -> tuple[TopicPartition, list[int]]:
    from kipmesh.client import TopicPartition

    partition, colon, ids = text.partition(":")
    parts = [part.strip() for part in ids.split(",")]
    if not colon or not partition.strip().isdecimal() or not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is not PARTITION:ID,ID,...", param_hint="--replicas")
    number, *brokers = (parse_number(one, "--replicas") for one in (partition, *parts))
    return TopicPartition(topic, number), brokers


def _read_plan(file: Path, topic: str | None) -> list[tuple[TopicPartition, list[int]]]:
    from kipmesh.client import TopicPartition

    try:
        partitions = json.loads(file.read_text())["partitions"]
        if not isinstance(partitions, list):
            raise CommandError(f'{file}: "partitions" must be a list')
        plan = [(TopicPartition(str(one["topic"]), int(one["partition"])), one["replicas"]) for one in partitions]
        if not all(isinstance(ids, list) and all(type(one) is int for one in ids) for _, ids in plan):
            raise TypeError
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise CommandError(
            f"{file} is not a reassignment plan; see `kipmesh topic reassign --help` for the format"
        ) from None
    out = [one for where, ids in plan for one in (where.partition, *ids) if not 0 <= one <= MAX_INT32]
    if out:
        raise CommandError(f"{file}: partition and broker ids must be 0 to {MAX_INT32}, got {out[0]}")
    names = {where.topic for where, _ in plan}
    if topic is not None and names - {topic}:
        raise CommandError(f"{file} contains topic {min(names - {topic})!r}; omit TOPIC to reassign all its topics")
    if len(dict(plan)) != len(plan) or not plan:
        raise CommandError(f"{file} must contain at least one partition, and each only once")
    return plan


async def _running(admin: AdminClient, topic: str | None) -> Mapping[TopicPartition, PartitionReassignment]:
    if topic is not None:
        await admin.describe_topics([topic])  # raises for an unknown topic
    running = await admin.list_partition_reassignments()
    return {where: one for where, one in running.items() if topic in (None, where.topic)}
