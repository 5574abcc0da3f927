"""What a consumer's partitions ask their leaders: ListOffsets and OffsetsForLeaderEpoch (392-08), many in one request.

Invariants: of each kind one round is under way at a time; an answer is given to a reader only if it still waits for it
(a seek, reset or assignment makes it void), and so is each failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from kipmesh.client.cluster import Cluster, LeaderCall
from kipmesh.client.fetch_state import PartitionState
from kipmesh.client.offsets import end_of_epochs_call, list_offsets_call
from kipmesh.client.types import TopicPartition
from kipmesh.core.consumer import Effects, EndOfEpochAtLeader, ListOffsetsAtLeader
from kipmesh.core.errors import KafkaError
from kipmesh.messages import EpochEndOffset

Question = ListOffsetsAtLeader | EndOfEpochAtLeader

Round = Sequence[tuple[PartitionState, int, Any]]
"""States, their readers' numbers, and questions or answers."""


class LeaderQuestions:
    """The questions of one consumer; `do` does what readers decide, `ended` is called after each round."""

    def __init__(
        self,
        cluster: Cluster,
        timeout_s: float,
        do: Callable[[PartitionState, Effects, KafkaError | None], None],
        ended: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._do = do
        self._ended = ended
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
            spawn(self.look_up(asked) if kind is ListOffsetsAtLeader else self.validate(asked))

    async def look_up(self, asked: Round) -> None:
        """Where offsets are."""
        try:
            wanted = {state.where: question.timestamp for state, number, question in asked if _awaits(state, number)}
            for state, number, place in await self._ask(asked, wanted, list_offsets_call(self._cluster, wanted)):
                self._do(state, state.reader.listed(number, place.offset), None)
        finally:
            self._asked(ListOffsetsAtLeader)

    async def validate(self, asked: Round) -> None:
        """Is what we have read in the leader's log?"""
        try:
            wanted = {state.where: question.epoch for state, number, question in asked if _awaits(state, number)}
            for state, number, end in await self._ask(asked, wanted, end_of_epochs_call(self._cluster, wanted)):
                self._do(state, state.reader.epoch_ended(number, EpochEndOffset(*end)), None)
        finally:
            self._asked(EndOfEpochAtLeader)

    async def _ask(self, asked: Round, wanted: Mapping[TopicPartition, int], call: LeaderCall) -> Round:
        """What the leaders say; their errors are given to the readers."""
        found, failures = await self._cluster.ask_leaders(wanted, call, self._timeout_s)
        now_ms = int(asyncio.get_running_loop().time() * 1000)
        answers = []
        for state, number, _ in asked:
            if not _awaits(state, number):
                continue
            if state.where in found:
                answers.append((state, number, found[state.where]))
            elif state.where in failures:
                error = failures[state.where]
                self._do(state, state.reader.failed(number, error.code, now_ms), state.located(error))
        return answers

    def _asked(self, kind: type[Question]) -> None:
        self._asking.discard(kind)
        self._ended()


def _awaits(state: PartitionState, number: int) -> bool:
    return state.reader.is_waiting_for(number)
