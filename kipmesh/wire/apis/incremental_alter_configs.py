"""IncrementalAlterConfigs (key 44), versions 0 and 1: of topics and brokers, forwarded to the active controller.

Not implemented: what the controller has no configuration of (loggers, groups, client metrics: INVALID_REQUEST).
"""

from __future__ import annotations

from kipmesh.core.messages import (
    AlterableConfig,
    AlterConfigsResource,
    AlterConfigsResourceResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

REQUEST = Struct(
    IncrementalAlterConfigsRequest,
    field(
        "resources",
        Array(
            Struct(
                AlterConfigsResource,
                field("resource_type", "int8"),
                field("resource_name", "string"),
                field(
                    "configs",
                    Array(
                        Struct(
                            AlterableConfig,
                            field("name", "string"),
                            field("config_operation", "int8"),
                            field("value", "string", nullable="0+"),
                        )
                    ),
                ),
            )
        ),
    ),
    field("validate_only", "bool"),
)
RESPONSE = Struct(
    IncrementalAlterConfigsResponse,
    field("throttle_time_ms", "int32"),
    field(
        "responses",
        Array(
            Struct(
                AlterConfigsResourceResponse,
                field("error_code", "int16"),
                field("error_message", "string", nullable="0+"),
                field("resource_type", "int8"),
                field("resource_name", "string"),
            )
        ),
    ),
)


async def _handle(
    services: Services, request: IncrementalAlterConfigsRequest, call: Call
) -> IncrementalAlterConfigsResponse:
    return await services.admin.incremental_alter_configs(request, call.context)


API = Api(
    44,
    "IncrementalAlterConfigs",
    versions("0-1"),
    flexible_since=1,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
)
