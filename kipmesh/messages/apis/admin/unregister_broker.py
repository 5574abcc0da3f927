"""UnregisterBroker (64): removes a stopped broker from the metadata."""

from kipmesh.messages.schema import Int16, Int32, Message, field


class UnregisterBrokerRequest(Message):
    broker_id: Int32 = field(1)


class UnregisterBrokerResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int16 = field(2)
    error_message: str | None = field(3)
