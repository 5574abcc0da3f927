"""`python -m kipmesh.testing.sim`: replay one seed, or run many and go on where the last run stopped.

With `--seeds N` the first N seeds are run; `--progress FILE` keeps how far that came and what was counted, for one
state of the code: when a module that the simulation runs changes, it begins at seed 0 again. A seed
without a fault and a change of leader is run but not counted, so more than N may be run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

from kipmesh.testing.sim import InvariantError, Outcome, run_seed

_NOT_RUN = ("kipmesh.core.config", "kipmesh.core.messages", "kipmesh.core.errors")
"""Loaded for their names: keys, tuples and numbers."""
_SAVE_EVERY = 50
_TELL_EVERY = 500
_TOLD = (
    *("elections", "leader changes", "truncations", "images reloaded", "applies failed"),
    *("snapshots made", "snapshots aborted", "snapshots fetched", "snapshots loaded", "snapshots deleted"),
    *("snapshot fetches resumed", "snapshot fetches dropped", "received snapshots corrupt", "log starts raised"),
    *("faults", "crashes", "power cuts", "disk failures", "wipes", "starts refused", "disks replaced"),
    *("messages", "messages lost", "messages doubled", "appends rejected", "acknowledged", "committed"),
)


@dataclass(slots=True)
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
    loaded = [(name, module) for name, module in sorted(sys.modules.items()) if name.startswith("kipmesh.")]
    for name, module in loaded:
        if module.__file__ and not name.startswith(_NOT_RUN):
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
        path.write_text(json.dumps({one.name: getattr(progress, one.name) for one in fields(progress)}))


def _run_many(wanted: int, path: Path | None) -> int:
    progress = _load(path)
    print(f"{progress.counted} of {wanted} seeds are done on this code ({progress.code})", flush=True)
    try:
        while progress.counted < wanted:
            began = time.perf_counter()
            progress.add(run_seed(progress.next_seed))
            progress.seconds += time.perf_counter() - began
            if progress.next_seed % _SAVE_EVERY == 0:
                _save(path, progress)
            if progress.next_seed % _TELL_EVERY == 0:
                print(f"{progress.counted} of {wanted} seeds are clean, {progress.seconds:.0f} s", flush=True)
    except InvariantError as error:
        print(f"FAILED {error}")
        return 1
    finally:
        _save(path, progress)
    _summary(progress)
    return 0


def _summary(progress: Progress) -> None:
    each_ms = 1000 * progress.seconds / max(1, progress.next_seed)
    print(
        f"{progress.counted} seeds clean (of {progress.next_seed} run), {progress.seconds:.0f} s, {each_ms:.0f} ms each"
    )
    points = sorted(name for name in progress.counts if name.startswith("crash at "))
    for name in (*_TOLD, *points):
        print(f"  {name:36} {progress.counts[name]:>12,}")


def _run_one(seed: int) -> int:
    try:
        outcome = run_seed(seed)
    except InvariantError as error:
        print(f"FAILED {error}")
        return 1
    print(f"seed {seed}: clean; {outcome.voters} voters, {outcome.observers} observers")
    for name, count in sorted(outcome.counts.items()):
        print(f"  {name:36} {count:>12,}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """See the module; 1 when an invariant was broken."""
    parser = argparse.ArgumentParser(prog="python -m kipmesh.testing.sim", description="simulate the metadata quorum")
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--seeds", type=int, default=300, help="how many seeds count")
    parser.add_argument("--progress", type=Path, help="go on where this file says")
    parser.add_argument("--verbose", action="store_true", help="with what storage logs")
    options = parser.parse_args(arguments)
    before = logging.root.manager.disable
    if not options.verbose:
        logging.disable(logging.CRITICAL)
    try:
        return _run_many(options.seeds, options.progress) if options.seed is None else _run_one(options.seed)
    finally:
        logging.disable(before)


if __name__ == "__main__":
    sys.exit(main())
