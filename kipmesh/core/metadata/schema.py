"""Kafka's flexible message format for values described by a line of text a field.

A schema says of each field what Kafka's own schema files say: `"isr []int32? @0"` is a nullable array of int32 in the
tagged field 0, `"directories []uuid 1+"` a field that version 1 brought. The fields' defaults are those of the value
type; a tagged field that has its default is not written, and an unknown tagged field is skipped.

Invariants: `decode(encode(value, v), v) == value` for each value whose fields `v` knows; bytes that are not a whole
message raise CorruptRecordError, never anything else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kipmesh.core.errors import CorruptRecordError

Value = Any  # a NamedTuple that a schema describes

ZERO_UUID = bytes(16)


class Reader:
    """A position in a message's bytes; each method takes one value and moves on, or raises CorruptRecordError."""

    __slots__ = ("data", "end", "position")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.end = len(data)

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        start = self.position
        if size < 0 or start + size > self.end:
            raise CorruptRecordError(f"the message ends at byte {self.end}, {start + size} are needed")
        self.position = start + size
        return self.data[start : self.position]

    def unsigned_varint(self) -> int:
        """A number of up to 32 bits, seven a byte, the lowest first."""
        value = shift = 0
        while shift <= 28:
            if self.position >= self.end:
                raise CorruptRecordError(f"the message ends at byte {self.end}, within a number")
            byte = self.data[self.position]
            self.position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise CorruptRecordError("a number of more than 32 bits")

    def expect_end(self) -> None:
        """Raise CorruptRecordError when bytes are left."""
        if self.position != self.end:
            raise CorruptRecordError(f"{self.end - self.position} bytes are left after the message")


def write_unsigned_varint(out: bytearray, value: int) -> None:
    """Append `value` (0 or more), seven bits a byte, the lowest first."""
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


class _Kind(NamedTuple):
    """How values of one type are written and read; `optional_*` is the nullable form, if the type has one."""

    write: Callable[[bytearray, Any], None]
    read: Callable[[Reader], Any]
    write_nullable: Callable[[bytearray, Any], None] | None = None
    read_nullable: Callable[[Reader], Any] | None = None


def _number(format_: str) -> _Kind:
    packed = struct.Struct(format_)

    def write(out: bytearray, value: float) -> None:
        out += packed.pack(value)

    def read(reader: Reader) -> Any:
        return packed.unpack(reader.take(packed.size))[0]

    return _Kind(write, read)


def _write_uuid(out: bytearray, value: bytes) -> None:
    if len(value) != 16:
        raise ValueError(f"an id has 16 bytes, not {len(value)}")
    out += value


def _write_bytes(out: bytearray, value: bytes) -> None:
    write_unsigned_varint(out, len(value) + 1)
    out += value


def _write_string(out: bytearray, value: str) -> None:
    _write_bytes(out, value.encode())


def _read_nullable_bytes(reader: Reader) -> bytes | None:
    size = reader.unsigned_varint()
    return None if size == 0 else reader.take(size - 1)


def _read_bytes(reader: Reader) -> bytes:
    value = _read_nullable_bytes(reader)
    if value is None:
        raise CorruptRecordError("null where a value is required")
    return value


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise CorruptRecordError(f"a string is not UTF-8: {error}") from None


def _read_nullable_string(reader: Reader) -> str | None:
    value = _read_nullable_bytes(reader)
    return None if value is None else _text(value)


def _nullable(write: Callable[[bytearray, Any], None]) -> Callable[[bytearray, Any], None]:
    def write_nullable(out: bytearray, value: Any) -> None:
        if value is None:
            out.append(0)
        else:
            write(out, value)

    return write_nullable


_KINDS: Mapping[str, _Kind] = {
    "bool": _number(">?"),
    "int8": _number(">b"),
    "int16": _number(">h"),
    "uint16": _number(">H"),
    "int32": _number(">i"),
    "int64": _number(">q"),
    "float64": _number(">d"),
    "uuid": _Kind(_write_uuid, lambda reader: reader.take(16)),
    "bytes": _Kind(_write_bytes, _read_bytes, _nullable(_write_bytes), _read_nullable_bytes),
    "string": _Kind(
        _write_string, lambda reader: _text(_read_bytes(reader)), _nullable(_write_string), _read_nullable_string
    ),
}


