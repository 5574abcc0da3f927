"""Programs that run a simulator's seeds: replay one, or run many and go on where the last run stopped.

With `--seeds N` the first N seeds are run; `--progress FILE` keeps how far that came and what was counted, for one
state of the code: when a module that the simulation runs changes, it begins at seed 0 again. A seed without a fault
and a change of leader is run but not counted, so more than N may be run.
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
"""Loaded for their names - keys, tuples and numbers - or not part of what is simulated."""
_SAVE_EVERY = 50
_TELL_EVERY = 500


@dataclass(frozen=True, slots=True)
class SeedProgram:
    """One simulator's program; `run_seed` raises InvariantError, `told` and what begins with `points` is summed up."""

    name: str
    description: str
    run_seed: Callable[[int], Outcome]
    told: tuple[str, ...]
    points: tuple[str, ...]

    def main(self, arguments: list[str] | None = None) -> int:
        """See the module; 1 when an invariant was broken."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.name}", description=self.description)
        parser.add_argument("--seed", type=int, help="run this seed only")
        parser.add_argument("--seeds", type=int, default=300, help="how many seeds count")
        parser.add_argument("--progress", type=Path, help="go on where this file says")
        parser.add_argument("--verbose", action="store_true", help="with what storage logs")
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
                if progress.next_seed % _TELL_EVERY == 0:
                    print(f"{progress.counted} of {wanted} seeds are clean, {progress.seconds:.0f} s", flush=True)
        finally:
            _save(path, progress)
        self._sum_up(progress)

    def _sum_up(self, progress: Progress) -> None:
        run, seconds = progress.next_seed, progress.seconds
        each_ms = 1000 * seconds / max(1, run)
        print(f"{progress.counted} seeds clean (of {run} run), {seconds:.0f} s of a core, {each_ms:.0f} ms each")
        points = sorted(name for name in progress.counts if name.startswith(self.points))
        for name in (*self.told, *points):
            print(f"  {name:36} {progress.counts[name]:>12,}")


@dataclass
class Progress:
    """How far it came; `code` says on which code."""

    code: str
    next_seed: int = 0
    counted: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """One more seed was clean."""
        self.next_seed = outcome.seed + 1
        if outcome.is_worth_counting:
            self.counted += 1
            self.counts += outcome.counts


def digest() -> str:
    """A digest of the code that the simulation runs: of the modules that it has loaded."""
    found = hashlib.sha256()
    for name, module in sorted(sys.modules.items()):
        if name.startswith("kipmesh.") and module.__file__ and not name.startswith(_NOT_RUN):
            found.update(Path(module.__file__).read_bytes())
    return found.hexdigest()[:16]


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
        beside = path.with_name(f"{path.name}.tmp")
        beside.write_text(json.dumps(vars(progress)))
        beside.replace(path)
