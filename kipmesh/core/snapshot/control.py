"""The control records that a snapshot begins and ends with, in Kafka's schemas (630-02).

A control record's key is its version (0) and type. Types that are not listed are for readers to skip.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct, error
from typing import NamedTuple

from kipmesh.core.errors import CorruptRecordError

_KEY = Struct(">hh")
_HEADER = Struct(">hq")
_FOOTER = Struct(">h")
_NO_TAGS = b"\0"


class ControlType(IntEnum):
    """Kafka's control records that a log or a snapshot of metadata can have."""

    LEADER_CHANGE = 2
    SNAPSHOT_HEADER = 3
    SNAPSHOT_FOOTER = 4
    KRAFT_VERSION = 5
    KRAFT_VOTERS = 6


class SnapshotHeader(NamedTuple):
    """Begins a snapshot."""

    version: int = 0
    last_contained_log_timestamp: int = 0
    """When the last record that is in it was appended, in ms."""


class SnapshotFooter(NamedTuple):
    """Ends a snapshot: what has one was written to its end."""

    version: int = 0


def encode_header(header: SnapshotHeader) -> tuple[bytes, bytes]:
    """Key and value."""
    return _KEY.pack(0, ControlType.SNAPSHOT_HEADER), _HEADER.pack(*header) + _NO_TAGS


def encode_footer(footer: SnapshotFooter) -> tuple[bytes, bytes]:
    """Key and value."""
    return _KEY.pack(0, ControlType.SNAPSHOT_FOOTER), _FOOTER.pack(*footer) + _NO_TAGS


def control_type(key: bytes | None) -> int:
    """The type that a control record's key says; CorruptRecordError."""
    try:
        return int(_KEY.unpack_from(key or b"")[1])
    except error:
        raise CorruptRecordError("a control record's key is shorter than its version and type") from None


def decode_header(value: bytes | None) -> SnapshotHeader:
    """The value of a SnapshotHeader; what newer versions add is skipped; CorruptRecordError."""
    try:
        return SnapshotHeader(*_HEADER.unpack_from(value or b""))
    except error:
        raise CorruptRecordError("a snapshot's header is cut") from None


def decode_footer(value: bytes | None) -> SnapshotFooter:
    """The value of a SnapshotFooter; what newer versions add is skipped; CorruptRecordError."""
    try:
        return SnapshotFooter(*_FOOTER.unpack_from(value or b""))
    except error:
        raise CorruptRecordError("a snapshot's footer is cut") from None
