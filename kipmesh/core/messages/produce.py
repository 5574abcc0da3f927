"""Produce (API key 0), as in `protos/kipmesh/v1/produce.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.messages.fetch import LeaderIdAndEpoch, NodeEndpoint


class PartitionProduceData(NamedTuple):
    index: int = 0  # type: ignore[assignment]
    records: bytes = b""


class TopicProduceData(NamedTuple):
    name: str = ""
    topic_id: bytes = b""
    partition_data: Sequence[PartitionProduceData] = ()


class ProduceRequest(NamedTuple):
    transactional_id: str | None = None
    acks: int = 0
    timeout_ms: int = 0
    topic_data: Sequence[TopicProduceData] = ()


class BatchIndexAndErrorMessage(NamedTuple):
    batch_index: int = 0
    batch_index_error_message: str | None = None


class PartitionProduceResponse(NamedTuple):
    index: int = 0  # type: ignore[assignment]
    error_code: int = 0
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1
    record_errors: Sequence[BatchIndexAndErrorMessage] = ()
    error_message: str | None = None
    current_leader: LeaderIdAndEpoch | None = None


class TopicProduceResponse(NamedTuple):
    name: str = ""
    topic_id: bytes = b""
    partition_responses: Sequence[PartitionProduceResponse] = ()


class ProduceResponse(NamedTuple):
    responses: Sequence[TopicProduceResponse] = ()
    throttle_time_ms: int = 0
    node_endpoints: Sequence[NodeEndpoint] = ()
