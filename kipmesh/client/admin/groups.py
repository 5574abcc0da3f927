"""Administration of consumer groups: what there is, where each one stands, and other offsets for groups that are empty.

Every broker lists the groups that it coordinates; all else is asked of the group's coordinator, wherever that moves.
Offsets are changed as somebody who is no member (generation -1): the coordinator allows that while the group is empty,
so a consumer that is running never loses its place to an administrator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from kipmesh import messages as m
from kipmesh.client.admin.requests import AdminRequests
from kipmesh.client.cluster import by_topic
from kipmesh.client.group_coordinator import GroupCoordinator, MemberIdentity
from kipmesh.client.offsets import list_offsets
from kipmesh.client.types import TIMESTAMP_EARLIEST, TIMESTAMP_LATEST, Node, TopicPartition
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.group.records import PROTOCOL_TYPE, decode_assignment, flat

GROUPS_AT_A_TIME = 16
T = TypeVar("T")
NewOffsets = Mapping[TopicPartition, int] | Mapping[tuple[str, int], int]


class GroupListing(NamedTuple):
    """A group, as its coordinator lists it."""

    group_id: str
    protocol_type: str
    """`consumer`, or empty where nobody ever joined."""
    state: str
    """Empty, PreparingRebalance, CompletingRebalance, Stable or Dead."""
    group_type: str


class GroupMemberDescription(NamedTuple):
    """A member of a group."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    host: str
    assignment: Sequence[TopicPartition]
    """In order; none while the group rebalances, and where the members are not consumers."""


class GroupDescription(NamedTuple):
    """A group and its members. One that there is not has the state Dead."""

    group_id: str
    state: str
    protocol_type: str
    partition_assignor: str
    """How partitions are shared out; empty while the group is not Stable."""
    coordinator: Node
    members: Sequence[GroupMemberDescription]


class CommittedOffset(NamedTuple):
    """Where a group goes on in a partition; the leader epoch is -1 where the committer did not say it."""

    offset: int
    leader_epoch: int
    metadata: str


class ResetTo(StrEnum):
    """Where `reset_group_offsets` puts a group."""

    EARLIEST = "earliest"
    """The first record."""
    LATEST = "latest"
    """After the last record."""
    OFFSET = "offset"
    """The offset `value`."""
    TIMESTAMP = "timestamp"
    """The first record at or after `value`, in ms since 1970; after the last record where there is none."""
    SHIFT_BY = "shift-by"
    """`value` records on from what is committed, back if it is negative."""


