"""`kipmesh topic reassign`, and what the commands share that wait for replicas to move.

| event                      | then                                                                                   |
| -------------------------- | -------------------------------------------------------------------------------------- |
| every TELL_S               | how much is left, and which fenced brokers are waited for (a terminal has a bar, too)  |
| `--timeout` is over        | exit code 1, and a line: what goes on without the command, and how it is cancelled     |
| Ctrl-C, SIGTERM or SIGHUP  | the command ends; the throttle stays, and that is said                                 |
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
    comma_list,
    number_of,
    plain_text,
    print_results,
    print_values,
    seconds_option,
)
from kipmesh.messages.schema import MAX_INT32

if TYPE_CHECKING:
    from kipmesh.client import AdminClient, TopicPartition
    from kipmesh.client.admin.reassignments import NewReplicas, PartitionReassignment
    from kipmesh.core.errors import KafkaError

    Concerns = Callable[[TopicPartition, PartitionReassignment], bool]
    Results = Mapping[TopicPartition, KafkaError | None]

TELL_S = 10.0
"""So often it is said what is waited for."""
LAST_LOOK_S = 2.0
"""So long that is asked for when the time is over."""

NOTHING_MOVES = "nothing is being moved"

T = TypeVar("T")
OnMoved = Callable[[int, int], None]
"""How many are done, and of how many."""

Throttle = Annotated[
    int | None,
    typer.Option(
        "--throttle",
        metavar="BYTES",
        min=1,
        max=2**63 - 1,
        help="Bytes a second that each broker fetches at most for the replicas that it is given. Taken back at the "
        "end of --wait; otherwise it stays.",
    ),
]

WaitTimeout = Annotated[
    float | None,
    seconds_option(
        "--timeout",
        "Seconds for all of it. Left out: 30 for each answer of a broker, and the replicas move for as long as it "
        "takes.",
        show_default=False,
    ),
]


@asynccontextmanager
async def throttled(admin: AdminClient, rate: int | None, *, lift: bool) -> AsyncIterator[None]:
    """Set the throttle of all brokers, and put it back as it was at the end if `lift`; None leaves it alone.

    Whoever is interrupted leaves it: what was begun goes on.
    """
    if rate is None:
        yield
        return
    from kipmesh.client.types import AlterOperation, ConfigAlteration, ConfigResource, ResourceType
    from kipmesh.core.config.base import FOLLOWER_THROTTLED_RATE

    everybody = ConfigResource(ResourceType.BROKER, "")
    found = (await admin.describe_configs([everybody]))[everybody].get(FOLLOWER_THROTTLED_RATE)
    await admin.alter_configs({everybody: [ConfigAlteration(FOLLOWER_THROTTLED_RATE, str(rate))]})
    try:
        yield
    except BaseException:
        _say_it_stays()
        raise
    if lift:
        back = ConfigAlteration(FOLLOWER_THROTTLED_RATE, None, AlterOperation.DELETE)
        if found is not None and found.value is not None:
            back = ConfigAlteration(FOLLOWER_THROTTLED_RATE, found.value)
        await admin.alter_configs({everybody: [back]})
    else:
        _say_it_stays()


def _say_it_stays() -> None:
    from kipmesh.core.config.base import FOLLOWER_THROTTLED_RATE

    key = f"--delete {FOLLOWER_THROTTLED_RATE}"
    print(f"the throttle stays until `kipmesh config alter broker all {key}`", file=sys.stderr)


class Deadline:
    """The end of `--timeout`, counted from here; None is never."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._at = None if timeout_s is None else time.monotonic() + timeout_s  # as event loops count

    def limit(self) -> asyncio.Timeout:
        """`async with` it: TimeoutError at the end."""
        return asyncio.timeout_at(self._at)

    @property
    def is_over(self) -> bool:
        """Whether that was before."""
        return self._at is not None and time.monotonic() >= self._at


