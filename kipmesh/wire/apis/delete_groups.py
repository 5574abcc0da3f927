"""DeleteGroups (key 42), versions 0 to 2: groups without members, with all that they committed.

Not implemented: nothing.
"""

from __future__ import annotations

from kipmesh.core.messages import DeletableGroupResult, DeleteGroupsRequest, DeleteGroupsResponse
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

REQUEST = Struct(DeleteGroupsRequest, field("groups_names", Array("string")))
RESPONSE = Struct(
    DeleteGroupsResponse,
    field("throttle_time_ms", "int32"),
    field("results", Array(Struct(DeletableGroupResult, field("group_id", "string"), field("error_code", "int16")))),
)


async def _handle(services: Services, request: DeleteGroupsRequest, call: Call) -> DeleteGroupsResponse:
    return await services.groups.delete_groups(request, call.context)


API = Api(
    42,
    "DeleteGroups",
    versions("0-2"),
    flexible_since=2,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
    request_bytes_max=1 << 20,
)
