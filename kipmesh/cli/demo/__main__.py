"""``python -m kipmesh.cli.demo``: what ``make demo`` runs."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Final

_EXIT_FAILED: Final = 1
_EXIT_SIGNAL: Final = 128
"""What shells add to the number of a signal."""


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 when every proof holds."""
    parser = argparse.ArgumentParser(
        prog="python -m kipmesh.cli.demo",
        description="A year of flights through a replicated mesh into Spark: a report, Parquet, and the proof.",
    )
    parser.add_argument("--scale", type=_positive, default=1, metavar="N", help="repeat the year N times (1)")
    parser.add_argument("--limit", type=_positive, metavar="N", help="only the first N flights of the year")
    parser.add_argument("--dir", type=Path, default=Path("build/demo"), help="where everything goes (build/demo)")
    parser.add_argument("--keep", action="store_true", help="leave the mesh running")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, and nothing else, to stdout")
    given = parser.parse_args(arguments)

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    from kipmesh.cli.demo.run import Demo, DemoOptions
    from kipmesh.cli.demo.workspace import DemoError
    from kipmesh.cluster import ClusterError
    from kipmesh.core.errors import KafkaError
    from kipmesh.spark.java import JavaMissingError
    from kipmesh.spark.jobs.flights.dataset import DatasetError

    try:
        passed = Demo(DemoOptions(given.dir, given.scale, given.limit, given.keep, given.json)).run()
    except KeyboardInterrupt as interrupt:
        print("kipmesh demo: interrupted; what it started is stopped", file=sys.stderr)
        return _EXIT_SIGNAL + next(iter(interrupt.args), signal.SIGINT)
    except (DemoError, ClusterError, DatasetError, JavaMissingError, KafkaError, OSError) as error:
        print(f"kipmesh demo: {error}", file=sys.stderr)
        return _EXIT_FAILED
    return 0 if passed else _EXIT_FAILED


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("a number of at least 1 is needed")
    return number


def _end(number: int, _frame: FrameType | None) -> None:
    # py4j tells at length of every call that an interrupt cuts short.
    logging.disable(logging.CRITICAL)
    if number == signal.SIGTERM:  # the clean-up is to end; SIGKILL and the next run do the rest
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    sys.exit(main())
