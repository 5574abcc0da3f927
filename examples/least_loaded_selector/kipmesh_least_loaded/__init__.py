"""A `replica.selector.class` that selects the least loaded replica in the client's zone.

The load of a replica is the number of (client, partition) pairs that this broker has recently sent to it. Each broker
has its own selector and does not know what other brokers send.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kipmesh.core.replica.selection import ClientMetadata, PartitionView, ReplicaSelector, ReplicaView, TopicPartition

WINDOW_MS = 300_000
CLIENTS_MAX = 100_000

_Key = tuple[str, TopicPartition]


class _Sent(NamedTuple):
    node_id: int
    at_ms: int


def zone_of(rack: str | None) -> str:
    """Return a rack's name without its last part, or the whole name if it has one part; "" without a rack."""
    return (rack or "").rpartition("/")[0] or (rack or "")


class LeastLoadedZoneSelector(ReplicaSelector):
    """A ReplicaSelector that selects the least loaded replica in the client's zone.

    Not thread-safe: a broker calls it on its event loop. `now_ms` returns monotonic time in milliseconds.
    """

    def __init__(self, now_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000) -> None:
        self._now_ms = now_ms
        self._window_ms = WINDOW_MS
        self._sent: OrderedDict[_Key, _Sent] = OrderedDict()  # oldest first
        self._load: Counter[int] = Counter()

    def configure(self, configs: Mapping[str, Any]) -> None:
        """Set the time in milliseconds for which a client counts as load to `metadata.max.age.ms`, default WINDOW_MS.

        Raises ValueError below 1.
        """
        self._window_ms = int(configs.get("metadata.max.age.ms", WINDOW_MS))
        if self._window_ms < 1:
            raise ValueError(f"metadata.max.age.ms must be at least 1, got {self._window_ms}")

    def select(self, topic_partition: TopicPartition, client: ClientMetadata, view: PartitionView) -> ReplicaView:
        """Return the client's previous replica if it is still a candidate in its zone, else the least loaded one there.

        The lowest node id wins among equal loads. Returns the leader if the client has no rack, or its zone no
        candidate.
        """
        now_ms = self._now_ms()
        self._expire(now_ms)
        if not client.rack_id:
            return view.leader
        zone = zone_of(client.rack_id)
        near = {replica.node_id: replica for replica in view.candidates() if zone_of(replica.rack) == zone}
        if not near:
            return view.leader
        key = (client.client_id, topic_partition)
        previous = self._sent.get(key)
        if previous is not None and previous.node_id in near:
            chosen = previous.node_id
        else:
            chosen = min(near, key=lambda node_id: (self._load[node_id], node_id))
        self._remember(key, _Sent(chosen, now_ms))
        return near[chosen]

    def close(self) -> None:
        """Clear all counts."""
        self._sent.clear()
        self._load.clear()

    def _remember(self, key: _Key, sent: _Sent) -> None:
        self._forget(key)
        self._sent[key] = sent
        self._load[sent.node_id] += 1
        if len(self._sent) > CLIENTS_MAX:
            self._forget(next(iter(self._sent)))

    def _forget(self, key: _Key) -> None:
        previous = self._sent.pop(key, None)
        if previous is not None:
            self._load[previous.node_id] -= 1

    def _expire(self, now_ms: int) -> None:
        while self._sent:
            key, sent = next(iter(self._sent.items()))
            if now_ms - sent.at_ms <= self._window_ms:
                return
            self._forget(key)
