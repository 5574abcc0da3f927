"""InitProducerId and AllocateProducerIds, as in `protos/kipmesh/v1/producer_ids.proto`."""

from __future__ import annotations

from typing import NamedTuple


class InitProducerIdRequest(NamedTuple):
    transactional_id: str | None = None
    transaction_timeout_ms: int = 0
    producer_id: int = -1
    producer_epoch: int = -1


class InitProducerIdResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    producer_id: int = -1
    producer_epoch: int = -1
    error_message: str | None = None


class AllocateProducerIdsRequest(NamedTuple):
    broker_id: int = 0
    broker_epoch: int = -1


class AllocateProducerIdsResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    producer_id_start: int = 0
    producer_id_len: int = 0
