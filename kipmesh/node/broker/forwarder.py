"""Forwards administrative requests to the active controller, so that clients need to know brokers only.

The decoded request is sent once, whatever the API is. While no controller is active, it waits for the next one within
its own timeout; then the response is REQUEST_TIMED_OUT, and the request may have been carried out. If the request was
repeated at another controller and the API `reconciles`, the response is compared with the metadata (`reconcile`).
"""

from __future__ import annotations

from typing import Any

import structlog

from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode
from kipmesh.messages.table import Api
from kipmesh.node.broker.controller_channel import ControllerChannel, is_inactive
from kipmesh.node.broker.reconcile import Image, Reconciler, Until
from kipmesh.rpc.client import TransportError

log = structlog.get_logger(__name__)

NO_ACTIVE_CONTROLLER = "no metadata controller is active"


class Forwarder:
    """One broker's."""

    def __init__(self, channel: ControllerChannel, image: Image, until: Until) -> None:
        """`until` waits for a condition over the published metadata."""
        self._channel = channel
        self._reconciler = Reconciler(image, until)

    async def forward(self, api: Api, request: Any, context: RequestContext) -> Any:
        """Return the active controller's response, or the API's error response."""
        settle = self._reconciler.begin(api, request) if api.reconciles else None
        timeout_s = context.answer_within(getattr(request, "timeout_ms", api.timeout_ms) / 1000)
        try:
            response, is_repeated = await self._channel.forward(api, request, timeout_s)
        except TransportError as error:
            if error.too_large:
                return api.error_response(
                    request, ErrorCode.INVALID_REQUEST, "the request is too large to be forwarded"
                )
            log.warning("no controller responded", method=api.name, error=str(error))
            return _timed_out(api, request, f"{NO_ACTIVE_CONTROLLER}, or it does not respond")
        if is_inactive(api, response):  # until the time was over
            return _timed_out(api, request, NO_ACTIVE_CONTROLLER)
        return await settle(response) if is_repeated and settle is not None else response


def _timed_out(api: Api, request: Any, why: str) -> Any:
    return api.error_response(request, ErrorCode.REQUEST_TIMED_OUT, why)
