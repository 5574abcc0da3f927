"""Requests under way: at most one a peer, so that a slow peer costs one request, not a queue of them.

Invariants: ids are never used twice by one machine; a response whose id is not the one under way is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable


class Peer:
    """One node that requests go to."""

    __slots__ = ("deadline_ms", "node_id", "not_before_ms", "request_id")

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.request_id = 0
        """0 when nothing is under way."""
        self.deadline_ms = 0
        self.not_before_ms = 0


class Peers:
    """All of them, by node id; those that were never asked are not there."""

    def __init__(self) -> None:
        self._peers: dict[int, Peer] = {}
        self._last_id = 0

    def is_free(self, node_id: int, now_ms: int) -> bool:
        """Whether a request may go there now."""
        peer = self._peers.get(node_id)
        return peer is None or (not peer.request_id and now_ms >= peer.not_before_ms)

    def begin(self, node_id: int, deadline_ms: int) -> int:
        """A request goes there; gives its id."""
        self._last_id += 1
        peer = self._peers.setdefault(node_id, Peer(node_id))
        peer.request_id, peer.deadline_ms = self._last_id, deadline_ms
        return self._last_id

    def end(self, request_id: int) -> int | None:
        """The request is over; gives who it went to, None when it is not under way."""
        for peer in self._peers.values():
            if peer.request_id == request_id:
                peer.request_id = 0
                return peer.node_id
        return None

    def back_off(self, node_id: int, until_ms: int) -> None:
        """Nothing more goes there before that."""
        self._peers.setdefault(node_id, Peer(node_id)).not_before_ms = until_ms

    def expire(self, now_ms: int, backoff_ms: int) -> None:
        """Give up requests that took too long."""
        for peer in self._peers.values():
            if peer.request_id and now_ms >= peer.deadline_ms:
                peer.request_id, peer.not_before_ms = 0, now_ms + backoff_ms

    def reset(self) -> None:
        """Another state or epoch: what is under way is of no interest, and nobody is backed off from."""
        self._peers.clear()

    def any_under_way(self) -> bool:
        """Whether a response is waited for."""
        return any(peer.request_id for peer in self._peers.values())

    def deadlines(self, now_ms: int) -> Iterable[int]:
        """When to look again."""
        for peer in self._peers.values():
            if peer.request_id:
                yield peer.deadline_ms
            elif peer.not_before_ms > now_ms:
                yield peer.not_before_ms
