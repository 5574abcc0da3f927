"""Random messages, and comparison with kio, whose classes are generated from Kafka's schemas."""

from __future__ import annotations

import datetime
import io
import random
import uuid
from typing import Any, Literal

from kio.index import load_payload_module
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType

from kipmesh.messages.kafka import is_message, item_type
from kipmesh.messages.schema import Array, Field, Message
from kipmesh.messages.table import Api

_RANGES = {"int8": 7, "int16": 15, "uint16": 16, "int32": 31, "uint32": 32, "int64": 62}


def random_value(source: random.Random, of: type[Message], version: int, size: int = 3) -> Any:
    """Return a message with random values for the fields of a version and defaults for the others."""
    values = {}
    for each in of.message_fields:
        if version in each.versions:
            values[each.name] = _field(source, each, version, size)
    return of(**values)


def _field(source: random.Random, each: Field, version: int, size: int) -> Any:
    if version in each.nullable and each.null is None and source.random() < 0.3:
        return None
    if isinstance(each.type, Array):
        of = each.type.of
        number = source.choice((0, 1, size, 130 if isinstance(of, str) else size))
        return tuple([_item(source, each.name, of, version, size) for _ in range(number)])
    return _item(source, each.name, each.type, version, size)


def _item(source: random.Random, name: str, of: Any, version: int, size: int) -> Any:
    if is_message(of):
        return random_value(source, of, version, size)
    if of == "string":
        return "".join(source.choices("abc/-é漢", k=source.choice((0, 1, 5, 126, 127, 200))))
    if of in ("bytes", "records"):
        return source.randbytes(source.choice((1, 5, 126, 127, 20_000)))
    if of == "uuid":
        return source.choice((b"", source.randbytes(16)))
    if of == "bool":
        return source.random() < 0.5
    if of == "float64":
        return source.random()
    if name.endswith("error_code"):
        return source.choice((0, 3, 6, 35, 78))
    if name.endswith("_ms"):
        return source.randrange(2**31 if of == "int32" else 2**40)
    return source.randrange(-(2 ** _RANGES[of]) if not of.startswith("u") else 0, 2 ** _RANGES[of])


def entity_type(api: Api, version: int, *, is_request: bool) -> Any:
    """Return the class of kio for a message."""
    assert api.key is not None
    kind: Literal[EntityType.request, EntityType.response]
    kind = EntityType.request if is_request else EntityType.response
    module = load_payload_module(api.key, version, kind)
    return next(
        entity
        for entity in vars(module).values()
        if isinstance(entity, type)
        and getattr(entity, "__type__", None) is kind
        and entity.__module__ == module.__name__
    )


def parse(entity: Any, data: bytes) -> Any:
    """Decode all of `data` with kio."""
    value, size = entity_reader(entity)(data, 0)
    assert size == len(data), f"kio read {size} of {len(data)} bytes"
    return value


def serialize(value: Any) -> bytes:
    """Encode a message with kio."""
    out = io.BytesIO()
    entity_writer(type(value))(out, value)
    return out.getvalue()


def plain(value: Any) -> Any:
    """Convert a value of kio to the type of this code base."""
    if isinstance(value, ErrorCode):
        return value.value
    if isinstance(value, datetime.timedelta):
        return round(value.total_seconds() * 1000)
    if isinstance(value, datetime.datetime):
        return round(value.timestamp() * 1000)
    if isinstance(value, uuid.UUID):
        return value.bytes if value.int else b""
    return value


def assert_same(ours: Any, of: type[Message], theirs: Any, version: int) -> None:
    """Compare the fields of a version by name."""
    for each in of.message_fields:
        if version not in each.versions:
            continue
        name = each.name
        name = name if hasattr(theirs, name) else name.removesuffix("_ms")
        our_value, kio_value = getattr(ours, each.name), getattr(theirs, name)
        inner = item_type(each)
        if is_message(inner) and our_value is not None and kio_value is not None:
            pairs = zip(our_value, kio_value, strict=True) if isinstance(each.type, Array) else [(our_value, kio_value)]
            for our_item, kio_item in pairs:
                assert_same(our_item, inner, kio_item, version)
        elif isinstance(each.type, Array) and our_value is not None:
            assert [plain(item) for item in kio_value] == list(our_value), each.name
        else:
            converted = plain(kio_value)
            if inner == "uuid" and converted is None:
                converted = b""
            assert converted == our_value, each.name
