"""`kipmesh.core.messages` says exactly what `protos/kipmesh/v1` says, and nothing is lost between the two."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh import messages
from kipmesh.rpc import codec

_INTEGERS = {
    FieldDescriptor.TYPE_INT32: 32,
    FieldDescriptor.TYPE_SINT32: 32,
    FieldDescriptor.TYPE_INT64: 64,
    FieldDescriptor.TYPE_SINT64: 64,
}


def _files(file: FileDescriptor, known: dict[str, FileDescriptor]) -> dict[str, FileDescriptor]:
    known[file.name] = file
    for inner in file.dependencies:
        _files(inner, known)
    return known


DESCRIPTORS: dict[str, Descriptor] = {
    name: descriptor
    for file in _files(codec.FILE_DESCRIPTOR, {}).values()
    for name, descriptor in file.message_types_by_name.items()
}
KNOWN: dict[str, codec.Translator] = {}
TRANSLATORS = {name: KNOWN.get(name) or codec.Translator(descriptor, KNOWN) for name, descriptor in DESCRIPTORS.items()}


def _is_list(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type in _INTEGERS:
        bits = _INTEGERS[field.type]
        return st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=8)
    assert field.type == FieldDescriptor.TYPE_BOOL, f"{field.full_name}: a type that the mesh does not use"
    return st.booleans()


def _values(descriptor: Descriptor) -> st.SearchStrategy[Any]:
    parts = []
    for field in descriptor.fields:
        part = _values(field.message_type) if field.message_type else _scalar(field)
        if _is_list(field):
            part = st.lists(part, max_size=2).map(tuple)
        elif field.message_type:
            part = st.none() | part
        elif field.has_presence:
            part = st.just(getattr(messages, descriptor.name)._field_defaults[field.name]) | part
        parts.append(part)
    return st.tuples(*parts).map(lambda fields: getattr(messages, descriptor.name)(*fields))


def test_each_message_has_a_value_of_its_name() -> None:
    assert set(messages.__all__) == set(DESCRIPTORS)


@pytest.mark.parametrize("name", sorted(DESCRIPTORS))
def test_fields_have_the_same_names_order_and_defaults(name: str) -> None:
    value_type = getattr(messages, name)
    assert value_type._fields == tuple(field.name for field in DESCRIPTORS[name].fields)
    assert set(value_type._field_defaults) == set(value_type._fields), "every field has a default"
    assert [field.number for field in DESCRIPTORS[name].fields] == list(range(1, len(value_type._fields) + 1))
    # Nothing on the wire means nothing was said: every field has the value's own default.
    assert TRANSLATORS[name].decode(b"") == value_type()


@pytest.mark.parametrize("name", sorted(DESCRIPTORS))
def test_what_is_encoded_is_what_is_decoded(name: str) -> None:
    @settings(max_examples=25, deadline=None, database=None)
    @given(_values(DESCRIPTORS[name]))
    def check(value: Any) -> None:
        decoded = TRANSLATORS[name].decode(TRANSLATORS[name].encode(value))
        assert decoded == value
        assert type(decoded) is type(value)

    check()


def test_methods_translate_their_own_messages() -> None:
    for methods in codec.METHODS.values():
        for method in methods.values():
            assert method.request.value_type.__name__.endswith("Request")
            assert method.response.value_type.__name__ == method.request.value_type.__name__.replace(
                "Request", "Response"
            )
