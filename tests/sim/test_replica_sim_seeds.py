"""More seeds of `test_replica_sim.test_seeds_are_clean`: more than 100 in all."""

from __future__ import annotations

import pytest
from replica_sim_support import CHUNKS, SEEDS, run_chunk


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_more_seeds_are_clean(chunk: int) -> None:
    run_chunk(range(SEEDS + chunk, 2 * SEEDS, CHUNKS))
