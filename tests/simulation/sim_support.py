"""Seeds of both simulators that the tests run, in chunks, and the search for a seed that finds a planted bug."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from simulation import quorum, replicas
from simulation.engine import BaseWorld, InvariantError, Outcome, run_world


@dataclass(frozen=True)
class Seeds:
    """Seeds of one simulator: the first half is run always, the other one by slow tests."""

    run_seed: Callable[[int], Outcome]
    half: int
    chunks: int
    idle_max: int
    """How many seeds of a chunk may lack a fault or a change of leader."""
    each: tuple[str, ...]
    """Happens twice at least in each seed that counts."""
    some: tuple[str, ...]
    """Happens in each chunk."""

    def run_chunk(self, chunk: int, *, first: int = 0) -> None:
        """Run one chunk of the half that begins with that seed."""
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
    """The first seed whose run breaks an invariant."""
    for seed in seeds:
        try:
            run_world(world(seed))
        except InvariantError as error:
            if isinstance(error.__cause__, AttributeError | NameError | TypeError):
                raise  # the planted bug itself is broken
            print(f"{bug}: {error}")
            return seed
    pytest.fail(f"not found in {seeds}")
