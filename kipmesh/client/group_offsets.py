"""Committed offsets of a group, as a member or from outside (generation -1).

Commits go one after the other, so that a later one is never overtaken by an earlier one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.client.group_channel import GroupChannel
from kipmesh.client.types import TopicPartition
from kipmesh.core.errors import ErrorCode, KafkaError


class Identity(NamedTuple):
    """Who commits; the defaults are somebody who is no member."""

    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


class GroupOffsets:
    """The offsets of one group."""

    def __init__(self, channel: GroupChannel, group_id: str) -> None:
        self._channel = channel
        self._group_id = group_id
        self._turn = asyncio.Lock()

    async def commit(self, offsets: Mapping[TopicPartition, int], who: Identity, timeout_s: float) -> None:
        """Commit the offsets of the next records to read; raises KafkaError."""
        if not offsets:
            return
        topics: dict[str, list[m.OffsetCommitRequestPartition]] = {}
        for (topic, partition), offset in offsets.items():
            topics.setdefault(topic, []).append(m.OffsetCommitRequestPartition(partition, offset, -1, ""))
        request = m.OffsetCommitRequest(
            self._group_id, *who, topics=[m.OffsetCommitRequestTopic(*topic) for topic in topics.items()]
        )
        async with self._turn:
            answer = await self._channel.call("OffsetCommit", request, timeout_s)
        for topic in answer.topics:
            for each in topic.partitions:
                if each.error_code:
                    raise KafkaError(each.error_code, f"commit of {topic.name}-{each.partition_index}")

    async def committed(self, partitions: Iterable[TopicPartition], timeout_s: float) -> dict[TopicPartition, int]:
        """The committed offsets; partitions without one are left out."""
        topics: dict[str, list[int]] = {}
        for topic, partition in partitions:
            topics.setdefault(topic, []).append(partition)
        if not topics:
            return {}
        wanted = [m.OffsetFetchRequestTopics(*topic) for topic in topics.items()]
        request = m.OffsetFetchRequest(groups=[m.OffsetFetchRequestGroup(self._group_id, topics=wanted)])
        (group,) = (await self._channel.call("OffsetFetch", request, timeout_s)).groups
        if group.error_code:
            raise KafkaError(ErrorCode.of(group.error_code), f"offsets of group {self._group_id!r}")
        return {
            TopicPartition(topic.name, each.partition_index): each.committed_offset
            for topic in group.topics
            for each in topic.partitions
            if each.committed_offset >= 0
        }
