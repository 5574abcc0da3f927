"""Request context: everything that a handler receives besides the request itself."""

from __future__ import annotations

from typing import Any, NamedTuple

from kipmesh.messages.schema import MAX_INT32

_RESPONSE_SHARE = 0.9


class RequestContext(NamedTuple):
    """Client and connection of one request, and limits of its response."""

    client_id: str
    """Client id from the request. Not authenticated."""
    peer: str
    """`ipv4:host:port` or `ipv6:[host]:port`."""
    stream: int = 0
    """Number of the stream that brought the request, unique in this process; 0 for a unary call."""
    time_left_s: float | None = None
    """Remaining deadline of a unary call; None if the caller set none."""
    listener: str = ""
    """Name of the listener; empty for `inter.broker.listener.name`. Responses contain this listener's addresses."""
    version: int | None = None
    """Version of the Kafka API; None for gRPC, which has all fields."""
    principal: str = "User:ANONYMOUS"
    """Authenticated principal."""
    connection: Any = None
    """`Session` of a Kafka connection; None for gRPC."""
    response_bytes_max: int = MAX_INT32
    """Soft limit for the size of a response: unread responses use memory."""

    def is_before(self, version: int) -> bool:
        """Whether the request has a Kafka API version below `version`. False for gRPC."""
        return self.version is not None and self.version < version

    def respond_within(self, limit_s: float) -> float:
        """Return the seconds that a handler may take: `limit_s`, or 90 % of `time_left_s` if that is shorter."""
        return limit_s if self.time_left_s is None else min(limit_s, _RESPONSE_SHARE * self.time_left_s)
