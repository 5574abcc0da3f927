"""Harness of all benchmarks: options, progress, clusters, metrics, summaries, tables and exit codes.

A benchmark declares its options with `Parser`, measures, and returns `run(options, measure, ...)`. Progress goes to
standard error, figures to standard output. An interrupted or failed run still prints the figures measured so far.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bench import system
from kipmesh.cluster import ClusterError, LocalCluster
from kipmesh.core.errors import KafkaError

HTTP_TIMEOUT_S = 30.0


class BenchError(Exception):
    """A step of a benchmark failed. The message is one line."""


# -- command line


class Parser(argparse.ArgumentParser):
    """Command line of a benchmark: `--json`, and `--quick` and `--markdown` if a help text is given for them."""

    def __init__(self, module: str, description: str | None, quick: str = "", markdown: str = "") -> None:
        super().__init__(prog=f"python -m {module}", description=description)
        self._by_size: dict[str, tuple[float, float]] = {}
        if quick:
            self.add_argument("--quick", action="store_true", help=quick)
        form = self.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="print one JSON object")
        if markdown:
            form.add_argument("--markdown", action="store_true", help=markdown)

    def number(
        self,
        name: str,
        text: str,
        full: float,
        quick: float | None = None,
        *,
        least: float = 1,
        most: float = 1000,
    ) -> None:
        """Add an option for a number from `least` to `most`, of the type of `full`.

        Args:
            full: default.
            quick: default with `--quick`; None if it is the same.
        """
        kind = type(full)

        def parse(given: str) -> float:
            try:
                value = kind(given)
            except ValueError:
                raise argparse.ArgumentTypeError(f"must be a number, got {given!r}") from None
            if not least <= value <= most:
                raise argparse.ArgumentTypeError(f"must be from {least:,} to {most:,}, got {given}")
            return value

        defaults = f"{full:,g}" if quick is None else f"{full:,g}; {quick:,g} with --quick"
        self._by_size[name.lstrip("-").replace("-", "_")] = full if quick is None else quick, full
        self.add_argument(name, type=parse, metavar="N", help=f"{text} ({defaults})")

    def parse(self, given: Sequence[str]) -> argparse.Namespace:
        """Return the options with the defaults of `number`, which depend on `--quick`. Exits with 2 on a bad option."""
        options = self.parse_args(given)
        for name, (quick, full) in self._by_size.items():
            if getattr(options, name) is None:
                setattr(options, name, quick if getattr(options, "quick", False) else full)
        return options


TABLE = "print a table for docs/benchmarks.md"


def key_values(items: Iterable[str]) -> dict[str, str]:
    """Return configuration by key from `KEY=VALUE` strings. Raises BenchError for a string without `=`."""
    pairs = [item.partition("=") for item in items]
    if wrong := [key for key, equals, _ in pairs if not equals]:
        raise BenchError(f"--config takes KEY=VALUE, got {wrong[0]}")
    return {key: value for key, _, value in pairs}


# -- running


def say(text: str) -> None:
    """Print one line of progress to standard error."""
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()


def interrupt_on_sigterm() -> None:
    """Make SIGTERM raise KeyboardInterrupt in the main thread, so that clusters are stopped."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def run(
    options: argparse.Namespace,
    measure: Callable[[], object],
    *,
    figures: Callable[[], Mapping[str, Any]],
    text: Callable[[], str],
    problems: Callable[[], Sequence[str]] = tuple,
) -> int:
    """Call `measure`, print the figures, and return the exit code: 0, 1 after a failure or problem, 130 if interrupted.

    BenchError, ClusterError, KafkaError and TimeoutError from `measure` are printed; other errors propagate.

    Args:
        measure: stores the results that `figures`, `text` and `problems` read. They are partial if it fails.
        figures: returns the object for `--json`. The description of the machine is added to it.
        text: returns the tables. Nothing is printed for an empty string.
        problems: returns violated expectations. If there are any, the exit code is 1.
    """
    interrupt_on_sigterm()
    status = 0
    try:
        measure()
    except KeyboardInterrupt:
        say("interrupted")
        status = 130
    except (BenchError, ClusterError, KafkaError, TimeoutError) as error:
        say(f"failed: {error or 'timed out'}")
        status = 1
    shown = json.dumps({"machine": system.describe_machine(), **figures()}) if options.json else text()
    if shown:
        sys.stdout.write(f"{shown}\n")
    found = problems()
    for problem in found:
        say(f"PROBLEM: {problem}")
    return status or (1 if found else 0)


