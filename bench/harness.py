"""The harness of every benchmark: options, progress, failures, processes of their own, and what is printed.

A benchmark file declares its options with `parser`, measures, and returns `run(options, measure, ...)`. Progress goes
to standard error, figures to standard output. An interrupted or failed run still prints the figures that it has.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.system import describe_machine
from kipmesh.cluster import ClusterError, LocalCluster
from kipmesh.core.errors import KafkaError


class BenchError(Exception):
    """A step did not do what it should have; the message is one line."""


def parser(module: str, description: str | None, quick: str = "", markdown: str = "") -> argparse.ArgumentParser:
    """Options that benchmarks share: `--json`, and `--quick` and `--markdown` where they have a help text."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    if quick:
        made.add_argument("--quick", action="store_true", help=quick)
    form = made.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object")
    if markdown:
        form.add_argument("--markdown", action="store_true", help=markdown)
    return made


TABLE = "a table for docs/benchmarks.md"


def fill(options: argparse.Namespace, quick: Mapping[str, Any], full: Mapping[str, Any]) -> None:
    """Give options that were not set their defaults, which depend on `--quick`."""
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def say(module: str, text: str) -> None:
    """Print one line of progress."""
    sys.stderr.write(f"{module}: {text}\n")
    sys.stderr.flush()


def interrupt_on_sigterm() -> None:
    """Make SIGTERM raise KeyboardInterrupt, so that clusters are stopped."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def run(
    module: str,
    options: argparse.Namespace,
    measure: Callable[[], object],
    *,
    figures: Callable[[], Mapping[str, Any]],
    text: Callable[[], str],
    problems: Callable[[], Sequence[str]] = tuple,
) -> int:
    """Measure, print the figures, and return the exit code.

    Args:
        measure: fills what `figures`, `text` and `problems` read; they print what there is when it fails.
        figures: the object of `--json`, without the machine, which is added.
        text: the tables; an empty string prints nothing.
        problems: violated expectations; with any, the exit code is 1.
    """
    interrupt_on_sigterm()
    status = 0
    try:
        measure()
    except KeyboardInterrupt:
        say(module, "interrupted")
        status = 130
    except (BenchError, ClusterError, KafkaError, TimeoutError) as error:
        say(module, f"failed: {error or 'timed out'}")
        status = 1
    shown = json.dumps({"machine": describe_machine(), **figures()}) if options.json else text()
    if shown:
        sys.stdout.write(f"{shown}\n")
    found = problems()
    for problem in found:
        say(module, f"PROBLEM: {problem}")
    return status or (1 if found else 0)


def in_process(module: str, *arguments: object) -> dict[str, Any]:
    """Run a step of a benchmark in a process of its own, which prints one JSON object."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    figures: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return figures


def three_brokers(leaders: int = 1, config: Mapping[str, str] | None = None) -> LocalCluster:
    """A cluster of processes: one controller and three brokers, in three racks. Use it as a context manager."""
    return LocalCluster(
        mode="processes", controllers=1, leaders=leaders, followers=3 - leaders, config=dict(config or {})
    )


def key_values(items: Iterable[str]) -> dict[str, str]:
    """Configuration given as `--config KEY=VALUE`; BenchError."""
    pairs = [item.partition("=") for item in items]
    if wrong := [key for key, equals, _ in pairs if not equals]:
        raise BenchError(f"--config takes KEY=VALUE, got {wrong[0]}")
    return {key: value for key, _, value in pairs}


# -- tables


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The median, and the range that it comes from."""
    return f"{statistics.median(values):,{form}} ({min(values):,{form}} .. {max(values):,{form}})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool = True) -> str:
    """A table for Markdown or for a terminal; all columns but the first are numbers."""
    if markdown:
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *[cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]]
        ).rstrip()
        for row in (head, *rows)
    )
