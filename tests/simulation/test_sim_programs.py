"""Command lines of the simulators."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from simulation.engine import InvariantError, Outcome
from simulation.quorum.__main__ import PROGRAM as QUORUM
from simulation.replicas.__main__ import PROGRAM as REPLICAS
from simulation.seed_runs import SeedProgram


@pytest.mark.parametrize("program", [QUORUM, REPLICAS], ids=lambda program: program.name)
def test_progress_file_resumes_a_run(program: SeedProgram, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = f"{tmp_path}/seeds.json"
    assert program.main(["--seeds", "1", "--progress", progress]) == 0
    assert program.main(["--seeds", "2", "--progress", progress]) == 0
    output = capsys.readouterr().out
    assert "0 of 1 seeds are done" in output
    assert "1 of 2 seeds are done" in output
    assert "elections" in output
    assert program.main(["--seed", "1"]) == 0
    assert "seed 1: clean" in capsys.readouterr().out


def test_violated_invariant_ends_run_and_keeps_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def third_is_broken(seed: int) -> Outcome:
        if seed == 2:
            raise InvariantError("seed 2 is broken")
        return Outcome(seed, "shape", Counter(), is_worth_counting=True)

    program = SeedProgram("name", "description", third_is_broken, (), ())
    assert program.main(["--seeds", "9", "--progress", f"{tmp_path}/seeds.json"]) == 1
    assert "FAILED seed 2 is broken" in capsys.readouterr().out
    assert program.main(["--seeds", "2", "--progress", f"{tmp_path}/seeds.json"]) == 0
    assert "2 of 2 seeds are done" in capsys.readouterr().out
