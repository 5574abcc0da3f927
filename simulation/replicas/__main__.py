"""`python -m simulation.replicas`: replay one seed or run many, see `simulation.seed_runs`."""

from __future__ import annotations

import sys

from simulation.replicas import World, run_seed
from simulation.seed_runs import SeedProgram

PROGRAM = SeedProgram(
    name=World.NAME,
    description="simulate the replication of partitions",
    run_seed=run_seed,
    summary_counts=(
        *("elections", "elections by log end", "unclean elections"),
        *("partitions without leader", "controller elections"),
        *("ISR shrinks", "ISR expansions", "truncations", "records truncated", "allowed losses"),
        *("faults", "crashes", "power cuts", "clean stops", "wipes", "processes failed", "starts failed"),
        *("messages", "messages lost", "messages duplicated", "metadata batches lost"),
        *("batches sent", "batches acknowledged", "acknowledged with acks=all", "committed", "records consumed"),
        *(
            "reads of leaders",
            "reads of followers",
            "consumer Redirected",
            "consumer LeftFollower",
            "consumer OffsetReset",
        ),
        "consumer TruncationFound",
    ),
    summary_prefixes=("crash at ", "fault "),
)

if __name__ == "__main__":
    sys.exit(PROGRAM.main())
