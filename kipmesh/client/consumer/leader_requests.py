"""ListOffsets and OffsetsForLeaderEpoch requests of a consumer's partitions to their leaders, batched (392-08).

Invariants: one round of each kind is in flight at a time; a response or failure reaches a reader only if the reader
still waits for it, that is, not after a seek, reset or assignment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from kipmesh.client.cluster import Cluster
from kipmesh.client.consumer.broker_fetches import PartitionState
from kipmesh.client.consumer.rules.values import Effects, EndOfEpochAtLeader, ListOffsetsAtLeader
from kipmesh.client.offsets import list_offsets_call, offsets_for_leader_epoch_call
from kipmesh.core.errors import KafkaError

LeaderRequest = ListOffsetsAtLeader | EndOfEpochAtLeader


@dataclass(eq=False)
class LeaderRequests:
    """Sends the leader requests of one consumer.

    A round sends one request of the same kind to each leader concerned. `apply` receives a partition, the effects of
    its response, and its error or None. `on_round_done` is called after each round.
    """

    cluster: Cluster
    timeout_s: float
    apply: Callable[[PartitionState, Effects, KafkaError | None], None]
    on_round_done: Callable[[], None]
    _wanted: dict[type[LeaderRequest], list[tuple[PartitionState, LeaderRequest]]] = field(default_factory=dict)
    _running: set[type[LeaderRequest]] = field(default_factory=set)

    def add(self, state: PartitionState, request: LeaderRequest) -> None:
        """Add a request to the next `start`, which drops it if a round of its kind is in flight."""
        self._wanted.setdefault(type(request), []).append((state, request))

    def start(self, now_ms: int, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Start a round for each kind of added request (ListOffsets, OffsetsForLeaderEpoch). `spawn` runs each."""
        wanted, self._wanted = self._wanted, {}
        for kind, requests in wanted.items():
            if kind in self._running:
                continue
            self._running.add(kind)
            sent = [(state, state.reader.sent(request, now_ms), request) for state, request in requests]
            spawn(self._run(kind, sent))

    async def _run(self, kind: type[LeaderRequest], sent: Sequence[tuple[PartitionState, int, LeaderRequest]]) -> None:
        is_list_offsets = kind is ListOffsetsAtLeader
        try:
            wanted = {
                state.topic_partition: request.timestamp if isinstance(request, ListOffsetsAtLeader) else request.epoch
                for state, request_id, request in sent
                if state.reader.is_pending(request_id)
            }
            make_call = list_offsets_call if is_list_offsets else offsets_for_leader_epoch_call
            values, failures = await self.cluster.call_leaders_once(
                wanted, make_call(self.cluster, wanted), self.timeout_s
            )
            now_ms = int(asyncio.get_running_loop().time() * 1000)
            for state, request_id, _ in sent:
                reader, topic_partition = state.reader, state.topic_partition
                if not reader.is_pending(request_id):
                    continue
                if topic_partition in failures:
                    error = failures[topic_partition]
                    self.apply(state, reader.failed(request_id, error.code, now_ms), state.located(error))
                elif topic_partition in values and is_list_offsets:
                    self.apply(state, reader.listed(request_id, values[topic_partition].offset), None)
                elif topic_partition in values:
                    self.apply(state, reader.epoch_ended(request_id, values[topic_partition]), None)
        finally:
            self._running.discard(kind)
            self.on_round_done()
