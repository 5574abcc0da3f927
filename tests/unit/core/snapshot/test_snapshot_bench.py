"""The snapshot benchmark at a small size. Timings at this size are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]


def test_snapshot_benchmark_reports_figures() -> None:
    command = [sys.executable, "-m", "bench.snapshot", "--topics", "1000", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=True)
    figures = json.loads(done.stdout)
    assert figures["records"] == 11_101
    assert figures["bytes"] > 1_000_000
    assert 0 < figures["generate_cpu_s"] < 30
    assert 0 < figures["load_cpu_s"] < 30
    usage = subprocess.run([*command[:3], "--topics", "1"], cwd=ROOT, capture_output=True, timeout=220, check=False)
    assert usage.returncode == 2
