"""What chaos does within a node's container: `python -m kipmesh.kube hold`, `resume`, `press` and `relieve`.

The node is the process whose command line says `-m kipmesh_SERVICE`: process 1 of its container, or another one where
the pod's containers share their processes. Process 1 cannot be held from within, whoever asks: the kernel keeps
SIGSTOP from it. That is why `hold` needs a pod whose processes are shared.

Pressure is a group of processes of its own, whose leader's id is in PRESSING. It ends at `relieve`, with its time, or
with the container.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

PRESSING = Path(tempfile.gettempdir()) / "kipmesh-pressing"
CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")
SERVICE = b"kipmesh_"
PRESSURE = b"kipmesh.kube.inside"
_LIMITLESS = 1 << 60
"""Version 1 says a number near 2**63 where there is no limit."""
PAGE_BYTES = 4096


def node_process() -> int:
    """The id of the node's process; 1 when no command line is a node's."""
    for number in sorted(int(one.name) for one in PROC.iterdir() if one.name.isdigit()):
        with suppress(OSError):
            words = (PROC / str(number) / "cmdline").read_bytes().split(b"\0")
            if any(flag == b"-m" and word.startswith(SERVICE) for flag, word in pairwise(words)):
                return number
    return 1


def signal_node(number: signal.Signals) -> None:
    """Raises OSError for what may not be done, ValueError for a SIGSTOP that the kernel would not deliver."""
    process = node_process()
    if process == 1 and number is signal.SIGSTOP:
        raise ValueError("process 1 cannot be held from within: the pod's processes are not shared")
    os.kill(process, number)


def memory_bytes() -> tuple[int, int]:
    """The limit of this container, and what is in use of it without what the kernel can drop; raises ValueError."""
    if (CGROUP / "memory.max").exists():
        folder, limit_file, used_file, dropped = CGROUP, "memory.max", "memory.current", "inactive_file"
    else:
        folder, limit_file, used_file = CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        dropped = "total_inactive_file"
    limit = (folder / limit_file).read_text().strip()
    if limit == "max" or int(limit) >= _LIMITLESS:
        raise ValueError("the container has no limit of memory")
    counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(limit), max(int((folder / used_file).read_text()) - int(counts.get(dropped, 0)), 0)


def press(workers: int, memory_share: float, for_s: float) -> None:
    """Begin, in the background; ends what was begun before. Raises ValueError, OSError."""
    relieve()
    taken_bytes = 0
    if memory_share:
        limit_bytes, used_bytes = memory_bytes()
        taken_bytes = max(int(limit_bytes * memory_share) - used_bytes, 0)
    arguments = [str(workers), str(taken_bytes), str(for_s)]
    files = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    words = [sys.executable, "-m", PRESSURE.decode(), *arguments]
    leader = os.posix_spawn(sys.executable, words, os.environ, file_actions=files, setsid=True)
    PRESSING.write_text(str(leader))


def relieve() -> None:
    """End it; nothing happens when there is none.

    The file outlives a container that was killed, and its number may be another group's in the next one.
    """
    with suppress(FileNotFoundError, ValueError, ProcessLookupError):
        group = int(PRESSING.read_text())
        if pressing(group):
            os.killpg(group, signal.SIGKILL)
    PRESSING.unlink(missing_ok=True)


def pressing(group: int) -> list[int]:
    """The ids of a group's processes that are pressure, by their command lines; the leader may be gone."""
    found = []
    for number in (int(one.name) for one in PROC.iterdir() if one.name.isdigit()):
        with suppress(OSError, ValueError, IndexError):
            # After the name, which may have anything in it: state, parent, group.
            group_of = int((PROC / str(number) / "stat").read_text().rpartition(")")[2].split()[2])
            words = (PROC / str(number) / "cmdline").read_bytes().split(b"\0")
            if group_of == group and (b"-m", PRESSURE) in pairwise(words):
                found.append(number)
    return found


def main(arguments: Sequence[str]) -> None:
    """The pressure itself: so many busy processes, so many bytes that are in use, for so long."""
    workers, taken_bytes, for_s = int(arguments[0]), int(arguments[1]), float(arguments[2])
    deadline = time.monotonic() + for_s
    for _ in range(workers):
        if os.fork() == 0:
            while time.monotonic() < deadline:
                pass
            os._exit(0)
    if taken_bytes:
        taken = mmap.mmap(-1, taken_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for place in range(0, taken_bytes, PAGE_BYTES):
            taken[place] = 1
    time.sleep(max(deadline - time.monotonic(), 0))


if __name__ == "__main__":
    main(sys.argv[1:])
