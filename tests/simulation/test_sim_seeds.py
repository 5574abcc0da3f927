"""The second half of the seeds of `test_seeds_are_clean`: at least 300 of the quorum and 100 of replicas in total."""

from __future__ import annotations

import pytest

from tests.simulation.sim_support import QUORUM, REPLICAS, Seeds

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("seeds", "chunk"),
    [
        *(pytest.param(QUORUM, chunk, id=f"quorum-{chunk}") for chunk in range(QUORUM.chunks)),
        *(pytest.param(REPLICAS, chunk, id=f"replicas-{chunk}") for chunk in range(REPLICAS.chunks)),
    ],
)
def test_more_seeds_are_clean(seeds: Seeds, chunk: int) -> None:
    seeds.run_chunk(chunk, first=seeds.half)
