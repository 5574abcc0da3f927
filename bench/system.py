"""What Linux says about processes and the machine: memory, CPU time, loopback traffic."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def with_children(pids: Iterable[int]) -> list[int]:
    """The processes and all that they started."""
    found: list[int] = []
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for children in PROC.glob(f"{pid}/task/*/children"):
            try:
                waiting += map(int, children.read_text().split())
            except OSError:  # the thread or the process has ended
                continue
    return found


def pss_bytes(pids: Iterable[int]) -> int:
    """Memory of the processes together; pages that several share count once."""
    total = 0
    for pid in pids:
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time that the processes have used so far, in user and system mode."""
    ticks = 0
    for pid in pids:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_SECOND


def peak_resident_bytes() -> int:
    """The most memory that this process ever had; `getrusage` gives the parent's if that was larger when it forked."""
    for line in (PROC / "self" / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def loopback_bytes() -> int:
    """Bytes that the loopback interface has received so far, of everything on this machine."""
    for line in (PROC / "net" / "dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise OSError("no loopback interface")


def describe_machine() -> dict[str, str | int | float]:
    """What figures depend on and a reader should know."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    models = [
        line.partition(":")[2].strip()
        for line in (PROC / "cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": models[0] if models else "unknown",
        "memory_gib": round(memory / (1 << 30), 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
    }
