"""Command line of a simulator: replay one seed, or run many seeds and resume an earlier run.

`--seeds N` runs seeds until N of them counted. A seed without a fault and a leader change is run but not counted.
`--progress FILE` stores the progress and the counters for one version of the code: if a simulated module changed, the
run restarts at seed 0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from simulation.engine import InvariantError, Outcome

_NOT_RUN = ("kipmesh.core.config", "kipmesh.messages.apis", "kipmesh.core.errors", __name__)
"""Modules of constants and types, and this one."""
_SAVE_EVERY = 50
_PRINT_EVERY = 500


@dataclass(frozen=True, slots=True)
class SeedProgram:
    """Command line of one simulator.

    Args:
        name: module name.
        run_seed: runs one seed, and raises InvariantError if an invariant is violated.
        summary_counts: names of the counters in the summary.
        summary_prefixes: name prefixes of further counters in the summary.
    """

    name: str
    description: str
    run_seed: Callable[[int], Outcome]
    summary_counts: tuple[str, ...]
    summary_prefixes: tuple[str, ...]

    def main(self, arguments: list[str] | None = None) -> int:
        """Run the command line. Return 1 if an invariant was violated, else 0."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.name}", description=self.description)
        parser.add_argument("--seed", type=int, help="run this seed only")
        parser.add_argument("--seeds", type=int, default=300, help="number of seeds to count")
        parser.add_argument("--progress", type=Path, help="file with the progress, to resume an earlier run")
        parser.add_argument("--verbose", action="store_true", help="show the log messages of storage")
        options = parser.parse_args(arguments)
        before = logging.root.manager.disable
        if not options.verbose:
            logging.disable(logging.CRITICAL)
        try:
            if options.seed is None:
                self._run_many(options.seeds, options.progress)
            else:
                self._run_one(options.seed)
        except InvariantError as error:
            print(f"FAILED {error}", flush=True)
            return 1
        finally:
            logging.disable(before)
        return 0

    def _run_one(self, seed: int) -> None:
        outcome = self.run_seed(seed)
        print(f"seed {seed}: clean; {outcome.shape}")
        for name, count in sorted(outcome.counts.items()):
            print(f"  {name:36} {count:>12,}")

    def _run_many(self, wanted: int, path: Path | None) -> None:
        progress = _load(path)
        print(f"{progress.counted} of {wanted} seeds are done on this code ({progress.code})", flush=True)
        try:
            while progress.counted < wanted:
                began = time.process_time()
                progress.add(self.run_seed(progress.next_seed))
                progress.seconds += time.process_time() - began
                if progress.next_seed % _SAVE_EVERY == 0:
                    _save(path, progress)
                if progress.next_seed % _PRINT_EVERY == 0:
                    print(f"{progress.counted} of {wanted} seeds are clean, {progress.seconds:.0f} s", flush=True)
        finally:
            _save(path, progress)
        self._print_summary(progress)

    def _print_summary(self, progress: Progress) -> None:
        run, seconds = progress.next_seed, progress.seconds
        each_ms = 1000 * seconds / max(1, run)
        print(f"{progress.counted} seeds clean (of {run} run), {seconds:.0f} s of a core, {each_ms:.0f} ms each")
        prefixed = sorted(name for name in progress.counts if name.startswith(self.summary_prefixes))
        for name in (*self.summary_counts, *prefixed):
            print(f"  {name:36} {progress.counts[name]:>12,}")


@dataclass
class Progress:
    """Progress of a run of many seeds on one version of the code, whose digest is `code`."""

    code: str
    next_seed: int = 0
    counted: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Add the outcome of the next seed. Its counters are added only if `is_worth_counting` is set."""
        self.next_seed = outcome.seed + 1
        if outcome.is_worth_counting:
            self.counted += 1
            self.counts += outcome.counts


def digest() -> str:
    """Return the first 16 hex digits of the SHA-256 hash of all loaded kipmesh modules that are simulated."""
    sha256 = hashlib.sha256()
    for name, module in sorted(sys.modules.items()):
        if name.startswith("kipmesh.") and module.__file__ and not name.startswith(_NOT_RUN):
            sha256.update(Path(module.__file__).read_bytes())
    return sha256.hexdigest()[:16]


def _load(path: Path | None) -> Progress:
    code = digest()
    if path is not None and path.exists():
        stored = json.loads(path.read_text())
        if stored["code"] == code:
            return Progress(**{**stored, "counts": Counter(stored["counts"])})
    return Progress(code)


def _save(path: Path | None, progress: Progress) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(json.dumps(vars(progress)))
        temporary.replace(path)
