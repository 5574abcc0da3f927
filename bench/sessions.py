"""`python -m bench.sessions`: cost of a fetch by the size of its session, and without a session (227-07 to 227-10).

A follower fetches from a leader with 1,000, 10,000 and 100,000 partitions. Between two fetches 0, 10 or 1,000 of them
get a record of 100 bytes. Fetches are:

- in a session;
- without a session, with all partitions, as with `enable.incremental.fetch=false`;
- without a session, with changed partitions only: the minimum.

Compared fetches alternate in one process. A ratio is the median of the ratios of all rounds. The cost includes
replicas, logs, session caches, handlers and encoded messages. It excludes gRPC, the network and the follower's logs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from bench import charts, harness
from bench.charts import Line
from bench.harness import number
from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import DirtyReplicas, Replica
from kipmesh.broker.requests.fetch import FetchHandler
from kipmesh.broker.requests.fetch_sessions import make_session_cache
from kipmesh.core.config import BrokerConfig, TopicConfig
from kipmesh.core.fetch_session import FetchSessionHandler, SessionRequest
from kipmesh.core.metadata.image import BrokerState, MetadataImage, PartitionState, TopicState
from kipmesh.core.record_batch import build
from kipmesh.messages import FetchPartition, FetchRequest, FetchResponse
from kipmesh.messages.proto import decode, encode
from kipmesh.node import monotonic_ms
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.log_manager import LogManager
from kipmesh.transport.grpc.server import RequestContext

LEADER_ID, FOLLOWER_ID, EPOCH = 1, 2, 7
TOPIC_PARTITIONS = 100
CHANGED_TOPICS = 10
"""Changed partitions are spread over so many topics at every size, because the size of requests depends on it."""
VALUE_BYTES = 100
WAIT_MS = 1
MAX_BYTES = 10 << 20

_LONG_ID = 1 << 28  # larger ids take five bytes on the wire, as nearly all random ids do

Place = tuple[int, int]
"""Number of the topic, and partition."""


class Cost(NamedTuple):
    """Cost of one fetch: bytes of the encoded messages, and CPU time of the thread in microseconds."""

    request_bytes: int
    response_bytes: int
    server_us: float
    client_us: float


def topic_id(topic: int) -> bytes:
    """Return the 16-byte id of the topic with the number `topic`."""
    return (topic + 1).to_bytes(16, "big")


def places(partitions: int, changed: int) -> list[Place]:
    """Return `changed` of `partitions` partitions: the same number from each of ten evenly spaced topics."""
    topics = partitions // TOPIC_PARTITIONS
    return [
        (number * topics // CHANGED_TOPICS, partition)
        for number in range(CHANGED_TOPICS)
        for partition in range(changed // CHANGED_TOPICS)
    ]


class Leader:
    """A broker that leads `partitions` partitions with one follower each. Their logs are in a new directory."""

    def __init__(self, directory: Path, partitions: int) -> None:
        self.partitions = partitions
        config = BrokerConfig.parse(
            {
                "node.id": LEADER_ID,
                "cluster.id": "bench",
                "controller.quorum.voters": "9@localhost:1",
                "log.dirs": str(directory),
            }
        )
        directory.mkdir()
        self._logs = LogManager(
            RealFileSystem(), (str(directory),), cluster_id="bench", node_id=LEADER_ID, defaults=TopicConfig()
        )
        self._logs.load(0)
        image = MetadataImage(offset=0)
        for broker in (LEADER_ID, FOLLOWER_ID):
            image.brokers[broker] = BrokerState(broker, EPOCH, b"x" * 16, {}, None, False, False, False)
        self._hosted, self._dirty_replicas = HostedReplicas(image), DirtyReplicas()
        self.replicas: dict[Place, Replica] = {}
        for topic in range(partitions // TOPIC_PARTITIONS):
            self._add(topic, image)
        self.handler = FetchHandler(
            config,
            self._hosted,
            make_session_cache(config, self._dirty_replicas.subscriptions, self._hosted),
            BrokerMetrics(CollectorRegistry()),
            lambda replica, isr: None,
            monotonic_ms,
        )
        self._batch = build([(None, b"v" * VALUE_BYTES)], base_offset=0, leader_epoch=-1, timestamp_ms=1)

    def _add(self, topic: int, image: MetadataImage) -> None:
        name = f"topic-{topic:06}"
        states = {}
        for index in range(TOPIC_PARTITIONS):
            state = PartitionState((LEADER_ID, FOLLOWER_ID), (LEADER_ID, FOLLOWER_ID), LEADER_ID, 0, 0)
            log = self._logs.create(name, index, topic_id(topic), TopicConfig(), 0)
            replica = Replica(LEADER_ID, log, 0, monotonic_ms, self._dirty_replicas)
            replica.become_leader(
                state, min_insync_replicas=1, lag_max_ms=30_000, eligible_epoch=self._hosted.eligible_epoch
            )
            self._hosted.add(replica)
            self.replicas[topic, index] = replica
            states[index] = state
        image.topics[topic_id(topic)] = TopicState(name, topic_id(topic), states)

    def append(self, changed: list[Place]) -> None:
        """Append a record of `VALUE_BYTES` to each of these partitions."""
        for place in changed:
            self.replicas[place].append(self._batch, 1, 1)

    async def end_session(self, session_id: int) -> None:
        """Close the follower's session with this id."""
        request = FetchRequest(replica_id=FOLLOWER_ID, replica_epoch=EPOCH, session_id=session_id)
        await self.handler.fetch(request, RequestContext("broker-2", "peer"))

    def close(self) -> None:
        """Close the logs. The caller deletes their directory."""
        self._logs.close(-1)


