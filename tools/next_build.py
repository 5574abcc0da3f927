"""Copy this checkout and patch it to a next version, for tests of rolling upgrades.

`python tools/next_build.py DIR`; `make image-next` builds an image of it. Differences, as in a future release:

- the version, and with it the image's label;
- a new field in FetchRequest and BrokerHeartbeatRequest, which are sent all the time;
- no field `throttle_time_ms` in BrokerHeartbeatResponse, which the current version still sends.
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
    """Copy the files that git tracks or would track, with local changes, and the wheels for images.

    Raises CalledProcessError if git fails, OSError if a file cannot be copied.
    """
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=root, check=True, capture_output=True
    )
    for name in filter(None, files.stdout.decode().split("\0")):
        source = root / name
        if source.is_file() and not source.is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    wheels = root / "build" / "wheels" / "service"
    if wheels.is_dir():
        shutil.copytree(wheels, target / "build" / "wheels" / "service")


def patch(target: Path) -> None:
    """Apply PATCHES to the copy. Raises SystemExit for a patch that does not match the sources."""
    for name, pattern, text in PATCHES:
        file = target / name
        changed, count = re.subn(pattern, text, file.read_text(), count=1)
        if not count:
            raise SystemExit(f"next_build: {name} does not match {pattern!r}; update PATCHES")
        file.write_text(changed)


def keep_wheels(target: Path) -> None:
    """Mark the copied wheels, if any, as current, so that the image does not build them again.

    Of the files that they depend on, only the version has changed.
    """
    stamp = target / "build" / "wheels" / "service" / "made-from"
    if stamp.exists():
        files = "cat pyproject.toml requirements.lock tools/image_wheels.sh | cksum"
        stamp.write_text(
            subprocess.run(["sh", "-c", files], cwd=target, check=True, capture_output=True, text=True).stdout
        )


def main(arguments: Sequence[str]) -> None:
    """Create the build in the directory `arguments[0]`, which replaces an earlier build there.

    Raises SystemExit if the directory exists and is not an earlier build, or a patch does not apply.
    """
    root, target = Path(__file__).resolve().parent.parent, Path(arguments[0])
    mark = target / ".next-build"
    if target.exists() and not mark.exists():
        raise SystemExit(
            f"next_build: {target} exists and is not an earlier build; remove it or choose another directory"
        )
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    mark.touch()
    copy(root, target)
    patch(target)
    keep_wheels(target)
    print(f"{target}: version {VERSION}")


if __name__ == "__main__":
    main(sys.argv[1:])
