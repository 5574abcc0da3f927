"""The session benchmark at a small size. Checks only figures that do not depend on the machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from bench import charts, sessions
from bench.charts import Line

ROOT = Path(__file__).resolve().parents[4]


def fast_directory(fallback: Path) -> Path:
    """Return /dev/shm if it has space: 4,000 short-lived logs keep a busy disk occupied for a minute."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 50 << 20 else fallback


def test_session_benchmark_reports_incremental_savings(tmp_path: Path) -> None:
    drawn = tmp_path / "curve.svg"
    command = [sys.executable, "-m", "bench.sessions", "--quick", "--rounds", "1", "--json", "--chart", str(drawn)]
    command += ["--dir", str(fast_directory(tmp_path))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=True)
    figures = json.loads(done.stdout)
    fetches = {(row["mode"], row["partitions"], row["changed"]): row for row in figures["fetches"]}
    assert figures["same_bytes"] == {"0": True, "10": True, "1000": True}
    nothing = fetches["session", 2000, 0]
    assert nothing["request_bytes"] < 40
    assert nothing["response_bytes"] < 10
    in_session, alone = fetches["session", 2000, 10], fetches["alone", 10, 10]
    for key in ("request_bytes", "response_bytes"):
        assert abs(in_session[key] - alone[key]) < 20
    assert fetches["all", 2000, 0]["request_bytes"] > 20_000
    assert all(row["server_us"] > 0 and row["client_us"] > 0 for row in figures["fetches"])
    assert all(0 < memory["server"] < 300 and 0 < memory["client"] < 500 for memory in figures["memory"])
    ElementTree.parse(drawn)
    usage = subprocess.run([*command[:3], "--rounds", "-1"], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert usage.returncode == 2


def test_changed_partitions_span_ten_topics_at_any_size() -> None:
    for partitions in (1000, 100_000):
        for changed in (10, 1000):
            positions = sessions.places(partitions, changed)
            assert len(set(positions)) == changed
            assert len({topic for topic, _ in positions}) == sessions.CHANGED_TOPICS
            assert max(topic for topic, _ in positions) < partitions // sessions.TOPIC_PARTITIONS


def test_line_charts_are_labelled_and_deterministic() -> None:
    lines = [Line("a < b", False, [(1000, 20.0), (100_000, 20.0)]), Line("c", True, [(1000, 3.0), (100_000, 999.0)])]
    drawn = charts.lines([("costs & more", lambda value: f"{value:g}", lines)] * 2, "across")
    root = ElementTree.fromstring(drawn)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("costs & more") == 2
    assert {"a < b", "c", "1,000", "100,000", "across", "10", "100"} <= set(texts)
    assert drawn == charts.lines([("costs & more", lambda value: f"{value:g}", lines)] * 2, "across")
