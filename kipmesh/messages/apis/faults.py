"""TODO faults."""

from collections.abc import Sequence

from kipmesh.messages.schema import Bool, Int32, Message, field


class InjectedFault(Message):
    # Given by the broker.
    fault_id: Int32 = field(1)
    # Kafka's name of the API without "Request", e.g. Fetch.
    api_name: str = field(2)
    # What requests are answered with; 0 for no error.
    fault_error_code: Int32 = field(3)
    delay_ms: Int32 = field(4)
    drops_connection: Bool = field(5)
    # Requests that are still to have it.
    times: Int32 = field(6)
    # Whose requests; empty for everybody's.
    client_id: str = field(7)


class InjectFaultRequest(Message):
    fault: InjectedFault | None = field(1)


class InjectFaultResponse(Message):
    error_code: Int32 = field(1)
    error_message: str | None = field(2)
    fault_id: Int32 = field(3)


class ListFaultsRequest(Message):
    pass


class ListFaultsResponse(Message):
    error_code: Int32 = field(1)
    error_message: str | None = field(2)
    faults: Sequence[InjectedFault] = field(3)


class ClearFaultsRequest(Message):
    # Empty for all.
    fault_ids: Sequence[Int32] = field(1)


class ClearFaultsResponse(Message):
    error_code: Int32 = field(1)
    error_message: str | None = field(2)
    cleared: Int32 = field(3)
