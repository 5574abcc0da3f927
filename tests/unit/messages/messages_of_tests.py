"""All declared messages, hypothesis strategies for their values, and conversions to Google's protobuf classes."""

from __future__ import annotations

import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc
from hypothesis import strategies as st

from kipmesh.messages import apis, records
from kipmesh.messages.kafka import is_message, item_type
from kipmesh.messages.proto import carried_fields
from kipmesh.messages.schema import Array, Field, Message, declared_in, modules_in

PROTOS = Path(__file__).resolve().parents[3] / "protos"
_INTEGERS = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "uint16": (0, 2**16 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint32": (0, 2**32 - 1),
    "int64": (-(2**63), 2**63 - 1),
}


def _declared(package: Any) -> list[type[Message]]:
    return [of for module in modules_in(package) for of in declared_in(module)]


REQUESTS_AND_RESPONSES = _declared(apis)
RECORDS = _declared(records)
CARRIED = [of for of in REQUESTS_AND_RESPONSES if carried_fields(of)]


def _scalar(kind: str) -> st.SearchStrategy[Any]:
    if kind in _INTEGERS:
        small = st.integers(max(_INTEGERS[kind][0], -2), min(_INTEGERS[kind][1], 300))
        return st.integers(*_INTEGERS[kind]) | small
    if kind == "bool":
        return st.booleans()
    if kind == "string":
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    if kind == "uuid":
        return st.binary(min_size=16, max_size=16).filter(any)
    if kind == "float64":
        return st.floats(allow_nan=False)
    return st.binary(max_size=8)


def _value(each: Field, version: int | None) -> st.SearchStrategy[Any]:
    kind = item_type(each)
    of = values(kind, version) if is_message(kind) else _scalar(kind)
    is_list = isinstance(each.type, Array)
    if is_list:
        of = st.lists(of, max_size=3).map(tuple)
    has_null = each.null_flag is not None if version is None else version in each.nullable and each.null is None
    if version is None and not is_list and each.default is None:
        has_null = True
    return st.none() | of if has_null else of


@cache
def values(of: type[Message], version: int | None = None) -> st.SearchStrategy[Any]:
    """Return a strategy for values that protobuf can encode or, with `version`, that Kafka's format can encode."""
    parts = {}
    for each in of.message_fields:
        if each.number is not None if version is None else version in each.versions:
            parts[each.name] = _value(each, version)
    return st.fixed_dictionaries(parts).map(lambda fields: of(**fields))


@lru_cache(maxsize=1)
def google() -> dict[str, Any]:
    """Return the classes that protoc and Google's library generate from `protos/`, by name."""
    with tempfile.NamedTemporaryFile() as out:
        files = sorted(map(str, PROTOS.glob("kipmesh/v1/*.proto")))
        assert protoc.main(["protoc", f"-I{PROTOS}", f"--descriptor_set_out={out.name}", *files]) == 0
        described = descriptor_pb2.FileDescriptorSet.FromString(Path(out.name).read_bytes())
    pool = descriptor_pool.DescriptorPool()
    pending = list(described.file)
    while pending:
        file = pending.pop(0)
        try:
            pool.Add(file)
        except TypeError:  # an imported file is still pending
            pending.append(file)
    return {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"kipmesh.v1.{message.name}"))
        for file in described.file
        for message in file.message_type
    }


def to_google(value: Message) -> Any:
    """Convert a declared message to a message of Google's library."""
    converted = google()[type(value).__name__]()
    for each in carried_fields(type(value)):
        field_value = getattr(value, each.name)
        if each.null_flag is not None and field_value is None:
            setattr(converted, each.null_flag.name, True)
        elif isinstance(each.type, Array):
            items = [to_google(item) if isinstance(item, Message) else item for item in field_value]
            getattr(converted, each.proto_name).extend(items)
        elif isinstance(field_value, Message):
            getattr(converted, each.proto_name).CopyFrom(to_google(field_value))
        elif field_value is not None and field_value != each.default:
            setattr(converted, each.proto_name, field_value)
    return converted


def from_google(of: type[Message], message: Any) -> Any:
    """Convert a message of Google's library to the declared message."""
    values: dict[str, Any] = {}
    for each in carried_fields(of):
        field_value = getattr(message, each.proto_name)
        kind = item_type(each)
        if isinstance(each.type, Array):
            is_null = each.null_flag is not None and getattr(message, each.null_flag.name)
            items = tuple([from_google(kind, item) if is_message(kind) else item for item in field_value])
            values[each.name] = None if is_null else items
        elif is_message(kind):
            values[each.name] = from_google(kind, field_value) if message.HasField(each.proto_name) else each.default
        else:
            has_presence = message.DESCRIPTOR.fields_by_name[each.proto_name].has_presence
            values[each.name] = field_value if not has_presence or message.HasField(each.proto_name) else each.default
    return of(**values)
