"""Calls to the coordinator of one group, and the group's committed offsets.

Any broker returns the coordinator (FindCoordinator). It is looked up again after a failed call and after
NOT_COORDINATOR, COORDINATOR_NOT_AVAILABLE or COORDINATOR_LOAD_IN_PROGRESS. Commits are sent one at a time, so that an
older commit cannot overtake a newer one. Invariant: a response of `call` never has one of these three errors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kipmesh import messages as m
from kipmesh.client.calls import api_of, call, transport_failure
from kipmesh.client.cluster import Cluster, by_topic
from kipmesh.client.types import Node, TopicPartition
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.transport.grpc.client import TransportError

COORDINATOR_ERRORS = frozenset(
    {ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}
)
"""Errors of a broker that is not, or not yet, the coordinator of the group."""


class MemberIdentity(NamedTuple):
    """The group member that commits offsets. The defaults denote a client that is not a member."""

    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


class GroupCoordinator:
    """Sends requests to the coordinator of the group `group_id`. All methods raise KafkaError."""

    def __init__(self, cluster: Cluster, group_id: str) -> None:
        self._cluster = cluster
        self._group_id = group_id
        self._commit_lock = asyncio.Lock()
        self.node: Node | None = None
        """The coordinator, or None if it must be looked up."""

    async def call_once(self, request: Any, timeout_s: float) -> Any:
        """Send a request without retries and return the response.

        Raises KafkaError if the coordinator cannot be found or does not respond within `timeout_s`. Errors in the
        response are not raised.
        """
        deadline = time.monotonic() + timeout_s
        node = self.node or await self._find(timeout_s)
        try:
            remaining_s = max(deadline - time.monotonic(), 0.001)
            response = await call(self._cluster.pool, node.address, request, remaining_s)
        except TransportError as error:
            self.node = None
            raise transport_failure(error) from None
        if not COORDINATOR_ERRORS.isdisjoint(api_of(request).errors(response)):
            self.node = None
        return response

    async def call(self, request: Any, timeout_s: float, *, attempt_timeout_s: float | None = None) -> Any:
        """Send a request, retrying until the coordinator handles it or `timeout_s` has elapsed.

        `attempt_timeout_s` limits each attempt. Raises the KafkaError of the last attempt, such as a transport failure.
        Errors in the response are not raised, except `COORDINATOR_ERRORS` at the timeout.
        """
        api = api_of(request)

        async def attempt(remaining_s: float) -> Any:
            try:
                response = await self.call_once(request, min(remaining_s, attempt_timeout_s or remaining_s))
            except KafkaError as error:
                return error
            code = next((code for code in api.errors(response) if code in COORDINATOR_ERRORS), None)
            return response if code is None else KafkaError(code, f"{api.rpc} failed for group {self._group_id!r}")

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

    async def commit(self, offsets: Mapping[TopicPartition, int], member: MemberIdentity, timeout_s: float) -> None:
        """Commit the offsets of the next records to consume. Does nothing without offsets.

        Raises the KafkaError of the first failed partition; the others are still committed.
        """
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
        async with self._commit_lock:
            response = await self.call(m.OffsetCommitRequest(self._group_id, *member, topics=topics), timeout_s)
        for topic in response.topics:
            for each in topic.partitions:
                if each.error_code:
                    raise KafkaError(each.error_code, f"commit failed for {topic.name}-{each.partition_index}")

    async def fetch_offsets(
        self, partitions: Iterable[tuple[str, int]] | None, timeout_s: float, *, attempt_timeout_s: float | None = None
    ) -> dict[TopicPartition, m.OffsetFetchResponsePartitions]:
        """Return the group's committed offsets of these partitions (None: all), with leader epoch and metadata.

        Partitions without a committed offset are omitted.
        """
        wanted = None
        if partitions is not None:
            wanted = [m.OffsetFetchRequestTopics(*topic) for topic in by_topic(partitions).items()]
        request = m.OffsetFetchRequest(groups=[m.OffsetFetchRequestGroup(self._group_id, topics=wanted)])
        (group,) = (await self.call(request, timeout_s, attempt_timeout_s=attempt_timeout_s)).groups
        if group.error_code:
            raise KafkaError(group.error_code, f"cannot fetch offsets of group {self._group_id!r}")
        return {
            TopicPartition(topic.name, each.partition_index): each
            for topic in group.topics
            for each in topic.partitions
            if each.committed_offset >= 0
        }

    async def committed(self, partitions: Iterable[TopicPartition], timeout_s: float) -> dict[TopicPartition, int]:
        """Return the group's committed offsets of these partitions. Partitions without one are omitted."""
        wanted = list(partitions)
        found = await self.fetch_offsets(wanted, timeout_s) if wanted else {}
        return {topic_partition: each.committed_offset for topic_partition, each in found.items()}
