"""The patches of `make image-next` fit the sources, and what comes out has the messages that it says."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]


def next_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("next_build", ROOT / "tools" / "next_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_next_build_has_other_messages(tmp_path: Path) -> None:
    tool = next_build()
    names = {name for name, _, _ in tool.PATCHES}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    tool.patch(tmp_path)
    changed = {name: (tmp_path / name).read_text() for name in names}
    assert f'version = "{tool.VERSION}"' in changed["pyproject.toml"]
    messages = changed["kipmesh/core/messages/broker_lifecycle.py"]
    fields: dict[str, object] = {}
    exec(compile(messages, "messages", "exec"), fields)
    request, response = fields["BrokerHeartbeatRequest"], fields["BrokerHeartbeatResponse"]
    assert request._fields[-1] == "build"  # type: ignore[attr-defined]
    assert "throttle_time_ms" not in response._fields  # type: ignore[attr-defined]
    protos = changed["protos/kipmesh/v1/broker_lifecycle.proto"]
    found = re.search(r"message BrokerHeartbeatResponse \{(.*?)\n\}", protos, re.DOTALL)
    assert found is not None
    assert "reserved 1;" in found[1]
    assert re.findall(r"(\w+) = \d+;", found[1]) == list(response._fields)  # type: ignore[attr-defined]
