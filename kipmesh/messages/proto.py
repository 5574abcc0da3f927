"""Protobuf's wire format: an encoder and a decoder per message, compiled from the declarations.

They read and write the messages that handlers use, without protobuf objects. Python source is generated when a type is
first used, as in `kipmesh.messages.kafka`. The tests compare every message with Google's implementation.

A field with its default is not written, and an absent field has its default. If a message field occurs twice, the last
value is used; Google's implementation merges them. Unknown fields are skipped. Decoding raises only MalformedError.
Encoding raises ValueError, TypeError or AttributeError for a value that the type cannot represent.
"""

import struct
from collections.abc import Callable
from functools import cache
from typing import Any

from kipmesh.messages.kafka import MalformedError, Source, is_message, item_type, put_varint, too_long
from kipmesh.messages.schema import Array, Field, Message, zero_of

VARINT, FIXED64, SIZED, FIXED32 = 0, 1, 2, 5
SCALARS = {
    "bool": "bool",
    "int8": "int32",
    "int16": "int32",
    "uint16": "int32",
    "int32": "int32",
    "uint32": "uint32",
    "int64": "int64",
    "float64": "double",
    "string": "string",
    "bytes": "bytes",
    "uuid": "bytes",
    "records": "bytes",
}
"""Scalar types of declarations -> scalar types of protobuf."""
_RANGES = {"int32": (-(2**31), 2**31), "uint32": (0, 2**32), "int64": (-(2**63), 2**63)}
_MINUS_ONE = b"\xff" * 9 + b"\x01"
_JOIN_BYTES_MIN = 8 << 10
"""A message with larger records is encoded as a list of parts, so that the records are copied only once."""
_DOUBLE = struct.Struct("<d")

Encoded = bytearray | list[Any]
Encoder = Callable[[Any], Encoded]
Decoder = Callable[[bytes, int, int], Any]


# --- called by compiled code ------------------------------------------------------------------------------------------


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise MalformedError("varint must have at most ten bytes")


def _read_int32(data: bytes, at: int) -> tuple[int, int]:
    if data[at : at + 10] == _MINUS_ONE:
        return -1, at + 10
    value, at = _read_varint(data, at)
    return (value & 0xFFFFFFFF ^ 0x80000000) - 0x80000000, at


def _read_int64(data: bytes, at: int) -> tuple[int, int]:
    if data[at : at + 10] == _MINUS_ONE:
        return -1, at + 10
    value, at = _read_varint(data, at)
    return (value & 0xFFFFFFFFFFFFFFFF ^ 0x8000000000000000) - 0x8000000000000000, at


def _read_uint32(data: bytes, at: int) -> tuple[int, int]:
    value, at = _read_varint(data, at)
    return value & 0xFFFFFFFF, at


def _read_bool(data: bytes, at: int) -> tuple[bool, int]:
    value, at = _read_varint(data, at)
    return bool(value), at


_READERS = {"int32": _read_int32, "int64": _read_int64, "uint32": _read_uint32, "bool": _read_bool}


def _putter(name: str) -> Callable[[bytearray, int], None]:
    first, end = _RANGES[name]

    def put(out: bytearray, value: int) -> None:
        if not first <= value < end:
            raise ValueError(f"{name} must be at least {first} and less than {end}, got {value}")
        put_varint(out, int(value) & 0xFFFFFFFFFFFFFFFF)

    return put


_PUTTERS = {name: _putter(name) for name in _RANGES}


def _pack(name: str, values: Any) -> bytes | bytearray:
    if name == "bool":
        return bytes(values)
    if min(values) >= 0 and max(values) < 0x80:
        return bytes(values)
    out, put = bytearray(), _PUTTERS[name]
    for value in values:
        put(out, value)
    return out


def _unpack(name: str, data: bytes) -> Any:
    if data.isascii():  # every number is one byte
        return [byte != 0 for byte in data] if name == "bool" else data
    read, at, end, values = _READERS[name], 0, len(data), []
    while at < end:
        value, at = read(data, at)
        values.append(value)
    return values


def _skip(data: bytes, at: int, tag: int) -> int:
    kind = tag & 7
    if tag < 8:
        raise MalformedError("field number must be at least 1, got 0")
    if kind == VARINT:
        return _read_varint(data, at)[1]
    if kind == FIXED64:
        return at + 8
    if kind == SIZED:
        size, at = _read_varint(data, at)
        return at + size
    if kind == FIXED32:
        return at + 4
    raise MalformedError(f"unsupported wire type {kind}")


def _joined_size(parts: list[Any]) -> int:
    return sum(map(len, parts))


