"""docs/wire.md lists the APIs that there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kipmesh.transport.kafka import metrics

ROOT = Path(__file__).resolve().parents[4]


def test_the_table_of_apis_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "tools/gen_wire_docs.py", "--check"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_reasons_for_which_connections_end_are_told_from_the_start_and_written_down() -> None:
    folders = [ROOT / "kipmesh" / name for name in ("transport", "broker/handlers")]
    source = "".join(path.read_text() for folder in folders for path in sorted(folder.rglob("*.py")))
    used = set(re.findall(r'(?:CloseConnection\(|RefusedError\(|\.end\(|\._reject\(|\.ended\[)\s*"([^"]+)"', source))
    assert {"held", "users not known", "acks-0", "size", "handshake", "fault"} <= used
    assert used == set(metrics.ENDED)
    table = (ROOT / "docs/wire.md").read_text().partition("| reason ")[2].partition("\n\n")[0]
    reasons = {name for row in table.split("\n") for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}
    assert reasons == set(metrics.ENDED)
