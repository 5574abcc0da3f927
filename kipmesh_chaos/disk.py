"""Faults of disks: one that is full, and files of a killed node that are not as it left them.

A full disk is a small file system in memory (tmpfs) under the data of each node, which a filler uses up: writes fail
with ENOSPC as anywhere. Mounting takes a namespace of the run's own (`unshare`, Linux; without root where the system
allows user namespaces to people); what is mounted in it is gone when the run's last process is.

A torn tail and a flipped bit are in what was not synced: the part of the last segment from the recovery point on. What
is before it a disk may not lose; a broker does not look at that again, like Kafka's.

A disk that fails is one of a broker's two: an empty read-only file system takes its place.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kipmesh.core import record_batch
from kipmesh.core.errors import KafkaError
from kipmesh.storage.checkpoint import read_offsets
from kipmesh.storage.fs import RealFileSystem
from kipmesh_chaos.target_cluster import ChaosError

NAMESPACE_VARIABLE = "KIPMESH_CHAOS_NAMESPACE"
DISK_MIB = 64
FILLER = "filler-of-chaos"
RECOVERY_POINTS = "recovery-point-offset-checkpoint"
_COMMAND_TIMEOUT_S = 10


class NotPossibleError(ChaosError):
    """This machine cannot do that: the experiment is skipped."""


class Damage(NamedTuple):
    """What was done to a file."""

    file: Path
    text: str


def _run(command: Sequence[str], what: str) -> None:
    """A command that is done within seconds; raises NotPossibleError with `what` and what it said."""
    try:
        done = subprocess.run(  # noqa: S603 - found by name, fixed arguments
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotPossibleError(f"{what}: no end within {_COMMAND_TIMEOUT_S} s") from None
    if done.returncode:
        raise NotPossibleError(f"{what}: {' '.join(done.stderr.split())}")


def enter_namespace(command: Sequence[str]) -> None:
    """Become `command` in a mount namespace of its own; returns if this process is in one; raises NotPossibleError."""
    if os.environ.get(NAMESPACE_VARIABLE):
        return
    if not sys.platform.startswith("linux"):
        raise NotPossibleError("a full disk needs Linux's namespaces")
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("mount") is None:
        raise NotPossibleError("a full disk needs the commands unshare and mount (util-linux)")
    options = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    _run([unshare, *options, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], "a full disk needs a mount namespace")
    os.execve(unshare, [unshare, *options, *command], {**os.environ, NAMESPACE_VARIABLE: "1"})  # noqa: S606


def mount(folder: Path, *, mebibytes: int = DISK_MIB) -> None:
    """A disk of its own for a folder; raises NotPossibleError."""
    folder.mkdir(parents=True, exist_ok=True)
    mounting = shutil.which("mount")
    if not os.environ.get(NAMESPACE_VARIABLE) or mounting is None:
        raise NotPossibleError("a full disk needs a mount namespace of the run's own")
    _run([mounting, "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)], f"no disk for {folder}")


def unmount(folder: Path) -> None:
    """Take it away with what is on it, if it is there."""
    command = shutil.which("umount")
    if command is not None and folder.is_mount():
        subprocess.run([command, "-l", str(folder)], capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=False)  # noqa: S603


def fail(folder: Path) -> None:
    """A disk that `mount` made fails: nothing can be opened or made there any more; files that are open are.

    Its content is kept aside until `repair`.
    """
    aside = _aside(folder)
    aside.mkdir(exist_ok=True)
    if not folder.is_mount():
        raise ChaosError(f"{folder} is no disk of its own")
    _run(["mount", "--move", str(folder), str(aside)], f"{folder} cannot be made to fail")
    _run(["mount", "-t", "tmpfs", "-o", "ro,size=4k", "tmpfs", str(folder)], f"{folder} cannot be made to fail")


def repair(folder: Path) -> None:
    """The disk that failed is there again, as it was; idempotent."""
    if _aside(folder).is_mount():
        unmount(folder)
        _run(["mount", "--move", str(_aside(folder)), str(folder)], f"{folder} cannot be repaired")


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-aside")


def fill(folder: Path) -> None:
    """Use up every byte of a disk that `mount` made."""
    if not folder.is_mount():
        raise ChaosError(f"{folder} is no disk of its own")
    size = 1 << 20
    with (folder / FILLER).open("wb", buffering=0) as output:
        while size:
            try:
                if output.write(bytes(size)) < size:
                    size //= 2
            except OSError:
                size //= 2


def empty(folder: Path) -> None:
    """Give the bytes back; idempotent."""
    with suppress(FileNotFoundError):
        (folder / FILLER).unlink()


def unsynced(data: Path, topic: str, partition: int) -> tuple[Path, int, int] | None:
    """The last segment of a stopped broker's partition, where its unsynced bytes begin, and its size."""
    segments = sorted((data / f"{topic}-{partition}").glob("*.log"))
    if not segments:
        return None
    try:
        points = read_offsets(RealFileSystem(), str(data / RECOVERY_POINTS))
    except (OSError, KafkaError):
        points = {}
    synced = next((offset for where, offset in points.items() if tuple(where) == (topic, partition)), 0)
    content = segments[-1].read_bytes()
    begin = len(content)
    with suppress(KafkaError):  # a batch that was being written is the end of it
        for position, header in record_batch.iterate(content, allow_partial=True):
            if header.base_offset >= synced:
                begin = position
                break
    return (segments[-1], begin, len(content)) if begin < len(content) else None


def tear(data: Path, topic: str, partition: int, source: random.Random) -> Damage | None:
    """Cut off a part of what was not synced; None when there is nothing."""
    found = unsynced(data, topic, partition)
    if found is None:
        return None
    file, begin, size = found
    keep = source.randrange(max(begin, size - 64 * 1024), size)
    os.truncate(file, keep)
    return Damage(file, f"{file.name} of {topic}-{partition}: {size - keep} of {size} bytes cut off")


def flip(data: Path, topic: str, partition: int, source: random.Random) -> Damage | None:
    """Turn one bit of what was not synced; None when there is nothing."""
    found = unsynced(data, topic, partition)
    if found is None:
        return None
    file, begin, size = found
    place, bit = source.randrange(begin, size), source.randrange(8)
    with file.open("r+b") as stream:
        stream.seek(place)
        (old,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([old ^ (1 << bit)]))
    return Damage(file, f"{file.name} of {topic}-{partition}: bit {bit} of byte {place} of {size} flipped")
