"""`python -m bench.sessions`: what a fetch costs by the size of its session, and without one (227-07 to 227-10).

A follower fetches from a leader with 1,000, 10,000 and 100,000 partitions, and between two fetches 0, 10 or 1,000 of
them get a record of 100 bytes each:

- in a session;
- without one, naming all partitions, as with `enable.incremental.fetch=false`;
- without one, naming just those that change: the least that there can be.

What is compared is measured in turns, round by round, in one process; a ratio is the median of the rounds' ratios.
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

from bench import charts, harness, system
from bench.charts import Line
from bench.report import number
from bench.sessions_cost import Cost, Follower, Leader, memory_bytes, places

MODULE = "bench.sessions"

SIZES = (1_000, 10_000, 100_000)
QUICK_SIZES = (1_000, 2_000)
CHANGES = (0, 10, 1_000)
AIM = 10
"""The changes that the targets are about."""
ROUNDS, QUICK_ROUNDS = 200, 5
FULL_ROUNDS, QUICK_FULL_ROUNDS = 5, 2
WARM_UP = 3
SIZE_RATIO_MAX, ALONE_RATIO_MAX = 1.3, 1.5
"""Server CPU with 10 changes: the largest session beside the smallest; that beside a fetch of just these."""

SESSION, ALL, ALONE = "session", "all", "alone"


class Row(NamedTuple):
    """One kind of fetch. Medians of the rounds, in microseconds of CPU."""

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
    """Server CPU of one beside another, with `changed` partitions changing."""

    name: str
    changed: int
    ratio: float
    target: float | None


class Memory(NamedTuple):
    """Bytes a partition of an idle session."""

    partitions: int
    server: float
    client: float


def row_of(mode: str, partitions: int, changed: int, costs: Sequence[Cost]) -> Row:
    """The medians; bytes are the last round's, all but the first of which are alike."""
    server, client = [cost.server_us for cost in costs], [cost.client_us for cost in costs]
    return Row(
        mode,
        partitions,
        changed,
        costs[-1].request_bytes,
        costs[-1].response_bytes,
        statistics.median(server),
        min(server),
        statistics.median(client),
        min(client),
        len(costs),
    )


def ratio_of(over: Sequence[Cost], under: Sequence[Cost]) -> float:
    """Median of the rounds'."""
    return statistics.median(a.server_us / b.server_us for a, b in zip(over, under, strict=True))


class Bench:
    """All leaders, their logs in one folder, and what was measured."""

    def __init__(self, folder: Path, sizes: Sequence[int], rounds: int, full_rounds: int) -> None:
        self.sizes, self.rounds, self.full_rounds = sizes, rounds, full_rounds
        self.rows: list[Row] = []
        self.ratios: list[Ratio] = []
        self.memory: list[Memory] = []
        self._leaders = {}
        for size in sizes:
            harness.say(MODULE, f"making {size:,} partitions ...")
            self._leaders[size] = Leader(folder / f"{size}", size)
        # No session marks its partitions, which are as many as those of the smallest session.
        self._bare = Leader(folder / "bare", sizes[0])
        gc.collect()
        gc.freeze()  # as a broker does when it has started

    def close(self) -> None:
        """All logs."""
        for leader in (*self._leaders.values(), self._bare):
            leader.close()

    async def run(self) -> None:
        """Everything."""
        for size, leader in self._leaders.items():
            harness.say(MODULE, f"memory of a session of {size:,} ...")
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
        harness.say(MODULE, f"{changed:,} changed, in sessions ...")
        where = {size: places(size, changed) for size in self.sizes}
        costs: dict[int, list[Cost]] = {size: [] for size in self.sizes}
        alone = Follower(self._bare, where[self.sizes[0]], enabled=False)
        alone_costs: list[Cost] = []
        for _ in range(2):  # what the last series left dirty
            for follower in followers.values():
                await follower.fetch([])
        for _ in range(WARM_UP + self.rounds):
            for size, follower in followers.items():
                costs[size].append(await follower.fetch(where[size]))
            if changed:  # a fetch without partitions is none
                alone_costs.append(await alone.fetch(where[self.sizes[0]]))
        first, last = self.sizes[0], self.sizes[-1]
        kept, least = {size: those[WARM_UP:] for size, those in costs.items()}, alone_costs[WARM_UP:]
        is_aim = changed == AIM
        self.rows += [row_of(SESSION, size, changed, those) for size, those in kept.items()]
        name, ratio = f"a session of {last:,} beside one of {first:,}", ratio_of(kept[last], kept[first])
        self.ratios.append(Ratio(name, changed, ratio, SIZE_RATIO_MAX if is_aim else None))
        if least:
            self.rows.append(row_of(ALONE, changed, changed, least))
            name, ratio = f"a session of {first:,} beside a fetch of just those", ratio_of(kept[first], least)
            self.ratios.append(Ratio(name, changed, ratio, ALONE_RATIO_MAX if is_aim else None))

    async def _without(self, size: int, changed: int) -> None:
        harness.say(MODULE, f"{changed:,} changed of {size:,}, without a session ...")
        leader, where = self._leaders[size], places(size, changed)
        follower = Follower(leader, list(leader.replicas), enabled=False)
        costs = [await follower.fetch(where) for _ in range(1 + self.full_rounds)]
        self.rows.append(row_of(ALL, size, changed, costs[1:]))

    def row(self, mode: str, partitions: int, changed: int) -> Row:
        """One that was measured."""
        return next(row for row in self.rows if row[:3] == (mode, partitions, changed))

    def has_same_bytes(self, changed: int) -> bool:
        """Whether a session's fetches have as many bytes whatever its size."""
        found = {self.row(SESSION, size, changed)[3:5] for size in self.sizes}
        return len(found) == 1


