"""TODO producer_ids."""

from kipmesh.messages.schema import Int16, Int32, Int64, Message, field


class InitProducerIdRequest(Message):
    # Transactions are not supported: a request that names one is refused.
    transactional_id: str | None = field(1)
    transaction_timeout_ms: Int32 = field(2)
    # What the producer has now, -1 for nothing.
    producer_id: Int64 = field(3, versions="3+", default=-1)
    producer_epoch: Int16 = field(4, versions="3+", default=-1)


class InitProducerIdResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int16 = field(2)
    producer_id: Int64 = field(3, default=-1)
    producer_epoch: Int16 = field(4, default=-1)
    # Ours: why it was refused.
    error_message: str | None = field(5, versions="")


class AllocateProducerIdsRequest(Message):
    """A broker asks the active controller for a block of ids to hand out."""

    broker_id: Int32 = field(1)
    broker_epoch: Int64 = field(2, default=-1)


class AllocateProducerIdsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int32 = field(2)
    producer_id_start: Int64 = field(3)
    producer_id_len: Int32 = field(4)
