"""DescribeUserScramCredentials (key 50), version 0: mechanisms and iterations, asked of the active controller.

Null users are all, and so is an empty list. Users of `sasl.users.file` are not in the metadata, and not told.

Not implemented: nothing.
"""

from __future__ import annotations

from kipmesh.core.messages import (
    CredentialInfo,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    DescribeUserScramCredentialsResult,
    UserName,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

REQUEST = Struct(
    DescribeUserScramCredentialsRequest,
    field("users", Array(Struct(UserName, field("name", "string"))), nullable="0+", null=()),
)
RESPONSE = Struct(
    DescribeUserScramCredentialsResponse,
    field("throttle_time_ms", "int32"),
    field("error_code", "int16"),
    field("error_message", "string", nullable="0+"),
    field(
        "results",
        Array(
            Struct(
                DescribeUserScramCredentialsResult,
                field("user", "string"),
                field("error_code", "int16"),
                field("error_message", "string", nullable="0+"),
                field(
                    "credential_infos",
                    Array(Struct(CredentialInfo, field("mechanism", "int8"), field("iterations", "int32"))),
                ),
            )
        ),
    ),
)


async def _handle(
    services: Services, request: DescribeUserScramCredentialsRequest, call: Call
) -> DescribeUserScramCredentialsResponse:
    return await services.admin.describe_user_scram_credentials(request, call.context)


API = Api(
    50,
    "DescribeUserScramCredentials",
    versions("0"),
    flexible_since=0,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
    request_bytes_max=1 << 20,
)
