"""ApiVersions (key 18), versions 0 to 4: which APIs and versions this listener speaks, from the registry itself.

A version that is not supported is answered in version 0 with UNSUPPORTED_VERSION and the versions of ApiVersions, so
that the client can ask again (KIP-511). From version 3 on clients say which software they are; a name that is none is
INVALID_REQUEST. The response's header never has tagged fields.

Not implemented: features (none are told, and their epoch is unknown), version 5's check of cluster and node id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode
from kipmesh.wire.api import API_VERSIONS_KEY, Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

SUPPORTED = versions("0-4")
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_SOFTWARE_MAX = 100


class ApiVersionsRequest(NamedTuple):
    """The client's software; empty before version 3."""

    client_software_name: str = ""
    client_software_version: str = ""


class ApiVersion(NamedTuple):
    """An API and its versions."""

    api_key: int
    min_version: int
    max_version: int


class ApiVersionsResponse(NamedTuple):
    """What there is."""

    error_code: int
    api_keys: Sequence[ApiVersion]


REQUEST = Struct(
    ApiVersionsRequest,
    field("client_software_name", "string", "3+"),
    field("client_software_version", "string", "3+"),
)
RESPONSE = Struct(
    ApiVersionsResponse,
    field("error_code", "int16"),
    field(
        "api_keys",
        Array(
            Struct(ApiVersion, field("api_key", "int16"), field("min_version", "int16"), field("max_version", "int16"))
        ),
    ),
    field("throttle_time_ms", "int32", "1+", default=0),
)

OnSoftware = Callable[[str, str], None]


def make(others: Iterable[Api]) -> Api:
    """The API that tells of itself and of all the others."""
    mine = ApiVersion(API_VERSIONS_KEY, *SUPPORTED)
    keys = sorted([mine, *(ApiVersion(api.key, *api.supported) for api in others)])

    async def handle(services: Services, request: ApiVersionsRequest | None, call: Call) -> ApiVersionsResponse:
        if request is None:
            return ApiVersionsResponse(ErrorCode.UNSUPPORTED_VERSION, [mine])
        if call.version >= 3:
            software = request.client_software_name, request.client_software_version
            if any(len(text) > _SOFTWARE_MAX or not _SOFTWARE.fullmatch(text) for text in software):
                return ApiVersionsResponse(ErrorCode.INVALID_REQUEST, ())
            call.session.client_software_name, call.session.client_software_version = software
            call.session.on_software(*software)
        return ApiVersionsResponse(ErrorCode.NONE, keys)

    return Api(
        API_VERSIONS_KEY,
        "ApiVersions",
        SUPPORTED,
        flexible_since=3,
        request=REQUEST,
        response=RESPONSE,
        handle=handle,
        response_flexible_since=SUPPORTED.last + 1,
    )