class Follower:
    """A follower that fetches some partitions of a leader, with or without sessions."""

    def __init__(self, leader: Leader, partitions: list[Place], *, enabled: bool) -> None:
        self._leader = leader
        self._session = FetchSessionHandler(enabled=enabled)
        self._moved = list(partitions)  # partitions with new positions, as `ReplicaFetcher._moved`

    @property
    def session_id(self) -> int:
        """Id of the open session, or 0."""
        return self._session.session_id

    def _next_request(self) -> tuple[SessionRequest, bytes]:
        for topic, index in self._moved:
            replica = self._leader.replicas[topic, index]
            log = replica.log  # equals the follower's log after all records are read
            position = FetchPartition(index, 0, log.log_end_offset, log.latest_epoch, log.log_start_offset, 1 << 20)
            self._session.want(replica.topic, replica.topic_id, position)
        self._moved = []
        request = self._session.next_request()
        filled = request.fill(
            FetchRequest(
                cluster_id="bench",
                replica_id=FOLLOWER_ID,
                replica_epoch=EPOCH,
                max_wait_ms=WAIT_MS,
                min_bytes=1,
                max_bytes=MAX_BYTES,
            )
        )
        return request, encode(filled)

    async def fetch(self, changed: list[Place]) -> Cost:
        """Append a record to each of the `changed` partitions, fetch them and return the cost of the fetch. Raises
        AssertionError if a record is missing.
        """
        clock = time.thread_time_ns
        begin = clock()
        request, sent = self._next_request()
        client_ns = clock() - begin
        self._leader.append(changed)
        begin = clock()
        context = RequestContext("broker-2", "peer")
        response = await self._leader.handler.fetch(decode(FetchRequest, sent), context)
        received = encode(response)
        server_ns = clock() - begin
        begin = clock()
        result = self._session.handle_response(request, decode(FetchResponse, received))
        client_ns += clock() - begin
        records = [one for one in result.partitions if one.data.records]
        if not result.is_accepted or len(records) != len(changed):
            raise AssertionError(f"{len(records)} of {len(changed)} records fetched, error {result.error.name}")
        self._moved = changed
        return Cost(len(sent), len(received), server_ns / 1e3, client_ns / 1e3)

    async def open(self) -> None:
        """Open a session with a full fetch. Repeats this until the session id has the usual encoded length."""
        while True:
            await self.fetch([])
            if self.session_id >= _LONG_ID:
                return
            await self.close()

    async def close(self) -> None:
        """Close the session on the leader, if there is one."""
        request = self._session.close()
        if request is not None:
            await self._leader.end_session(request.session_id)


