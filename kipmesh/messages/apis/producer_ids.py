"""InitProducerId (22) and AllocateProducerIds (67)."""

from kipmesh.messages.schema import Int16, Int32, Int64, Message, field


class InitProducerIdRequest(Message):
    # Must be null: transactions are not supported yet (INVALID_REQUEST).
    transactional_id: str | None = field(1)
    transaction_timeout_ms: Int32 = field(2)
    # The producer's current id, -1 if it has none.
    producer_id: Int64 = field(3, versions="3+", default=-1)
    producer_epoch: Int16 = field(4, versions="3+", default=-1)


class InitProducerIdResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int16 = field(2)
    producer_id: Int64 = field(3, default=-1)
    producer_epoch: Int16 = field(4, default=-1)
    # The reason of an error. Not in Apache Kafka.
    error_message: str | None = field(5, versions="")


class AllocateProducerIdsRequest(Message):
    """Requests a block of producer ids for a broker."""

    broker_id: Int32 = field(1)
    broker_epoch: Int64 = field(2, default=-1)


class AllocateProducerIdsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int32 = field(2)
    producer_id_start: Int64 = field(3)
    producer_id_len: Int32 = field(4)
