"""Disk faults: full disks, failed disks, and damage to unsynced bytes of a killed node.

A full disk is a small tmpfs under each node's data that a filler file uses up, so that writes fail with ENOSPC.
Mounting needs a mount namespace of the run (`unshare`, Linux; without root where user namespaces are allowed), which
ends with its last process.

A torn tail or flipped bit affects only bytes of the last segment after the recovery point. A disk may not lose synced
bytes, and a broker, like Kafka's, does not check them again. A failed disk is replaced by an empty read-only file
system.
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
    """The machine or the cluster cannot run this experiment, which is then skipped."""


def _run(command: Sequence[str], purpose: str) -> None:
    """Run a command with a timeout of 10 s. Raises NotPossibleError with `purpose` and the command's error
    if it fails.
    """
    try:
        done = subprocess.run(  # noqa: S603 - found by name, fixed arguments
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotPossibleError(f"{purpose}: {command[0]} timed out after {_COMMAND_TIMEOUT_S} s") from None
    if done.returncode:
        raise NotPossibleError(f"{purpose}: {' '.join(done.stderr.split())}")


def enter_namespace(command: Sequence[str]) -> None:
    """Replace this process with `command` in a new mount namespace. Returns only if the process is already in one.

    Raises NotPossibleError if this is not Linux, the command unshare or mount is missing, or permission is denied.
    """
    if os.environ.get(NAMESPACE_VARIABLE):
        return
    if not sys.platform.startswith("linux"):
        raise NotPossibleError("a full disk needs the namespaces of Linux")
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("mount") is None:
        raise NotPossibleError("a full disk needs the commands unshare and mount (util-linux)")
    options = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    _run([unshare, *options, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], "a full disk needs a mount namespace")
    os.execve(unshare, [unshare, *options, *command], {**os.environ, NAMESPACE_VARIABLE: "1"})  # noqa: S606


def mount(directory: Path, *, mebibytes: int = DISK_MIB) -> None:
    """Mount a tmpfs of this size on a directory, which is created if necessary. Raises NotPossibleError outside the
    run's mount namespace or if the command fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    mounting = shutil.which("mount")
    if not os.environ.get(NAMESPACE_VARIABLE) or mounting is None:
        raise NotPossibleError("a full disk needs the command mount and a mount namespace of the run")
    command = [mounting, "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(directory)]
    _run(command, f"cannot mount {directory}")


def unmount(directory: Path) -> None:
    """Unmount a directory's tmpfs and discard its files. Does nothing if there is no mount.

    Ignores a failure. Raises subprocess.TimeoutExpired if the command does not end within 10 s.
    """
    command = shutil.which("umount")
    if command is not None and directory.is_mount():
        subprocess.run([command, "-l", str(directory)], capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=False)  # noqa: S603


def fail(directory: Path) -> None:
    """Make the disk at a mount point fail. Opening its files fails; files that are already open remain usable.

    The content is kept aside for `repair`. Raises NotPossibleError; ChaosError if the directory is not a mount point.
    """
    aside = _aside(directory)
    aside.mkdir(exist_ok=True)
    _check_is_mount(directory)
    _run(["mount", "--move", str(directory), str(aside)], f"cannot fail {directory}")
    _run(["mount", "-t", "tmpfs", "-o", "ro,size=4k", "tmpfs", str(directory)], f"cannot fail {directory}")


def repair(directory: Path) -> None:
    """Restore a disk that `fail` has failed, with its content. Does nothing for any other disk. Raises
    NotPossibleError.
    """
    if _aside(directory).is_mount():
        unmount(directory)
        _run(["mount", "--move", str(_aside(directory)), str(directory)], f"cannot repair {directory}")


def _check_is_mount(directory: Path) -> None:
    if not directory.is_mount():
        raise ChaosError(f"{directory} is not a mount point")


def _aside(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}-aside")


def fill(directory: Path) -> None:
    """Use up the free bytes of the disk at a mount point with a filler file. Raises ChaosError if the directory is not
    a mount point.
    """
    _check_is_mount(directory)
    size = 1 << 20
    with (directory / FILLER).open("wb", buffering=0) as output:
        while size:
            try:
                if output.write(bytes(size)) < size:
                    size //= 2
            except OSError:
                size //= 2


def empty(directory: Path) -> None:
    """Delete the filler file of `fill`; idempotent."""
    (directory / FILLER).unlink(missing_ok=True)


def unsynced(data: Path, topic: str, partition: int) -> tuple[Path, int, int] | None:
    """Return (file, position, size): the last segment of a stopped broker's partition, the start of its first unsynced
    batch and its size in bytes.

    Returns None if all bytes of the segment are synced or there is no segment. Without a recovery point, all bytes
    count as unsynced.
    """
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
    with suppress(KafkaError):  # an incomplete batch ends the segment
        for position, header in record_batch.iterate(content, allow_partial=True):
            if header.base_offset >= synced:
                begin = position
                break
    return (segments[-1], begin, len(content)) if begin < len(content) else None


def tear(data: Path, topic: str, partition: int, source: random.Random) -> str | None:
    """Cut off a random part of a partition's unsynced bytes, at most 64 KiB. Returns a description, or None if there
    are no unsynced bytes.
    """
    found = unsynced(data, topic, partition)
    if found is None:
        return None
    file, begin, size = found
    keep = source.randrange(max(begin, size - 64 * 1024), size)
    os.truncate(file, keep)
    return f"{file.name} of {topic}-{partition}: {size - keep} of {size} bytes cut off"


def flip(data: Path, topic: str, partition: int, source: random.Random) -> str | None:
    """Flip one random bit of a partition's unsynced bytes. Returns a description, or None if there are no unsynced
    bytes.
    """
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
    return f"{file.name} of {topic}-{partition}: bit {bit} of byte {place} of {size} flipped"
