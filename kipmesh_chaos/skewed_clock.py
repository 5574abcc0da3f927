"""`python -m kipmesh_chaos.skewed_clock FILE MODULE ARGUMENTS...`: run a module under a wall clock that can jump.

FILE holds one number, a signed 64-bit integer of nanoseconds, which is added to every reading of Python's wall clock;
who changes the file makes the clock jump at once. What measures durations (`time.monotonic`, timers of the event loop
and of gRPC) does not jump, as on Linux.
"""

from __future__ import annotations

import mmap
import runpy
import struct
import sys
import time
from pathlib import Path

_OFFSET = struct.Struct("=q")


def set_offset(file: Path, offset_s: float) -> None:
    """Make the clock of who runs under this file jump; makes the file."""
    data = _OFFSET.pack(round(offset_s * 1e9))
    if not file.exists():
        file.write_bytes(data)
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), _OFFSET.size) as view:
        view[:] = data


def skew(file: Path) -> None:
    """From now on `time.time` and `time.time_ns` of this process have the offset of the file."""
    with file.open("rb") as stream:
        view = mmap.mmap(stream.fileno(), _OFFSET.size, access=mmap.ACCESS_READ)
    true_ns = time.time_ns

    def skewed_ns() -> int:
        return true_ns() + int(_OFFSET.unpack(view[:])[0])

    def skewed() -> float:
        return skewed_ns() / 1e9

    time.time_ns = skewed_ns
    time.time = skewed


def main() -> None:
    """Run the module as `python -m` would."""
    file, module = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    skew(Path(file))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
