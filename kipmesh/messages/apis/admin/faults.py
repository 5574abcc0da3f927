"""InjectFault, ListFaults, ClearFaults: fault injection for tests. Only kipmesh has these APIs."""

from collections.abc import Sequence

from kipmesh.messages.schema import Bool, Int32, Message, field


class InjectedFault(Message):
    # Assigned by the broker.
    fault_id: Int32 = field(1)
    # Kafka's name of the API without "Request", e.g. Fetch.
    api_name: str = field(2)
    # The error of the response; 0 for none.
    fault_error_code: Int32 = field(3)
    delay_ms: Int32 = field(4)
    drops_connection: Bool = field(5)
    # The number of requests that the fault still applies to.
    times: Int32 = field(6)
    # The client id that the fault applies to; empty for all.
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
    # Empty: all.
    fault_ids: Sequence[Int32] = field(1)


class ClearFaultsResponse(Message):
    error_code: Int32 = field(1)
    error_message: str | None = field(2)
    cleared: Int32 = field(3)
