"""Memory, CPU time and loopback traffic of processes and of the machine, from Linux's /proc."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def with_children(pids: Iterable[int]) -> list[int]:
    """Return the process ids `pids` and those of all their descendants that are running."""
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
    """Return the sum of the proportional set sizes of the processes in bytes; a page shared only by them counts once.
    Raises OSError if one has ended.
    """
    total = 0
    for pid in pids:
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds of the processes so far, user and system mode together. Raises OSError if one
    has ended.
    """
    ticks = 0
    for pid in pids:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_SECOND


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process in bytes. `getrusage` would include the parent's memory before
    the fork. Raises OSError if it is unknown.
    """
    for line in (PROC / "self" / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface has received so far, from all processes of this machine. Raises
    OSError without that interface.
    """
    for line in (PROC / "net" / "dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise OSError("no loopback interface")


def idle_load(pids: Iterable[int], seconds: float) -> tuple[float, float]:
    """Wait for `seconds`, and return (CPU use of the processes in percent of one core, loopback traffic in kB/s) during
    that time. Raises OSError if a process ends.
    """
    pids = list(pids)
    cpu, loopback, begin = cpu_seconds(pids), loopback_bytes(), time.perf_counter()
    time.sleep(seconds)
    passed = time.perf_counter() - begin
    return (cpu_seconds(pids) - cpu) / passed * 100, (loopback_bytes() - loopback) / passed / 1e3


def describe_machine() -> dict[str, str | int | float]:
    """Return processors, memory, Python version, kernel and load, on which the figures depend."""
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
