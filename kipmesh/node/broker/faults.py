"""The service Faults of a broker: faults for tests at its listeners of the Kafka protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.messages import (
    ClearFaultsRequest,
    ClearFaultsResponse,
    InjectFaultRequest,
    InjectFaultResponse,
    ListFaultsRequest,
    ListFaultsResponse,
)
from kipmesh.rpc.server import RequestContext

if TYPE_CHECKING:
    from kipmesh.wire.faults import Faults

_OFF = KafkaError(ErrorCode.POLICY_VIOLATION, "fault.injection.enable is false at this broker")


class FaultsHandler:
    """Refuses everything with POLICY_VIOLATION unless `fault.injection.enable`."""

    def __init__(self, *, is_enabled: bool) -> None:
        self.faults: Faults | None = None
        if is_enabled:
            from kipmesh.wire.faults import Faults  # not loaded where there are none

            self.faults = Faults()

    async def inject_fault(self, request: InjectFaultRequest, context: RequestContext) -> InjectFaultResponse:
        """InjectFault, which is ours."""
        try:
            if request.fault is None:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "there is no fault in the request")
            return InjectFaultResponse(fault_id=self._enabled().add(request.fault))
        except KafkaError as error:
            return InjectFaultResponse(error.code, error.message)

    async def list_faults(self, request: ListFaultsRequest, context: RequestContext) -> ListFaultsResponse:
        """ListFaults, which is ours."""
        try:
            return ListFaultsResponse(faults=self._enabled().all())
        except KafkaError as error:
            return ListFaultsResponse(error.code, error.message)

    async def clear_faults(self, request: ClearFaultsRequest, context: RequestContext) -> ClearFaultsResponse:
        """ClearFaults, which is ours."""
        try:
            return ClearFaultsResponse(cleared=self._enabled().clear(frozenset(request.fault_ids)))
        except KafkaError as error:
            return ClearFaultsResponse(error.code, error.message)

    def _enabled(self) -> Faults:
        if self.faults is None:
            raise _OFF
        return self.faults
