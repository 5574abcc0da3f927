"""A local cluster for the job, and the flights in it, if no running cluster is named.

The cluster runs as processes, like `kipmesh local`. Some flights are delayed by weeks and some invalid values are
added, so that the job has late data and dead letters to find. Their exact numbers are known.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
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
"""Maximum delay of a held-back flight, as a share of the time span of all flights."""
PARTITIONS: Final = 6
REPLICATION_FACTOR: Final = 3
COUNTS: Final = Counts(1, 1, 2, 0)
NEVER_DELETED: Final = {"retention.ms": "-1"}
"""The default retention would delete flights of 2013 while they are read."""
_WINDOW: Final = 5_000
BROKEN: Final[Sequence[bytes | None]] = (
    b"not json",
    b"[1, 2]",
    b'{"carrier":"AA","flight":1}',
    b"\xff\xfe\x00",
    b'{"carrier":"AA","flight":1,"origin":"JFK","dest":"LAX","time_hour":"2013-05-05T10:00:00Z","minute":5,"dep_delay":"late"}',
    None,
)
"""Values that are not flights, each for a different reason."""


@contextmanager
def local_cluster(directory: Path, counts: Counts, *, keep: bool = False) -> Iterator[ProcessCluster]:
    """Start a cluster of processes in an empty directory and yield it. Raises ClusterError.

    The end of the block stops the cluster. With `keep`, the cluster keeps running unless the block raises.
    """
    cluster = ProcessCluster(directory, owned=not keep)
    with closing(cluster), ExitStack() as stack:
        stack.callback(_stop, cluster)
        cluster.up(counts, {})
        yield cluster
        if keep:
            stack.pop_all()
            cluster.detach()


def _stop(cluster: ProcessCluster) -> None:
    with suppress(ClusterError):
        cluster.down()


def remove_cluster(directory: Path) -> int:
    """Stop the cluster that an earlier run left in a directory, and delete the directory. Returns the number of
    processes that were running; 0 if there was no cluster or its state is unreadable.

    Raises JobError if the cluster does not stop.
    """
    running = 0
    if (directory / "cluster.json").exists():
        cluster = ProcessCluster(directory)
        try:
            running = sum(status.state != "stopped" for status in cluster.status())
            cluster.down()
        except ClusterError as error:
            # Without a readable cluster.json its processes are unknown, and the directory is deleted anyway.
            if (directory / "cluster.json").exists() and "cannot read" not in str(error):
                raise JobError(f"the cluster of an earlier run did not stop: {error}") from None
    shutil.rmtree(directory, ignore_errors=True)
    return running


def hold_back(flights: pd.DataFrame, count: int) -> pd.DataFrame:
    """Move up to `count` evenly spread flights later in the order, by 60 days or by a quarter of the time span if that
    is less. Schedules do not change, so the flights arrive late.

    The last flights are never chosen. Returns the flights unchanged for a `count` of 0 or less.
    """
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
    """Yield (key, value) of each flight, and insert `count` invalid values (at most one per flight) evenly among them.

    `total` is the number of flights.
    """
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
    """Create the topic with 6 partitions and 3 replicas, and write all records with acks=all; return their number.
    Raises KafkaError if the topic exists, or for the first record that fails.

    `report` is called with the number of records sent so far. `client` is client configuration besides the addresses;
    `config` is topic configuration.
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
    """Yield (key, value) of all flights of `scale` years, with up to `late` held-back flights and `broken` invalid
    values per year.
    """
    for shift in range(scale):
        yield from with_broken(encode(hold_back(shift_years(year, shift), late)), len(year), broken)


def expected(year: pd.DataFrame, broken: int, scale: int) -> Expected:
    """Return the counts and the sum of delays that the job must find in the output of `encoded`."""
    none = min(broken, len(year))
    return Expected(
        scale * len(year),
        scale * int(year["dep_delay"].isna().sum()),
        scale * int(year["dep_delay"].sum()),
        scale * none,
    )
