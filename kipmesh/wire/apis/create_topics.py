"""CreateTopics (key 19), versions 2 to 7: forwarded to the active controller.

From version 5 on the answer has the topic's partitions, replication factor and configuration, from version 7 on its id.

Not implemented: the configuration of a topic that is only validated (what the request sets is told), and in answers
beyond it `is_sensitive` (nothing is).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.config.resources import ConfigSource
from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import (
    ConfigEntry,
    CreatableReplicaAssignment,
    CreatableTopic,
    CreateTopicsRequest,
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
)
from kipmesh.core.metadata.image import TOPIC_RESOURCE
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

TELLS_CONFIGS = 5

Configs = Sequence[DescribeConfigsResourceResult]


class _Result(NamedTuple):
    name: str = ""
    topic_id: bytes = b""
    error_code: int = 0
    error_message: str | None = None
    num_partitions: int = -1
    replication_factor: int = -1
    configs: Configs | None = ()
    topic_config_error_code: int = 0


class _Response(NamedTuple):
    throttle_time_ms: int = 0
    topics: Sequence[_Result] = ()


REQUEST = Struct(
    CreateTopicsRequest,
    field(
        "topics",
        Array(
            Struct(
                CreatableTopic,
                field("name", "string"),
                field("num_partitions", "int32"),
                field("replication_factor", "int16"),
                field(
                    "assignments",
                    Array(
                        Struct(
                            CreatableReplicaAssignment,
                            field("partition_index", "int32"),
                            field("broker_ids", Array("int32")),
                        )
                    ),
                ),
                field(
                    "configs",
                    Array(Struct(ConfigEntry, field("name", "string"), field("value", "string", nullable="0+"))),
                ),
            )
        ),
    ),
    field("timeout_ms", "int32"),
    field("validate_only", "bool"),
)
RESPONSE = Struct(
    _Response,
    field("throttle_time_ms", "int32"),
    field(
        "topics",
        Array(
            Struct(
                _Result,
                field("name", "string"),
                field("topic_id", "uuid", "7+"),
                field("error_code", "int16"),
                field("error_message", "string", nullable="0+"),
                field("topic_config_error_code", "int16", "5+", tag=0),
                field("num_partitions", "int32", "5+"),
                field("replication_factor", "int16", "5+"),
                field(
                    "configs",
                    Array(
                        Struct(
                            DescribeConfigsResourceResult,
                            field("name", "string"),
                            field("value", "string", nullable="5+"),
                            field("read_only", "bool"),
                            field("config_source", "int8"),
                            field("is_sensitive", "bool", default=False),
                        )
                    ),
                    "5+",
                    nullable="5+",
                ),
            )
        ),
    ),
)


async def _handle(services: Services, request: CreateTopicsRequest, call: Call) -> _Response:
    response = await services.admin.create_topics(request, call.context)
    results = [_Result(*one) for one in response.topics]
    if call.version >= TELLS_CONFIGS:
        made = [one.name for one in results if not one.error_code]
        if request.validate_only:
            wanted = {topic.name: [_asked(entry) for entry in topic.configs] for topic in request.topics}
            results = [one._replace(configs=() if one.error_code else wanted[one.name]) for one in results]
        elif made:
            told = await _configs(services, made, call)
            results = [one if one.error_code else _with_configs(one, told.get(one.name)) for one in results]
    return _Response(response.throttle_time_ms, results)


def _asked(entry: ConfigEntry) -> DescribeConfigsResourceResult:
    return DescribeConfigsResourceResult(entry.name, entry.value, config_source=ConfigSource.TOPIC)


async def _configs(services: Services, names: Sequence[str], call: Call) -> dict[str, Configs | ErrorCode]:
    """Of topics; the error of each whose configuration cannot be told."""
    resources = [DescribeConfigsResource(TOPIC_RESOURCE, name) for name in names]
    response = await services.admin.describe_configs(DescribeConfigsRequest(resources), call.context)
    return {
        one.resource_name: ErrorCode.of(one.error_code) if one.error_code else one.configs for one in response.results
    }


def _with_configs(result: _Result, told: Configs | ErrorCode | None) -> _Result:
    if told is None or isinstance(told, ErrorCode):
        code = ErrorCode.UNKNOWN_SERVER_ERROR if told is None else told
        return result._replace(configs=None, num_partitions=-1, replication_factor=-1, topic_config_error_code=code)
    return result._replace(configs=told)


API = Api(19, "CreateTopics", versions("2-7"), flexible_since=5, request=REQUEST, response=RESPONSE, handle=_handle)
