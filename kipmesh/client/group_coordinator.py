"""Calls to the coordinator of one group, whichever broker that is, and the group's committed offsets.

The coordinator is found by asking any broker, and looked for again when it does not answer or says that it is not
(or not yet) the one. Commits go one after the other, so that a later one is never overtaken by an earlier one.
Invariant: `call` gives an answer whose error, if any, does not come from having asked the wrong broker, or raises a
KafkaError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kipmesh import messages as m
from kipmesh.client.calls import api_of, call, no_answer
from kipmesh.client.cluster import Cluster, by_topic
from kipmesh.client.types import Node, TopicPartition
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.transport.grpc.client import TransportError

ELSEWHERE = frozenset(
    {ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}
)


class Identity(NamedTuple):
    """Who commits; the defaults are a client that is no member."""

    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


class GroupCoordinator:
    """One client's way to the coordinator of `group_id`."""

    def __init__(self, cluster: Cluster, group_id: str) -> None:
        self._cluster = cluster
        self._group_id = group_id
        self._turn = asyncio.Lock()
        self.node: Node | None = None
        """The broker that was found last; None while it is to be looked for."""

    async def once(self, request: Any, timeout_s: float) -> Any:
        """Ask once, within `timeout_s`; raises KafkaError when there is no answer."""
        deadline = time.monotonic() + timeout_s
        node = self.node or await self._find(timeout_s)
        try:
            left = max(deadline - time.monotonic(), 0.001)
            answer = await call(self._cluster.pool, node.address, request, left)
        except TransportError as error:
            self.node = None
            raise no_answer(error) from None
        if not ELSEWHERE.isdisjoint(api_of(request).errors(answer)):
            self.node = None
        return answer

    async def call(self, request: Any, timeout_s: float, *, answer_within_s: float | None = None) -> Any:
        """Ask until the coordinator has answered, for `timeout_s`; one answer may take `answer_within_s`."""
        api = api_of(request)

        async def attempt(left_s: float) -> Any:
            try:
                answer = await self.once(request, min(left_s, answer_within_s or left_s))
            except KafkaError as error:
                return error
            code = next((code for code in api.errors(answer) if code in ELSEWHERE), None)
            return answer if code is None else KafkaError(code, f"{api.rpc} of group {self._group_id!r}")

        return await self._cluster.retry(attempt, timeout_s)

    async def _find(self, timeout_s: float) -> Node:
        def retry(response: m.FindCoordinatorResponse) -> ErrorCode | None:
            code = response.coordinators[0].error_code if response.coordinators else ErrorCode.COORDINATOR_NOT_AVAILABLE
            return ErrorCode.of(code) if ErrorCode.of(code).retriable else None

        request = m.FindCoordinatorRequest(coordinator_keys=[self._group_id])
        found = (await self._cluster.call_any(request, timeout_s, retry)).coordinators[0]
        if found.error_code:
            raise KafkaError(found.error_code, found.error_message or "")
        self.node = Node(found.node_id, found.host, found.port)
        return self.node

    # --- offsets

    async def commit(self, offsets: Mapping[TopicPartition, int], who: Identity, timeout_s: float) -> None:
        """Commit the offsets of the next records to read; raises KafkaError."""
        if not offsets:
            return
        topics = [
            m.OffsetCommitRequestTopic(
                topic,
                [
                    m.OffsetCommitRequestPartition(index, offsets[TopicPartition(topic, index)], -1, "")
                    for index in partitions
                ],
            )
            for topic, partitions in by_topic(offsets).items()
        ]
        async with self._turn:
            answer = await self.call(m.OffsetCommitRequest(self._group_id, *who, topics=topics), timeout_s)
        for topic in answer.topics:
            for each in topic.partitions:
                if each.error_code:
                    raise KafkaError(each.error_code, f"commit of {topic.name}-{each.partition_index}")

    async def fetch_offsets(
        self, partitions: Iterable[tuple[str, int]] | None, timeout_s: float, *, answer_within_s: float | None = None
    ) -> dict[TopicPartition, m.OffsetFetchResponsePartitions]:
        """The committed offsets of these or all partitions; partitions without one are left out."""
        wanted = None
        if partitions is not None:
            wanted = [m.OffsetFetchRequestTopics(*topic) for topic in by_topic(partitions).items()]
        request = m.OffsetFetchRequest(groups=[m.OffsetFetchRequestGroup(self._group_id, topics=wanted)])
        (group,) = (await self.call(request, timeout_s, answer_within_s=answer_within_s)).groups
        if group.error_code:
            raise KafkaError(group.error_code, f"offsets of group {self._group_id!r}")
        return {
            TopicPartition(topic.name, each.partition_index): each
            for topic in group.topics
            for each in topic.partitions
            if each.committed_offset >= 0
        }

    async def committed(self, partitions: Iterable[TopicPartition], timeout_s: float) -> dict[TopicPartition, int]:
        """The committed offsets of these; partitions without one are left out."""
        wanted = list(partitions)
        found = await self.fetch_offsets(wanted, timeout_s) if wanted else {}
        return {where: each.committed_offset for where, each in found.items()}
