"""Replication keeps the REP rules under the faults of many seeds."""

from __future__ import annotations

import pytest

from simulation.replicas import InvariantError, World, run_seed, run_world
from tests.simulation.sim_support import REPLICAS


@pytest.mark.parametrize("chunk", range(REPLICAS.chunks))
def test_seeds_are_clean(chunk: int) -> None:
    REPLICAS.run_chunk(chunk)


@pytest.mark.parametrize("seed", [861, 1036, 1463, 2761, 3819, 4936, 11137, 13386, 14969, 15725])
def test_seeds_that_found_bugs_are_clean(seed: int) -> None:
    run_seed(seed)


def test_seed_replays_exactly() -> None:
    assert run_seed(3).counts == run_seed(3).counts


@pytest.mark.parametrize("min_isr", [1, 3])
def test_acks_all_works_with_unclean_elections(min_isr: int) -> None:
    outcome = run_world(World(20 + min_isr, brokers=5, min_isr=min_isr, is_unclean=True))
    assert outcome.counts["acknowledged with acks=all"]


def test_run_without_faults_has_no_elections_and_few_repeats() -> None:
    outcome = run_world(World(1, only_faults=("none",)))
    assert not outcome.counts["faults"]
    assert not outcome.counts["elections"]
    assert (
        outcome.counts["batches sent"] - outcome.counts["batches acknowledged"] <= outcome.counts["batches sent"] // 4
    )


def test_failure_names_seed_and_replay_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(world: World) -> None:
        raise KeyError("a defect of whatever kind")

    monkeypatch.setattr(World, "run", broken)
    with pytest.raises(InvariantError, match=r"seed 5 .*python -m simulation.replicas --seed 5"):
        run_seed(5)
