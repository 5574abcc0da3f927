"""Faults inside a node's container: `python -m kipmesh.kube hold`, `resume`, `press` and `relieve`.

The node is the process with `-m kipmesh_SERVICE` in its command line. It is process 1, unless the pod's containers
share their process namespace. The kernel never delivers SIGSTOP to process 1 from inside, so `hold` needs a shared
namespace.

Pressure is a separate process group, whose id is in PID_FILE. It ends with `relieve`, after its time, or with the
container.
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

PID_FILE = Path(tempfile.gettempdir()) / "kipmesh-pressing"
CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")
SERVICE = b"kipmesh_"
PRESSURE = b"kipmesh.kube.inside"
_LIMITLESS = 1 << 60
"""cgroup v1 shows a number near 2**63 if there is no limit."""
PAGE_BYTES = 4096


def node_process() -> int:
    """Return the pid of the node's process: the lowest pid that runs `-m kipmesh_SERVICE`, or 1 if there is none."""
    for number in sorted(int(one.name) for one in PROC.iterdir() if one.name.isdigit()):
        with suppress(OSError):
            words = (PROC / str(number) / "cmdline").read_bytes().split(b"\0")
            if any(flag == b"-m" and word.startswith(SERVICE) for flag, word in pairwise(words)):
                return number
    return 1


def signal_node(number: signal.Signals) -> None:
    """Send a signal to the node's process. Raises ValueError for SIGSTOP to process 1, or OSError if sending fails."""
    process = node_process()
    if process == 1 and number is signal.SIGSTOP:
        raise ValueError(
            "cannot pause process 1 from inside its pod: set shareProcessNamespace (chaos.pause in the chart)"
        )
    os.kill(process, number)


def memory_bytes() -> tuple[int, int]:
    """Return this container's memory limit and its use without inactive file caches, both in bytes.

    Raises ValueError if there is no limit, or OSError if the control group cannot be read.
    """
    if (CGROUP / "memory.max").exists():
        directory, limit_file, used_file, dropped = CGROUP, "memory.max", "memory.current", "inactive_file"
    else:
        directory, limit_file, used_file = CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        dropped = "total_inactive_file"
    limit = (directory / limit_file).read_text().strip()
    if limit == "max" or int(limit) >= _LIMITLESS:
        raise ValueError("the container has no memory limit: set resources.limits.memory")
    counts = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    return int(limit), max(int((directory / used_file).read_text()) - int(counts.get(dropped, 0)), 0)


def press(workers: int, memory_share: float, for_s: float) -> None:
    """End any previous pressure, then start new pressure in the background. Returns without waiting for it to end.

    Args: workers: number of busy processes; memory_share: share of the memory limit (0 to 1) that all processes
    together may reach, or 0 for no memory pressure; for_s: duration in seconds. Raises ValueError if `memory_share` is
    set but the container has no memory limit, or OSError.
    """
    relieve()
    taken_bytes = 0
    if memory_share:
        limit_bytes, used_bytes = memory_bytes()
        taken_bytes = max(int(limit_bytes * memory_share) - used_bytes, 0)
    arguments = [str(workers), str(taken_bytes), str(for_s)]
    files = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    words = [sys.executable, "-m", PRESSURE.decode(), *arguments]
    leader = os.posix_spawn(sys.executable, words, os.environ, file_actions=files, setsid=True)
    PID_FILE.write_text(str(leader))


def relieve() -> None:
    """Kill the processes that `press` started, if they are still running.

    Checks the group's command lines first: the pid file survives a killed container, and the pid may be reused.
    """
    with suppress(FileNotFoundError, ValueError, ProcessLookupError):
        group = int(PID_FILE.read_text())
        if pressure_processes(group):
            os.killpg(group, signal.SIGKILL)
    PID_FILE.unlink(missing_ok=True)


def pressure_processes(group: int) -> list[int]:
    """Return the pids in a process group that run this module in the way in which `press` starts it.

    The group leader may have exited.
    """
    found = []
    for number in (int(one.name) for one in PROC.iterdir() if one.name.isdigit()):
        with suppress(OSError, ValueError, IndexError):
            # Fields after the command name, which may contain spaces: state, parent, group.
            group_of = int((PROC / str(number) / "stat").read_text().rpartition(")")[2].split()[2])
            words = (PROC / str(number) / "cmdline").read_bytes().split(b"\0")
            if group_of == group and (b"-m", PRESSURE) in pairwise(words):
                found.append(number)
    return found


def main(arguments: Sequence[str]) -> None:
    """Put pressure on the container until the time is over. The busy processes are forked.

    `arguments`: number of busy processes, bytes of memory to use, seconds.
    """
    workers, taken_bytes, for_s = int(arguments[0]), int(arguments[1]), float(arguments[2])
    deadline = time.monotonic() + for_s
    for _ in range(workers):
        if os.fork() == 0:
            while time.monotonic() < deadline:
                pass
            os._exit(0)
    if taken_bytes:
        taken = mmap.mmap(-1, taken_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for offset in range(0, taken_bytes, PAGE_BYTES):
            taken[offset] = 1
    time.sleep(max(deadline - time.monotonic(), 0))


if __name__ == "__main__":
    main(sys.argv[1:])
