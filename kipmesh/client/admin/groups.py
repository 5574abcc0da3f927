"""Administration of consumer groups: list, describe and delete groups, and change their offsets.

Each broker lists the groups that it coordinates. All other requests go to the coordinator of the group. Offset changes
use generation -1, which the coordinator accepts only while the group is empty. A running consumer therefore never has
its position changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from kipmesh import messages as m
from kipmesh.client import arguments
from kipmesh.client.admin.requests import AdminRequests
from kipmesh.client.cluster import by_topic
from kipmesh.client.group_coordinator import GroupCoordinator, MemberIdentity
from kipmesh.client.offsets import list_offsets
from kipmesh.client.types import TIMESTAMP_EARLIEST, TIMESTAMP_LATEST, Node, TopicPartition
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.group.records import PROTOCOL_TYPE, decode_assignment, flat

CONCURRENT_GROUPS_MAX = 16
T = TypeVar("T")
NewOffsets = Mapping[TopicPartition, int] | Mapping[tuple[str, int], int]


class GroupListing(NamedTuple):
    """A group as listed by its coordinator."""

    group_id: str
    protocol_type: str
    """`consumer`, or empty if no member ever joined."""
    state: str
    """Empty, PreparingRebalance, CompletingRebalance, Stable or Dead."""
    group_type: str


class GroupMemberDescription(NamedTuple):
    """A member of a group, as its coordinator describes it."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    host: str
    assignment: Sequence[TopicPartition]
    """Assigned partitions, sorted. Empty during a rebalance, and for members that are not consumers."""


class GroupDescription(NamedTuple):
    """A group and its members. A missing group has the state Dead."""

    group_id: str
    state: str
    protocol_type: str
    partition_assignor: str
    """Name of the assignor; empty unless the group is Stable."""
    coordinator: Node
    members: Sequence[GroupMemberDescription]


class CommittedOffset(NamedTuple):
    """The committed offset of a partition. The leader epoch is -1 if it was not committed."""

    offset: int
    leader_epoch: int
    metadata: str


class ResetTo(StrEnum):
    """Target of `reset_group_offsets`."""

    EARLIEST = "earliest"
    """The first record."""
    LATEST = "latest"
    """After the last record."""
    OFFSET = "offset"
    """The offset `value`."""
    TIMESTAMP = "timestamp"
    """The first record at or after `value`, in ms since 1970, or after the last record if there is none."""
    SHIFT_BY = "shift-by"
    """The committed offset plus `value`, which may be negative."""


