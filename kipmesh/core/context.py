"""Who asks a node for something: what the handlers of requests know of the connection that a request came by."""

from __future__ import annotations

from typing import NamedTuple


class RequestContext(NamedTuple):
    """Who asks: the client's own name for itself, and the address that it comes from."""

    client_id: str
    peer: str
    """`ipv4:host:port` or `ipv6:[host]:port`."""
    stream: int = 0
    """The stream that brought the request, a number that no other one of this process has; 0 for a unary call."""
    time_left_s: float | None = None
    """How long the caller of a unary call waited for the answer when it came; None when it did not say."""
    listener: str = ""
    """The listener that it came by, whose addresses of brokers the client is told; empty for the brokers' own."""

    def answer_within(self, limit_s: float) -> float:
        """At most `limit_s`, and soon enough for an answer that says why there is none to reach the caller in time."""
        return limit_s if self.time_left_s is None else min(limit_s, _ANSWER_SHARE * self.time_left_s)


_ANSWER_SHARE = 0.9
