"""`python -m bench.sessions`: cost of a fetch by the size of its session, and without a session (227-07 to 227-10).

A follower fetches from a leader with 1,000, 10,000 and 100,000 partitions. Between two fetches 0, 10 or 1,000 of them
get a record of 100 bytes. Fetches are:

- in a session;
- without a session, with all partitions, as with `enable.incremental.fetch=false`;
- without a session, with changed partitions only: the minimum.

Compared fetches alternate in one process. A ratio is the median of the ratios of all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import charts, harness
from bench.charts import Line
from bench.harness import number
from bench.sessions_cost import Cost, Follower, Leader, memory_bytes, places

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
    """Figures of one kind of fetch. CPU is the median of the rounds, in microseconds."""

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
    """Return the medians of the costs. Bytes are those of the last round; only the first round differs."""
    server, client = [cost.server_us for cost in costs], [cost.client_us for cost in costs]
    cpu = (statistics.median(server), min(server), statistics.median(client), min(client))
    return Row(mode, partitions, changed, costs[-1].request_bytes, costs[-1].response_bytes, *cpu, len(costs))


def ratio_of(over: Sequence[Cost], under: Sequence[Cost]) -> float:
    """Return the median of the rounds' ratios of server CPU."""
    return statistics.median(a.server_us / b.server_us for a, b in zip(over, under, strict=True))


class Bench:
    """All leaders, with their logs in one directory, and the measured figures."""

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
        """Close all logs."""
        for leader in (*self._leaders.values(), self._bare):
            leader.close()

    async def run(self) -> None:
        """Measure memory, sessions, and fetches without sessions; AssertionError if a record is missing."""
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
        """Return a measured row."""
        return next(row for row in self.rows if row[:3] == (mode, partitions, changed))

    def has_same_bytes(self, changed: int) -> bool:
        """Return whether the bytes of fetches in a session are independent of its size."""
        found = {self.row(SESSION, size, changed)[3:5] for size in self.sizes}
        return len(found) == 1


def time_of(us: float) -> str:
    """Format microseconds."""
    return f"{us / 1e6:.2f} s" if us >= 1e6 else f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.0f} us"


COST_HEAD = ("changed", "fetch", "request, B", "response, B", "server CPU", "client CPU")
RATIO_HEAD = ("server CPU", "changed", "ratio", "target")
MEMORY_HEAD = ("partitions in the session", "server, B a partition", "client, B a partition")
NAMES = {SESSION: "session of {:,}", ALL: "no session, all {:,} named", ALONE: "no session, just those named"}


def cost_rows(bench: Bench) -> list[tuple[str, ...]]:
    """Return the table of costs."""
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
    """Return the table of ratios with verdicts."""
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
    """Return the table of memory."""
    return [(f"{size:,}", number(server), number(client)) for size, server, client in bench.memory]


def report(bench: Bench, *, markdown: bool) -> str:
    """Format all tables."""
    return "\n\n".join(
        [
            harness.table(COST_HEAD, cost_rows(bench), markdown=markdown),
            harness.table(RATIO_HEAD, ratio_rows(bench), markdown=markdown),
            harness.table(MEMORY_HEAD, memory_rows(bench), markdown=markdown),
        ]
    )


def chart_of(bench: Bench) -> str:
    """Draw server CPU and bytes of a fetch by the number of partitions as SVG."""
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
    """Format microseconds that are a power of ten."""
    return f"{us / 1e6:g} s" if us >= 1e6 else f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} us"


def size_of(size_bytes: float) -> str:
    """Format bytes."""
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
    """Parse the command line."""
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
    """Measure, and print the tables."""
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
