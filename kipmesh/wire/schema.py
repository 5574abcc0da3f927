"""What messages of Kafka's protocol look like, by version: tables that `kipmesh.wire.codec` turns into code.

A `Struct` is a NamedTuple with the fields it has on the wire, in the wire's order. Fields go by name: a value's
attribute and its field are called the same.

- A field of the value that the wire (or this version) lacks has the NamedTuple's default when it was read.
- A field of the wire that the value lacks is dropped when it is read, and written as its `default`.
- A field with a tag is written when it differs from the NamedTuple's default.
- An id of a topic is 16 bytes, and `b""` where there is none (zeros on the wire).
- Null is `null` when it is read (None unless the table says otherwise), and None when it is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

VERSION_MAX = 32_767

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
"""Types of fixed size, and their codes in `struct`'s language."""
SIZED = frozenset({"string", "bytes", "records"})
"""Types that begin with their length. `records` are bytes that are not copied."""


class Versions(NamedTuple):
    """A range of versions, both ends included."""

    first: int
    last: int

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.first <= version <= self.last


NEVER = Versions(0, -1)


def versions(text: str) -> Versions:
    """As Kafka's schemas write them: `0+`, `1-6`, `3`, and the empty text for none."""
    if not text:
        return NEVER
    if text.endswith("+"):
        return Versions(int(text[:-1]), VERSION_MAX)
    first, dash, last = text.partition("-")
    return Versions(int(first), int(last if dash else first))


class Array(NamedTuple):
    """Values of one type: a name of `FIXED` or `SIZED`, or a Struct."""

    of: str | Struct


class Field(NamedTuple):
    """One field; made by `field`."""

    name: str
    type: str | Struct | Array
    versions: Versions
    nullable: Versions
    tag: int | None
    default: Any
    null: Any


def field(
    name: str,
    type: str | Struct | Array,  # noqa: A002 - as Kafka's schemas call it
    since: str = "0+",
    *,
    nullable: str = "",
    tag: int | None = None,
    default: Any = None,
    null: Any = None,
) -> Field:
    """A field in the versions `since`, and null allowed in the versions `nullable`."""
    if isinstance(type, str) and type not in FIXED and type not in SIZED:
        raise ValueError(f"field {name}: there is no type {type!r}")
    return Field(name, type, versions(since), versions(nullable), tag, default, null)


class Struct:
    """A value's fields, in the wire's order. `value` is the NamedTuple."""

    __slots__ = ("fields", "value")

    def __init__(self, value: type[Any], *fields: Field) -> None:
        self.value = value
        self.fields = fields

    def __repr__(self) -> str:
        return f"Struct({self.value.__name__})"
