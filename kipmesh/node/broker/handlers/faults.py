"""InjectFault, ListFaults, ClearFaults: faults for tests. POLICY_VIOLATION unless `fault.injection.enable`."""

from __future__ import annotations

from kipmesh import messages as m
from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.node.broker.parts import BrokerParts
from kipmesh.transport.faults import Faults


def _enabled(broker: BrokerParts) -> Faults:
    if broker.faults is None:
        raise KafkaError(ErrorCode.POLICY_VIOLATION, "fault.injection.enable is false at this broker")
    return broker.faults


async def inject_fault(
    broker: BrokerParts, request: m.InjectFaultRequest, context: RequestContext
) -> m.InjectFaultResponse:
    """Add a fault; return its number."""
    if request.fault is None:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "there is no fault in the request")
    return m.InjectFaultResponse(fault_id=_enabled(broker).add(request.fault))


async def list_faults(
    broker: BrokerParts, request: m.ListFaultsRequest, context: RequestContext
) -> m.ListFaultsResponse:
    """List the faults that still apply."""
    return m.ListFaultsResponse(faults=_enabled(broker).all())


async def clear_faults(
    broker: BrokerParts, request: m.ClearFaultsRequest, context: RequestContext
) -> m.ClearFaultsResponse:
    """Remove faults, all by default."""
    return m.ClearFaultsResponse(cleared=_enabled(broker).clear(frozenset(request.fault_ids)))
