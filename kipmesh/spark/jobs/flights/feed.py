"""A mesh of the job's own and the flights in it, when no running one is named.

The mesh is made of processes by ``kipmesh local``, as a user would. So that there is something to see, some flights are
held back, as if their reports came weeks late, and some values are put in that are no flights; both are counted here,
and the job has to find them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kipmesh.spark.jobs.flights.dataset import Flight, encode
from kipmesh.spark.jobs.frame import JobError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import pandas as pd

    from kipmesh.spark.jobs.flights.results import Expected

HELD_BACK_DAYS_MAX: Final = 60
HELD_BACK_SHARE: Final = 0.25
"""Of the time that the flights are of, at most."""
PARTITIONS: Final = 6
_COMMAND: Final = (sys.executable, "-m", "kipmesh.cli.main", "local")
_SECONDS: Final = 180.0
_WINDOW: Final = 5_000
BROKEN: Final[Sequence[bytes | None]] = (
    b"not json",
    b"[1, 2]",
    b'{"carrier":"AA","flight":1}',
    b"\xff\xfe\x00",
    b'{"carrier":"AA","flight":1,"origin":"JFK","dest":"LAX","time_hour":"2013-05-05T10:00:00Z","minute":5,"dep_delay":"late"}',
    None,
)
"""Values that are no flights, each for another reason."""


@contextmanager
def own_mesh(folder: Path) -> Iterator[str]:
    """A mesh in `folder` and its bootstrap address; at the end it is stopped and its files are removed.

    One that an earlier run left there, because it was killed, is stopped first.
    """
    _remove(folder)
    try:
        _local("up", folder, "--controllers", "1", "--leaders", "1", "--followers", "2")
        yield str(json.loads((folder / "cluster.json").read_text())["bootstrap"])
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    if (folder / "cluster.json").exists():
        with suppress(JobError):
            _local("down", folder)
    shutil.rmtree(folder, ignore_errors=True)


def _local(what: str, folder: Path, *more: str) -> None:
    command = [*_COMMAND, what, "--dir", str(folder), *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise JobError(f"kipmesh local {what} took more than {_SECONDS:.0f} seconds") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise JobError(f"kipmesh local {what} failed: {said[-1] if said else f'exit code {done.returncode}'}")


def hold_back(flights: pd.DataFrame, count: int) -> pd.DataFrame:
    """The same flights, scheduled as before, `count` of them (evenly chosen) weeks later in the order."""
    import pandas as pd

    scheduled = pd.to_datetime(flights["time_hour"]) + pd.to_timedelta(flights["minute"], unit="min")
    if count <= 0 or flights.empty:
        return flights
    delay = min(pd.Timedelta(days=HELD_BACK_DAYS_MAX), HELD_BACK_SHARE * (scheduled.max() - scheduled.min()))
    early = flights.index[scheduled < scheduled.max() - delay]
    chosen = early[:: max(1, -(-len(early) // count))][:count]
    arrival = scheduled.copy()
    arrival.loc[chosen] += delay
    return flights.loc[arrival.sort_values(kind="stable").index].reset_index(drop=True)


def with_broken(flights: Iterable[Flight], total: int, count: int) -> Iterator[tuple[bytes, bytes | None]]:
    """Keys and values, with `count` values among them that are none, evenly spread."""
    every = max(1, total // count) if count else 0
    put = 0
    for number, flight in enumerate(flights):
        if every and put < count and number % every == 0:
            yield flight.key, BROKEN[put % len(BROKEN)]
            put += 1
        yield flight.key, flight.value


def produce(
    bootstrap: str,
    topic: str,
    records: Iterable[tuple[bytes, bytes | None]],
    report: Callable[[int], None],
    client: Mapping[str, str] | None = None,
) -> int:
    """Make the topic and write the records, each acknowledged by all replicas; how many. KafkaError if one fails.

    `client`: further configuration of its clients.
    """
    from kipmesh.client import NewTopic
    from kipmesh.client.sync import AdminClient, Producer

    with AdminClient(bootstrap, **(client or {})) as admin:
        # The flights are of 2013: by the usual retention they would be deleted while they are read.
        admin.create_topics([NewTopic(topic, PARTITIONS, 3, {"retention.ms": "-1"})])
    count, source = 0, iter(records)
    with Producer(bootstrap, **(client or {}), linger_ms=20, batch_size=128 * 1024) as producer:
        while window := list(islice(source, _WINDOW)):
            deliveries = producer.send_many(topic, [(key, value) for key, value in window])
            producer.flush()
            for delivery in deliveries:
                delivery.result()
            count += len(window)
            report(count)
    return count


def encoded(year: pd.DataFrame, late: int, broken: int, *, scale: int = 1) -> Iterator[tuple[bytes, bytes | None]]:
    """The records of all years, held back and broken once a year."""
    from kipmesh.spark.jobs.flights.dataset import shift_years

    for shift in range(scale):
        yield from with_broken(encode(hold_back(shift_years(year, shift), late)), len(year), broken)


def expected(year: pd.DataFrame, broken: int, scale: int) -> Expected:
    """What the job has to find of that."""
    from kipmesh.spark.jobs.flights.results import Expected

    none = min(broken, len(year))
    return Expected(
        scale * len(year),
        scale * int(year["dep_delay"].isna().sum()),
        scale * int(year["dep_delay"].sum()),
        scale * none,
    )
