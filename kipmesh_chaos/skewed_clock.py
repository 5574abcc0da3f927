"""`python -m kipmesh_chaos.skewed_clock FILE MODULE ARGUMENTS...`: run a module under a wall clock that can jump.

FILE holds a signed 64-bit number of nanoseconds that is added to every reading of Python's wall clock. A change of the
file makes the clock jump immediately. Monotonic clocks, and so the timers of asyncio and gRPC, are not affected, as on
Linux.
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
    """Set the offset in a clock file, in seconds; creates the file if necessary. Running processes that use the file
    see the change immediately. Raises OSError.
    """
    data = _OFFSET.pack(round(offset_s * 1e9))
    if not file.exists():
        file.write_bytes(data)
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), _OFFSET.size) as view:
        view[:] = data


def skew(file: Path) -> None:
    """Make `time.time` and `time.time_ns` of this process add the current offset in the file. Raises OSError."""
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
    """Run the module that the command line names under the skewed clock, as `python -m` would."""
    file, module = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    skew(Path(file))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
