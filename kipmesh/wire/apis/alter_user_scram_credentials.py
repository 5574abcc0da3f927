"""AlterUserScramCredentials (key 51), version 0: forwarded to the active controller, which says what is acceptable.

As in Apache Kafka a request alters each user once, whatever the mechanism: DUPLICATE_RESOURCE.

Not implemented: nothing.
"""

from __future__ import annotations

from kipmesh.core.messages import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    AlterUserScramCredentialsResult,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
)
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

REQUEST = Struct(
    AlterUserScramCredentialsRequest,
    field("deletions", Array(Struct(ScramCredentialDeletion, field("name", "string"), field("mechanism", "int8")))),
    field(
        "upsertions",
        Array(
            Struct(
                ScramCredentialUpsertion,
                field("name", "string"),
                field("mechanism", "int8"),
                field("iterations", "int32"),
                field("salt", "bytes"),
                field("salted_password", "bytes"),
            )
        ),
    ),
)
RESPONSE = Struct(
    AlterUserScramCredentialsResponse,
    field("throttle_time_ms", "int32"),
    field(
        "results",
        Array(
            Struct(
                AlterUserScramCredentialsResult,
                field("user", "string"),
                field("error_code", "int16"),
                field("error_message", "string", nullable="0+"),
            )
        ),
    ),
)


async def _handle(
    services: Services, request: AlterUserScramCredentialsRequest, call: Call
) -> AlterUserScramCredentialsResponse:
    return await services.admin.alter_user_scram_credentials(request, call.context)


API = Api(
    51,
    "AlterUserScramCredentials",
    versions("0"),
    flexible_since=0,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
    request_bytes_max=4 << 20,
)
