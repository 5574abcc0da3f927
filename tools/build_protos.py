"""Generate `kipmesh/v1` from `protos/kipmesh/v1`: a hatchling build hook, and a script for a checkout."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Any

PACKAGE = Path("kipmesh/v1")


def generate(root: Path) -> list[Path]:
    """Write messages and their type stubs below `root`; returns the files written."""
    from grpc_tools import protoc

    sources = sorted((root / "protos" / PACKAGE).glob("*.proto"))
    target = root / PACKAGE
    target.mkdir(parents=True, exist_ok=True)
    include = resources.files("grpc_tools") / "_proto"
    out = [f"--python_out={root}", f"--pyi_out={root}"]
    status = protoc.main(["protoc", f"-I{root / 'protos'}", f"-I{include}", *out, *map(str, sources)])
    if status:
        raise SystemExit(f"protoc failed with status {status}")
    (target / "__init__.py").write_text('"""Generated from protos/kipmesh/v1; do not edit."""\n')
    return sorted(target.glob("*.py*"))


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script, without the build system
    pass
else:

    class ProtoBuildHook(BuildHookInterface[Any]):
        """Generates the messages before a wheel, an editable install or an sdist is made."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Generate below the project's root."""
            generate(Path(self.root))


if __name__ == "__main__":
    for path in generate(Path(__file__).resolve().parent.parent):
        sys.stdout.write(f"{path}\n")
