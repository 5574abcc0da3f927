"""The least loaded replica of the client's zone, for `replica.selector.class`.

A broker knows nothing of the other brokers' load but what it sends there itself: the (client, partition) pairs that it
sent to each replica lately. Each broker counts for itself, as each loads a selector of its own.
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
    """All but the last part of a rack's name; the whole name if it has one part."""
    return (rack or "").rpartition("/")[0] or (rack or "")


class LeastLoadedZoneSelector(ReplicaSelector):
    """See the module. One instance serves one broker; it is called on its event loop only."""

    def __init__(self, now_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000) -> None:
        self._now_ms = now_ms
        self._window_ms = WINDOW_MS
        self._sent: OrderedDict[_Key, _Sent] = OrderedDict()  # the longest ago first
        self._load: Counter[int] = Counter()

    def configure(self, configs: Mapping[str, Any]) -> None:
        """Clients come back when their metadata is old: that is how long they count."""
        self._window_ms = int(configs.get("metadata.max.age.ms", WINDOW_MS))
        if self._window_ms < 1:
            raise ValueError("metadata.max.age.ms is at least 1")

    def select(self, topic_partition: TopicPartition, client: ClientMetadata, view: PartitionView) -> ReplicaView:
        """The replica of the zone with the least load; the one before, if it is still good."""
        now_ms = self._now_ms()
        self._expire(now_ms)
        if not client.rack_id:
            return view.leader
        zone = zone_of(client.rack_id)
        near = {replica.node_id: replica for replica in view.candidates() if zone_of(replica.rack) == zone}
        if not near:
            return view.leader
        key = (client.client_id, topic_partition)
        before = self._sent.get(key)
        if before is not None and before.node_id in near:
            chosen = before.node_id
        else:
            chosen = min(near, key=lambda node_id: (self._load[node_id], node_id))
        self._remember(key, _Sent(chosen, now_ms))
        return near[chosen]

    def close(self) -> None:
        """Forget all."""
        self._sent.clear()
        self._load.clear()

    def _remember(self, key: _Key, sent: _Sent) -> None:
        self._forget(key)
        self._sent[key] = sent
        self._load[sent.node_id] += 1
        if len(self._sent) > CLIENTS_MAX:
            self._forget(next(iter(self._sent)))

    def _forget(self, key: _Key) -> None:
        before = self._sent.pop(key, None)
        if before is not None:
            self._load[before.node_id] -= 1

    def _expire(self, now_ms: int) -> None:
        while self._sent:
            key, sent = next(iter(self._sent.items()))
            if now_ms - sent.at_ms <= self._window_ms:
                return
            self._forget(key)
