"""DescribeConfigs (key 32), versions 1 to 4: of topics and brokers, forwarded to the active controller;
of the broker that is asked also what its file says, and the defaults.

Null keys are all, and so is an empty list. A resource that is named more than once is answered once, with all keys
that it was asked for. Types are told from version 3 on, documentation to those who ask for it.

Not implemented: synonyms other than the value itself and where it is from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kipmesh.core.messages import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResult,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

UNKNOWN_TYPE, BOOLEAN, STRING, INT, LONG, DOUBLE, LIST = 0, 1, 2, 3, 5, 6, 7
TYPES: Mapping[str, int] = {
    "cleanup.policy": LIST,
    "compression.type": STRING,
    "delete.retention.ms": LONG,
    "file.delete.delay.ms": LONG,
    "flush.messages": LONG,
    "flush.ms": LONG,
    "follower.replication.throttled.rate": LONG,
    "index.interval.bytes": INT,
    "max.compaction.lag.ms": LONG,
    "max.message.bytes": INT,
    "message.timestamp.after.max.ms": LONG,
    "message.timestamp.before.max.ms": LONG,
    "message.timestamp.type": STRING,
    "min.cleanable.dirty.ratio": DOUBLE,
    "min.compaction.lag.ms": LONG,
    "min.insync.replicas": INT,
    "retention.bytes": LONG,
    "retention.ms": LONG,
    "segment.bytes": INT,
    "segment.index.bytes": INT,
    "segment.ms": LONG,
    "unclean.leader.election.enable": BOOLEAN,
}
"""As Apache Kafka has them: clients read values by them."""


class _Request(NamedTuple):
    resources: Sequence[DescribeConfigsResource] = ()
    include_synonyms: bool = False
    include_documentation: bool = False


class _Synonym(NamedTuple):
    name: str = ""
    value: str | None = None
    source: int = 0


class _Config(NamedTuple):
    name: str = ""
    value: str | None = None
    read_only: bool = False
    config_source: int = 0
    documentation: str | None = None
    synonyms: Sequence[_Synonym] = ()
    config_type: int = UNKNOWN_TYPE


class _Result(NamedTuple):
    error_code: int = 0
    error_message: str | None = None
    resource_type: int = 0
    resource_name: str = ""
    configs: Sequence[_Config] = ()


class _Response(NamedTuple):
    throttle_time_ms: int = 0
    results: Sequence[_Result] = ()


REQUEST = Struct(
    _Request,
    field(
        "resources",
        Array(
            Struct(
                DescribeConfigsResource,
                field("resource_type", "int8"),
                field("resource_name", "string"),
                field("configuration_keys", Array("string"), nullable="0+", null=()),
            )
        ),
    ),
    field("include_synonyms", "bool", "1+"),
    field("include_documentation", "bool", "3+"),
)
RESPONSE = Struct(
    _Response,
    field("throttle_time_ms", "int32"),
    field(
        "results",
        Array(
            Struct(
                _Result,
                field("error_code", "int16"),
                field("error_message", "string", nullable="0+"),
                field("resource_type", "int8"),
                field("resource_name", "string"),
                field(
                    "configs",
                    Array(
                        Struct(
                            _Config,
                            field("name", "string"),
                            field("value", "string", nullable="0+"),
                            field("read_only", "bool"),
                            field("config_source", "int8", "1+"),
                            field("is_sensitive", "bool", default=False),
                            field(
                                "synonyms",
                                Array(
                                    Struct(
                                        _Synonym,
                                        field("name", "string"),
                                        field("value", "string", nullable="0+"),
                                        field("source", "int8"),
                                    )
                                ),
                                "1+",
                            ),
                            field("config_type", "int8", "3+"),
                            field("documentation", "string", "3+", nullable="3+"),
                        )
                    ),
                ),
            )
        ),
    ),
)


async def _handle(services: Services, request: _Request, call: Call) -> _Response:
    asked = DescribeConfigsRequest(request.resources, request.include_documentation)
    response = await services.admin.describe_configs(asked, call.context)
    results = [_result(one, has_synonyms=request.include_synonyms) for one in response.results]
    return _Response(response.throttle_time_ms, results)


def _result(one: DescribeConfigsResult, *, has_synonyms: bool) -> _Result:
    configs = [_config(each, has_synonyms=has_synonyms) for each in one.configs]
    return _Result(one.error_code, one.error_message, one.resource_type, one.resource_name, configs)


def _config(one: DescribeConfigsResourceResult, *, has_synonyms: bool) -> _Config:
    synonyms = [_Synonym(one.name, one.value, one.config_source)] if has_synonyms else ()
    return _Config(*one, synonyms=synonyms, config_type=TYPES.get(one.name, UNKNOWN_TYPE))


API = Api(
    32,
    "DescribeConfigs",
    versions("1-4"),
    flexible_since=4,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
    request_bytes_max=1 << 20,
)