async def memory_bytes(leader: Leader) -> tuple[float, float]:
    """Return the bytes per partition of an open, idle session of all partitions: (in the leader, in the follower), by
    tracemalloc.
    """
    warm_up = Follower(leader, list(leader.replicas), enabled=True)
    await warm_up.open()  # compiles the codecs
    await warm_up.close()
    del warm_up
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        follower = Follower(leader, list(leader.replicas), enabled=True)
        await follower.open()
        session_id = follower.session_id
        gc.collect()
        both = tracemalloc.get_traced_memory()[0]
        del follower
        gc.collect()
        server = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    await leader.end_session(session_id)
    return (server - before) / leader.partitions, (both - server) / leader.partitions


SIZES = (1_000, 10_000, 100_000)
QUICK_SIZES = (1_000, 2_000)
CHANGES = (0, 10, 1_000)
TARGET_CHANGES = 10
"""Changed partitions to which the targets apply."""
ROUNDS, QUICK_ROUNDS = 200, 5
FULL_ROUNDS, QUICK_FULL_ROUNDS = 5, 2
WARM_UP = 3
SIZE_RATIO_MAX, ALONE_RATIO_MAX = 1.3, 1.5
"""Maximum ratios of server CPU: largest to smallest session, and smallest session to changed partitions only."""

SESSION, ALL, ALONE = "session", "all", "alone"
"""Modes: in a session; without one, all partitions; without one, changed partitions only."""


class Row(NamedTuple):
    """Figures of one kind of fetch: bytes, and the median and minimum of the CPU in microseconds over all rounds.
    `mode` is SESSION, ALL or ALONE.
    """

    mode: str
    partitions: int
    changed: int
    request_bytes: int
    response_bytes: int
    server_us: float
    server_us_min: float
    client_us: float
    client_us_min: float
    rounds: int


class Ratio(NamedTuple):
    """Ratio of the server CPU of two kinds of fetches, with `changed` changed partitions."""

    name: str
    changed: int
    ratio: float
    target: float | None


class Memory(NamedTuple):
    """Bytes per partition of an idle session, in the leader and in the follower."""

    partitions: int
    server: float
    client: float


def row_of(mode: str, partitions: int, changed: int, costs: Sequence[Cost]) -> Row:
    """Return the row of these costs. Bytes are those of the last round; only the first round differs."""
    server, client = [cost.server_us for cost in costs], [cost.client_us for cost in costs]
    cpu = (statistics.median(server), min(server), statistics.median(client), min(client))
    return Row(mode, partitions, changed, costs[-1].request_bytes, costs[-1].response_bytes, *cpu, len(costs))


def ratio_of(over: Sequence[Cost], under: Sequence[Cost]) -> float:
    """Return the median of the rounds' ratios of server CPU, `over` divided by `under`."""
    return statistics.median(a.server_us / b.server_us for a, b in zip(over, under, strict=True))


