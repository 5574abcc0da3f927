"""Between protobuf messages and the plain values of `kipmesh.core.messages`.

Both sides have the same names in the same order, so one table made from the descriptors translates all of them. A
field with presence that is absent becomes the value type's default (None or -1); everything else maps one to one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, cast

from google.protobuf import descriptor as _descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kipmesh.core import messages
from kipmesh.v1 import services_pb2

Value = Any  # one of the NamedTuples of kipmesh.core.messages


def _is_repeated(field: _descriptor.FieldDescriptor) -> bool:
    newer: bool | None = getattr(field, "is_repeated", None)  # `label` goes away in later protobufs
    if newer is not None:
        return newer
    older: int = getattr(field, "label")  # noqa: B009
    return older == _descriptor.FieldDescriptor.LABEL_REPEATED


class Translator:
    """Translates one message type, and holds the translators of the types inside it."""

    def __init__(self, descriptor: _descriptor.Descriptor, known: dict[str, Translator]) -> None:
        known[descriptor.name] = self
        self.value_type: Callable[..., Value] = getattr(messages, descriptor.name)
        self.message_type: Callable[..., Message] = GetMessageClass(descriptor)
        fields: Sequence[_descriptor.FieldDescriptor] = descriptor.fields
        self._names = tuple(field.name for field in fields)
        names = self._names
        self._get: Callable[[Message], tuple[Any, ...]] = (
            attrgetter(*names) if len(names) > 1 else lambda message: tuple([getattr(message, name) for name in names])
        )
        defaults = cast("Any", self.value_type)._field_defaults
        # (position, name, default) of scalars whose absence means something else than zero.
        self._optional = [
            (position, field.name, defaults[field.name])
            for position, field in enumerate(fields)
            if field.has_presence and field.message_type is None
        ]
        self._nested: list[tuple[int, str, bool, Translator]] = []
        self._lists: list[int] = []
        for position, field in enumerate(fields):
            repeated = _is_repeated(field)
            if field.message_type is not None:
                inner = known.get(field.message_type.name) or Translator(field.message_type, known)
                self._nested.append((position, field.name, repeated, inner))
            elif repeated:
                self._lists.append(position)

    def from_message(self, message: Message) -> Value:
        """The value that `message` says."""
        if not (self._nested or self._lists or self._optional):
            return self.value_type(*self._get(message))
        parts = list(self._get(message))
        for position, name, default in self._optional:
            if not parts[position] and not message.HasField(name):
                parts[position] = default
        for position in self._lists:
            parts[position] = tuple(parts[position])
        for position, name, repeated, inner in self._nested:
            if repeated:
                parts[position] = tuple([inner.from_message(item) for item in parts[position]])
            else:
                parts[position] = inner.from_message(parts[position]) if message.HasField(name) else None
        return self.value_type(*parts)

    def _to_dict(self, value: Value) -> dict[str, Any]:
        fields = dict(zip(self._names, value, strict=True))
        for position, name, repeated, inner in self._nested:
            part = value[position]
            if repeated:
                fields[name] = [inner._to_dict(item) for item in part] if part else None
            elif part is not None:
                fields[name] = inner._to_dict(part)
        return fields

    def to_message(self, value: Value) -> Message:
        """A protobuf message that says `value`. Inner messages go in as dicts: protobuf would copy made ones."""
        return self.message_type(**self._to_dict(value))

    def encode(self, value: Value) -> bytes:
        """`value` as bytes on the wire."""
        return self.to_message(value).SerializeToString()

    def decode(self, data: bytes) -> Value:
        """The value that the bytes say; raises `google.protobuf.message.DecodeError`."""
        message = self.message_type()
        message.ParseFromString(data)
        return self.from_message(message)


class Method:
    """One RPC: its full name and the translators of its request and response."""

    __slots__ = ("name", "path", "request", "response", "streaming")

    def __init__(self, service: str, name: str, request: Translator, response: Translator) -> None:
        self.name = name
        self.path = f"/{service}/{name}"
        self.request = request
        self.response = response
        self.streaming = name.endswith("Stream")


def _methods() -> dict[str, dict[str, Method]]:
    known: dict[str, Translator] = {}
    table: dict[str, dict[str, Method]] = {}
    for service in services_pb2.DESCRIPTOR.services_by_name.values():
        table[service.name] = {
            method.name: Method(
                service.full_name,
                method.name,
                known.get(method.input_type.name) or Translator(method.input_type, known),
                known.get(method.output_type.name) or Translator(method.output_type, known),
            )
            for method in service.methods
        }
    return table


METHODS: dict[str, dict[str, Method]] = _methods()
"""Service name -> method name -> method, from `services.proto`; never changed."""

FILE_DESCRIPTOR = services_pb2.DESCRIPTOR
