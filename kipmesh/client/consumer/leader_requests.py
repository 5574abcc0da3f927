"""What a consumer's partitions ask their leaders: ListOffsets and OffsetsForLeaderEpoch (392-08), many in one request.

Invariants: of each kind one round is under way at a time; an answer is given to a reader only if it still waits for it
(a seek, reset or assignment makes it void), and so is each failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kipmesh.client.cluster import Cluster
from kipmesh.client.consumer.broker_fetches import PartitionState
from kipmesh.client.consumer.rules.values import Effects, EndOfEpochAtLeader, ListOffsetsAtLeader
from kipmesh.client.offsets import list_offsets_call, offsets_for_leader_epoch_call
from kipmesh.core.errors import KafkaError

Question = ListOffsetsAtLeader | EndOfEpochAtLeader


@dataclass(eq=False)
class LeaderQuestions:
    """The questions of one consumer; `do` does what readers decide, `ended` is called after each round."""

    cluster: Cluster
    timeout_s: float
    do: Callable[[PartitionState, Effects, KafkaError | None], None]
    ended: Callable[[], None]

    def __post_init__(self) -> None:
        self._wanted: dict[type[Question], list[tuple[PartitionState, Question]]] = {}
        self._asking: set[type[Question]] = set()

    def want(self, state: PartitionState, question: Question) -> None:
        """To be asked in this step; if a round is under way, it has to be wanted again after that."""
        self._wanted.setdefault(type(question), []).append((state, question))

    def start(self, now_ms: int, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Begin rounds of what is wanted."""
        wanted, self._wanted = self._wanted, {}
        for kind, questions in wanted.items():
            if kind in self._asking:
                continue
            self._asking.add(kind)
            asked = [(state, state.reader.sent(question, now_ms), question) for state, question in questions]
            spawn(self._ask(kind, asked))

    async def _ask(self, kind: type[Question], asked: Sequence[tuple[PartitionState, int, Question]]) -> None:
        """One round: where offsets are, or whether what was read is in the leaders' logs."""
        is_lookup = kind is ListOffsetsAtLeader
        try:
            wanted = {
                state.where: question.timestamp if isinstance(question, ListOffsetsAtLeader) else question.epoch
                for state, number, question in asked
                if state.reader.is_waiting_for(number)
            }
            request = (list_offsets_call if is_lookup else offsets_for_leader_epoch_call)(self.cluster, wanted)
            found, failures = await self.cluster.call_leaders_once(wanted, request, self.timeout_s)
            now_ms = int(asyncio.get_running_loop().time() * 1000)
            for state, number, _ in asked:
                reader, where = state.reader, state.where
                if not reader.is_waiting_for(number):
                    continue
                if where in failures:
                    error = failures[where]
                    self.do(state, reader.failed(number, error.code, now_ms), state.located(error))
                elif where in found and is_lookup:
                    self.do(state, reader.listed(number, found[where].offset), None)
                elif where in found:
                    self.do(state, reader.epoch_ended(number, found[where]), None)
        finally:
            self._asking.discard(kind)
            self.ended()