def in_process(module: str, *arguments: object) -> dict[str, Any]:
    """Run a module in a new process and return the JSON object that it prints. Raises CalledProcessError if its exit
    code is not 0.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    figures: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return figures


# -- clusters


def three_brokers(leaders: int = 1, config: Mapping[str, Any] | None = None, controllers: int = 1) -> LocalCluster:
    """Return a cluster of processes, not yet started, with three brokers in three racks, `leaders` of which are
    preferred leaders. Use it as a context manager.
    """
    return LocalCluster(
        mode="processes", controllers=controllers, leaders=leaders, followers=3 - leaders, config=dict(config or {})
    )


def pids(cluster: LocalCluster) -> list[int]:
    """Return the process ids of all running nodes and of their children."""
    return system.with_children(node.pid for node in cluster.nodes if node.pid is not None)


def samples(http: str | None) -> list[Sample]:
    """Return all samples of the metrics page of the node at `http` (host:port). Raises OSError."""
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=HTTP_TIMEOUT_S) as response:
        families = text_string_to_metric_families(response.read().decode())
    return [sample for family in families for sample in family.samples]


def metric(http: str | None, name: str, **labels: str) -> float:
    """Return the sum of the samples of a node's metric that have these labels; 0 if there are none. Raises OSError."""
    found = [each for each in samples(http) if each.name == name and labels.items() <= each.labels.items()]
    return sum(each.value for each in found)


# -- figures


class Figure(NamedTuple):
    """A measured quantity. The target is a minimum, or a maximum if `is_upper` is set."""

    key: str
    label: str
    unit: str
    target: float | None = None
    is_upper: bool = False

    def verdict(self, value: float) -> str:
        """Return the target and whether `value` meets it, such as `>= 80: met`, or an empty string if there is no
        target.
        """
        if self.target is None:
            return ""
        sign, is_met = ("<=", value <= self.target) if self.is_upper else (">=", value >= self.target)
        return f"{sign} {self.target:g}: {met(is_met)}"


class Summary(NamedTuple):
    """Median, range and number of the values of one figure over all runs."""

    figure: Figure
    median: float
    least: float
    greatest: float
    runs: int


def summarize(samples_by_key: Mapping[str, Sequence[float]], figures: Sequence[Figure]) -> list[Summary]:
    """Return a summary for each figure that has samples, in the order of `figures`."""
    return [
        Summary(figure, statistics.median(values), min(values), max(values), len(values))
        for figure in figures
        if (values := samples_by_key.get(figure.key))
    ]


def as_json(summaries: Iterable[Summary]) -> dict[str, Any]:
    """Return median, range, number of runs and unit of each figure, under the key `figures`."""
    return {
        "figures": {
            figure.key: {"median": median, "min": least, "max": greatest, "runs": runs, "unit": figure.unit}
            for figure, median, least, greatest, runs in summaries
        }
    }


def as_table(summaries: Iterable[Summary], *, markdown: bool) -> str:
    """Return a table of the summaries for docs/benchmarks.md or for a terminal; an empty string if there are none."""
    rows = [
        (
            figure.label,
            f"{number(median)} {figure.unit}",
            f"{number(least)} .. {number(greatest)}",
            str(runs),
            figure.verdict(median),
        )
        for figure, median, least, greatest, runs in summaries
    ]
    return table(("what", "median", "min .. max", "runs", "target"), rows, markdown=markdown) if rows else ""


def met(is_met: bool) -> str:
    """Return `met` or `missed`."""
    return "met" if is_met else "missed"


def number(value: float) -> str:
    """Format a number with at most two decimals, or with none from 1,000 up."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def spread(values: Sequence[float], unit: str = "") -> str:
    """Format the median with its unit, and the range, such as `1.20 s (1.10 .. 1.40)`."""
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f} .. {max(values):.2f})"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, markdown: bool = True, left: int = 1) -> str:
    """Format a table for Markdown or for a terminal. All columns but the first `left` are aligned to the right."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    if markdown:
        lines.insert(1, ["---" if column < left else "---:" for column in range(len(head))])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
