"""Copy this checkout and make the next version of it: a build that rolling upgrades are tried with, and nothing else.

python tools/next_build.py DIR ; `make image-next` makes an image of it.

What is different, as in a release to come:
- the version, and with it the image's label;
- a field more in requests that are sent all the time: `build` of FetchRequest and BrokerHeartbeatRequest, never empty,
  which the version before does not know;
- a field less: `throttle_time_ms` of BrokerHeartbeatResponse, whose number is reserved, and which the version before
  still sends.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

VERSION = "0.9.9"
PROTOS = "protos/kipmesh/v1"
MESSAGES = "kipmesh/core/messages"
PATCHES = (
    ("pyproject.toml", r'\nversion = "[^"]+"\n', f'\nversion = "{VERSION}"\n'),
    (f"{PROTOS}/fetch.proto", r"(\n  string rack_id = 12;\n)", r"\1  string build = 100;\n"),
    (f"{MESSAGES}/fetch.py", r"(class FetchRequest\(NamedTuple\):\n(?:    .+\n)+)", r'\1    build: str = "next"\n'),
    (f"{PROTOS}/broker_lifecycle.proto", r"(\n  repeated bytes offline_log_dirs = 7;\n)", r"\1  string build = 100;\n"),
    (
        f"{MESSAGES}/broker_lifecycle.py",
        r"(class BrokerHeartbeatRequest\(NamedTuple\):\n(?:    .+\n)+)",
        r'\1    build: str = "next"\n',
    ),
    (
        f"{PROTOS}/broker_lifecycle.proto",
        r"(message BrokerHeartbeatResponse \{\n)  int32 throttle_time_ms = 1;\n",
        r'\1  reserved 1;\n  reserved "throttle_time_ms";\n',
    ),
    (
        f"{MESSAGES}/broker_lifecycle.py",
        r"(class BrokerHeartbeatResponse\(NamedTuple\):\n)    throttle_time_ms: int = 0\n",
        r"\1",
    ),
)


def copy(root: Path, target: Path) -> None:
    """The files that git knows, as they are now, and the wheels that images are made from."""
    named = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=root, check=True, capture_output=True
    )
    for name in filter(None, named.stdout.decode().split("\0")):
        source = root / name
        if source.is_file() and not source.is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    wheels = root / "build" / "wheels" / "service"
    if wheels.is_dir():
        shutil.copytree(wheels, target / "build" / "wheels" / "service")


def patch(target: Path) -> None:
    """Raises SystemExit when a place is not found: the sources have changed."""
    for name, pattern, text in PATCHES:
        file = target / name
        changed, count = re.subn(pattern, text, file.read_text(), count=1)
        if not count:
            raise SystemExit(f"next_build: {name} has no {pattern!r}")
        file.write_text(changed)


def keep_wheels(target: Path) -> None:
    """They are still right: nothing that they follow from has changed but the version."""
    stamp = target / "build" / "wheels" / "service" / "made-from"
    if stamp.exists():
        files = "cat pyproject.toml requirements.lock tools/image_wheels.sh | cksum"
        stamp.write_text(
            subprocess.run(["sh", "-c", files], cwd=target, check=True, capture_output=True, text=True).stdout
        )


def main(arguments: Sequence[str]) -> None:
    """DIR must not be there yet, or be one that this made."""
    root, target = Path(__file__).resolve().parent.parent, Path(arguments[0])
    mark = target / ".next-build"
    if target.exists() and not mark.exists():
        raise SystemExit(f"next_build: {target} is there already")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    mark.touch()
    copy(root, target)
    patch(target)
    keep_wheels(target)
    print(f"{target}: version {VERSION}")


if __name__ == "__main__":
    main(sys.argv[1:])
