"""Seeds of the simulation of replication that `make test` runs, in chunks, in two files: test workers share files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kipmesh.testing.replica_sim import run_seed

SEEDS = 56
"""Of each of the two files."""
CHUNKS = 7

_SOME = ("elections", "ISR shrinks", "ISR expansions", "crashes", "acknowledged with acks=all", "reads of followers")


def run_chunk(seeds: Iterable[int]) -> None:
    """Run them; a seed counts with a fault and a change of leader only."""
    counts: Counter[str] = Counter()
    outcomes = [run_seed(seed) for seed in seeds]
    counted = [outcome for outcome in outcomes if outcome.is_worth_counting]
    assert len(counted) >= len(outcomes) - 2, "100 of all must count"
    for outcome in counted:
        counts += outcome.counts
    missing = [kind for kind in _SOME if not counts[kind]]
    assert not missing, f"none in {len(counted)} seeds: {missing}"
