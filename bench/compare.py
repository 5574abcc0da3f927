"""`python -m bench.compare`: kipmesh beside Apache Kafka on one machine, with the same programs of others as clients.

In every turn each shape of `bench.compare_shapes` is started, measured and stopped, one after the other, so that none
has company. A ratio is of one turn's two clusters; the table has the median of the turns' ratios and their range.
What was measured is kept in a file (`build/compare.json`) as soon as it is there: a run that was interrupted, or that
asks for other figures (`--only`), goes on where that file ends, and `--fresh` begins anew. Needs Java, Maven and
confluent-kafka. Progress goes to standard error, the table to standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import compare_report, harness, system
from bench.compare_figures import GROUPS, QUICK, Samples, Sizes, measure
from bench.compare_shapes import SHAPES, TUNED, Shape
from bench.kafka import ROOT, prepare, version
from bench.kafka_broker import HEAP

MODULE = "bench.compare"

KEPT = ROOT / "build" / "compare.json"
KEPT_QUICK = ROOT / "build" / "compare-quick.json"
MINUTES_MAX = 25


class Kept:
    """Samples by turn, shape and group, in a file that is replaced at once."""

    def __init__(self, path: Path, is_fresh: bool) -> None:
        self._path = path
        self.turns: list[dict[str, dict[str, Samples]]] = []
        self.problems: dict[str, str] = {}
        if path.exists() and not is_fresh:
            self.turns = json.loads(path.read_text())["turns"]

    def missing(self, turn: int, shape: Shape, groups: Sequence[str]) -> list[str]:
        """Groups of the shape that the turn does not have."""
        while len(self.turns) <= turn:
            self.turns.append({})
        has = self.turns[turn].get(shape.key, {})
        return [name for name in groups if name in shape.groups and name not in has]

    def add(self, turn: int, shape: Shape, group: str, samples: Samples | None, problem: str) -> None:
        """Of one group; without samples the problem is told under the table."""
        if samples is None:
            self.problems[f"{shape.label}: {group}"] = problem
            return
        self.turns[turn].setdefault(shape.key, {})[group] = samples
        self._path.parent.mkdir(exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"turns": self.turns}, indent=1))
        new.replace(self._path)

    def flat(self) -> list[dict[str, Samples]]:
        """Of each turn, samples of all groups together by shape."""
        return [
            {
                shape: {key: value for samples in groups.values() for key, value in samples.items()}
                for shape, groups in turn.items()
            }
            for turn in self.turns
        ]


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(
        MODULE, __doc__, "one round of a tenth of the load, kept in another file", f"{harness.TABLE} (the default)"
    )
    shapes = [shape.key for shape in SHAPES]

    def several(known: Sequence[str]) -> Any:
        def parse(text: str) -> list[str]:
            names = text.split(",")
            unknown = sorted(set(names) - set(known))
            if unknown:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
            return names

        return parse

    parser.add_argument("--turns", type=int, default=None, help="how often (3; 1 with --quick)")
    parser.add_argument("--only", type=several(GROUPS), default=list(GROUPS), help=f"of {','.join(GROUPS)}")
    parser.add_argument("--shapes", type=several(shapes), default=shapes, help=f"of {','.join(shapes)}")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES_MAX, help=f"begin no cluster after that ({MINUTES_MAX})"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--report", action="store_true", help="measure nothing: only tell what was measured before")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="the ratios as SVG")
    options = parser.parse_args(given)
    harness.fill(options, {"turns": 1}, {"turns": 3})
    if not 1 <= options.turns <= 100 or not 0 < options.minutes <= 1000:
        parser.error("turns from 1 to 100, minutes up to 1,000")
    return options


def run(options: argparse.Namespace, kept: Kept) -> None:
    """All that is missing, in time."""
    sizes: Sizes = QUICK if options.quick else Sizes()
    begin = time.monotonic()
    for turn in range(options.turns):
        for shape in SHAPES:
            wanted = kept.missing(turn, shape, options.only) if shape.key in options.shapes else []
            if not wanted:
                continue
            if time.monotonic() - begin > options.minutes * 60:
                harness.say(MODULE, f"out of time: turn {turn + 1}, {shape.label} is left out; run it again to go on")
                continue
            harness.say(MODULE, f"turn {turn + 1}/{options.turns}, {shape.label}: {', '.join(wanted)}")

            def keep(group: str, samples: Samples | None, why: str, turn: int = turn, shape: Shape = shape) -> None:
                kept.add(turn, shape, group, samples, why)

            measure(shape, wanted, sizes, partial(harness.say, MODULE), keep)
    harness.say(MODULE, f"done after {(time.monotonic() - begin) / 60:.1f} minutes")


def as_text(kept: Kept) -> str:
    """The table, and what it depends on."""
    turns = kept.flat()
    tuned = ", ".join(f"{key} {value}" for key, value in TUNED.items())
    lines = [
        compare_report.as_markdown(compare_report.rows_of(turns), SHAPES),
        "",
        f"Apache Kafka {version()}, each JVM with {' '.join(HEAP)}. Our timeouts: {tuned}.",
        f"{len(turns)} rounds; {system.describe_machine()}",
        *[f"Not measured: {what}: {problem}" for what, problem in kept.problems.items()],
    ]
    return "\n".join(lines)


def main(given: Sequence[str]) -> int:
    """Measure what is missing, and print the figures of everything."""
    options = arguments(given)
    kept = Kept(KEPT_QUICK if options.quick else KEPT, options.fresh)

    def measure_missing() -> None:
        if not options.report:
            prepare()
            run(options, kept)

    status = harness.run(
        MODULE,
        options,
        measure_missing,
        figures=lambda: {"turns": kept.flat(), "problems": kept.problems},
        text=lambda: as_text(kept),
        problems=lambda: [f"{what}: {problem}" for what, problem in kept.problems.items()],
    )
    if options.chart:
        options.chart.parent.mkdir(parents=True, exist_ok=True)
        options.chart.write_text(compare_report.chart(compare_report.rows_of(kept.flat())))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
