"""The parts of a controller that its handlers use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kipmesh.core.context import RequestContext
from kipmesh.node.controller.owner import DoOrCleanUp


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerParts:
    """Made once per controller, before it listens."""

    do: DoOrCleanUp
    """Makes one decision while this controller is active; its response comes when the decision is committed."""
    now_ms: Callable[[], int]
    """The monotonic clock."""
    next_offset: Callable[[], int]
    """The log end offset of the metadata log."""
    disconnected: Callable[[int, int], None]
    """Called with a broker and the number of its heartbeat stream when that ended."""
    heartbeat_streams: dict[int, int] = field(default_factory=dict)
    """Open heartbeat streams, and the broker of each."""

    def stream_ended(self, context: RequestContext) -> None:
        """Handle the end of a heartbeat stream: the broker ended it, or it broke."""
        broker_id = self.heartbeat_streams.pop(context.stream, None)
        if broker_id is not None:
            self.disconnected(broker_id, context.stream)
