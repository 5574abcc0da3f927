"""AllocateProducerIds: the controller hands out producer ids in blocks, each to one broker and never again.

As Kafka does: one `ProducerIdsRecord` a block says where the next one begins. What a broker has not used of its block
when it ends is lost, which 2^63 ids allow.
"""

from __future__ import annotations

from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.core.metadata.records import ProducerIdsRecord
from kipmesh.messages import AllocateProducerIdsRequest, AllocateProducerIdsResponse
from kipmesh.messages.limits import MAX_INT64

BLOCK_SIZE = 1000
"""Kafka's."""


def allocate_producer_ids(
    image: MetadataImage, request: AllocateProducerIdsRequest
) -> Decision[AllocateProducerIdsResponse]:
    """The next block for a broker; STALE_BROKER_EPOCH unless it is registered with that epoch."""
    broker = image.brokers.get(request.broker_id)
    if broker is None or broker.broker_epoch != request.broker_epoch:
        return Decision((), AllocateProducerIdsResponse(error_code=ErrorCode.STALE_BROKER_EPOCH))
    start = image.next_producer_id
    if start > MAX_INT64 - BLOCK_SIZE:
        return Decision((), AllocateProducerIdsResponse(error_code=ErrorCode.UNKNOWN_SERVER_ERROR))
    record = ProducerIdsRecord(request.broker_id, request.broker_epoch, start + BLOCK_SIZE)
    return Decision((record,), AllocateProducerIdsResponse(producer_id_start=start, producer_id_len=BLOCK_SIZE))
