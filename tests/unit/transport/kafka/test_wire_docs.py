"""docs/wire.md lists all APIs and all reasons for closed connections."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kipmesh.transport.kafka import metrics

ROOT = Path(__file__).resolve().parents[4]


def test_api_table_in_wire_docs_is_current() -> None:
    check = subprocess.run(
        [sys.executable, "tools/gen_wire_docs.py", "--check"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr


def test_connection_end_reasons_match_metric_and_docs() -> None:
    directories = [ROOT / "kipmesh" / name for name in ("transport", "broker/handlers")]
    source = "".join(path.read_text() for directory in directories for path in sorted(directory.rglob("*.py")))
    used = set(re.findall(r'(?:CloseConnection\(|RefusedError\(|\.end\(|\._reject\(|\.ended\[)\s*"([^"]+)"', source))
    assert {"held", "users not known", "acks-0", "size", "handshake", "fault"} <= used
    assert used == set(metrics.ENDED)
    table = (ROOT / "docs/wire.md").read_text().partition("| reason ")[2].partition("\n\n")[0]
    reasons = {name for row in table.split("\n") for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}
    assert reasons == set(metrics.ENDED)
