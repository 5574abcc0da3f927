"""`python -m kipmesh.testing.sim`: replay one seed, or run many; see `kipmesh.testing.seed_runs`."""

from __future__ import annotations

import sys

from kipmesh.testing.seed_runs import SeedProgram
from kipmesh.testing.sim import run_seed

PROGRAM = SeedProgram(
    name="kipmesh.testing.sim",
    description="simulate the metadata quorum",
    run_seed=run_seed,
    shape=lambda outcome: f"{outcome.voters} voters, {outcome.observers} observers",
    told=(
        *("elections", "leader changes", "truncations", "images reloaded", "applies failed"),
        *("snapshots made", "snapshots aborted", "snapshots fetched", "snapshots loaded", "snapshots deleted"),
        *("snapshot fetches resumed", "snapshot fetches dropped", "received snapshots corrupt", "log starts raised"),
        *("faults", "crashes", "power cuts", "disk failures", "wipes", "starts refused", "disks replaced"),
        *("messages", "messages lost", "messages doubled", "appends rejected", "acknowledged", "committed"),
    ),
    points=("crash at ",),
)

if __name__ == "__main__":
    sys.exit(PROGRAM.main())
