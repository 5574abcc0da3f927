"""DescribeCluster (key 60), versions 0 and 1: the brokers on this listener. The controller is told as by Metadata.

Not implemented: the controllers' own endpoints (UNSUPPORTED_ENDPOINT_TYPE: they speak gRPC alone), fenced brokers
(version 2), authorized operations (always unknown).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import MetadataRequest
from kipmesh.wire.api import Api, Call
from kipmesh.wire.apis.metadata import UNKNOWN_OPERATIONS, controller_id
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

BROKERS = 1


class _Request(NamedTuple):
    endpoint_type: int = BROKERS


class _Broker(NamedTuple):
    broker_id: int
    host: str
    port: int
    rack: str | None


class _Response(NamedTuple):
    error_code: int = 0
    error_message: str | None = None
    endpoint_type: int = BROKERS
    cluster_id: str = ""
    controller_id: int = -1
    brokers: Sequence[_Broker] = ()


REQUEST = Struct(
    _Request,
    field("include_cluster_authorized_operations", "bool", default=False),
    field("endpoint_type", "int8", "1+"),
)
RESPONSE = Struct(
    _Response,
    field("throttle_time_ms", "int32", default=0),
    field("error_code", "int16"),
    field("error_message", "string", nullable="0+"),
    field("endpoint_type", "int8", "1+"),
    field("cluster_id", "string"),
    field("controller_id", "int32"),
    field(
        "brokers",
        Array(
            Struct(
                _Broker,
                field("broker_id", "int32"),
                field("host", "string"),
                field("port", "int32"),
                field("rack", "string", nullable="0+"),
            )
        ),
    ),
    field("cluster_authorized_operations", "int32", default=UNKNOWN_OPERATIONS),
)


async def _handle(services: Services, request: _Request, call: Call) -> _Response:
    if request.endpoint_type != BROKERS:
        message = "only brokers have endpoints for the Kafka protocol"
        code = ErrorCode.UNSUPPORTED_ENDPOINT_TYPE
        return _Response(code, message, request.endpoint_type, services.cluster_id)
    response = await services.broker.metadata(MetadataRequest(), call.context)
    brokers = [_Broker(*broker) for broker in response.brokers]
    return _Response(
        response.error_code,
        None,
        BROKERS,
        services.cluster_id,
        controller_id(services, response.brokers),
        brokers,
    )


API = Api(
    60,
    "DescribeCluster",
    versions("0-1"),
    flexible_since=0,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
)