def time_of(us: float) -> str:
    """Microseconds for people."""
    return f"{us / 1e6:.2f} s" if us >= 1e6 else f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.0f} us"


COST_HEAD = ("changed", "fetch", "request, B", "response, B", "server CPU", "client CPU")
RATIO_HEAD = ("server CPU", "changed", "ratio", "target")
MEMORY_HEAD = ("partitions in the session", "server, B a partition", "client, B a partition")
NAMES = {SESSION: "session of {:,}", ALL: "no session, all {:,} named", ALONE: "no session, just those named"}


def cost_rows(bench: Bench) -> list[tuple[str, ...]]:
    """The cost curve."""
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
    """The ratios, and whether the targets are met."""
    lines: list[tuple[str, ...]] = []
    for name, changed, ratio, target in bench.ratios:
        aim = "" if target is None else f"<= {target:g}: {'met' if ratio <= target else 'missed'}"
        lines.append((name, f"{changed:,}", f"{ratio:.2f}", aim))
    for changed in CHANGES:
        same = bench.has_same_bytes(changed)
        lines.append(
            ("bytes, whatever the session's size", f"{changed:,}", "1.00" if same else "-", f"= 1: {_met(same)}")
        )
    return lines


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def memory_rows(bench: Bench) -> list[tuple[str, ...]]:
    """Memory of sessions."""
    return [(f"{size:,}", number(server), number(client)) for size, server, client in bench.memory]


def report(bench: Bench, *, markdown: bool) -> str:
    """All tables."""
    return "\n\n".join(
        [
            harness.table(COST_HEAD, cost_rows(bench), markdown=markdown),
            harness.table(RATIO_HEAD, ratio_rows(bench), markdown=markdown),
            harness.table(MEMORY_HEAD, memory_rows(bench), markdown=markdown),
        ]
    )


def chart_of(bench: Bench) -> str:
    """Server CPU and bytes of a fetch by the number of partitions, as SVG."""
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
    """Powers of ten, in microseconds."""
    return f"{us / 1e6:g} s" if us >= 1e6 else f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} us"


def size_of(size_bytes: float) -> str:
    """Bytes for people."""
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes:.0f} B"


def about(bench: Bench) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "machine": system.describe_machine(),
        "load": os.getloadavg(),
        "fetches": [row._asdict() for row in bench.rows],
        "ratios": [ratio._asdict() for ratio in bench.ratios],
        "same_bytes": {changed: bench.has_same_bytes(changed) for changed in CHANGES},
        "memory": [memory._asdict() for memory in bench.memory],
    }


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(
        MODULE, __doc__, "small and few rounds: seconds instead of minutes", "tables for docs/benchmarks.md"
    )
    parser.add_argument("--rounds", type=int, default=None, help=f"of fetches in sessions ({ROUNDS})")
    parser.add_argument("--dir", type=Path, default=None, help="where to put the logs for the time of the run")
    parser.add_argument("--chart", type=Path, default=None, metavar="FILE", help="write the curve as SVG, too")
    options = parser.parse_args(given)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    if not 1 <= options.rounds <= 100_000:
        parser.error("rounds from 1 to 100,000")
    return options


def main(given: Sequence[str]) -> int:
    """Measure, and print the tables."""
    options = arguments(given)
    sizes = QUICK_SIZES if options.quick else SIZES
    full_rounds = QUICK_FULL_ROUNDS if options.quick else FULL_ROUNDS
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        bench = Bench(Path(folder), sizes, options.rounds, full_rounds)

        def measure() -> None:
            asyncio.run(bench.run())
            bench.close()
            if options.chart is not None:
                options.chart.write_text(chart_of(bench), encoding="utf-8")

        return harness.run(
            MODULE,
            options,
            measure,
            figures=lambda: about(bench),
            text=lambda: report(bench, markdown=options.markdown),
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
