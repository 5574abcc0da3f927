"""Kafka's wire format: a reader and a writer per message and version, compiled from the declarations.

Python source is generated when a version is first used, as in `dataclasses`. Consecutive fields of fixed size are one
call of `struct`. Values are read into, and written from, the messages that handlers use.

- A reader takes bytes or a memoryview and never reads beyond its end. For invalid bytes it raises MalformedError,
  ValueError, IndexError or struct.error; `Codec.read` converts all of them to MalformedError.
- `records` are slices of the frame. List items and tagged fields are counted, because an item of two bytes takes a
  hundred bytes in memory, so the frame size does not bound memory and time (LIM-01).
- A zero uuid is read as the field's default. A writer appends to an `Out`, where large `records` become separate parts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from kipmesh.messages.schema import Array, Field, Message

FIXED = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "float64": "d",
    "uuid": "16s",
}
"""Types of fixed size and their `struct` format codes."""
COPY_BYTES_MAX = 8 << 10
"""Larger records are passed to the socket without a copy."""
ZERO_ID = bytes(16)

ITEMS_MAX = 100_000
"""Default maximum number of list items and tagged fields in one message."""

Reader = Callable[[memoryview | bytes, int, list[int]], tuple[Any, int]]
"""Takes a frame, a position and a list with the remaining number of items; returns the value and the next position."""
Writer = Callable[["Out", Any], None]


class MalformedError(ValueError):
    """Raised for bytes that are not a valid message of their type and version."""


class Out(bytearray):
    """A message that is being written: the content of `parts`, then the bytes of this object."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes | bytearray | memoryview] = []

    def splice(self, data: bytes | memoryview) -> None:
        """Append `data` as a separate part, without copying it."""
        self.parts.append(bytes(self))
        self.parts.append(data)
        self.clear()


# --- called by compiled code ------------------------------------------------------------------------------------------


def read_varint(view: memoryview | bytes, at: int) -> tuple[int, int]:
    """Return (unsigned varint of at most five bytes, position after it). Raises MalformedError or IndexError."""
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 28:
            raise MalformedError("varint must have at most five bytes")


def put_varint(out: bytearray, value: int) -> None:
    """Append an unsigned varint."""
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def not_null(name: str) -> MalformedError:
    """Return (do not raise) the error for a null in a field that is not nullable."""
    return MalformedError(f"{name} must not be null")


def too_long(name: str, size: int, left: int) -> MalformedError:
    """Return (do not raise) the error for a length beyond the end of the message."""
    return MalformedError(f"{name} has length {size}, but only {left} bytes are left")


def take_items(room: list[int], number: int) -> None:
    """Subtract `number` from the items that remain in `room[0]`. Raises MalformedError if too few remain."""
    if number > room[0]:
        raise MalformedError(f"list must have at most {room[0]} items, got {number}")
    room[0] -= number


def skip_tags(view: memoryview | bytes, at: int, room: list[int]) -> int:
    """Return the position after some tagged fields, which count as items. Raises MalformedError or IndexError."""
    number, at = read_varint(view, at)
    take_items(room, number)
    for _ in range(number):
        _, at = read_varint(view, at)
        size, at = read_varint(view, at)
        at += size
        if at > len(view):
            raise too_long("a tagged field", size, len(view) - at + size)
    return at


def is_message(kind: Any) -> bool:
    """Return whether a field's type is a message, and not a list or the name of a scalar type."""
    return isinstance(kind, type)


def item_type(each: Field) -> Any:
    """Return the type of a field, or of its items if it is a list."""
    return each.type.of if isinstance(each.type, Array) else each.type


_LENGTH: dict[bool, struct.Struct] = {True: struct.Struct(">h"), False: struct.Struct(">i")}
_GLOBALS: dict[str, Any] = {
    "MalformedError": MalformedError,
    "ZERO_ID": ZERO_ID,
    "make": tuple.__new__,
    "not_null": not_null,
    "pack_h": _LENGTH[True].pack,
    "pack_i": _LENGTH[False].pack,
    "put_varint": put_varint,
    "read_h": _LENGTH[True].unpack_from,
    "read_i": _LENGTH[False].unpack_from,
    "read_varint": read_varint,
    "skip_tags": skip_tags,
    "take_items": take_items,
    "too_long": too_long,
    "unpack_from": struct.unpack_from,
    "pack": struct.pack,
}


# --- code generation --------------------------------------------------------------------------------------------------