async def moved(
    admin: AdminClient, what: str, concerns: Concerns, work: Callable[[OnMoved], Awaitable[T]], deadline: Deadline
) -> T:
    """Do the work, which waits for the replicas that `concerns` it, and say meanwhile what is waited for.

    `what` is said after a number, as in "3 replicas of broker 1". CommandError when the time is over.
    """
    left: list[int] = []
    with _shown(what) as bar:

        def on_moved(done: int, total: int) -> None:
            left[:] = [total - done, total]
            bar(done, total)

        telling = asyncio.create_task(_tell(admin, what, concerns, left))
        try:
            async with deadline.limit() as limit:
                return await work(on_moved)
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            telling.cancel()
    said = "; ".join(filter(None, await _what_is_left(admin, what, concerns, left, LAST_LOOK_S)))
    raise CommandError(
        f"after {deadline.timeout_s:g} s {said}. What was begun goes on in the background; the same command waits for "
        "it again, `kipmesh topic reassign --list` shows it, and `kipmesh topic reassign --cancel` takes it back"
    )


async def _tell(admin: AdminClient, what: str, concerns: Concerns, left: Collection[int]) -> None:
    while True:
        await asyncio.sleep(TELL_S)
        count, why = await _what_is_left(admin, what, concerns, left, TELL_S)
        if why:
            print(f"kipmesh: {count}; {why}", file=sys.stderr, flush=True)
        elif not sys.stderr.isatty():  # a terminal has the bar
            print(f"kipmesh: {count}", file=sys.stderr, flush=True)


async def _what_is_left(
    admin: AdminClient, what: str, concerns: Concerns, left: Collection[int], timeout_s: float
) -> tuple[str, str]:
    """How much, and what that waits for beyond records that are copied, if anything."""
    from kipmesh.core.errors import KafkaError

    count = "{} of {} {} are left to move".format(*left, what) if left else f"how many {what} are left is not known"
    try:
        async with asyncio.timeout(timeout_s):
            running = await admin.list_partition_reassignments()
            alive = {node.node_id for node in (await admin.describe_cluster()).brokers}
    except (KafkaError, TimeoutError):
        return count, "no active controller says what they wait for"
    targets = Counter(
        broker for where, one in running.items() if concerns(where, one) for broker in one.adding_replicas
    )
    fenced = sorted(targets.keys() - alive)
    return count, ", ".join(f"broker {broker} is fenced and {targets[broker]} wait for it" for broker in fenced)


@contextmanager
def _shown(what: str) -> Iterator[OnMoved]:
    """A bar on a terminal; elsewhere nothing."""
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
        bar = bars.add_task(what, total=1)
        yield lambda done, total: bars.update(bar, completed=done, total=max(total, 1))


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
    *,
    connection: AdminConnection,
    timeout_s: WaitTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Give partitions other replicas, while they are read and written.

    New replicas fetch all records from the leader; when all of them are in sync, the old ones leave and their files are
    deleted. Exit code 1 when a partition was refused.

    Examples:
    kipmesh topic reassign flights --replicas 0:1,2,3 --replicas 1:2,3,4 --wait
    kipmesh topic reassign --file plan.json --throttle 10000000 --wait
    kipmesh topic reassign --list
    kipmesh topic reassign flights --cancel
    cat plan.json  # as kafka-reassign-partitions.sh takes it
    {"version": 1, "partitions": [{"topic": "flights", "partition": 0, "replicas": [1, 2, 3]}]}
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
            return await _begin(admin, dict(wanted), deadline if wait else None)

    results, moving = connection.run_stoppable(work)
    done = "cancelled" if cancel else "moved"
    said = {where: "moving" if where in moving else done for where in results}
    print_results(results, said.__getitem__, as_json=as_json, none=NOTHING_MOVES)
    if any(results.values()):
        raise typer.Exit(EXIT_FAILED)


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


async def _running(admin: AdminClient, topic: str | None) -> Mapping[TopicPartition, PartitionReassignment]:
    if topic is not None:
        await admin.describe_topics([topic])  # an unknown one is said so
    running = await admin.list_partition_reassignments()
    return {where: one for where, one in running.items() if topic in (None, where.topic)}
