"""InitProducerId (key 22), versions 0 to 5: ids for idempotent producers.

Not implemented: transactions (INVALID_REQUEST for a transactional id), version 6 (two-phase commit).
"""

from __future__ import annotations

from kipmesh.core.messages import InitProducerIdRequest, InitProducerIdResponse
from kipmesh.wire.api import Api, Call
from kipmesh.wire.schema import Struct, field, versions
from kipmesh.wire.services import Services

REQUEST = Struct(
    InitProducerIdRequest,
    field("transactional_id", "string", nullable="0+"),
    field("transaction_timeout_ms", "int32"),
    field("producer_id", "int64", "3+"),
    field("producer_epoch", "int16", "3+"),
)
RESPONSE = Struct(
    InitProducerIdResponse,
    field("throttle_time_ms", "int32"),
    field("error_code", "int16"),
    field("producer_id", "int64"),
    field("producer_epoch", "int16"),
)


async def _handle(services: Services, request: InitProducerIdRequest, call: Call) -> InitProducerIdResponse:
    return await services.broker.init_producer_id(request, call.context)


API = Api(
    22,
    "InitProducerId",
    versions("0-5"),
    flexible_since=2,
    request=REQUEST,
    response=RESPONSE,
    handle=_handle,
)
