"""From chunks of bytes to frames: four bytes of length, then that many bytes; headers of requests. Sans-IO.

    framer = Framer(staging, may_take, may_go_on)
    view = framer.buffer()                  # where the next bytes are to be put
    frames = framer.received(number)        # at once: other connections use the same staging buffer

- Whole frames that arrive in the staging buffer are copied out of it once. One that is not complete gets memory of its
  own, into which the rest of it is received: of a large frame, only the beginning is ever copied.
- `may_take(size, key, number)` is asked once for each frame that is taken, as soon as its length and its API key are
  known and before there is memory for it; `number` of its bytes are wanted now. It raises `RefusedError`, or answers
  False where there is no room now: then `is_full` holds, nothing more should be received, and `resume()` asks again.
- The rest of a large frame is asked for in steps, as its bytes come: `may_go_on(step, rest)` gives how many more may be
  received, 0 where there is no room now. Memory grows with them: a length alone holds `FIRST_BYTES` at most.
- What is refused is refused when the frames before it were given out; a length that cannot be, before more has come.
- Invariant: the frames are the same however their bytes were cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, unpack_from
from struct import error as struct_error
from typing import NamedTuple

from kipmesh.messages import SaslAuthenticateResponse
from kipmesh.messages.kafka import MalformedError, Out, skip_tags

STAGING_BYTES = 64 << 10
FIRST_BYTES = 16 << 10
"""Of a frame that is not complete, wanted at once; then three times what there is."""
HEADER_BYTES_MIN = 10
"""Of a request: key, version, correlation id, and the length of the client's id."""
HEADER_TAGS_MAX = 100
"""Tagged fields of a request's header; Kafka has none yet."""
_LENGTH, _KEY = Struct(">i"), Struct(">h")
_NO_KEY = -1

MayTake = Callable[[int, int, int], bool]
MayGoOn = Callable[[int, int], int]


class RefusedError(Exception):
    """Bytes that are not taken, and why; the connection is of no more use."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Framer:
    """Of one connection."""

    __slots__ = (
        "_frame",
        "_have",
        "_may_go_on",
        "_may_take",
        "_refusal",
        "_rest",
        "_size",
        "_size_min",
        "_staging",
        "is_full",
    )

    def __init__(
        self, staging: bytearray, may_take: MayTake, may_go_on: MayGoOn, size_min: int = HEADER_BYTES_MIN
    ) -> None:
        self._staging = staging
        self._size_min = size_min
        self._may_take = may_take
        self._may_go_on = may_go_on
        self._rest = b""  # received, and in no frame yet
        self._frame: bytearray | None = None  # as long as what may be received of it
        self._have = self._size = 0
        self._refusal: RefusedError | None = None
        self.is_full = False
        """Nothing more should be received: there is no room for the next bytes, or they are refused."""

    @property
    def is_within_frame(self) -> bool:
        """Whether a frame was taken that is not complete."""
        return self._frame is not None

    @property
    def granted(self) -> int:
        """Bytes of the frame that is not complete for which there is room; 0 if there is none."""
        return 0 if self._frame is None else len(self._frame)

    def buffer(self) -> memoryview:
        """Where to receive."""
        if self._frame is not None and not self.is_full:
            return memoryview(self._frame)[self._have :]
        return memoryview(self._staging)

    def received(self, number: int) -> list[bytes | bytearray]:
        """So many bytes were put into `buffer()`: the frames that are complete now. Raises RefusedError."""
        if self.is_full:
            self._rest += self._staging[:number]
            return []
        if self._frame is not None:
            self._have += number
            return self._go_on()
        if not self._rest:
            return self._cut(memoryview(self._staging)[:number])
        return self._cut(memoryview(self._rest + self._staging[:number]))

    def resume(self) -> list[bytes | bytearray]:
        """There may be room again, or what came before is done: further frames. Raises RefusedError."""
        if not self.is_full:
            return []
        if self._refusal is not None:
            raise self._refusal
        self.is_full = False
        return self._cut(memoryview(self._rest)) if self._frame is None else self._go_on()

    def _go_on(self) -> list[bytes | bytearray]:
        """The frame, if it is complete now, and what was received after it while it had no room."""
        frame = self._frame
        assert frame is not None
        while self._have < self._size:
            if self._have == len(frame):
                rest = self._size - self._have
                more = self._may_go_on(min(rest, max(FIRST_BYTES, 3 * self._have)), rest)
                if not more:
                    self.is_full = True
                    return []
                # Not extended in place: whoever received into it may still hold a view of it.
                self._frame = bytearray(self._have + more)
                self._frame[: self._have] = frame
                frame = self._frame
            if not self._rest:
                return []
            part = self._rest[: len(frame) - self._have]
            frame[self._have : self._have + len(part)] = part
            self._have += len(part)
            self._rest = self._rest[len(part) :]
        self._frame = None
        return [frame, *self._cut(memoryview(self._rest), is_first=False)]

    def _cut(self, view: memoryview, *, is_first: bool = True) -> list[bytes | bytearray]:
        frames: list[bytes | bytearray] = []
        at, end = 0, len(view)
        while end - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(view, at)
            there = end - at - _LENGTH.size
            if size >= self._size_min and there < min(size, _KEY.size):
                break
            key = _KEY.unpack_from(view, at + _LENGTH.size)[0] if min(size, there) >= _KEY.size else _NO_KEY
            wanted = min(size, max(there, FIRST_BYTES))
            if not self._takes(size, key, wanted, is_first=is_first and not frames):
                self.is_full = True
                break
            at += _LENGTH.size
            if there < size:
                self._frame, self._have, self._size = bytearray(wanted), there, size
                self._frame[:there] = view[at:]
                self._rest = b""
                return frames if there < wanted else [*frames, *self._go_on()]
            frames.append(bytes(view[at : at + size]))
            at += size
        self._rest = bytes(view[at:])
        return frames

    def _takes(self, size: int, key: int, wanted: int, *, is_first: bool) -> bool:
        """Whether the next frame is taken now; a refusal waits until the frames before it were given out."""
        try:
            if size < self._size_min:
                raise RefusedError("length", f"a frame of {size} bytes")
            return self._may_take(size, key, wanted)
        except RefusedError as error:
            if is_first:
                raise
            self._refusal = error
            return False


class Header(NamedTuple):
    """The beginning of a request."""

    key: int
    version: int
    correlation_id: int
    client_id: str
    body: int
    """The position of the body."""


def read_header(view: memoryview, flexible: Callable[[int, int], bool]) -> Header:
    """Return the header of a frame. Raises MalformedError.

    `flexible` states whether an API key and a version have tagged fields in the header.
    """
    try:
        key, version, correlation_id, size = unpack_from(">hhih", view, 0)
        at = 10 + max(size, 0)
        if size < -1 or at > len(view):
            raise MalformedError(f"a client id of {size} bytes")
        client_id = str(view[10:at], "utf-8")
        if flexible(key, version):
            at = skip_tags(view, at, [HEADER_TAGS_MAX])
    except (struct_error, IndexError, ValueError) as error:
        raise MalformedError(f"a request's header: {error}") from None
    return Header(key, version, correlation_id, client_id, at)


def encode_bare(response: SaslAuthenticateResponse) -> Out:
    """Return the frame of a SASL message without a header; nothing for an error."""
    out = Out()
    if not response.error_code:
        out += len(response.auth_bytes).to_bytes(4, "big")
        out += response.auth_bytes
    return out
