"""What the commands share that wait for replicas to move: the throttle, what is said meanwhile, and how it ends.

| event                      | then                                                                                   |
| -------------------------- | -------------------------------------------------------------------------------------- |
| every TELL_S               | how much is left, and which fenced brokers are waited for (a terminal has a bar, too)  |
| `--timeout` is over        | exit code 1, and a line: what goes on without the command, and how it is cancelled     |
| Ctrl-C, SIGTERM or SIGHUP  | the command ends; the throttle stays, and that is said                                 |
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kipmesh.cli.common import ADMIN_TIMEOUT_S, CommandError, run, seconds_option
from kipmesh.cli.consume_support import Ending

if TYPE_CHECKING:
    from kipmesh.client import AdminClient, TopicPartition
    from kipmesh.client.reassignments import PartitionReassignment

    Concerns = Callable[[TopicPartition, PartitionReassignment], bool]

TELL_S = 10.0
"""So often it is said what is waited for."""
LAST_LOOK_S = 2.0
"""So long that is asked for when the time is over."""

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


def call_timeout_s(timeout_s: float | None) -> float:
    """What a call may take of `--timeout`."""
    return ADMIN_TIMEOUT_S if timeout_s is None else timeout_s


def stoppable(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """As `common.run`; SIGTERM and SIGHUP cancel it as Ctrl-C does, and the exit code is a shell's."""
    found: list[T] = []

    async def work() -> None:
        found.append(await make())

    code = run(lambda: Ending().run(work()))
    if code:
        raise typer.Exit(code)
    return found[0]


@asynccontextmanager
async def throttled(admin: AdminClient, rate: int | None, *, lift: bool) -> AsyncIterator[None]:
    """Set the throttle of all brokers, and put it back as it was at the end if `lift`; None leaves it alone.

    Whoever is interrupted leaves it: what was begun goes on.
    """
    if rate is None:
        yield
        return
    from kipmesh.client.types import AlterOperation, ConfigAlteration, ConfigResource, ResourceType
    from kipmesh.core.config.resources import FOLLOWER_THROTTLED_RATE

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
    from kipmesh.core.config.resources import FOLLOWER_THROTTLED_RATE

    key = f"--delete {FOLLOWER_THROTTLED_RATE}"
    print(f"the throttle stays until `kipmesh config alter broker all {key}`", file=sys.stderr)


class Deadline:
    """The end of `--timeout`, counted from here; None is never. Within an event loop."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._at = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    def limit(self) -> asyncio.Timeout:
        """`async with` it: TimeoutError at the end."""
        return asyncio.timeout_at(self._at)

    @property
    def is_over(self) -> bool:
        """Whether that was before."""
        return self._at is not None and asyncio.get_running_loop().time() >= self._at


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
