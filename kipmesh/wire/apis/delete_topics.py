"""DeleteTopics (key 20), versions 1 to 6: forwarded to the active controller. By name, from version 6 on by id, too.

Not implemented: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.messages import DeletableTopicResult, DeleteTopicsRequest, DeleteTopicsResponse, DeleteTopicState
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Array, Struct, field, versions
from kipmesh.wire.services import Services

BY_ID = 6


class _Request(NamedTuple):
    topics: Sequence[DeleteTopicState] = ()
    topic_names: Sequence[str] = ()
    timeout_ms: int = 0


REQUEST = Struct(
    _Request,
    field(
        "topics",
        Array(Struct(DeleteTopicState, field("name", "string", nullable="6+"), field("topic_id", "uuid"))),
        "6+",
    ),
    field("topic_names", Array("string"), "1-5"),
    field("timeout_ms", "int32"),
)
RESPONSE = Struct(
    DeleteTopicsResponse,
    field("throttle_time_ms", "int32"),
    field(
        "responses",
        Array(
            Struct(
                DeletableTopicResult,
                field("name", "string", nullable="6+"),
                field("topic_id", "uuid", "6+"),
                field("error_code", "int16"),
                field("error_message", "string", "5+", nullable="5+"),
            )
        ),
    ),
)


async def _handle(services: Services, request: _Request, call: Call) -> DeleteTopicsResponse:
    topics = request.topics if call.version >= BY_ID else [DeleteTopicState(name) for name in request.topic_names]
    return await services.admin.delete_topics(DeleteTopicsRequest(topics, request.timeout_ms), call.context)


API = Api(20, "DeleteTopics", versions("1-6"), flexible_since=4, request=REQUEST, response=RESPONSE, handle=_handle)
