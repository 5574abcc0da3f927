"""Write deploy/grafana/dashboards from the code in `tools/dashboards`. `--check` only compares."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from tools.dashboards import kip_227, kip_392, kip_526, kip_630, mesh, wire

TARGET = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"


def render() -> Mapping[str, str]:
    """Return the text of each dashboard by file name."""
    made = {
        "mesh": mesh.make(),
        "kip_227": kip_227.make(),
        "kip_392": kip_392.make(),
        "kip_526": kip_526.make(),
        "kip_630": kip_630.make(),
        "wire": wire.make(),
    }
    return {
        f"{name}.json": json.dumps(one.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for name, one in made.items()
    }


def stale(files: Mapping[str, str], target: Path = TARGET) -> list[str]:
    """Return the names of files in `target` that are missing, different or obsolete."""
    present = {path.name: path.read_text(encoding="utf-8") for path in target.glob("*.json")}
    return sorted(name for name in files.keys() | present.keys() if files.get(name) != present.get(name))


def main(arguments: list[str]) -> int:
    """Write the dashboards and delete obsolete files, or with `--check` only compare them.

    Return 1 if `--check` finds a difference, else 0.
    """
    files = render()
    names = stale(files)
    if "--check" in arguments:
        for name in names:
            sys.stderr.write(f"deploy/grafana/dashboards/{name} differs from tools/dashboards: make dashboards\n")
        return 1 if names else 0
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name in files:
            (TARGET / name).write_text(files[name], encoding="utf-8")
        else:
            (TARGET / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
