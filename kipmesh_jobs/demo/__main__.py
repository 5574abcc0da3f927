"""The command `python -m kipmesh_jobs.demo` of `make demo`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Final

from kipmesh.cluster.signals import signals_as_interrupt
from kipmesh_jobs.frame import JobError, OutputBusyError, Settings, run_job

_EXIT_FAILED: Final = 1
_EXIT_SIGNAL: Final = 128
"""Exit code of a process that a signal ended, minus the signal's number."""


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Return 0 if all checks pass, 1 if one fails or the demo raises a known error, or 128 plus the
    signal's number after SIGINT or SIGTERM.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kipmesh_jobs.demo",
        description="Stream a year of flights through a replicated cluster into Spark: report, Parquet and checks.",
    )
    parser.add_argument("--scale", type=_positive, default=1, metavar="N", help="repeat the year N times (1)")
    parser.add_argument("--limit", type=_positive, metavar="N", help="only the first N flights of the year")
    parser.add_argument("--dir", type=Path, default=Path("build/demo"), help="output directory (build/demo)")
    parser.add_argument("--keep", action="store_true", help="leave the cluster running")
    parser.add_argument("--json", action="store_true", help="print only the summary, as JSON, to standard output")
    parsed = parser.parse_args(arguments)

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from kipmesh.cluster import ClusterError
    from kipmesh.core.errors import KafkaError
    from kipmesh.spark.java import JavaMissingError
    from kipmesh_jobs.demo.run import JOB, Options

    settings = Settings(parsed.dir, master="local[2]", as_json=parsed.json)
    try:
        with signals_as_interrupt():
            outcome = run_job(JOB, Options(parsed.scale, parsed.limit, parsed.keep), settings)
    except KeyboardInterrupt as interrupt:
        print("kipmesh demo: interrupted, cluster and Spark are stopped", file=sys.stderr)
        return _EXIT_SIGNAL + next(iter(interrupt.args), signal.SIGINT)
    except (OutputBusyError, JobError, ClusterError, JavaMissingError, KafkaError, OSError) as error:
        option = " (--dir)" if isinstance(error, OutputBusyError) else ""
        print(f"kipmesh demo: {error}{option}", file=sys.stderr)
        return _EXIT_FAILED
    if parsed.json:
        print(json.dumps(outcome.summary, indent=2))
    return 0 if outcome.passed else _EXIT_FAILED


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