class GroupAdmin(AdminRequests):
    """Requests of `AdminClient` about consumer groups."""

    async def list_groups(self, *, states: Collection[str] = (), types: Collection[str] = ()) -> list[GroupListing]:
        """Return the groups that have one of these states and one of these types (empty: any), sorted by id.

        Raises KafkaError if a broker does not respond within `default.api.timeout.ms`, because its groups would be
        missing. A group whose coordinator is changing may be missing.
        """
        request = m.ListGroupsRequest(arguments.names("states", states), arguments.names("types", types))

        async def attempt(remaining_s: float) -> list[m.ListedGroup] | KafkaError:
            brokers = (await self._fetch_metadata(m.MetadataRequest(), remaining_s)).brokers
            nodes = [Node(one.node_id, one.host, one.port) for one in brokers]
            timeout_s = min(remaining_s, self._cluster.request_timeout_ms / 1000)
            responses = list((await self._call_brokers(request, nodes, timeout_s)).values())
            failure = next((response for response in responses if isinstance(response, KafkaError)), None)
            return failure or [one for response in responses for one in response.groups]

        listed = {one.group_id: one for one in await self._cluster.retry(attempt, self._timeout_s)}
        return [
            GroupListing(one.group_id, one.protocol_type, one.group_state, one.group_type)
            for _, one in sorted(listed.items())
        ]

    async def describe_groups(self, group_ids: Iterable[str]) -> dict[str, GroupDescription]:
        """Return the state, coordinator and members of each group, by group id. A missing group has the state Dead.

        Raises KafkaError for the first group that cannot be described.
        """
        return await _for_each(arguments.names("group_ids", group_ids), self._describe_group)

    async def list_group_offsets(
        self, group_id: str, partitions: Iterable[tuple[str, int]] | None = None
    ) -> dict[TopicPartition, CommittedOffset]:
        """Return the group's committed offsets of these partitions (None: all). Partitions without one are omitted.

        The result is empty for a missing group. Raises KafkaError.
        """
        wanted = None if partitions is None else arguments.topic_partitions(partitions)
        coordinator = GroupCoordinator(self._cluster, group_id)
        limit_s = self._cluster.request_timeout_ms / 1000
        found = await coordinator.fetch_offsets(wanted, self._timeout_s, attempt_timeout_s=limit_s)
        return {
            partition: CommittedOffset(one.committed_offset, one.committed_leader_epoch, one.metadata or "")
            for partition, one in found.items()
        }

    async def alter_group_offsets(self, group_id: str, offsets: NewOffsets) -> None:
        """Commit offsets for an empty or new group, without checking that records exist at these offsets.

        Raises ValueError for a negative offset, and KafkaError: UNKNOWN_MEMBER_ID if the group has members, or the
        error of the first rejected partition, such as UNKNOWN_TOPIC_OR_PARTITION; the others are still committed.
        """
        wanted = arguments.by_partition("offsets", offsets)
        for (topic, partition), offset in wanted.items():
            if offset < 0:
                raise ValueError(f"offset must not be negative, got {offset} for {topic}-{partition}")
        await self._commit(group_id, wanted)

    async def reset_group_offsets(
        self,
        group_id: str,
        partitions: Iterable[tuple[str, int]],
        to: ResetTo,
        value: int = 0,
        *,
        dry_run: bool = False,
    ) -> dict[TopicPartition, int]:
        """Reset the offsets of an empty group in these partitions and return the new offsets.

        With `dry_run` nothing is committed. `to` decides whether `value` is an offset, a timestamp in ms or a number of
        offsets. New offsets are clamped to the range from the log start to the high watermark. Raises KafkaError:
        UNKNOWN_MEMBER_ID if the group has members (not with `dry_run`), UNKNOWN_TOPIC_OR_PARTITION, OFFSET_OUT_OF_RANGE
        for SHIFT_BY without a committed offset.
        """
        wanted = arguments.topic_partitions(partitions)
        arguments.check_integer("value", value, arguments.TIMESTAMP if to is ResetTo.TIMESTAMP else "int")
        offsets = await self._reset_offsets(group_id, wanted, to, value)
        if not dry_run:
            await self._commit(group_id, offsets)
        return offsets

    async def delete_group_offsets(self, group_id: str, partitions: Iterable[tuple[str, int]]) -> None:
        """Delete the group's committed offsets of these partitions.

        Raises KafkaError: GROUP_ID_NOT_FOUND, or GROUP_SUBSCRIBED_TO_TOPIC for the first partition whose topic a member
        subscribes to; the other offsets are still deleted.
        """
        topics = [
            m.OffsetDeleteRequestTopic(topic, [m.OffsetDeleteRequestPartition(index) for index in numbers])
            for topic, numbers in by_topic(arguments.topic_partitions(partitions)).items()
        ]
        _, response = await self._call_group(group_id, m.OffsetDeleteRequest(group_id, topics))
        if response.error_code:
            raise KafkaError(response.error_code, f"cannot delete committed offsets of group {group_id!r}")
        for topic in response.topics:
            for one in topic.partitions:
                if one.error_code:
                    text = f"cannot delete the offset of {topic.name}-{one.partition_index} of group {group_id!r}"
                    raise KafkaError(one.error_code, text)

    async def delete_groups(self, group_ids: Iterable[str]) -> None:
        """Delete empty groups and their offsets.

        Raises KafkaError for the first group that could not be deleted (GROUP_ID_NOT_FOUND, NON_EMPTY_GROUP); the
        others are still deleted.
        """
        await _for_each(arguments.names("group_ids", group_ids), self._delete_group)

    # --- internals -------------------------------------------------------------------------------------------------

    async def _call_group(self, group_id: str, request: Any) -> tuple[GroupCoordinator, Any]:
        coordinator = GroupCoordinator(self._cluster, group_id)
        limit_s = self._cluster.request_timeout_ms / 1000
        return coordinator, await coordinator.call(request, self._timeout_s, attempt_timeout_s=limit_s)

    async def _commit(self, group_id: str, offsets: Mapping[TopicPartition, int]) -> None:
        try:
            await GroupCoordinator(self._cluster, group_id).commit(offsets, MemberIdentity(), self._timeout_s)
        except KafkaError as error:
            if error.code is not ErrorCode.UNKNOWN_MEMBER_ID:
                raise
            raise KafkaError(error.code, f"group {group_id!r} has members; stop its consumers first") from None

    async def _describe_group(self, group_id: str) -> GroupDescription:
        coordinator, response = await self._call_group(group_id, m.DescribeGroupsRequest([group_id]))
        group: m.DescribedGroup
        (group,) = response.groups
        if group.error_code:
            raise KafkaError(group.error_code, f"cannot describe group {group_id!r}")
        assert coordinator.node is not None
        is_consumer = group.protocol_type == PROTOCOL_TYPE
        members = [_member(member, is_consumer=is_consumer) for member in group.members]
        return GroupDescription(
            group_id,
            group.group_state,
            group.protocol_type,
            group.protocol_data,
            coordinator.node,
            sorted(members, key=lambda member: (member.client_id, member.member_id)),
        )

    async def _delete_group(self, group_id: str) -> None:
        _, response = await self._call_group(group_id, m.DeleteGroupsRequest([group_id]))
        (result,) = response.results
        if result.error_code:
            raise KafkaError(result.error_code, f"cannot delete group {group_id!r}")

    async def _reset_offsets(
        self, group_id: str, partitions: Collection[TopicPartition], to: ResetTo, value: int
    ) -> dict[TopicPartition, int]:
        first, last = await asyncio.gather(
            self._offsets_at(partitions, TIMESTAMP_EARLIEST), self._offsets_at(partitions, TIMESTAMP_LATEST)
        )
        wanted: Mapping[TopicPartition, int]
        if to is ResetTo.EARLIEST:
            wanted = first
        elif to is ResetTo.LATEST:
            wanted = last
        elif to is ResetTo.OFFSET:
            wanted = dict.fromkeys(partitions, value)
        elif to is ResetTo.TIMESTAMP:
            found = await self._offsets_at(partitions, max(value, 0))
            wanted = {each: last[each] if found[each] < 0 else found[each] for each in partitions}
        else:
            committed = await self.list_group_offsets(group_id, partitions)
            for each in partitions:
                if each not in committed:
                    text = f"group {group_id!r} has no committed offset in {each.topic}-{each.partition}"
                    raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, text)
            wanted = {each: committed[each].offset + value for each in partitions}
        return {each: max(first[each], min(wanted[each], last[each])) for each in partitions}

    async def _offsets_at(self, partitions: Collection[TopicPartition], timestamp: int) -> dict[TopicPartition, int]:
        """Return each partition's offset for a timestamp (ms or TIMESTAMP_...), or -1 if there is none."""
        found = await list_offsets(self._cluster, dict.fromkeys(partitions, timestamp), self._timeout_s)
        return {topic_partition: -1 if place is None else place.offset for topic_partition, place in found.items()}


def _member(member: m.DescribedGroupMember, *, is_consumer: bool) -> GroupMemberDescription:
    assignment: list[TopicPartition] = []
    if is_consumer:
        try:
            lists = decode_assignment(member.member_assignment).assigned_partitions
        except CorruptRecordError:  # the assignment's format is private to the members
            lists = ()
        assignment = sorted(TopicPartition(*topic_partition) for topic_partition in flat(lists))
    return GroupMemberDescription(
        member.member_id, member.group_instance_id, member.client_id, member.client_host, assignment
    )


async def _for_each(group_ids: Iterable[str], work: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """Call `work` for every group, a few at a time, and return the results by group id.

    Raises the first error after all calls have ended.
    """
    slots = asyncio.Semaphore(CONCURRENT_GROUPS_MAX)

    async def run(group_id: str) -> T:
        async with slots:
            return await work(group_id)

    tasks = {group_id: asyncio.create_task(run(group_id)) for group_id in dict.fromkeys(group_ids)}
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    return {group_id: task.result() for group_id, task in tasks.items()}
