"""Produce (0)."""

from collections.abc import Sequence

from kipmesh.messages.apis.fetch import LeaderIdAndEpoch, NodeEndpoint
from kipmesh.messages.schema import Int16, Int32, Int64, Message, Records, Uuid, field


class PartitionProduceData(Message):
    index: Int32 = field(1)
    # One record batch, format v2.
    records: Records = field(2, nullable="0+", null=b"")


class TopicProduceData(Message):
    name: str = field(1, versions="0-12")
    topic_id: Uuid = field(2, versions="13+")
    partition_data: Sequence[PartitionProduceData] = field(3)


class ProduceRequest(Message):
    transactional_id: str | None = field(1, nullable="3+")
    # 0: no response; 1: the leader has appended; -1: every member of the ISR has.
    acks: Int16 = field(2)
    timeout_ms: Int32 = field(3)
    topic_data: Sequence[TopicProduceData] = field(4)


class BatchIndexAndErrorMessage(Message):
    batch_index: Int32 = field(1)
    batch_index_error_message: str | None = field(2, nullable="8+")


class PartitionProduceResponse(Message):
    index: Int32 = field(1)
    error_code: Int16 = field(2)
    base_offset: Int64 = field(3, default=-1)
    log_append_time_ms: Int64 = field(4, versions="2+", default=-1)
    log_start_offset: Int64 = field(5, versions="5+", default=-1)
    record_errors: Sequence[BatchIndexAndErrorMessage] = field(6, versions="8+")
    error_message: str | None = field(7, versions="8+")
    current_leader: LeaderIdAndEpoch | None = field(8, versions="10+", tag=0)


class TopicProduceResponse(Message):
    name: str = field(1, versions="0-12")
    topic_id: Uuid = field(2, versions="13+")
    partition_responses: Sequence[PartitionProduceResponse] = field(3, mirrors="partition_data")


class ProduceResponse(Message):
    responses: Sequence[TopicProduceResponse] = field(1, mirrors="topic_data")
    throttle_time_ms: Int32 = field(2, versions="1+")
    node_endpoints: Sequence[NodeEndpoint] = field(3, versions="10+", tag=0)
