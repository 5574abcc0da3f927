"""Every message in every version, compared with the classes of kio, which are generated from Kafka's schemas."""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from kipmesh.messages import ApiVersionsResponse
from kipmesh.messages.kafka import FIXED, MalformedError, Out, is_message, item_type
from kipmesh.messages.schema import Message
from kipmesh.messages.table import KAFKA_APIS, Api
from tests.unit.transport.kafka.kio_of_tests import assert_same, entity_type, parse, random_value, serialize

ROUNDS = 20
NOT_DECLARED: dict[type[Message], frozenset[str]] = {
    ApiVersionsResponse: frozenset(
        {"supported_features", "finalized_features", "finalized_features_epoch", "zk_migration_ready"}
    ),
}
"""Tagged fields of Apache Kafka that are not declared."""
CASES = [
    pytest.param(api, version, is_request, id=f"{api.name}-v{version}-{'request' if is_request else 'response'}")
    for api in KAFKA_APIS.values()
    for version in range(api.versions.first, api.versions.last + 1)
    for is_request in (True, False)
]


def _bytes(out: Out) -> bytes:
    return b"".join((*out.parts, out))


def _comparable(value: object) -> object:
    """Replace memory views by bytes."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, tuple):
        return tuple([_comparable(item) for item in value])
    return value


@pytest.mark.parametrize(("api", "version", "is_request"), CASES)
def test_encoded_bytes_and_fields_match_kafka(api: Api, version: int, is_request: bool) -> None:
    of = api.request if is_request else api.response
    codec = api.request_codec(version) if is_request else api.response_codec(version)
    entity = entity_type(api, version, is_request=is_request)
    source = random.Random(f"{api.name} {version} {is_request}")
    for _ in range(ROUNDS):
        value = random_value(source, of, version)
        out = Out()
        codec.write(out, value)
        data = _bytes(out)
        theirs = parse(entity, data)
        assert_same(value, of, theirs, version)
        assert serialize(theirs) == data
        read, end = codec.read(memoryview(data), 0)
        assert end == len(data)
        assert isinstance(read, of)
        assert _comparable(read) == _comparable(value)
        for cut in {0, 1, len(data) // 2, len(data) - 1}.intersection(range(len(data))):
            with pytest.raises(MalformedError):
                codec.read(memoryview(data[:cut]), 0)


def _check_fields(of: type[Message], entity: Any, version: int) -> None:
    """Compare names, order, tags and nullability with the class of kio, also in nested messages."""
    declared = {each.name: each for each in of.message_fields if version in each.versions}
    known = {name if (name := each.name) in declared else f"{name}_ms": each for each in fields(entity)}
    known = {name: each for name, each in known.items() if name.removesuffix("_ms") not in NOT_DECLARED.get(of, ())}
    tags = {name: each.metadata["tag"] for name, each in known.items() if "tag" in each.metadata}
    assert {name: each.tag for name, each in declared.items() if name in tags} == tags
    assert [name for name in declared if name not in tags] == [name for name in known if name not in tags]
    assert set(declared) == set(known)
    types = get_type_hints(entity)
    for name, each in declared.items():
        kind = item_type(each)
        if each.type not in FIXED and each.tag is None:
            assert (version in each.nullable) == (NoneType in get_args(types[known[name].name])), name
        if is_message(kind):
            (inner,) = _dataclasses(types[known[name].name])
            _check_fields(kind, inner, version)


def _dataclasses(annotation: Any) -> list[Any]:
    if is_dataclass(annotation):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _dataclasses(argument)]


@pytest.mark.parametrize(("api", "version", "is_request"), CASES)
def test_declared_fields_match_kafka_in_order(api: Api, version: int, is_request: bool) -> None:
    of = api.request if is_request else api.response
    _check_fields(of, entity_type(api, version, is_request=is_request), version)
