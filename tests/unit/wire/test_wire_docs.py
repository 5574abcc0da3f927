"""docs/wire.md lists the APIs that there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_table_of_apis_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "tools/gen_wire_docs.py", "--check"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
