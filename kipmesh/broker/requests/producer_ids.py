"""InitProducerId (API key 22): ids for idempotent producers, from blocks that the controller allocates.

The broker fetches a block at the first request and whenever one is used up; concurrent requests wait for the same
block. Invariant: no id is assigned twice in the cluster, because the controller gives each block to one broker once. A
request with an id and an epoch gets a new id, as in Kafka: idempotent producers raise their epochs and send it only
when the epochs are used up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from kipmesh import messages as m
from kipmesh.broker.membership.controller_channel import ControllerChannel
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages.table import ALLOCATE_PRODUCER_IDS
from kipmesh.transport.grpc.client import TransportError
from kipmesh.transport.grpc.server import RequestContext

log = structlog.get_logger(__name__)

ALLOCATE_TIMEOUT_S = 5.0


class ProducerIdsHandler:
    """Responds to InitProducerId. Belongs to the event loop. `broker_epoch` returns the epoch of the registration."""

    def __init__(self, broker_id: int, channel: ControllerChannel, broker_epoch: Callable[[], int]) -> None:
        self._broker_id = broker_id
        self._channel = channel
        self._broker_epoch = broker_epoch
        self._next = self._end = 0
        self._allocating = asyncio.Lock()

    async def init_producer_id(
        self, request: m.InitProducerIdRequest, context: RequestContext
    ) -> m.InitProducerIdResponse:
        """Return a new producer id with epoch 0.

        Errors: INVALID_REQUEST for a transactional id, or if only one of producer id and epoch is set;
        COORDINATOR_NOT_AVAILABLE, which clients retry, if no controller responds in time or the controller refuses.
        """
        refusal = _refusal(request)
        if refusal:
            return _failed(ErrorCode.INVALID_REQUEST, refusal)
        try:
            producer_id = await self._take(context.respond_within(ALLOCATE_TIMEOUT_S))
        except KafkaError as error:
            return _failed(error.code, error.message)
        return m.InitProducerIdResponse(producer_id=producer_id, producer_epoch=0)

    async def _take(self, timeout_s: float) -> int:
        if self._next == self._end:
            async with self._allocating:
                if self._next == self._end:  # another request may have allocated
                    await self._allocate(timeout_s)
        producer_id = self._next
        self._next += 1
        return producer_id

    async def _allocate(self, timeout_s: float) -> None:
        request = m.AllocateProducerIdsRequest(self._broker_id, self._broker_epoch())
        code = ErrorCode.COORDINATOR_NOT_AVAILABLE
        try:
            response: m.AllocateProducerIdsResponse = await self._channel.call(
                ALLOCATE_PRODUCER_IDS, request, timeout_s
            )
        except TransportError as error:
            raise KafkaError(code, f"the metadata controller did not respond to AllocateProducerIds: {error}") from None
        if response.error_code:
            name = ErrorCode.of(response.error_code).name
            raise KafkaError(code, f"the metadata controller refused AllocateProducerIds: {name}")
        self._next = response.producer_id_start
        self._end = self._next + response.producer_id_len
        log.info("producer ids allocated", start=self._next, count=response.producer_id_len)


def _refusal(request: m.InitProducerIdRequest) -> str:
    if request.transactional_id is not None:
        return "transactions are not supported, remove transactional.id"
    if (request.producer_id < 0) != (request.producer_epoch < 0):
        got = f"{request.producer_id} and {request.producer_epoch}"
        return f"producer id and epoch must both be set or both be -1, got {got}"
    return ""


def _failed(code: ErrorCode, message: str) -> m.InitProducerIdResponse:
    return m.InitProducerIdResponse(error_code=code, error_message=message)