_GLOBALS: dict[str, Any] = {
    "joined_size": _joined_size,
    "make": tuple.__new__,
    "pack": _pack,
    "pack_double": _DOUBLE.pack,
    "put_varint": put_varint,
    "read_varint": _read_varint,
    "skip": _skip,
    "too_long": too_long,
    "unpack": _unpack,
    "unpack_double": _DOUBLE.unpack_from,
    "MalformedError": MalformedError,
    **{f"put_{name}": put for name, put in _PUTTERS.items()},
    **{f"read_{name}": read for name, read in _READERS.items()},
}


def _varint(value: int) -> bytes:
    out = bytearray()
    put_varint(out, value)
    return bytes(out)


def _wire_type(kind: Any, *, is_list: bool) -> int:
    if is_message(kind):
        return SIZED
    scalar = SCALARS[kind]
    if scalar in _RANGES or scalar == "bool":
        return SIZED if is_list else VARINT
    return FIXED64 if scalar == "double" else SIZED


def carried_fields(of: type[Message]) -> list[Field]:
    """Return the fields of a message that are sent over gRPC."""
    return [each for each in of.message_fields if each.number is not None]


def has_presence(each: Field) -> bool:
    """Return whether the protobuf field is `optional`: a scalar whose default is not zero or empty."""
    return not isinstance(each.type, Array) and not is_message(each.type) and each.default != zero_of(each.type)


# --- encoding ---------------------------------------------------------------------------------------------------------


@cache
def _has_records(of: type[Message]) -> bool:
    types = [item_type(each) for each in carried_fields(of)]
    return any(kind in ("records", "bytes") or (is_message(kind) and _has_records(kind)) for kind in types)


@cache
def _encoder(of: type[Message]) -> Encoder:
    source = Source(_GLOBALS)
    source.add(0, "def made(value):")
    source.add(1, "out = bytearray()")
    if _has_records(of):
        source.add(1, "parts = None")
    for each in sorted(carried_fields(of), key=lambda one: one.number or 0):
        _encode_field(source, each)
    if _has_records(of):
        source.add(1, "if parts is not None:", "    parts.append(out)", "    return parts")
    source.add(1, "return out")
    made: Encoder = source.function()
    return made


def _encode_field(source: Source, each: Field) -> None:
    assert each.number is not None
    kind, is_list = item_type(each), isinstance(each.type, Array)
    tag = repr(_varint(each.number << 3 | _wire_type(kind, is_list=is_list)))
    source.add(1, f"one = value.{each.name}")
    if is_list:
        if each.null_flag is not None:
            flag = repr(_varint(each.null_flag.number << 3) + b"\x01")
            source.add(1, "if one is None:", f"    out += {flag}")
        source.add(1, "if one:")
        if _wire_type(kind, is_list=False) == VARINT:
            source.add(2, f"one = pack({SCALARS[kind]!r}, one)", f"out += {tag}", "put_varint(out, len(one))")
            source.add(2, "out += one")
        else:
            source.add(2, "for one in one:")
            _encode_one(source, 3, each, kind, tag)
        return
    if is_message(kind):
        source.add(1, "if one is not None:")
    elif each.default in (False, 0, "", b"") and each.default is not None:
        source.add(1, "if one:")
    else:
        source.add(1, f"if one != {source.bind('default', each.default)}:")
    _encode_one(source, 2, each, kind, tag)


def _encode_one(source: Source, depth: int, each: Field, kind: Any, tag: str) -> None:
    add = source.add
    scalar = None if is_message(kind) else SCALARS[kind]
    if scalar == "bool":
        add(depth, f"out += {tag}", "out.append(1 if one else 0)")
    elif scalar == "double":
        add(depth, f"out += {tag}", "out += pack_double(one)")
    elif scalar in _RANGES:
        add(depth, f"out += {tag}")
        add(depth, "if 0 <= one < 128:", "    out.append(one)", "else:", f"    put_{scalar}(out, one)")
    else:
        if scalar is None:
            add(depth, f"one = {source.bind('encode', _encoder(kind))}(one)")
        elif scalar == "string":
            add(depth, "one = one.encode()")
        is_nested_list = scalar is None and _has_records(kind)
        size = "joined_size(one) if one.__class__ is list else len(one)" if is_nested_list else "len(one)"
        add(depth, f"size = {size}", f"out += {tag}")
        add(depth, "if size < 128:", "    out.append(size)", "else:", "    put_varint(out, size)")
        if is_nested_list:
            add(depth, "if one.__class__ is list:", "    if parts is None:", "        parts = []")
            add(depth + 1, "parts.append(out)", "parts += one", "out = bytearray()")
            add(depth, "else:", "    out += one")
        elif scalar == "bytes" and kind != "uuid":
            add(depth, f"if size > {_JOIN_BYTES_MIN}:", "    if parts is None:", "        parts = []")
            add(depth + 1, "parts.append(out)", "parts.append(one)", "out = bytearray()")
            add(depth, "else:", "    out += one")
        else:
            add(depth, "out += one")


