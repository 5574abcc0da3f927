"""The context of a request: everything that a handler receives besides its content."""

from __future__ import annotations

from typing import Any, NamedTuple

from kipmesh.messages.schema import MAX_INT32

_RESPONSE_SHARE = 0.9


class RequestContext(NamedTuple):
    """The client and the connection of one request, and the limits of its response."""

    client_id: str
    """The client's own name for itself."""
    peer: str
    """`ipv4:host:port` or `ipv6:[host]:port`."""
    stream: int = 0
    """The stream that brought the request, unique in this process; 0 for a unary call."""
    time_left_s: float | None = None
    """The time that the caller of a unary call still waits; None if it did not state a limit."""
    listener: str = ""
    """The listener that received the request; empty for `inter.broker.listener.name`. Clients get its addresses."""
    version: int | None = None
    """The version of Kafka's protocol; None for gRPC, which has every field."""
    principal: str = "User:ANONYMOUS"
    """The authenticated principal."""
    connection: Any = None
    """The `Session` of a connection of the Kafka listener; None for gRPC."""
    response_bytes_max: int = MAX_INT32
    """Bytes that a large response should not exceed, because unread responses use up memory."""

    def is_before(self, version: int) -> bool:
        """Whether the request is in a version of Kafka's protocol before `version`."""
        return self.version is not None and self.version < version

    def respond_within(self, limit_s: float) -> float:
        """Return at most `limit_s`, and less if the caller would not get a response that explains the failure."""
        return limit_s if self.time_left_s is None else min(limit_s, _RESPONSE_SHARE * self.time_left_s)
