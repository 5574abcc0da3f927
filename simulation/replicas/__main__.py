"""`python -m simulation.replicas`: replay one seed, or run many; see `simulation.seed_runs`."""

from __future__ import annotations

import sys

from simulation.replicas import World, run_seed
from simulation.seed_runs import SeedProgram

PROGRAM = SeedProgram(
    name=World.NAME,
    description="simulate the replication of partitions",
    run_seed=run_seed,
    told=(
        *("elections", "elections by log end", "unclean elections"),
        *("partitions without leader", "controller elections"),
        *("ISR shrinks", "ISR expansions", "truncations", "records truncated", "losses as the rules allow"),
        *("faults", "crashes", "power cuts", "clean stops", "wipes", "processes failed", "starts failed"),
        *("messages", "messages lost", "messages doubled", "metadata batches lost"),
        *("batches sent", "batches acknowledged", "acknowledged with acks=all", "committed", "records consumed"),
        *("reads of leaders", "reads of followers", "consumer Redirected", "consumer Left", "consumer OffsetReset"),
        "consumer TruncationFound",
    ),
    points=("crash at ", "fault "),
)

if __name__ == "__main__":
    sys.exit(PROGRAM.main())
