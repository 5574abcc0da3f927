"""Protobuf descriptors of the declared messages, for gRPC reflection only; the codecs do not use them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf import descriptor_pool as pools

from kipmesh.messages.kafka import item_type
from kipmesh.messages.proto import SCALARS, carried_fields, has_presence
from kipmesh.messages.schema import Array, Message
from kipmesh.messages.table import METHODS, PROTO_PACKAGE, SERVICES

FILE = "kipmesh/v1/all.proto"
_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
}


@lru_cache(maxsize=1)
def descriptor_pool() -> Any:
    """Return a pool with all messages and services in one file."""
    file = descriptor_pb2.FileDescriptorProto(name=FILE, package=PROTO_PACKAGE, syntax="proto3")
    known: set[type[Message]] = set()
    for service in SERVICES:
        described = file.service.add(name=service.name)
        for method in METHODS[service.name].values():
            for of in (method.api.request, method.api.response):
                _add_message(file, of, known)
            described.method.add(
                name=method.name,
                input_type=_type_name(method.api.request),
                output_type=_type_name(method.api.response),
                client_streaming=method.streaming,
                server_streaming=method.streaming,
            )
    pool = pools.DescriptorPool()
    pool.Add(file)
    for name in ("grpc_health.v1.health_pb2", "grpc_reflection.v1alpha.reflection_pb2"):
        module = __import__(name, fromlist=["DESCRIPTOR"])
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    return pool


def _type_name(of: type[Message]) -> str:
    return f".{PROTO_PACKAGE}.{of.__name__}"


def _add_message(file: Any, of: type[Message], known: set[type[Message]]) -> None:
    if of in known:
        return
    known.add(of)
    described = file.message_type.add(name=of.__name__)
    for each in carried_fields(of):
        kind = item_type(each)
        field = described.field.add(name=each.proto_name, number=each.number)
        field.label = _Field.LABEL_REPEATED if isinstance(each.type, Array) else _Field.LABEL_OPTIONAL
        if isinstance(kind, str):
            field.type = _TYPES[SCALARS[kind]]
        else:
            field.type, field.type_name = _Field.TYPE_MESSAGE, _type_name(kind)
            _add_message(file, kind, known)
        if has_presence(each):
            field.proto3_optional = True
            field.oneof_index = len(described.oneof_decl)
            described.oneof_decl.add(name=f"_{each.proto_name}")
        if each.null_flag is not None:
            described.field.add(
                name=each.null_flag.name,
                number=each.null_flag.number,
                label=_Field.LABEL_OPTIONAL,
                type=_Field.TYPE_BOOL,
            )
