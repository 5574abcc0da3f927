"""Every table in every version, both ways, beside kio's classes, which were made from Kafka's own schemas."""

from __future__ import annotations

import random
import struct

import pytest
from kio_of_tests import assert_same, entity_type, parse, random_value, serialize

from kipmesh.wire.api import Api
from kipmesh.wire.codec import Codec, MalformedError, Out
from kipmesh.wire.registry import make_registry
from kipmesh.wire.schema import Struct

ROUNDS = 20
RENAMED: dict[int, dict[str, str]] = {}
"""Fields that kio calls otherwise, by API."""

CASES = [
    pytest.param(api, version, is_request, id=f"{api.name}-v{version}-{'request' if is_request else 'response'}")
    for api in make_registry().values()
    for version in range(api.supported.first, api.supported.last + 1)
    for is_request in (True, False)
]


def _bytes(out: Out) -> bytes:
    return b"".join((*out.parts, out))


def _comparable(value: object) -> object:
    """Lists and tuples, bytes and views are the same."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, (list, tuple)):
        return [_comparable(one) for one in value]
    return value


@pytest.mark.parametrize(("api", "version", "is_request"), CASES)
def test_bytes_and_fields_are_those_of_kafka(api: Api, version: int, is_request: bool) -> None:
    table: Struct = api.request if is_request else api.response
    codec = Codec(table, version, flexible=version >= api.flexible_since)
    entity = entity_type(api, version, is_request=is_request)
    source = random.Random(f"{api.name} {version} {is_request}")
    for _ in range(ROUNDS):
        value = random_value(source, table, version)
        out = Out()
        codec.write(out, value)
        data = _bytes(out)
        theirs = parse(entity, data)
        assert_same(value, table, theirs, version, RENAMED.get(api.key, {}))
        assert serialize(theirs) == data
        read, end = codec.read(memoryview(data), 0)
        assert end == len(data)
        assert _comparable(read) == _comparable(value)
        for cut in {0, 1, len(data) // 2, len(data) - 1}.intersection(range(len(data))):
            with pytest.raises((struct.error, IndexError, ValueError, MalformedError)):
                codec.read(memoryview(data[:cut]), 0)
