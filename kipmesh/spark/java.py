"""Finds a Java runtime for Spark 4 (17 or newer), or installs one with the system's package manager.

Searches JAVA_HOME, PATH and the usual directories of systems and version managers. `ensure_java` installs Java only if
none is found and this process may use a known package manager; otherwise it raises `JavaMissingError`.

`python -m kipmesh.spark.java` prints JAVA_HOME; `--install` also installs a missing Java.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

MINIMUM_VERSION: Final = 17

_VERSION_SECONDS: Final = 20.0
_INSTALL_SECONDS: Final = 600.0
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
_DIRECTORIES: Final = (
    "/usr/lib/jvm/*",
    "/usr/java/*",
    "/opt/java/*",
    "/opt/jdk*",
    "/opt/homebrew/opt/openjdk*/libexec/openjdk.jdk/Contents/Home",
    "/usr/local/opt/openjdk*/libexec/openjdk.jdk/Contents/Home",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
    "~/.sdkman/candidates/java/*",
    "~/.jdks/*",
    "~/.asdf/installs/java/*",
    "~/.local/share/mise/installs/java/*",
)
# Package manager, the command that installs a Java runtime, whether it needs root.
_INSTALLERS: Final[tuple[tuple[str, str, bool], ...]] = (
    ("apt-get", "apt-get update -qq && apt-get install -y -qq --no-install-recommends {package}", True),
    ("dnf", "dnf install -y -q java-17-openjdk-headless || dnf install -y -q java-21-openjdk-headless", True),
    ("apk", "apk add --no-cache openjdk17-jre-headless", True),
    ("brew", "brew install --quiet openjdk@17", False),
)
_APT_PACKAGES: Final = "openjdk-17-jre-headless || apt-get install -y -qq --no-install-recommends default-jre-headless"


class JavaMissingError(Exception):
    """No Java runtime of at least `MINIMUM_VERSION` was found or installed. The message names a remedy."""


def find_java() -> Path | None:
    """Return the JAVA_HOME of the first Java runtime of at least `MINIMUM_VERSION`, or None."""
    return next((home for home in dict.fromkeys(_candidates()) if java_version(home) >= MINIMUM_VERSION), None)


def ensure_java(report: Callable[[str], None] = lambda _line: None) -> Path:
    """Return JAVA_HOME, installing Java first if none is found.

    `report` is called with one line before an installation. Raises JavaMissingError if no known package manager can be
    used or the installation fails.
    """
    home = find_java()
    if home is not None:
        return home
    command = _installer()
    if command is None:
        raise JavaMissingError(
            f"Spark needs Java {MINIMUM_VERSION} or newer, and none was found;"
            " install it (e.g. openjdk-17-jre-headless) or set JAVA_HOME"
        )
    report(f"no Java {MINIMUM_VERSION}+ found, installing it: {command}")
    problem = _run_installer(command)
    home = find_java()
    if home is None:
        raise JavaMissingError(
            f"Spark needs Java {MINIMUM_VERSION} or newer, and its installation failed ({problem});"
            " install it manually or set JAVA_HOME"
        )
    return home


def java_version(home: Path) -> int:
    """Return the feature version (8, 17, ...) of the Java in `home`, 0 if `bin/java` is missing or does not run."""
    executable = home / "bin" / "java"
    if not os.access(executable, os.X_OK):
        return 0
    try:
        done = subprocess.run(  # noqa: S603
            [executable, "-version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = _VERSION.search(done.stderr + done.stdout)
    return int(match.group(1)) if match and done.returncode == 0 else 0


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home)
    if found := shutil.which("java"):
        # /usr/bin/java links to .../bin/java on most systems. On macOS it is a stub, for which java_version returns 0.
        yield Path(found).resolve().parent.parent
    for pattern in _DIRECTORIES:
        directory = Path(pattern).expanduser()
        root = Path(directory.anchor)
        yield from sorted(root.glob(str(directory.relative_to(root))))


def _installer() -> str | None:
    for program, command, needs_root in _INSTALLERS:
        if shutil.which(program) and (not needs_root or os.geteuid() == 0):
            return command.format(package=_APT_PACKAGES)
    return None


def _run_installer(command: str) -> str:
    try:
        done = subprocess.run(  # noqa: S602 (a constant of this module)
            command,
            shell=True,
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def main() -> int:
    """Print JAVA_HOME and return 0. Without Java, print a line to standard error and return 1.

    With the argument `--install`, a missing Java is installed first.
    """
    try:
        home = ensure_java(lambda line: print(line, file=sys.stderr)) if "--install" in sys.argv[1:] else find_java()
        if home is None:
            raise JavaMissingError(f"no Java {MINIMUM_VERSION} or newer found; install it or set JAVA_HOME")
    except JavaMissingError as error:
        print(error, file=sys.stderr)
        return 1
    print(home)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
