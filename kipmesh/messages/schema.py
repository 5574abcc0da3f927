"""Declarations of messages: one class per message, one line per field.

A declaration has the content of Apache Kafka's schema files (type, versions, nullable versions, tag, default) and the
field number in protobuf. Fields are declared in the order of Kafka's wire format. The codecs of
`kipmesh.messages.kafka` and `kipmesh.messages.proto`, the `.proto` files and the protocol documentation are derived
from it. See ADR 11.

Instances are immutable named tuples with Kafka's field names. Every field has a default: the declared one, or zero,
empty or None. A missing topic id is `b""`, otherwise it has 16 bytes.
"""

from collections import namedtuple
from collections.abc import Iterator, Sequence
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType, NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Self,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

Bool = bool
Int8 = Annotated[int, "int8"]
Int16 = Annotated[int, "int16"]
UInt16 = Annotated[int, "uint16"]
Int32 = Annotated[int, "int32"]
UInt32 = Annotated[int, "uint32"]
Int64 = Annotated[int, "int64"]
Float64 = Annotated[float, "float64"]
Uuid = Annotated[bytes, "uuid"]
Records = Annotated[bytes, "records"]
"""Record batches, which codecs do not copy."""

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
VERSION_MAX = 32_767
_PYTHON_TYPES = {bool: "bool", str: "string", bytes: "bytes"}
_ZEROS: dict[str, Any] = {"bool": False, "float64": 0.0, "string": "", "bytes": b"", "uuid": b"", "records": b""}
_UNSET: Any = object()


def zero_of(kind: Any) -> Any:
    """Return the zero or empty value of the scalar type named `kind`, for example "" for "string"."""
    return _ZEROS.get(kind, 0)


class Versions(NamedTuple):
    """An inclusive range of versions."""

    first: int
    last: int

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.first <= version <= self.last

    def __str__(self) -> str:
        if self.last == VERSION_MAX:
            return f"{self.first}+"
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


NEVER = Versions(0, -1)


def parse_versions(text: str) -> Versions:
    """Parse a range in the notation of Kafka's schemas: `0+`, `1-6`, `3`, or "" for NEVER. Raises ValueError."""
    if not text:
        return NEVER
    if text.endswith("+"):
        return Versions(int(text[:-1]), VERSION_MAX)
    first, dash, last = text.partition("-")
    return Versions(int(first), int(last if dash else first))


class Array(NamedTuple):
    """The type of a list. `of` is the name of a scalar type or a Message class."""

    of: Any


class NullFlag(NamedTuple):
    """The boolean protobuf field that represents a null list, because protobuf has no null lists."""

    name: str
    number: int


class Field(NamedTuple):
    """One field of a message."""

    name: str
    type: Any
    """The name of a scalar type, an Array, or a Message class."""
    number: int | None
    """The field number in protobuf; None for a field that is not sent over gRPC."""
    versions: Versions
    nullable: Versions
    tag: int | None
    default: Any
    null: Any
    """The value that a null in Kafka's format is read as."""
    null_flag: NullFlag | None
    proto_name: str
    mirrors: tuple[str, ...] | None
    """In a response: the request's fields whose values this field repeats in an error response."""
    is_refusal: bool
    """Whether this `error_code` can refuse the whole request."""


ITEM = ""
"""In `mirrors`: the request's list item itself, if the request lists scalars."""


def field(
    number: int | None = None,
    *,
    versions: str = "0+",
    nullable: str | None = None,
    tag: int | None = None,
    default: Any = _UNSET,
    null: Any = None,
    null_flag: tuple[str, int] | None = None,
    proto_name: str = "",
    mirrors: str | tuple[str, ...] | None = None,
    is_refusal: bool = True,
) -> Any:
    """Declare a field.

    Args:
        number: field number in protobuf; without one, the field is not sent over gRPC.
        versions: versions of Kafka's format with this field; "" if only gRPC has it.
        nullable: versions of Kafka's format in which the field may be null; by default all if the type allows None.
        tag: tag in flexible versions. A tagged field is written if it differs from its default.
        default: value of an absent field; by default zero, empty, or None if the type allows None.
        null: value that a null in Kafka's format is read as.
        null_flag: name and number of the boolean protobuf field that represents a null list.
        proto_name: name in protobuf, if it differs.
        mirrors: in a response, the request's field (or ITEM) whose value this field repeats in an error response. A
            list must declare it. A scalar without a declared default repeats the request's field of the same name.
        is_refusal: False if this `error_code` of a response cannot refuse the whole request.
    """
    return Field(
        name="",
        type=None,
        number=number,
        versions=parse_versions(versions),
        nullable=_UNSET if nullable is None else parse_versions(nullable),
        tag=tag,
        default=default,
        null=null,
        null_flag=None if null_flag is None else NullFlag(*null_flag),
        proto_name=proto_name,
        mirrors=(mirrors,) if isinstance(mirrors, str) else mirrors,
        is_refusal=is_refusal,
    )