def _array(item: _Kind) -> _Kind:
    def write(out: bytearray, values: Any) -> None:
        write_unsigned_varint(out, len(values) + 1)
        for value in values:
            item.write(out, value)

    def read_nullable(reader: Reader) -> Any:
        size = reader.unsigned_varint()
        if size == 0:
            return None
        if size - 1 > reader.end - reader.position:  # an item has at least one byte
            raise CorruptRecordError(f"an array of {size - 1} items in {reader.end - reader.position} bytes")
        return tuple([item.read(reader) for _ in range(size - 1)])

    def read(reader: Reader) -> Any:
        value = read_nullable(reader)
        if value is None:
            raise CorruptRecordError("null where an array is required")
        return value

    return _Kind(write, read, _nullable(write), read_nullable)


class Field(NamedTuple):
    """One field of a schema, in the order of the value type's fields."""

    name: str
    since: int
    tag: int | None
    default: Any
    write: Callable[[bytearray, Any], None]
    read: Callable[[Reader], Any]


class Schema:
    """How values of one NamedTuple type are written: see the module's text for the fields' notation."""

    def __init__(self, value_type: Any, lines: tuple[str, ...], structs: Mapping[str, Schema] | None = None) -> None:
        self.value_type = value_type
        self.fields = tuple(_field(line, value_type, structs or {}) for line in lines)
        names = tuple(field.name for field in self.fields)
        if names != value_type._fields:
            raise TypeError(f"the schema of {value_type.__name__} has {names}")
        self._tags = {field.tag: index for index, field in enumerate(self.fields) if field.tag is not None}

    def write(self, out: bytearray, value: Value, version: int) -> None:
        """Append `value` in `version`; raises ValueError when the version lacks a field that is not its default."""
        tagged = []
        for field, part in zip(self.fields, value, strict=True):
            if field.since > version:
                if part != field.default:
                    raise ValueError(f"version {version} of {self.value_type.__name__} has no {field.name}")
            elif field.tag is None:
                field.write(out, part)
            elif part != field.default:
                tagged.append((field.tag, field, part))
        write_unsigned_varint(out, len(tagged))
        for tag, field, part in sorted(tagged, key=lambda item: item[0]):
            body = bytearray()
            field.write(body, part)
            write_unsigned_varint(out, tag)
            write_unsigned_varint(out, len(body))
            out += body

    def read(self, reader: Reader, version: int) -> Value:
        """The value at the reader's position."""
        parts = [
            field.default if field.tag is not None or field.since > version else field.read(reader)
            for field in self.fields
        ]
        for _ in range(reader.unsigned_varint()):
            index = self._tags.get(reader.unsigned_varint())
            body = Reader(reader.take(reader.unsigned_varint()))
            if index is not None and self.fields[index].since <= version:
                parts[index] = self.fields[index].read(body)
                body.expect_end()
        return self.value_type(*parts)

    def kind(self) -> _Kind:
        """This schema as the type of a field. Structs in metadata records are the same in all versions."""
        return _Kind(lambda out, value: self.write(out, value, 0), lambda reader: self.read(reader, 0))


def _field(line: str, value_type: Any, structs: Mapping[str, Schema]) -> Field:
    name, type_, *rest = line.split()
    since, tag = 0, None
    for part in rest:
        if part.startswith("@"):
            tag = int(part[1:])
        else:
            since = int(part.removesuffix("+"))
    nullable = type_.endswith("?")
    plain = type_.removesuffix("?")
    item = plain.removeprefix("[]")
    kind = structs[item].kind() if item in structs else _KINDS[item]
    if plain != item:
        kind = _array(kind)
    write, read = (kind.write_nullable, kind.read_nullable) if nullable else (kind.write, kind.read)
    if write is None or read is None:
        raise TypeError(f"{line!r}: the type has no null")
    return Field(name, since, tag, value_type._field_defaults[name], write, read)
