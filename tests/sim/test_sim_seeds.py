"""More seeds of `test_sim_raft.test_seeds_are_clean`: 300 and more in all."""

from __future__ import annotations

import pytest
from sim_support import CHUNKS, SEEDS, run_chunk


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_more_seeds_are_clean(chunk: int) -> None:
    run_chunk(range(SEEDS + chunk, 2 * SEEDS, CHUNKS))