def _parse_type(annotation: Any) -> tuple[Any, bool]:
    """Return the field type of an annotation, and whether it allows None. Raises TypeError for a string."""
    if isinstance(annotation, str):
        text = f"annotation must be a type, got text {annotation!r}; remove `from __future__ import annotations`"
        raise TypeError(text)
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        (inner,) = [argument for argument in get_args(annotation) if argument is not NoneType]
        return _parse_type(inner)[0], True
    if origin is Annotated:
        return annotation.__metadata__[0], False
    if origin is not None and issubclass(origin, Sequence):
        return Array(_parse_type(get_args(annotation)[0])[0]), False
    return _PYTHON_TYPES.get(annotation, annotation), False


def _make_field(name: str, annotation: Any, declared: Field) -> Field:
    """Return the declared field, completed from the attribute's name and annotation."""
    kind, allows_none = _parse_type(annotation)
    is_struct = isinstance(kind, type)
    default, nullable = declared.default, declared.nullable
    if default is _UNSET:
        if allows_none or is_struct:
            default = None if allows_none else kind()
        else:
            default = () if isinstance(kind, Array) else zero_of(kind)
    if nullable is _UNSET:
        nullable = parse_versions("0+" if allows_none and not (is_struct and declared.tag is not None) else "")
    return declared._replace(
        name=name, type=kind, default=default, nullable=nullable, proto_name=declared.proto_name or name
    )


class RecordKey(NamedTuple):
    """Number, versions and first flexible version (with tagged fields) of a record type."""

    key: int
    versions: Versions
    flexible_since: int


# All fields have defaults, so there is no field specifier for type checkers to read.
@dataclass_transform(frozen_default=True)
class MessageType(type):
    """The metaclass of declarations: creates a named tuple class from the declared fields."""

    message_fields: tuple[Field, ...]
    record_key: RecordKey

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        key: int = -1,
        versions: str = "",
        flexible: str = "",
    ) -> Any:
        """Create the class. `key`, `versions` and `flexible` apply to records only (RecordKey)."""
        if not bases:
            return super().__new__(mcs, name, bases, namespace)
        specs = {attribute: spec for attribute, spec in namespace.items() if isinstance(spec, Field)}
        annotations = namespace.get("__annotations__", {})
        fields = tuple([_make_field(attribute, annotations[attribute], spec) for attribute, spec in specs.items()])
        base = namedtuple(name, specs, defaults=[each.default for each in fields], module=namespace["__module__"])  # type: ignore[misc]
        rest = {attribute: value for attribute, value in namespace.items() if attribute not in specs}
        since = parse_versions(flexible).first if flexible else VERSION_MAX
        rest |= {
            "__slots__": (),
            "message_fields": fields,
            "record_key": RecordKey(key, parse_versions(versions), since),
        }
        return super().__new__(mcs, name, (base, *bases), rest)


class Message(metaclass=MessageType):
    """Base class of all declared messages and records; instances are immutable named tuples."""

    if TYPE_CHECKING:
        _fields: ClassVar[tuple[str, ...]]
        _field_defaults: ClassVar[dict[str, Any]]

        @classmethod
        def _make(cls, values: Any) -> Self: ...
        def _replace(self, **changes: Any) -> Self: ...
        def _asdict(self) -> dict[str, Any]: ...
        def __lt__(self, other: Self) -> bool: ...
    else:
        __slots__ = ()


def modules_in(package: ModuleType) -> Iterator[ModuleType]:
    """Import and yield the modules of a package and its subpackages."""
    for info in walk_packages(package.__path__, f"{package.__name__}."):
        if not info.ispkg:
            yield import_module(info.name)


def declared_in(module: ModuleType) -> list[type[Message]]:
    """Return the messages that a module declares, in order of declaration."""
    values = vars(module).values()
    declared = [value for value in values if isinstance(value, MessageType) and value.__module__ == module.__name__]
    return cast("list[type[Message]]", declared)
