"""ListGroups (key 16), versions 0 to 5: the groups that this broker coordinates.

By states from version 4 on, by types from version 5 on; every group here is of type `classic`.

Not implemented: nothing.
"""

from __future__ import annotations

from kipmesh.core.messages import ListedGroup, ListGroupsRequest, ListGroupsResponse
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

REQUEST = Struct(
    ListGroupsRequest,
    field("states_filter", Array("string"), "4+"),
    field("types_filter", Array("string"), "5+"),
)
RESPONSE = Struct(
    ListGroupsResponse,
    field("throttle_time_ms", "int32", "1+"),
    field("error_code", "int16"),
    field(
        "groups",
        Array(
            Struct(
                ListedGroup,
                field("group_id", "string"),
                field("protocol_type", "string"),
                field("group_state", "string", "4+"),
                field("group_type", "string", "5+"),
            )
        ),
    ),
)


async def _handle(services: Services, request: ListGroupsRequest, call: Call) -> ListGroupsResponse:
    return await services.groups.list_groups(request, call.context)


API = Api(16, "ListGroups", versions("0-5"), flexible_since=3, request=REQUEST, response=RESPONSE, handle=_handle)
