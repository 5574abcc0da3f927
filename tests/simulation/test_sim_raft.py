"""The metadata quorum keeps its invariants under the faults of many seeds (630-19)."""

from __future__ import annotations

import pytest

from simulation.quorum import InvariantError, World, run_seed, run_world
from tests.simulation.sim_support import QUORUM


@pytest.mark.parametrize("chunk", range(QUORUM.chunks))
def test_seeds_are_clean(chunk: int) -> None:
    QUORUM.run_chunk(chunk)


def test_seed_replays_exactly() -> None:
    assert run_seed(3).counts == run_seed(3).counts


@pytest.mark.parametrize("voters", [1, 3, 5])
@pytest.mark.parametrize("observers", [0, 5])
def test_quorums_of_all_sizes_commit(voters: int, observers: int) -> None:
    outcome = run_world(World(voters * 10 + observers, voters=voters, observers=observers))
    assert outcome.shape == f"{voters} voters, {observers} observers"
    assert outcome.counts["acknowledged"]


def test_failure_names_seed_and_replay_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(world: World) -> None:
        raise KeyError("a defect of whatever kind")

    monkeypatch.setattr(World, "run", broken)
    with pytest.raises(InvariantError, match=r"seed 5 .*python -m simulation.quorum --seed 5"):
        run_seed(5)
