"""``python -m kipmesh_jobs.demo``: what ``make demo`` runs."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Final

from kipmesh.cluster.signals import ending_as_interrupt
from kipmesh_jobs.frame import FolderBusyError, JobError, Settings, run_job

_EXIT_FAILED: Final = 1
_EXIT_SIGNAL: Final = 128
"""What shells add to the number of a signal."""


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 when every proof holds."""
    parser = argparse.ArgumentParser(
        prog="python -m kipmesh_jobs.demo",
        description="A year of flights through a replicated mesh into Spark: a report, Parquet, and the proof.",
    )
    parser.add_argument("--scale", type=_positive, default=1, metavar="N", help="repeat the year N times (1)")
    parser.add_argument("--limit", type=_positive, metavar="N", help="only the first N flights of the year")
    parser.add_argument("--dir", type=Path, default=Path("build/demo"), help="where everything goes (build/demo)")
    parser.add_argument("--keep", action="store_true", help="leave the mesh running")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, and nothing else, to stdout")
    given = parser.parse_args(arguments)

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from kipmesh.cluster import ClusterError
    from kipmesh.core.errors import KafkaError
    from kipmesh.spark.java import JavaMissingError
    from kipmesh_jobs.demo.run import JOB, Options

    settings = Settings(given.dir, master="local[2]", as_json=given.json)
    try:
        with ending_as_interrupt():
            outcome = run_job(JOB, Options(given.scale, given.limit, given.keep), settings)
    except KeyboardInterrupt as interrupt:
        print("kipmesh demo: interrupted; what it started is stopped", file=sys.stderr)
        return _EXIT_SIGNAL + next(iter(interrupt.args), signal.SIGINT)
    except FolderBusyError as error:
        print(f"kipmesh demo: {error} (--dir)", file=sys.stderr)
        return _EXIT_FAILED
    except (JobError, ClusterError, JavaMissingError, KafkaError, OSError) as error:
        print(f"kipmesh demo: {error}", file=sys.stderr)
        return _EXIT_FAILED
    if given.json:
        print(json.dumps(outcome.summary, indent=2))
    return 0 if outcome.passed else _EXIT_FAILED


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("a number of at least 1 is needed")
    return number


if __name__ == "__main__":
    sys.exit(main())
