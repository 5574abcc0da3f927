"""DescribeProducers (61): the idempotent producers that a replica of a partition knows."""

from collections.abc import Sequence

from kipmesh.messages.schema import ITEM, Int16, Int32, Int64, Message, field


class DescribeProducersTopic(Message):
    name: str = field(1)
    partition_indexes: Sequence[Int32] = field(2)


class DescribeProducersRequest(Message):
    topics: Sequence[DescribeProducersTopic] = field(1)


class ActiveProducer(Message):
    producer_id: Int64 = field(1)
    producer_epoch: Int32 = field(2)
    last_sequence: Int32 = field(3, default=-1)
    # The largest timestamp of the producer's last batch.
    last_timestamp: Int64 = field(4, default=-1)
    # -1, because transactions are not supported yet.
    coordinator_epoch: Int32 = field(5)
    current_txn_start_offset: Int64 = field(6, default=-1)


class DescribeProducersPartitionResponse(Message):
    partition_index: Int32 = field(1, mirrors=ITEM)
    error_code: Int16 = field(2)
    error_message: str | None = field(3)
    active_producers: Sequence[ActiveProducer] = field(4)


class DescribeProducersTopicResponse(Message):
    name: str = field(1)
    partitions: Sequence[DescribeProducersPartitionResponse] = field(2, mirrors="partition_indexes")


class DescribeProducersResponse(Message):
    throttle_time_ms: Int32 = field(1)
    topics: Sequence[DescribeProducersTopicResponse] = field(2, mirrors="topics")
