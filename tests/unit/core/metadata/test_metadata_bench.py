"""The benchmark of 630-18 at a small size: its totals are correct. Timings at this size are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import fencing

ROOT = Path(__file__).resolve().parents[4]


def test_seed_benchmark_totals_are_correct() -> None:
    by_partition, by_event = fencing.seed_of(30_000, 40), fencing.seed_of(1, 8)
    assert fencing.size(by_partition["values_bytes"]) == "1.14 MiB"
    assert by_partition["values_sent_bytes"] / (1 << 20) == pytest.approx(113.29, abs=0.01)
    assert fencing.size(by_event["values_sent_bytes"]) == "0.77 KiB"
    seed = fencing.compaction(100e6, 50e6)
    assert (seed.map_read, seed.copy_read, seed.written) == (1, 3, 2)


def test_fencing_by_event_writes_one_record() -> None:
    event = fencing.measure_failure(100, by_event=True)
    partition = fencing.measure_failure(100, by_event=False)
    assert event["partitions"] == partition["partitions"] == 30
    assert (event["records"], partition["records"]) == (1, 31)
    assert event["values_bytes"] < 20
    assert event["values_bytes"] < event["batch_bytes"] < 100
    assert event["responses_sent_bytes"] > 99 * event["batch_bytes"]
    assert partition["record_bytes"] > 40
    assert partition["proofs"]["records"] == 30
    assert event["proofs"]["records"] <= 30


def test_changing_state_is_compacted_without_reading_snapshots(tmp_path: Path) -> None:
    figures = fencing.measure_changes(tmp_path, 200_000, 20_000)
    assert figures["snapshots"] == 2
    assert figures["log_read_bytes"] >= figures["log_bytes"]
    assert figures["snapshot_read_bytes"] == 0
    assert figures["snapshot_written_bytes"] >= 2 * figures["snapshot_bytes"] * 0.9


@pytest.mark.parametrize("form", ["--json", "--markdown"])
def test_fencing_benchmark_reports_costs(form: str) -> None:
    command = [sys.executable, "-m", "bench.fencing", "--quick", "--topics", "100", form]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=True)
    if form == "--json":
        figures: dict[str, Any] = json.loads(done.stdout)
        assert figures["by_event"]["records"] == 1
        assert figures["by_partition"]["all_partitions"] == 1000
        assert figures["changes"]["snapshots"] == 2
    else:
        assert "| sent to 99 observers, with batch framing | - |" in done.stdout
        assert "| read, in all | 1.0" in done.stdout