def encode(value: Message) -> bytes:
    """Return the message in protobuf's format.

    Raises ValueError, TypeError or AttributeError for a value that its type cannot represent.
    """
    encoded = _encoder(type(value))(value)
    return b"".join(encoded) if isinstance(encoded, list) else bytes(encoded)


# --- decoding ---------------------------------------------------------------------------------------------------------


@cache
def _decoder(of: type[Message]) -> Decoder:
    source, fields = Source(_GLOBALS), carried_fields(of)
    add = source.add
    add(0, "def made(data, at, end):")
    for each in fields:
        is_list = isinstance(each.type, Array)
        add(1, f"v_{each.name} = {'[]' if is_list else source.bind('default', each.default)}")
        if each.null_flag is not None:
            add(1, f"null_{each.name} = False")
    add(1, "while at < end:")
    add(2, "tag = data[at]", "at += 1", "if tag > 127:", "    tag, at = read_varint(data, at - 1)")
    word = "if"
    for each in fields:
        for tag, lines in _decode_cases(source, each):
            add(2, f"{word} tag == {tag}:", *[f"    {line}" for line in lines])
            word = "elif"
    add(2, *(["else:", "    at = skip(data, at, tag)"] if fields else ["at = skip(data, at, tag)"]))
    add(1, "if at != end:", f"    raise too_long({of.__name__!r}, at - end, 0)")
    arguments = []
    for each in of.message_fields:
        if each.number is None:
            arguments.append(source.bind("default", each.default))
        elif isinstance(each.type, Array):
            listed = f"tuple(v_{each.name})"
            if each.null_flag is not None:
                text = f"{each.null_flag.name} must not be set if {each.name} has items"
                add(1, f"if null_{each.name} and v_{each.name}:", f"    raise MalformedError({text!r})")
                listed = f"None if null_{each.name} else {listed}"
            arguments.append(listed)
        else:
            arguments.append(f"v_{each.name}")
    add(1, f"return make({source.bind('of', of)}, ({''.join(argument + ', ' for argument in arguments)}))")
    made: Decoder = source.function()
    return made


def _decode_cases(source: Source, each: Field) -> list[tuple[int, list[str]]]:
    """Return the tags of a field, each with the source lines that read a value with that tag."""
    assert each.number is not None
    kind, is_list, base = item_type(each), isinstance(each.type, Array), each.number << 3
    one = "item" if is_list else f"v_{each.name}"
    store = [f"v_{each.name}.append(item)"] if is_list else []
    size = ["size = data[at]", "at += 1", "if size > 127:", "    size, at = read_varint(data, at - 1)"]
    size += ["after = at + size", "if after > end:", f"    raise too_long({each.name!r}, size, end - at)"]
    cases = []
    if is_message(kind):
        read = source.bind("decode", _decoder(kind))
        cases.append((base | SIZED, [*size, f"{one} = {read}(data, at, after)", "at = after", *store]))
    else:
        scalar = SCALARS[kind]
        if scalar in ("string", "bytes"):
            take = "str(data[at:after], 'utf-8')" if scalar == "string" else "data[at:after]"
            cases.append((base | SIZED, [*size, f"{one} = {take}", "at = after", *store]))
        elif scalar == "double":
            cases.append((base | FIXED64, [f"{one}, = unpack_double(data, at)", "at += 8", *store]))
        else:
            convert = [f"    {one} = {one} != 0"] if scalar == "bool" else []
            read_one = [f"{one} = data[at]", f"if {one} > 127:", f"    {one}, at = read_{scalar}(data, at)"]
            read_one += ["else:", "    at += 1", *convert]
            if is_list:
                unpacked = f"v_{each.name} += unpack({scalar!r}, data[at:after])"
                cases.append((base | SIZED, [*size, unpacked, "at = after"]))
            cases.append((base | VARINT, [*read_one, *store]))
    if each.null_flag is not None:
        flag = each.null_flag.number << 3
        cases.append((flag, [f"null_{each.name}, at = read_bool(data, at)"]))
    return cases


def decode(of: type[Message], data: bytes) -> Any:
    """Decode a message of type `of`. Raises MalformedError for invalid bytes; skips unknown fields."""
    try:
        return _decoder(of)(data, 0, len(data))
    except MalformedError:
        raise
    except (struct.error, IndexError, ValueError) as error:
        raise MalformedError(f"{of.__name__}: {error}") from None
