"""The patches of `make image-next` apply to the sources and change the messages that it describes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json
from kipmesh import messages as m
from kipmesh.messages import proto
print(json.dumps([
    proto.encode(m.FetchRequest()).hex(),
    proto.encode(m.BrokerHeartbeatRequest(1)).hex(),
    list(m.BrokerHeartbeatResponse._fields),
]))
"""


def next_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("next_build", ROOT / "tools" / "next_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_patched_build_has_changed_messages(tmp_path: Path) -> None:
    tool = next_build()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "kipmesh" / "messages", tmp_path / "kipmesh" / "messages")
    shutil.copy(ROOT / "kipmesh" / "__init__.py", tmp_path / "kipmesh")
    tool.patch(tmp_path)
    assert f'version = "{tool.VERSION}"' in (tmp_path / "pyproject.toml").read_text()
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    fetch, heartbeat, fields = json.loads(result.stdout)
    unknown = b"\xa2\x06\x04next".hex()
    assert fetch == unknown
    assert heartbeat == unknown + b"\x08\x01".hex()
    assert "throttle_time_ms" not in fields
