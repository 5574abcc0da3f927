"""`python -m kipmesh.testing.replica_sim`: replay one seed, or run many and go on where the last run stopped.

The same options as `python -m kipmesh.testing.sim`, in a small program of its own, for that one does not change while
long runs of it go on. A seed without a fault and a change of leader is run but not counted.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

from kipmesh.testing.replica_sim import InvariantError, Outcome, run_seed
from kipmesh.testing.sim.__main__ import digest

_SAVE_EVERY = 50
_TELL_EVERY = 500
_TOLD = (
    *("elections", "elections by log end", "unclean elections", "partitions without leader", "controller elections"),
    *("ISR shrinks", "ISR expansions", "truncations", "records truncated", "losses as the rules allow"),
    *("faults", "crashes", "power cuts", "clean stops", "wipes", "processes failed", "starts failed"),
    *("messages", "messages lost", "messages doubled", "metadata batches lost"),
    *("batches sent", "batches acknowledged", "acknowledged with acks=all", "committed", "records consumed"),
    *("reads of leaders", "reads of followers", "consumer Redirected", "consumer Left", "consumer OffsetReset"),
    "consumer TruncationFound",
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
            began = time.process_time()
            progress.add(run_seed(progress.next_seed))
            progress.seconds += time.process_time() - began
            if progress.next_seed % _SAVE_EVERY == 0:
                _save(path, progress)
            if progress.next_seed % _TELL_EVERY == 0:
                print(f"{progress.counted} of {wanted} seeds are clean, {progress.seconds:.0f} s", flush=True)
    except InvariantError as error:
        print(f"FAILED {error}", flush=True)
        return 1
    finally:
        _save(path, progress)
    each_ms = 1000 * progress.seconds / max(1, progress.next_seed)
    print(
        f"{progress.counted} seeds clean (of {progress.next_seed} run), {progress.seconds:.0f} s, {each_ms:.0f} ms each"
    )
    points = sorted(name for name in progress.counts if name.startswith(("crash at ", "fault ")))
    for name in (*_TOLD, *points):
        print(f"  {name:36} {progress.counts[name]:>12,}")
    return 0


def _run_one(seed: int) -> int:
    try:
        outcome = run_seed(seed)
    except InvariantError as error:
        print(f"FAILED {error}")
        return 1
    print(f"seed {seed}: clean; {outcome.brokers} brokers, {outcome.partitions} partitions")
    for name, count in sorted(outcome.counts.items()):
        print(f"  {name:36} {count:>12,}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """See the module; 1 when an invariant was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m kipmesh.testing.replica_sim", description="simulate the replication of partitions"
    )
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
