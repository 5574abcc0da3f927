"""`python -m simulation.quorum`: replay one seed or run many, see `simulation.seed_runs`."""

from __future__ import annotations

import sys

from simulation.quorum import World, run_seed
from simulation.seed_runs import SeedProgram

PROGRAM = SeedProgram(
    name=World.NAME,
    description="simulate the metadata quorum",
    run_seed=run_seed,
    summary_counts=(
        *("elections", "leader changes", "truncations", "images reloaded", "applies failed"),
        *("snapshots made", "snapshots aborted", "snapshots fetched", "snapshots loaded", "snapshots deleted"),
        *("snapshot fetches resumed", "snapshot fetches dropped", "received snapshots corrupt", "log starts raised"),
        *("faults", "crashes", "power cuts", "disk failures", "wipes", "starts refused", "disks replaced"),
        *("messages", "messages lost", "messages duplicated", "appends rejected", "acknowledged", "committed"),
    ),
    summary_prefixes=("crash at ",),
)

if __name__ == "__main__":
    sys.exit(PROGRAM.main())
