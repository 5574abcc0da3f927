"""Faults for tests, as in `protos/kipmesh/v1/faults.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class InjectedFault(NamedTuple):
    fault_id: int = 0
    api_name: str = ""
    fault_error_code: int = 0
    delay_ms: int = 0
    drops_connection: bool = False
    times: int = 0
    client_id: str = ""


class InjectFaultRequest(NamedTuple):
    fault: InjectedFault | None = None


class InjectFaultResponse(NamedTuple):
    error_code: int = 0
    error_message: str | None = None
    fault_id: int = 0


class ListFaultsRequest(NamedTuple):
    pass


class ListFaultsResponse(NamedTuple):
    error_code: int = 0
    error_message: str | None = None
    faults: Sequence[InjectedFault] = ()


class ClearFaultsRequest(NamedTuple):
    fault_ids: Sequence[int] = ()


class ClearFaultsResponse(NamedTuple):
    error_code: int = 0
    error_message: str | None = None
    cleared: int = 0