class Bench:
    """All leaders, with their logs in one directory, and the measured figures. The constructor creates the
    partitions.
    """

    def __init__(self, directory: Path, sizes: Sequence[int], rounds: int, full_rounds: int) -> None:
        self.sizes, self.rounds, self.full_rounds = sizes, rounds, full_rounds
        self.rows: list[Row] = []
        self.ratios: list[Ratio] = []
        self.memory: list[Memory] = []
        self._leaders = {}
        for size in sizes:
            harness.say(f"creating {size:,} partitions ...")
            self._leaders[size] = Leader(directory / f"{size}", size)
        # Has no sessions, and as many partitions as the smallest session.
        self._bare = Leader(directory / "bare", sizes[0])
        gc.collect()
        gc.freeze()  # as a broker does after its start

    def close(self) -> None:
        """Close the logs of all leaders."""
        for leader in (*self._leaders.values(), self._bare):
            leader.close()

    async def run(self) -> None:
        """Measure memory, fetches in sessions, and fetches without sessions; store the figures. Raises AssertionError
        if a record is missing.
        """
        for size, leader in self._leaders.items():
            harness.say(f"memory of a session of {size:,} ...")
            self.memory.append(Memory(size, *await memory_bytes(leader)))
        followers = {size: Follower(one, list(one.replicas), enabled=True) for size, one in self._leaders.items()}
        for follower in followers.values():
            await follower.open()
        for changed in CHANGES:
            await self._in_sessions(followers, changed)
        for follower in followers.values():
            await follower.close()
        for changed in CHANGES:
            for size in self.sizes:
                await self._without(size, changed)

    async def _in_sessions(self, followers: dict[int, Follower], changed: int) -> None:
        harness.say(f"{changed:,} changed, in sessions ...")
        targets = {size: places(size, changed) for size in self.sizes}
        costs: dict[int, list[Cost]] = {size: [] for size in self.sizes}
        alone = Follower(self._bare, targets[self.sizes[0]], enabled=False)
        alone_costs: list[Cost] = []
        for _ in range(2):  # partitions that are dirty from the last series
            for follower in followers.values():
                await follower.fetch([])
        for _ in range(WARM_UP + self.rounds):
            for size, follower in followers.items():
                costs[size].append(await follower.fetch(targets[size]))
            if changed:  # a fetch needs a partition
                alone_costs.append(await alone.fetch(targets[self.sizes[0]]))
        first, last = self.sizes[0], self.sizes[-1]
        kept, least = {size: those[WARM_UP:] for size, those in costs.items()}, alone_costs[WARM_UP:]
        is_target = changed == TARGET_CHANGES
        self.rows += [row_of(SESSION, size, changed, those) for size, those in kept.items()]
        name, ratio = f"a session of {last:,} beside one of {first:,}", ratio_of(kept[last], kept[first])
        self.ratios.append(Ratio(name, changed, ratio, SIZE_RATIO_MAX if is_target else None))
        if least:
            self.rows.append(row_of(ALONE, changed, changed, least))
            name, ratio = f"a session of {first:,} beside a fetch of just those", ratio_of(kept[first], least)
            self.ratios.append(Ratio(name, changed, ratio, ALONE_RATIO_MAX if is_target else None))

    async def _without(self, size: int, changed: int) -> None:
        harness.say(f"{changed:,} changed of {size:,}, without a session ...")
        leader, targets = self._leaders[size], places(size, changed)
        follower = Follower(leader, list(leader.replicas), enabled=False)
        costs = [await follower.fetch(targets) for _ in range(1 + self.full_rounds)]
        self.rows.append(row_of(ALL, size, changed, costs[1:]))

    def row(self, mode: str, partitions: int, changed: int) -> Row:
        """Return the measured row of this mode, session size and number of changed partitions. Raises StopIteration if
        there is none.
        """
        return next(row for row in self.rows if row[:3] == (mode, partitions, changed))

    def has_same_bytes(self, changed: int) -> bool:
        """Whether the bytes of fetches in a session are the same for all session sizes."""
        found = {self.row(SESSION, size, changed)[3:5] for size in self.sizes}
        return len(found) == 1


def time_of(us: float) -> str:
    """Format microseconds in us, ms or s."""
    return f"{us / 1e6:.2f} s" if us >= 1e6 else f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.0f} us"


COST_HEAD = ("changed", "fetch", "request, B", "response, B", "server CPU", "client CPU")
RATIO_HEAD = ("server CPU", "changed", "ratio", "target")
MEMORY_HEAD = ("partitions in the session", "server, B a partition", "client, B a partition")
NAMES = {SESSION: "session of {:,}", ALL: "no session, all {:,} named", ALONE: "no session, just those named"}


def cost_rows(bench: Bench) -> list[tuple[str, ...]]:
    """Return the rows of the cost table."""
    order = [(changed, mode) for changed in CHANGES for mode in (SESSION, ALONE, ALL)]
    return [
        (
            f"{changed:,}",
            NAMES[mode].format(row.partitions),
            f"{row.request_bytes:,}",
            f"{row.response_bytes:,}",
            time_of(row.server_us),
            time_of(row.client_us),
        )
        for changed, mode in order
        for row in bench.rows
        if (row.changed, row.mode) == (changed, mode)
    ]


