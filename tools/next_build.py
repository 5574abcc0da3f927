"""Copy this checkout and make the next version of it: a build that rolling upgrades are tried with, and nothing else.

python tools/next_build.py DIR ; `make image-next` makes an image of it.

What is different, as in a release to come:
- the version, and with it the image's label;
- a field more in requests that are sent all the time, FetchRequest and BrokerHeartbeatRequest, which the version before
  does not know;
- a field less: `throttle_time_ms` of BrokerHeartbeatResponse, which the version before still sends.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

VERSION = "0.9.9"
MESSAGES = "kipmesh/messages/apis"
UNKNOWN_FIELD = r"""    if of.__name__ in ("FetchRequest", "BrokerHeartbeatRequest"):
        source.add(1, "out += b'\\xa2\\x06\\x04next'")  # field 100, a string
"""
PATCHES = (
    ("pyproject.toml", r'\nversion = "[^"]+"\n', f'\nversion = "{VERSION}"\n'),
    (
        "kipmesh/messages/proto.py",
        r'(\n    source\.add\(1, "out = bytearray\(\)"\)\n)',
        r"\1" + UNKNOWN_FIELD.replace("\\", r"\\"),
    ),
    (
        f"{MESSAGES}/broker_lifecycle.py",
        r"(class BrokerHeartbeatResponse\(Message\):\n)    throttle_time_ms: Int32 = field\(1\)\n",
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