class GroupAdmin(AdminRequests):
    """The part of `AdminClient` that is about groups."""

    async def list_groups(self, *, states: Collection[str] = (), types: Collection[str] = ()) -> list[GroupListing]:
        """The groups in one of these states and of one of these types, by id; none given are all.

        Raises KafkaError when a broker does not answer, for then some would be missing. A group whose coordinator
        changes at this moment may be missing.
        """
        request = m.ListGroupsRequest(list(states), list(types))

        async def attempt(left_s: float) -> list[m.ListedGroup] | KafkaError:
            brokers = (await self._fetch_metadata(m.MetadataRequest(), left_s)).brokers
            nodes = [Node(one.node_id, one.host, one.port) for one in brokers]
            timeout_s = min(left_s, self._cluster.request_timeout_ms / 1000)
            answers = list((await self._call_brokers(request, nodes, timeout_s)).values())
            failure = next((answer for answer in answers if isinstance(answer, KafkaError)), None)
            return failure or [one for answer in answers for one in answer.groups]

        listed = {one.group_id: one for one in await self._cluster.retry(attempt, self._timeout_s)}
        return [
            GroupListing(one.group_id, one.protocol_type, one.group_state, one.group_type)
            for _, one in sorted(listed.items())
        ]

    async def describe_groups(self, group_ids: Iterable[str]) -> dict[str, GroupDescription]:
        """State, coordinator and members of each group; one that there is not is Dead."""
        return await _each(group_ids, self._describe_group)

    async def list_group_offsets(
        self, group_id: str, partitions: Iterable[tuple[str, int]] | None = None
    ) -> dict[TopicPartition, CommittedOffset]:
        """What the group has committed, of all partitions or of these; those without are left out."""
        coordinator = GroupCoordinator(self._cluster, group_id)
        limit_s = self._cluster.request_timeout_ms / 1000
        found = await coordinator.fetch_offsets(partitions, self._timeout_s, attempt_timeout_s=limit_s)
        return {
            where: CommittedOffset(one.committed_offset, one.committed_leader_epoch, one.metadata or "")
            for where, one in found.items()
        }

    async def alter_group_offsets(self, group_id: str, offsets: NewOffsets) -> None:
        """Commit these offsets for a group that is empty, or that there was not.

        Raises KafkaError: UNKNOWN_MEMBER_ID while the group has members; for the first of the partitions that were
        refused (UNKNOWN_TOPIC_OR_PARTITION), while the others are committed all the same. Whether there are records
        at the offsets is not looked at. ValueError for a negative offset.
        """
        if any(offset < 0 for offset in offsets.values()):
            raise ValueError("an offset is not negative")
        wanted = {TopicPartition(*where): offset for where, offset in offsets.items()}
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
        """Put an empty group somewhere else in these partitions: the new offsets, not committed with `dry_run`.

        Offsets before the first record become that one's, those beyond the end the end. Raises KafkaError as
        `alter_group_offsets`, and OFFSET_OUT_OF_RANGE for SHIFT_BY where nothing is committed.
        """
        wanted = [TopicPartition(*where) for where in partitions]
        offsets = await self._reset_offsets(group_id, wanted, to, value)
        if not dry_run:
            await self._commit(group_id, offsets)
        return offsets

    async def delete_group_offsets(self, group_id: str, partitions: Iterable[tuple[str, int]]) -> None:
        """Forget what is committed for these partitions.

        Raises KafkaError: GROUP_ID_NOT_FOUND, or GROUP_SUBSCRIBED_TO_TOPIC for the first partition that a member may
        be reading; the others are forgotten all the same.
        """
        topics = [
            m.OffsetDeleteRequestTopic(topic, [m.OffsetDeleteRequestPartition(index) for index in numbers])
            for topic, numbers in by_topic(partitions).items()
        ]
        _, answer = await self._call_group(group_id, m.OffsetDeleteRequest(group_id, topics))
        if answer.error_code:
            raise KafkaError(answer.error_code, f"group {group_id!r}")
        for topic_answer in answer.topics:
            for one in topic_answer.partitions:
                if one.error_code:
                    text = f"{topic_answer.name}-{one.partition_index} of group {group_id!r}"
                    raise KafkaError(one.error_code, text)

    async def delete_groups(self, group_ids: Iterable[str]) -> None:
        """Delete empty groups and their offsets.

        Raises KafkaError for the first that was not deleted (GROUP_ID_NOT_FOUND, NON_EMPTY_GROUP); the others are
        deleted all the same.
        """
        await _each(group_ids, self._delete_group)

    # --- inside ----------------------------------------------------------------------------------------------------

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
            raise KafkaError(error.code, f"group {group_id!r} has members: only they may commit") from None

    async def _describe_group(self, group_id: str) -> GroupDescription:
        coordinator, response = await self._call_group(group_id, m.DescribeGroupsRequest([group_id]))
        group: m.DescribedGroup
        (group,) = response.groups
        if group.error_code:
            raise KafkaError(group.error_code, f"group {group_id!r}")
        assert coordinator.node is not None  # it has answered
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
            raise KafkaError(result.error_code, f"group {group_id!r}")

    async def _reset_offsets(
        self, group_id: str, partitions: Collection[TopicPartition], to: ResetTo, value: int
    ) -> dict[TopicPartition, int]:
        first, last = await asyncio.gather(
            self._edges(partitions, TIMESTAMP_EARLIEST), self._edges(partitions, TIMESTAMP_LATEST)
        )
        wanted: Mapping[TopicPartition, int]
        if to is ResetTo.EARLIEST:
            wanted = first
        elif to is ResetTo.LATEST:
            wanted = last
        elif to is ResetTo.OFFSET:
            wanted = dict.fromkeys(partitions, value)
        elif to is ResetTo.TIMESTAMP:
            found = await self._edges(partitions, max(value, 0))
            wanted = {where: last[where] if found[where] < 0 else found[where] for where in partitions}
        else:
            committed = await self.list_group_offsets(group_id, partitions)
            for where in partitions:
                if where not in committed:
                    text = f"group {group_id!r} has no committed offset in {where.topic}-{where.partition}"
                    raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, text)
            wanted = {where: committed[where].offset + value for where in partitions}
        return {where: max(first[where], min(wanted[where], last[where])) for where in partitions}

    async def _edges(self, partitions: Collection[TopicPartition], timestamp: int) -> dict[TopicPartition, int]:
        """Offsets by ListOffsets; -1 where there is none."""
        found = await list_offsets(self._cluster, dict.fromkeys(partitions, timestamp), self._timeout_s)
        return {where: -1 if place is None else place.offset for where, place in found.items()}


def _member(member: m.DescribedGroupMember, *, is_consumer: bool) -> GroupMemberDescription:
    assignment: list[TopicPartition] = []
    if is_consumer:
        try:
            lists = decode_assignment(member.member_assignment).assigned_partitions
        except CorruptRecordError:  # only the members need to understand it
            lists = ()
        assignment = sorted(TopicPartition(*where) for where in flat(lists))
    return GroupMemberDescription(
        member.member_id, member.group_instance_id, member.client_id, member.client_host, assignment
    )


async def _each(group_ids: Iterable[str], work: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """Do it for every group, some at a time; raises the first error when all are through."""
    places = asyncio.Semaphore(GROUPS_AT_A_TIME)

    async def one(group_id: str) -> T:
        async with places:
            return await work(group_id)

    listed = list(dict.fromkeys(group_ids))
    done: dict[str, T] = {}
    failures: list[BaseException] = []
    for group_id, result in zip(listed, await asyncio.gather(*map(one, listed), return_exceptions=True), strict=True):
        if isinstance(result, BaseException):
            failures.append(result)
        else:
            done[group_id] = result
    if failures:
        raise failures[0]
    return done