def ratio_rows(bench: Bench) -> list[tuple[str, ...]]:
    """Return the rows of the ratio table, with verdicts."""
    lines: list[tuple[str, ...]] = []
    for name, changed, ratio, target in bench.ratios:
        aim = "" if target is None else f"<= {target:g}: {harness.met(ratio <= target)}"
        lines.append((name, f"{changed:,}", f"{ratio:.2f}", aim))
    for changed in CHANGES:
        same = bench.has_same_bytes(changed)
        lines.append(
            ("bytes, whatever the session's size", f"{changed:,}", "1.00" if same else "-", f"= 1: {harness.met(same)}")
        )
    return lines


def memory_rows(bench: Bench) -> list[tuple[str, ...]]:
    """Return the rows of the memory table."""
    return [(f"{size:,}", number(server), number(client)) for size, server, client in bench.memory]


def report(bench: Bench, *, markdown: bool) -> str:
    """Format the three tables as text."""
    return "\n\n".join(
        [
            harness.table(COST_HEAD, cost_rows(bench), markdown=markdown),
            harness.table(RATIO_HEAD, ratio_rows(bench), markdown=markdown),
            harness.table(MEMORY_HEAD, memory_rows(bench), markdown=markdown),
        ]
    )


def chart_of(bench: Bench) -> str:
    """Return an SVG with server CPU and bytes of a fetch by the number of partitions."""
    panels = []
    for title, unit, value in (
        ("server CPU a fetch", axis_time, lambda row: row.server_us),
        ("bytes a fetch, request and response", size_of, lambda row: float(row.request_bytes + row.response_bytes)),
    ):
        lines = []
        for mode, name in ((ALL, "no session"), (SESSION, "session")):
            for changed in CHANGES:
                points = [(size, value(bench.row(mode, size, changed))) for size in bench.sizes]
                lines.append(Line(f"{name}, {changed:,} changed", mode == ALL, points))
        panels.append((title, unit, lines))
    return charts.lines(panels, "partitions of the follower")


def axis_time(us: float) -> str:
    """Format microseconds that are a power of ten in us, ms or s."""
    return f"{us / 1e6:g} s" if us >= 1e6 else f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} us"


def size_of(size_bytes: float) -> str:
    """Format a number of bytes in B, kB or MB (powers of 1,000)."""
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes:.0f} B"


def about(bench: Bench) -> dict[str, Any]:
    """Return all figures, for `--json`."""
    return {
        "load": os.getloadavg(),
        "fetches": [row._asdict() for row in bench.rows],
        "ratios": [ratio._asdict() for ratio in bench.ratios],
        "same_bytes": {changed: bench.has_same_bytes(changed) for changed in CHANGES},
        "memory": [memory._asdict() for memory in bench.memory],
    }


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Exits with 2 on a bad option."""
    parser = harness.Parser(
        "bench.sessions",
        __doc__,
        "small sessions, few rounds: seconds instead of minutes",
        "print tables for docs/benchmarks.md",
    )
    parser.number("--rounds", "rounds of fetches in sessions", ROUNDS, QUICK_ROUNDS, most=100_000)
    parser.add_argument("--dir", type=Path, default=None, help="parent of the temporary directory for logs")
    parser.add_argument("--chart", type=Path, default=None, metavar="FILE", help="write the costs as SVG")
    return parser.parse(given)


def main(given: Sequence[str]) -> int:
    """Measure, print the tables, and return the exit code of `harness.run`."""
    options = arguments(given)
    sizes = QUICK_SIZES if options.quick else SIZES
    full_rounds = QUICK_FULL_ROUNDS if options.quick else FULL_ROUNDS
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        bench = Bench(Path(directory), sizes, options.rounds, full_rounds)

        def measure() -> None:
            asyncio.run(bench.run())
            bench.close()
            if options.chart is not None:
                options.chart.write_text(chart_of(bench), encoding="utf-8")

        return harness.run(
            options,
            measure,
            figures=lambda: about(bench),
            text=lambda: report(bench, markdown=options.markdown),
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
