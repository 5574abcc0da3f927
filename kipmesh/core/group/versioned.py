"""Kafka's older message format: two bytes of a version, then fields whose lengths are fixed-size numbers.

It is what `__consumer_offsets` and the consumers' embedded protocol are written in. A schema says of each field what
Kafka's own schema files say, one line a field: `"topics []string"`, `"userData bytes?"` (nullable), `"generation_id
int32 2+"` (since version 2), `"expire_timestamp int64 1-1"` (in version 1 only). From `flexible_since` on the lengths
are varints and tagged fields follow, which are skipped.

Invariants: `decode(encode(value, v)) == value` for each value whose fields `v` has; bytes that are not a whole message
raise CorruptRecordError, never anything else. A version above the last known one is read as that, with what follows
left alone, where `newer_versions_extend` says that they only add to the end; `is_prefix` is for a schema of the first
fields alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata.schema import Reader, write_unsigned_varint

Value = Any  # a NamedTuple that a schema describes

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_NUMBERS = {"int16": _INT16, "int32": _INT32, "int64": struct.Struct(">q")}
_STRING_BYTES_MAX = 32767
_NEVER = 1 << 15


class _Type(NamedTuple):
    name: str
    is_array: bool
    is_nullable: bool


class _Field(NamedTuple):
    name: str
    type: _Type
    since: int
    until: int
    default: Any

    def is_in(self, version: int) -> bool:
        return self.since <= version <= self.until


class VersionedSchema:
    """How values of one NamedTuple type are written; see the module's text for the fields' notation."""

    def __init__(
        self,
        value_type: Any,
        lines: tuple[str, ...],
        structs: Mapping[str, VersionedSchema] | None = None,
        *,
        versions: tuple[int, int] = (0, 0),
        flexible_since: int = _NEVER,
        newer_versions_extend: bool = False,
        is_prefix: bool = False,
    ) -> None:
        self.value_type = value_type
        self.first_version, self.last_version = versions
        self._structs = structs or {}
        self._flexible_since = flexible_since
        self._newer_versions_extend = newer_versions_extend
        self._is_prefix = is_prefix
        self._fields = tuple(_field(line, value_type) for line in lines)
        names = tuple(field.name for field in self._fields)
        if names != value_type._fields:
            raise TypeError(f"the schema of {value_type.__name__} has {names}")

    def encode(self, value: Value, version: int) -> bytes:
        """The version and the value; fields that the version lacks are left out."""
        out = bytearray(_INT16.pack(version))
        self.write(out, value, version, is_flexible=version >= self._flexible_since)
        return bytes(out)

    def decode(self, data: bytes) -> Value:
        """The value that a whole message says; raises CorruptRecordError, also for a version that is not known."""
        reader = Reader(data)
        version = _INT16.unpack(reader.take(2))[0]
        is_newer = version > self.last_version
        if version < self.first_version or (is_newer and not self._newer_versions_extend):
            raise CorruptRecordError(f"version {version} of {self.value_type.__name__}")
        version = min(version, self.last_version)
        value = self.read(reader, version, is_flexible=version >= self._flexible_since)
        if not is_newer and not self._is_prefix:
            reader.expect_end()
        return value

    def write(self, out: bytearray, value: Value, version: int, *, is_flexible: bool) -> None:
        """Append the fields of `version`."""
        for field, part in zip(self._fields, value, strict=True):
            if field.is_in(version):
                self._write(out, field.type, part, version, is_flexible)
        if is_flexible:
            out.append(0)  # tagged fields

    def read(self, reader: Reader, version: int, *, is_flexible: bool) -> Value:
        """The value at the reader's position; a field that the version lacks has its default."""
        parts = [
            self._read(reader, field.type, version, is_flexible) if field.is_in(version) else field.default
            for field in self._fields
        ]
        if is_flexible:
            for _ in range(reader.unsigned_varint()):
                reader.unsigned_varint()
                reader.take(reader.unsigned_varint())
        return self.value_type(*parts)

    def _write(self, out: bytearray, type_: _Type, part: Any, version: int, is_flexible: bool) -> None:
        if type_.is_array:
            _write_size(out, len(part), _INT32, is_flexible)
            item = _Type(type_.name, False, False)
            for one in part:
                self._write(out, item, one, version, is_flexible)
        elif type_.name in _NUMBERS:
            out += _NUMBERS[type_.name].pack(part)
        elif type_.name in self._structs:
            self._structs[type_.name].write(out, part, version, is_flexible=is_flexible)
        elif part is None:
            if not type_.is_nullable:
                raise ValueError("null where a value is required")
            _write_size(out, -1, _length_of(type_.name), is_flexible)
        else:
            raw = part.encode() if type_.name == "string" else part
            if type_.name == "string" and not is_flexible and len(raw) > _STRING_BYTES_MAX:
                raise ValueError(f"a string of {len(raw)} bytes; at most {_STRING_BYTES_MAX} can be written")
            _write_size(out, len(raw), _length_of(type_.name), is_flexible)
            out += raw

    def _read(self, reader: Reader, type_: _Type, version: int, is_flexible: bool) -> Any:
        if type_.is_array:
            size = _read_size(reader, _INT32, is_flexible)
            if not 0 <= size <= reader.end - reader.position:  # an item has at least one byte
                raise CorruptRecordError(f"an array of {size} items in {reader.end - reader.position} bytes")
            item = _Type(type_.name, False, False)
            return tuple([self._read(reader, item, version, is_flexible) for _ in range(size)])
        if type_.name in _NUMBERS:
            number = _NUMBERS[type_.name]
            return number.unpack(reader.take(number.size))[0]
        if type_.name in self._structs:
            return self._structs[type_.name].read(reader, version, is_flexible=is_flexible)
        size = _read_size(reader, _length_of(type_.name), is_flexible)
        if size == -1 and type_.is_nullable:
            return None
        raw = reader.take(size)
        if type_.name == "bytes":
            return raw
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CorruptRecordError(f"a string is not UTF-8: {error}") from None


def _length_of(name: str) -> struct.Struct:
    return _INT16 if name == "string" else _INT32


def _write_size(out: bytearray, size: int, fixed: struct.Struct, is_flexible: bool) -> None:
    if is_flexible:
        write_unsigned_varint(out, size + 1)
    else:
        out += fixed.pack(size)


def _read_size(reader: Reader, fixed: struct.Struct, is_flexible: bool) -> int:
    unpack: Callable[[bytes], tuple[Any, ...]] = fixed.unpack
    return reader.unsigned_varint() - 1 if is_flexible else int(unpack(reader.take(fixed.size))[0])


def _field(line: str, value_type: Any) -> _Field:
    name, type_, *rest = line.split()
    since, until = 0, _NEVER
    if rest:
        first, _, last = rest[0].removesuffix("+").partition("-")
        since, until = int(first), int(last) if last else until
    item = type_.removesuffix("?").removeprefix("[]")
    kind = _Type(item, type_.startswith("[]"), type_.endswith("?"))
    return _Field(name, kind, since, until, value_type._field_defaults.get(name))
