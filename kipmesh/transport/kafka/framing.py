"""Splits a byte stream into frames (a length of four bytes, then the bytes) and reads request headers. Sans-IO.

    view = framer.buffer()                  # receive the next bytes here
    frames = framer.received(number)        # call immediately: other connections share the staging buffer

`reserve(size, key, number)` is called once per frame, for its first `number` bytes. It raises RefusedError, or returns
False if memory is full: then `is_full` is set until `resume()` is called. `extend(step, rest)` reserves more bytes as a
large frame arrives, so that an announced length alone holds at most FIRST_BYTES.
Invariant: the frames do not depend on how the bytes were split. A refusal is raised after all frames before it.
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
"""Bytes that are reserved for the start of an incomplete frame; each extension is three times the received bytes."""
HEADER_BYTES_MIN = 10
"""Minimum size of a request: API key, version, correlation id, and the length of the client id."""
HEADER_TAGS_MAX = 100
"""Maximum number of tagged fields in a request header; Apache Kafka defines none yet."""
_LENGTH, _KEY = Struct(">i"), Struct(">h")
_NO_KEY = -1

Reserve = Callable[[int, int, int], bool]
Extend = Callable[[int, int], int]


class RefusedError(Exception):
    """Raised for a frame with an invalid length or above a size limit. The connection must be closed.

    `reason` is a label of `kipmesh_wire_connections_ended_total`.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Framer:
    """The framing state of one connection. `size_min` is the minimum length of a frame."""

    __slots__ = (
        "_extend",
        "_frame",
        "_have",
        "_refusal",
        "_reserve",
        "_rest",
        "_size",
        "_size_min",
        "_staging",
        "is_full",
    )

    def __init__(self, staging: bytearray, reserve: Reserve, extend: Extend, size_min: int = HEADER_BYTES_MIN) -> None:
        self._staging = staging
        self._size_min = size_min
        self._reserve = reserve
        self._extend = extend
        self._rest = b""  # received bytes that belong to no frame yet
        self._frame: bytearray | None = None  # incomplete frame; its length is the reserved memory
        self._have = self._size = 0
        self._refusal: RefusedError | None = None
        self.is_full = False
        """Whether reading must stop, because memory is full or the next bytes are refused."""

    @property
    def is_within_frame(self) -> bool:
        """Whether there is an incomplete frame with reserved memory."""
        return self._frame is not None

    @property
    def granted(self) -> int:
        """Bytes that are reserved for the incomplete frame, or 0 if there is none."""
        return 0 if self._frame is None else len(self._frame)

    def buffer(self) -> memoryview:
        """Return the buffer for the next received bytes, valid until `received` is called."""
        if self._frame is not None and not self.is_full:
            return memoryview(self._frame)[self._have :]
        return memoryview(self._staging)

    def received(self, number: int) -> list[bytes | bytearray]:
        """Process `number` bytes that were written into `buffer()`. Returns the frames that are complete now, if any.

        Raises RefusedError if the first frame to return has an invalid length or is above a size limit.
        """
        if self.is_full:
            self._rest += self._staging[:number]
            return []
        if self._frame is not None:
            self._have += number
            return self._continue_frame()
        if not self._rest:
            return self._cut(memoryview(self._staging)[:number])
        return self._cut(memoryview(self._rest + self._staging[:number]))

    def resume(self) -> list[bytes | bytearray]:
        """Continue after memory was released. Returns the frames that are complete now, or none unless `is_full`.

        Raises RefusedError for a frame with an invalid length or above a size limit.
        """
        if not self.is_full:
            return []
        if self._refusal is not None:
            raise self._refusal
        self.is_full = False
        return self._cut(memoryview(self._rest)) if self._frame is None else self._continue_frame()

    def _continue_frame(self) -> list[bytes | bytearray]:
        """Return the frame if it is complete now, and the frames that were received after it while memory was full."""
        frame = self._frame
        assert frame is not None
        while self._have < self._size:
            if self._have == len(frame):
                rest = self._size - self._have
                more = self._extend(min(rest, max(FIRST_BYTES, 3 * self._have)), rest)
                if not more:
                    self.is_full = True
                    return []
                # Copied, because the transport may still hold a view of the old buffer.
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
            available = end - at - _LENGTH.size
            if size >= self._size_min and available < min(size, _KEY.size):
                break
            key = _KEY.unpack_from(view, at + _LENGTH.size)[0] if min(size, available) >= _KEY.size else _NO_KEY
            wanted = min(size, max(available, FIRST_BYTES))
            if not self._accepts(size, key, wanted, is_first=is_first and not frames):
                self.is_full = True
                break
            at += _LENGTH.size
            if available < size:
                self._frame, self._have, self._size = bytearray(wanted), available, size
                self._frame[:available] = view[at:]
                self._rest = b""
                return frames if available < wanted else [*frames, *self._continue_frame()]
            frames.append(bytes(view[at : at + size]))
            at += size
        self._rest = bytes(view[at:])
        return frames

    def _accepts(self, size: int, key: int, wanted: int, *, is_first: bool) -> bool:
        """Return whether memory was reserved for the next frame.

        A refusal is not raised until the frames before this one have been returned.
        """
        try:
            if size < self._size_min:
                raise RefusedError("length", f"frame length must be at least {self._size_min}, got {size}")
            return self._reserve(size, key, wanted)
        except RefusedError as error:
            if is_first:
                raise
            self._refusal = error
            return False


class Header(NamedTuple):
    """The header of a request."""

    key: int
    version: int
    correlation_id: int
    client_id: str
    body: int
    """Position of the body in the frame."""


def read_header(view: memoryview, flexible: Callable[[int, int], bool]) -> Header:
    """Return the header of a frame. Raises MalformedError if it is invalid or incomplete.

    `flexible(key, version)` returns whether the header has tagged fields.
    """
    try:
        key, version, correlation_id, size = unpack_from(">hhih", view, 0)
        at = 10 + max(size, 0)
        if size < -1 or at > len(view):
            raise MalformedError(f"client id length {size} exceeds the frame")
        client_id = str(view[10:at], "utf-8")
        if flexible(key, version):
            at = skip_tags(view, at, [HEADER_TAGS_MAX])
    except (struct_error, IndexError, ValueError) as error:
        raise MalformedError(f"invalid request header: {error}") from None
    return Header(key, version, correlation_id, client_id, at)


def encode_bare(response: SaslAuthenticateResponse) -> Out:
    """Return the frame of a SASL message without a header (SaslHandshake v0), or nothing for an error."""
    out = Out()
    if not response.error_code:
        out += len(response.auth_bytes).to_bytes(4, "big")
        out += response.auth_bytes
    return out
