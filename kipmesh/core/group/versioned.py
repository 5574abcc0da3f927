"""Records that begin with their version: those of `__consumer_offsets`, and what consumers exchange in a group.

Invariants: `decode(of, encode(value, v)) == value` for each value whose fields `v` has; bytes that are not a whole
message raise CorruptRecordError, never anything else.
"""

from __future__ import annotations

import struct
from typing import TypeVar

from kipmesh.core.errors import CorruptRecordError
from kipmesh.messages.kafka import ITEMS_MAX, MalformedError, Out, record_codec
from kipmesh.messages.schema import Message

_M = TypeVar("_M", bound=Message)
_VERSION = struct.Struct(">h")


def encode(value: Message, version: int) -> bytes:
    """Return the version and the value, without fields that the version lacks.

    Raises ValueError for a value that a field cannot state.
    """
    out = Out()
    out += _VERSION.pack(version)
    try:
        record_codec(type(value), version, strict=False).write(out, value)
    except (struct.error, AttributeError) as error:
        raise ValueError(f"{type(value).__name__}: {error}") from None
    return bytes(out)


def decode(of: type[_M], data: bytes, *, newer_versions_extend: bool = False, is_prefix: bool = False) -> _M:
    """Return the value of a whole message. Raises CorruptRecordError, also for an unknown version.

    With `newer_versions_extend` a newer version is read as the last known one, and what follows is ignored. With
    `is_prefix` whatever follows the value is ignored.
    """
    key = of.record_key
    if len(data) < _VERSION.size:
        raise CorruptRecordError(f"{of.__name__}: {len(data)} bytes")
    (version,) = _VERSION.unpack_from(data)
    is_newer = version > key.versions.last
    if version < key.versions.first or (is_newer and not newer_versions_extend):
        raise CorruptRecordError(f"version {version} of {of.__name__}")
    try:
        value, end = record_codec(of, min(version, key.versions.last), strict=False).read(
            data, _VERSION.size, max(ITEMS_MAX, len(data))
        )
    except MalformedError as error:
        raise CorruptRecordError(str(error)) from None
    if end != len(data) and not is_newer and not is_prefix:
        raise CorruptRecordError(f"{len(data) - end} bytes are left after {of.__name__}")
    found: _M = value
    return found