class Source:
    """The source lines of one generated function, and the values of the names that they use."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names: dict[str, Any] = dict(names)
        self._lines: list[str] = []
        self._counter = 0

    def add(self, depth: int, *lines: str) -> None:
        """Append lines, indented by `depth` levels."""
        self._lines.extend("    " * depth + line for line in lines)

    def bind(self, prefix: str, value: Any) -> str:
        """Make a value available to the source and return its name."""
        self._counter += 1
        name = f"{prefix}_{self._counter}"
        self.names[name] = value
        return name

    def function(self) -> Any:
        """Compile the lines, which must define the function `made`, and return it."""
        space = dict(self.names)
        exec("\n".join(self._lines), space)  # noqa: S102 - source generated from our own declarations
        return space["made"]


class Codec:
    """Reader and writer of one message type in one version.

    Args: flexible: whether the version has tagged fields; strict: whether `write` raises ValueError if a field that the
    version lacks differs from its default, instead of dropping the field.
    """

    __slots__ = ("_name", "_read", "write")

    def __init__(self, of: type[Message], version: int, *, flexible: bool, strict: bool = False) -> None:
        self._name = f"{of.__name__} v{version}"
        self._read, self.write = _compiled(of, _Form(version, flexible, strict), {})

    def read(self, view: memoryview | bytes, at: int = 0, items_max: int = ITEMS_MAX) -> tuple[Any, int]:
        """Return (message at position `at`, position after it). Raises MalformedError, also if there are more than
        `items_max` items."""
        try:
            return self._read(view, at, [items_max])
        except MalformedError:
            raise
        except (struct.error, IndexError, ValueError) as error:
            raise MalformedError(f"{self._name}: {error}") from None


@cache
def record_codec(of: type[Message], version: int, *, strict: bool = True) -> Codec:
    """Return the codec of a record type in one version. `strict`: see Codec."""
    return Codec(of, version, flexible=version >= of.record_key.flexible_since, strict=strict)


class _Form(NamedTuple):
    version: int
    flexible: bool
    strict: bool


_Known = dict[type[Message], tuple[Reader, Writer]]


def _compiled(of: type[Message], form: _Form, known: _Known) -> tuple[Reader, Writer]:
    if of not in known:
        for each in of.message_fields:
            inner = item_type(each)
            if is_message(inner) and form.version in each.versions:
                _compiled(inner, form, known)
        known[of] = _ReaderMaker(of, form, known).made(), _WriterMaker(of, form, known).made()
    return known[of]


class _Maker:
    def __init__(self, of: type[Message], form: _Form, known: _Known) -> None:
        self._of = of
        self._form = form
        self._flexible = flexible = form.flexible
        self._known = known
        self._source = Source(_GLOBALS)
        present = [each for each in of.message_fields if form.version in each.versions]
        self._plain = [each for each in present if each.tag is None or not flexible]
        self._tagged = sorted((each for each in present if each.tag is not None and flexible), key=lambda f: f.tag or 0)

    def _nullable(self, each: Field) -> bool:
        return self._form.version in each.nullable

    def _runs(self) -> list[list[Field]]:
        """Return the untagged fields, grouping consecutive fields of fixed size."""
        runs: list[list[Field]] = []
        for each in self._plain:
            if runs and _is_fixed(each) and _is_fixed(runs[-1][-1]):
                runs[-1].append(each)
            else:
                runs.append([each])
        return runs


def _is_fixed(each: Field) -> bool:
    return each.type in FIXED


def _format(fields: list[Field]) -> str:
    return ">" + "".join(FIXED[str(each.type)] for each in fields)


class _ReaderMaker(_Maker):
    def made(self) -> Reader:
        """Generate and return the reader."""
        source = self._source
        source.add(0, "def made(view, at, room):")
        for run in self._runs():
            if _is_fixed(run[0]):
                self._read_fixed(run)
            else:
                self._read_one(1, run[0], f"v_{run[0].name}")
        if self._flexible:
            self._read_tags()
        value = source.bind("value", self._of)
        read = {each.name for each in (*self._plain, *self._tagged)}
        arguments = [
            f"v_{each.name}" if each.name in read else source.bind("default", each.default)
            for each in self._of.message_fields
        ]
        source.add(1, f"return make({value}, ({''.join(argument + ', ' for argument in arguments)})), at")
        made: Reader = source.function()
        return made

    def _read_fixed(self, run: list[Field], depth: int = 1) -> None:
        layout = struct.Struct(_format(run))
        unpack = self._source.bind("unpack", layout.unpack_from)
        targets = "".join(f"v_{each.name}, " for each in run)
        self._source.add(depth, f"{targets}= {unpack}(view, at)", f"at += {layout.size}")
        for each in run:
            if each.type == "uuid":
                default = "ZERO_ID" if each.default == ZERO_ID else "b''"
                self._source.add(depth, f"if v_{each.name} == ZERO_ID:", f"    v_{each.name} = {default}")

    def _read_one(self, depth: int, each: Field, target: str) -> None:
        kind = each.type
        if isinstance(kind, Array):
            self._read_array(depth, each, kind, target)
        elif is_message(kind):
            self._read_struct(depth, each, kind, target)
        elif kind in FIXED:
            self._read_fixed([each], depth)
        else:
            self._read_sized(depth, each.name, kind, target, self._nullable(each), each.null)

    def _read_length(self, depth: int, is_short: bool) -> None:
        """Generate code that reads a length into `size`; -1 is null."""
        if self._flexible:
            self._source.add(
                depth,
                "size = view[at] - 1",
                "at += 1",
                "if size >= 127:",
                "    size, at = read_varint(view, at - 1)",
                "    size -= 1",
            )
        else:
            code, width = ("h", 2) if is_short else ("i", 4)
            self._source.add(depth, f"size, = read_{code}(view, at)", f"at += {width}")

    def _null_or(self, depth: int, name: str, target: str, nullable: bool, null: Any) -> None:
        """Generate code for a length below 0. The code ends with `else:`, and the caller adds that branch."""
        add = self._source.add
        add(depth, "if size < 0:")
        if nullable:
            add(depth, "    if size < -1:", f"        raise too_long({name!r}, size, 0)")
            add(depth, f"    {target} = {self._source.bind('null', null)}")
        else:
            add(depth, f"    raise not_null({name!r})")
        add(depth, "else:")

    def _read_sized(self, depth: int, name: str, kind: str, target: str, nullable: bool, null: Any) -> None:
        self._read_length(depth, kind == "string")
        self._null_or(depth, name, target, nullable, null)
        take = {"string": "str(view[at:end], 'utf-8')", "bytes": "bytes(view[at:end])", "records": "view[at:end]"}
        self._source.add(
            depth + 1,
            "end = at + size",
            "if end > len(view):",
            f"    raise too_long({name!r}, size, len(view) - at)",
            f"{target} = {take[kind]}",
            "at = end",
        )

    def _read_array(self, depth: int, each: Field, kind: Array, target: str) -> None:
        add, of = self._source.add, kind.of
        self._read_length(depth, False)
        self._null_or(depth, each.name, target, self._nullable(each), each.null)
        depth += 1
        # Each item takes at least one byte.
        add(depth, "if size > len(view) - at:", f"    raise too_long({each.name!r}, size, len(view) - at)")
        add(depth, "take_items(room, size)")
        if isinstance(of, str) and of in FIXED and of != "uuid":
            code, width = FIXED[of], struct.calcsize(">" + FIXED[of])
            add(depth, f"{target} = unpack_from(f'>{{size}}{code}', view, at)", f"at += size * {width}")
            return
        add(depth, "items = []", "for _ in range(size):")
        if is_message(of):
            read = self._source.bind("read", self._known[of][0])
            add(depth + 1, f"item, at = {read}(view, at, room)")
        elif of == "uuid":
            add(depth + 1, "item, = unpack_from('16s', view, at)", "at += 16")
        else:
            self._read_sized(depth + 1, each.name, of, "item", False, None)
        add(depth + 1, "items.append(item)")
        add(depth, f"{target} = tuple(items)")

    def _read_struct(self, depth: int, each: Field, kind: type[Message], target: str) -> None:
        read = self._source.bind("read", self._known[kind][0])
        if not self._nullable(each):
            self._source.add(depth, f"{target}, at = {read}(view, at, room)")
            return
        self._source.add(
            depth,
            "at += 1",
            "if view[at - 1] == 255:",
            f"    {target} = {self._source.bind('null', each.null)}",
            "else:",
            f"    {target}, at = {read}(view, at, room)",
        )

    def _read_tags(self) -> None:
        add = self._source.add
        if not self._tagged:
            add(1, "if view[at] == 0:", "    at += 1", "else:", "    at = skip_tags(view, at, room)")
            return
        for each in self._tagged:
            add(1, f"v_{each.name} = {self._source.bind('default', each.default)}")
        add(1, "number, at = read_varint(view, at)", "take_items(room, number)", "for _ in range(number):")
        add(2, "tag, at = read_varint(view, at)", "size, at = read_varint(view, at)", "after = at + size")
        add(2, "if after > len(view):", "    raise too_long('a tagged field', size, len(view) - at)")
        for index, each in enumerate(self._tagged):
            add(2, f"{'if' if index == 0 else 'elif'} tag == {each.tag}:")
            self._read_one(3, each, f"v_{each.name}")
            # Otherwise a field of size 0 could be repeated without end.
            add(
                3,
                "if at != after:",
                f"    raise MalformedError({f'{each.name} does not have the length that its tag declares'!r})",
            )
        add(2, "at = after")


class _WriterMaker(_Maker):
    def made(self) -> Writer:
        """Generate and return the writer."""
        source = self._source
        source.add(0, "def made(out, value):")
        if self._form.strict:
            self._check_strictly()
        for run in self._runs():
            if _is_fixed(run[0]):
                pack = source.bind("pack", struct.Struct(_format(run)).pack)
                source.add(1, f"out += {pack}({', '.join(self._fixed(each) for each in run)})")
            else:
                self._write_one(1, run[0], f"value.{run[0].name}", "out")
        if self._flexible:
            self._write_tags()
        source.add(1, "pass")
        made: Writer = source.function()
        return made

    def _check_strictly(self) -> None:
        """Generate checks that raise ValueError for a field that the version lacks or an id that does not have 16
        bytes."""
        add = self._source.add
        for each in self._of.message_fields:
            if self._form.version not in each.versions:
                text = f"{self._of.__name__} version {self._form.version} has no field {each.name}"
                default = self._source.bind("default", each.default)
                add(1, f"if value.{each.name} != {default}:", f"    raise ValueError({text!r})")
            elif item_type(each) == "uuid":
                ids = f"value.{each.name} or ()" if isinstance(each.type, Array) else f"(value.{each.name},)"
                add(1, f"for one in {ids}:", "    if len(one) != 16:")
                add(3, f"raise ValueError(f'an id in {each.name} must have 16 bytes, got {{len(one)}}')")

    def _fixed(self, each: Field) -> str:
        return f"value.{each.name} or ZERO_ID" if each.type == "uuid" else f"value.{each.name}"

    def _write_one(self, depth: int, each: Field, expression: str, out: str) -> None:
        kind, add = each.type, self._source.add
        add(depth, f"one = {expression}")
        if is_message(kind):
            write = self._source.bind("write", self._known[kind][1])
            if self._nullable(each):
                add(depth, "if one is None:", f"    {out}.append(255)", "else:", f"    {out}.append(1)")
                add(depth + 1, f"{write}({out}, one)")
            else:
                add(depth, f"{write}({out}, one)")
            return
        if self._nullable(each):
            add(depth, "if one is None:")
            self._write_null(depth + 1, kind == "string", out)
            add(depth, "else:")
            depth += 1
        if isinstance(kind, Array):
            self._write_array(depth, kind, out)
        elif kind in FIXED:
            pack = self._source.bind("pack", struct.Struct(">" + FIXED[kind]).pack)
            add(depth, f"{out} += {pack}(one{' or ZERO_ID' if kind == 'uuid' else ''})")
        else:
            self._write_sized(depth, kind, "one", out)

    def _write_null(self, depth: int, is_short: bool, out: str) -> None:
        null = "b'\\0'" if self._flexible else "b'\\xff\\xff'" if is_short else "b'\\xff\\xff\\xff\\xff'"
        self._source.add(depth, f"{out} += {null}")

    def _write_length(self, depth: int, is_short: bool, out: str) -> None:
        """Generate code that writes the length `size`."""
        if self._flexible:
            self._source.add(
                depth, "if size < 127:", f"    {out}.append(size + 1)", "else:", f"    put_varint({out}, size + 1)"
            )
        else:
            self._source.add(depth, f"{out} += pack_{'h' if is_short else 'i'}(size)")

    def _write_sized(self, depth: int, kind: str, name: str, out: str) -> None:
        if kind == "string":
            self._source.add(depth, f"{name} = {name}.encode()")
        self._source.add(depth, f"size = len({name})")
        self._write_length(depth, kind == "string", out)
        if kind == "records":
            add = self._source.add
            add(depth, f"if size > {COPY_BYTES_MAX}:", f"    {out}.splice({name})", "else:", f"    {out} += {name}")
        else:
            self._source.add(depth, f"{out} += {name}")

    def _write_array(self, depth: int, kind: Array, out: str) -> None:
        add, of = self._source.add, kind.of
        add(depth, "size = len(one)")
        self._write_length(depth, False, out)
        if is_message(of):
            add(depth, "for item in one:", f"    {self._source.bind('write', self._known[of][1])}({out}, item)")
        elif of == "uuid":
            add(depth, "for item in one:", f"    {out} += item or ZERO_ID")
        elif of in FIXED:
            add(depth, f"{out} += pack(f'>{{len(one)}}{FIXED[of]}', *one)")
        else:
            add(depth, "for item in one:")
            self._write_sized(depth + 1, of, "item", out)

    def _write_tags(self) -> None:
        add = self._source.add
        if not self._tagged:
            add(1, "out.append(0)")
            return
        add(1, "number, tags = 0, bytearray()")
        for each in self._tagged:
            default = self._source.bind("default", each.default)
            add(1, f"one = value.{each.name}")
            is_list = isinstance(each.type, Array) and each.default is not None
            add(1, "if one:" if is_list else f"if one != {default}:")
            add(2, "number += 1", "field = bytearray()")
            self._write_one(2, each, "one", "field")
            add(2, f"put_varint(tags, {each.tag})", "put_varint(tags, len(field))", "tags += field")
        add(1, "put_varint(out, number)", "out += tags")
