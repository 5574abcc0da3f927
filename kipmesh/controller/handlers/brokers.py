"""BrokerRegistration (62) and BrokerHeartbeat (63) on the active controller."""

from __future__ import annotations

from typing import Any

from kipmesh import messages as m
from kipmesh.controller.decision_queue import ControllerParts
from kipmesh.core.context import RequestContext


async def broker_registration(
    controller: ControllerParts, request: m.BrokerRegistrationRequest, context: RequestContext
) -> Any:
    """Register a broker and start its session. Error codes: see `BrokerLifecycle.register`. Raises KafkaError as
    `QuorumController.do` does."""
    return await controller.do(
        "BrokerRegistration", lambda core: core.brokers.register(request, controller.now_ms(), controller.next_offset())
    )


async def broker_heartbeat(
    controller: ControllerParts, request: m.BrokerHeartbeatRequest, context: RequestContext
) -> Any:
    """Renew a broker's session, and record the stream that carried this heartbeat as the broker's current one. Error
    codes: BROKER_ID_NOT_REGISTERED, STALE_BROKER_EPOCH. Raises KafkaError as `QuorumController.do` does."""
    stream = context.stream
    if stream:
        controller.heartbeat_streams[stream] = request.broker_id
    return await controller.do(
        "BrokerHeartbeat",
        lambda core: core.heartbeat(request, controller.now_ms(), controller.next_offset(), stream),
    )
