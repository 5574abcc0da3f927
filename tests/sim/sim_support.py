"""Seeds that `make test` runs, in chunks, in two files: test workers share files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kipmesh.testing.sim import run_seed

SEEDS = 152
"""Of each of the two files."""
CHUNKS = 19

_EACH = ("elections", "snapshots made", "snapshots fetched", "snapshots deleted", "acknowledged")
_SOME = ("truncations", "crashes", "power cuts", "messages lost", "snapshots loaded", "log starts raised")


def run_chunk(seeds: Iterable[int]) -> None:
    """Run them; a seed counts with a fault and a change of leader only, and each makes, fetches, deletes snapshots."""
    counts: Counter[str] = Counter()
    outcomes = [run_seed(seed) for seed in seeds]
    counted = [outcome for outcome in outcomes if outcome.is_worth_counting]
    assert len(counted) >= len(outcomes) - 1, "300 of all must count"
    for outcome in counted:
        counts += outcome.counts
        few = [kind for kind in _EACH if outcome.counts[kind] < 2]
        assert not few, f"seed {outcome.seed}: {few}"
    missing = [kind for kind in _SOME if not counts[kind]]
    assert not missing, f"none in {len(counted)} seeds: {missing}"
