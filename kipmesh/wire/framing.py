"""From chunks of bytes to frames: four bytes of length, then that many bytes. Sans-IO.

    framer = Framer(staging, may_take)
    view = framer.buffer()                  # where the next bytes are to be put
    frames = framer.received(number)        # at once: other connections use the same staging buffer

- Whole frames that arrive in the staging buffer are copied out of it once. One that is not complete gets memory of its
  own, into which the rest of it is received: of a large frame, only the beginning is ever copied.
- `may_take(size, key)` is asked once for each frame that is taken, as soon as its length and its API key are known and
  before there is memory for it. It raises `RefusedError`, or answers False where there is no room now: then `is_full`
  holds, nothing more should be received, and `resume()` asks again.
- What is refused is refused when the frames before it were given out.
- Invariant: the frames are the same however their bytes were cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

STAGING_BYTES = 64 << 10
HEADER_BYTES_MIN = 10
"""Of a request: key, version, correlation id, and the length of the client's id."""
_PREFIX = Struct(">ih")
_LENGTH_BYTES = 4

MayTake = Callable[[int, int], bool]


class RefusedError(Exception):
    """Bytes that are not taken, and why; the connection is of no more use."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Framer:
    """Of one connection."""

    __slots__ = ("_frame", "_have", "_may_take", "_refusal", "_rest", "_staging", "is_full")

    def __init__(self, staging: bytearray, may_take: MayTake) -> None:
        self._staging = staging
        self._may_take = may_take
        self._rest = b""  # received, and in no frame yet
        self._frame: bytearray | None = None
        self._have = 0
        self._refusal: RefusedError | None = None
        self.is_full = False
        """Nothing more should be received: there is no room for the next frame, or it is refused."""

    @property
    def frame_bytes(self) -> int:
        """Bytes of the frame that was taken and is not complete; 0 if there is none."""
        return 0 if self._frame is None else len(self._frame)

    def buffer(self) -> memoryview:
        """Where to receive."""
        if self._frame is not None:
            return memoryview(self._frame)[self._have :]
        return memoryview(self._staging)

    def received(self, number: int) -> list[bytes | bytearray]:
        """So many bytes were put into `buffer()`: the frames that are complete now. Raises RefusedError."""
        if self._frame is not None:
            self._have += number
            if self._have < len(self._frame):
                return []
            frame, self._frame = self._frame, None
            return [frame]
        if not self._rest:
            return self._cut(memoryview(self._staging)[:number])
        self._rest += self._staging[:number]
        return [] if self.is_full else self._cut(memoryview(self._rest))

    def resume(self) -> list[bytes | bytearray]:
        """There may be room again, or what came before is done: further frames. Raises RefusedError."""
        if not self.is_full:
            return []
        if self._refusal is not None:
            raise self._refusal
        self.is_full = False
        return self._cut(memoryview(self._rest))

    def _cut(self, view: memoryview) -> list[bytes | bytearray]:
        frames: list[bytes | bytearray] = []
        at, end = 0, len(view)
        while end - at >= _PREFIX.size:
            size, key = _PREFIX.unpack_from(view, at)
            if not self._takes(size, key, is_first=not frames):
                self.is_full = True
                break
            at += _LENGTH_BYTES
            if end - at < size:
                self._frame = bytearray(size)
                self._have = end - at
                self._frame[: self._have] = view[at:]
                at = end
                break
            frames.append(bytes(view[at : at + size]))
            at += size
        self._rest = bytes(view[at:])
        return frames

    def _takes(self, size: int, key: int, *, is_first: bool) -> bool:
        """Whether the next frame is taken now; a refusal waits until the frames before it were given out."""
        try:
            if size < HEADER_BYTES_MIN:
                raise RefusedError("length", f"a frame of {size} bytes")
            return self._may_take(size, key)
        except RefusedError as error:
            if is_first:
                raise
            self._refusal = error
            return False
