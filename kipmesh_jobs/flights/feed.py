"""A mesh of the job's own and the flights in it, when no running one is named.

The mesh is made of processes, as by ``kipmesh local``. So that there is something to see, some flights are
held back, as if their reports came weeks late, and some values are put in that are no flights; both are counted here,
and the job has to find them.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final

import pandas as pd

from kipmesh.client import Delivery, NewTopic
from kipmesh.client.sync import AdminClient, Producer
from kipmesh.cluster import ClusterError
from kipmesh.cluster.layout import Counts
from kipmesh.cluster.process_cluster import ProcessCluster
from kipmesh_jobs.flights.dataset import Flight, encode, shift_years
from kipmesh_jobs.flights.results import Expected
from kipmesh_jobs.frame import JobError

HELD_BACK_DAYS_MAX: Final = 60
HELD_BACK_SHARE: Final = 0.25
"""Of the time that the flights are of, at most."""
PARTITIONS: Final = 6
REPLICATION_FACTOR: Final = 3
COUNTS: Final = Counts(1, 1, 2, 0)
NEVER_DELETED: Final = {"retention.ms": "-1"}
"""The flights are of 2013: by the usual retention they would be deleted while they are read."""
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
def own_mesh(folder: Path, counts: Counts, *, keep: bool = False) -> Iterator[ProcessCluster]:
    """A mesh of processes in an empty `folder`, stopped at the end; with `keep` only if the block raises."""
    cluster = ProcessCluster(folder, owned=not keep)
    is_kept = False
    try:
        cluster.up(counts, {})
        yield cluster
        is_kept = keep
    finally:
        if is_kept:
            cluster.detach()
        else:
            with suppress(ClusterError):
                cluster.down()
        cluster.close()


def clear_mesh(folder: Path) -> int:
    """Stop the mesh that an earlier run left in `folder` and remove its files; how many of its processes still ran."""
    running = 0
    if (folder / "cluster.json").exists():
        cluster = ProcessCluster(folder)
        try:
            running = sum(status.state != "stopped" for status in cluster.status())
            cluster.down()
        except ClusterError as error:
            # Without a readable cluster.json nobody knows of processes; their folder is removed under them.
            if (folder / "cluster.json").exists() and "cannot be read" not in str(error):
                raise JobError(f"the cluster of an earlier run does not stop: {error}") from None
    shutil.rmtree(folder, ignore_errors=True)
    return running


def hold_back(flights: pd.DataFrame, count: int) -> pd.DataFrame:
    """The same flights, scheduled as before, `count` of them (evenly chosen) weeks later in the order."""
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
    client: Mapping[str, str],
    config: Mapping[str, str] = NEVER_DELETED,
) -> int:
    """Make the topic and write the records, each acknowledged by all replicas; how many. KafkaError if one fails.

    `client`: further configuration of its clients.
    """
    with AdminClient(bootstrap, **client) as admin:
        admin.create_topics([NewTopic(topic, PARTITIONS, REPLICATION_FACTOR, config)])
    count, source = 0, iter(records)
    pending: deque[Delivery] = deque()
    with Producer(bootstrap, **client, acks="all", linger_ms=20, batch_size=128 * 1024) as producer:
        while window := list(islice(source, _WINDOW)):
            pending.extend(producer.send_many(topic, window))
            while pending and pending[0].done():
                pending.popleft().result()
            count += len(window)
            report(count)
        producer.flush()
        for delivery in pending:
            delivery.result()
    return count


def encoded(year: pd.DataFrame, late: int, broken: int, *, scale: int = 1) -> Iterator[tuple[bytes, bytes | None]]:
    """The records of all years, held back and broken once a year."""
    for shift in range(scale):
        yield from with_broken(encode(hold_back(shift_years(year, shift), late)), len(year), broken)


def expected(year: pd.DataFrame, broken: int, scale: int) -> Expected:
    """What the job has to find of that."""
    none = min(broken, len(year))
    return Expected(
        scale * len(year),
        scale * int(year["dep_delay"].isna().sum()),
        scale * int(year["dep_delay"].sum()),
        scale * none,
    )
