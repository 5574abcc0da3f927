"""Seeds of both simulators for the tests, in chunks, and the search for a seed that finds an injected bug."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from simulation import quorum, replicas
from simulation.engine import BaseWorld, InvariantError, Outcome, run_world


@dataclass(frozen=True)
class Seeds:
    """Seeds of one simulator. The first half always runs, the second half in slow tests."""

    run_seed: Callable[[int], Outcome]
    half: int
    chunks: int
    idle_max: int
    """Maximum number of seeds of a chunk without a fault or a leader change."""
    each: tuple[str, ...]
    """Counters that are at least 2 in each counted seed."""
    some: tuple[str, ...]
    """Counters that are positive in each chunk."""

    def run_chunk(self, chunk: int, *, first: int = 0) -> None:
        """Run one chunk of the half that starts with seed `first`."""
        counts: Counter[str] = Counter()
        outcomes = [self.run_seed(seed) for seed in range(first + chunk, first + self.half, self.chunks)]
        counted = [outcome for outcome in outcomes if outcome.is_worth_counting]
        assert len(counted) >= len(outcomes) - self.idle_max
        for outcome in counted:
            counts += outcome.counts
            few = [kind for kind in self.each if outcome.counts[kind] < 2]
            assert not few, f"seed {outcome.seed}: {few}"
        missing = [kind for kind in self.some if not counts[kind]]
        assert not missing, f"none in {len(counted)} seeds: {missing}"


QUORUM = Seeds(
    quorum.run_seed,
    half=152,
    chunks=19,
    idle_max=1,  # 300 of all must count
    each=("elections", "snapshots made", "snapshots fetched", "snapshots deleted", "acknowledged"),
    some=("truncations", "crashes", "power cuts", "messages lost", "snapshots loaded", "log starts raised"),
)
REPLICAS = Seeds(
    replicas.run_seed,
    half=56,
    chunks=7,
    idle_max=2,  # 100 of all must count
    each=(),
    some=("elections", "ISR shrinks", "ISR expansions", "crashes", "acknowledged with acks=all", "reads of followers"),
)


def seed_that_finds(bug: str, world: Callable[[int], BaseWorld], seeds: Iterable[int]) -> int:
    """Return the first seed whose run violates an invariant."""
    for seed in seeds:
        try:
            run_world(world(seed))
        except InvariantError as error:
            if isinstance(error.__cause__, AttributeError | NameError | TypeError):
                raise  # the injected bug is itself defective
            print(f"{bug}: {error}")
            return seed
    pytest.fail(f"bug {bug!r} was not found in {seeds}")
