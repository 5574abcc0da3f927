"""The coordinator of the groups of one partition of `__consumer_offsets`, sans-IO.

Each method is an event with the time at which it happens, and returns a `Decision`: writes, which the driver appends in
their order and reports with `committed` or `failed`, and answers by the numbers that the driver gave the requests. A
request is answered once, by this step or a later one. `tick` is due at `next_deadline_ms`.

What is durable is `table`, which follows from the records alone; a coordinator made from a table that was read from the
log goes on where the last one stopped: with stable groups as they were, and members' sessions beginning anew. What was
between two generations is lost with the broker; its members are told ILLEGAL_GENERATION or UNKNOWN_MEMBER_ID and join
again.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection
from functools import partial

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.book import Book
from kipmesh.core.group.classic import GroupState
from kipmesh.core.group.membership import Membership
from kipmesh.core.group.offsets import Offsets, tombstones
from kipmesh.core.group.rebalances import HEARTBEAT, JOIN, Rebalances
from kipmesh.core.group.records import GroupMetadataKey, GroupRecord
from kipmesh.core.group.table import GroupTable
from kipmesh.core.group.types import Client, Decision, Instant, Settings

GROUP_METADATA_TOPIC = "__consumer_offsets"
INTERNAL_TOPICS = frozenset({GROUP_METADATA_TOPIC})
"""Topics that brokers write for themselves: clients may read them, and not produce to them."""
GROUP_TYPE = "classic"


def partition_for(group_id: str, partitions: int) -> int:
    """Which partition of `__consumer_offsets` has the group: by Java's hash of its id, as with every Kafka broker."""
    value = 0
    for (unit,) in struct.iter_unpack(">H", group_id.encode("utf-16-be")):
        value = (31 * value + unit) & 0xFFFFFFFF
    signed = value - (1 << 32) if value >> 31 else value
    return (0 if signed == -(1 << 31) else abs(signed)) % partitions


class GroupCoordinator:
    """The groups of one partition."""

    def __init__(self, settings: Settings, table: GroupTable) -> None:
        self._book = Book(settings, table)
        self._rebalances = Rebalances(self._book)
        self._membership = Membership(self._book, self._rebalances)
        self._offsets = Offsets(self._book, self._rebalances)

    @property
    def table(self) -> GroupTable:
        """What is committed."""
        return self._book.table

    def loaded(self, now: Instant) -> Decision:
        """The first event: sessions begin now."""
        for group_id, value in self._book.table.groups.items():
            group = self._book.group(group_id) if value.members else None
            if group is not None:
                self._rebalances.loaded(group, now)
        return self._book.take()

    def unloaded(self, now: Instant) -> Decision:
        """The last event: this broker does not lead the partition any more. Whoever waits is told NOT_COORDINATOR."""
        self._book.is_closed = True
        for group in self._book.live.values():
            self._rebalances.unloaded(group, now)
        self._book.abandon(ErrorCode.NOT_COORDINATOR, now)
        return self._book.take()

    # --- members ---------------------------------------------------------------------------------------------------

    def join(self, request: m.JoinGroupRequest, client: Client, unique: str, request_id: int, now: Instant) -> Decision:
        """JoinGroup (API key 11); `unique` makes a new member's id unique."""
        self._membership.join(request, client, unique, request_id, now)
        return self._book.take()

    def hung_up(self, group_id: str, request_id: int) -> None:
        """Who sent that JoinGroup waits for the answer no more: it keeps its place, but is not to lead."""
        group = self._book.live.get(group_id)
        for member in group.members.values() if group is not None else ():
            if member.awaiting_join == request_id:
                member.has_hung_up = True

    def sync(self, request: m.SyncGroupRequest, request_id: int, now: Instant) -> Decision:
        """SyncGroup (API key 14)."""
        self._membership.sync(request, request_id, now)
        return self._book.take()

    def heartbeat(self, request: m.HeartbeatRequest, request_id: int, now: Instant) -> Decision:
        """Heartbeat (API key 12)."""
        self._membership.heartbeat(request, request_id, now)
        return self._book.take()

    def leave(self, request: m.LeaveGroupRequest, request_id: int, now: Instant) -> Decision:
        """LeaveGroup (API key 13)."""
        self._membership.leave(request, request_id, now)
        return self._book.take()

    # --- offsets ---------------------------------------------------------------------------------------------------

    def commit(self, request: m.OffsetCommitRequest, request_id: int, now: Instant) -> Decision:
        """OffsetCommit (API key 8)."""
        self._offsets.commit(request, request_id, now)
        return self._book.take()

    def fetch(self, request: m.OffsetFetchRequestGroup, request_id: int) -> Decision:
        """One group of an OffsetFetch (API key 9)."""
        self._offsets.fetch(request, request_id)
        return self._book.take()

    def delete_offsets(self, request: m.OffsetDeleteRequest, request_id: int, now: Instant) -> Decision:
        """OffsetDelete (API key 47)."""
        self._offsets.delete(request, request_id, now)
        return self._book.take()

    def topics_deleted(self, names: Collection[str], now: Instant) -> Decision:
        """Topics are gone: so are their offsets."""
        self._offsets.topics_deleted(frozenset(names), now)
        return self._book.take()

    def expire_offsets(self, now: Instant) -> Decision:
        """Every `offsets.retention.check.interval.ms`."""
        self._offsets.expire(now)
        return self._book.take()

    # --- groups ----------------------------------------------------------------------------------------------------

    def list_groups(self, states: Collection[str] = (), types: Collection[str] = ()) -> list[m.ListedGroup]:
        """The groups in one of the states and of one of the types; no states or types are all."""
        wanted = {state.lower() for state in states}
        if types and GROUP_TYPE not in {type_.lower() for type_ in types}:
            return []
        listed = []
        for group_id in dict.fromkeys([*self._book.table.group_ids(), *self._book.live]):
            group = self._book.group(group_id)
            if group is not None and (not wanted or group.state.value.lower() in wanted):
                listed.append(m.ListedGroup(group_id, group.protocol_type or "", group.state.value, GROUP_TYPE))
        return listed

    def describe(self, group_id: str) -> m.DescribedGroup:
        """One group of DescribeGroups (API key 15); a group that there is not is Dead, which is no error."""
        group = self._book.group(group_id)
        if group is None:
            return m.DescribedGroup(group_id=group_id, group_state=GroupState.DEAD.value)
        is_stable = group.state is GroupState.STABLE
        name = group.protocol_name if is_stable else None
        members = [
            m.DescribedGroupMember(
                member.member_id,
                member.group_instance_id,
                member.client_id,
                member.client_host,
                b"" if name is None else member.protocols.get(name, b""),
                member.assignment if is_stable else b"",
            )
            for member in group.members.values()
        ]
        return m.DescribedGroup(0, None, group_id, group.state.value, group.protocol_type or "", name or "", members)

    def delete_group(self, group_id: str, request_id: int, now: Instant) -> Decision:
        """One group of DeleteGroups (API key 42): answered with a DeletableGroupResult."""
        self._delete_group(group_id, request_id, now)
        return self._book.take()

    def _delete_group(self, group_id: str, request_id: int, now: Instant) -> None:
        book = self._book
        if book.is_busy(group_id) and not book.is_closed:
            book.when_quiet(group_id, partial(self._delete_group, group_id, request_id), now)
            return
        group = book.group(group_id)
        code = ErrorCode.NONE
        if book.is_closed:
            code = ErrorCode.NOT_COORDINATOR
        elif group is None:
            code = ErrorCode.GROUP_ID_NOT_FOUND
        elif not group.is_empty:
            code = ErrorCode.NON_EMPTY_GROUP
        if code:
            book.answer(request_id, m.DeletableGroupResult(group_id, code))
            return
        records = tombstones(group_id, list(book.table.offsets(group_id)))
        records.append(GroupRecord(GroupMetadataKey(group_id), None))
        self._offsets.delete_group(
            group_id, records, lambda code: book.answer(request_id, m.DeletableGroupResult(group_id, code))
        )

    # --- writes and time -------------------------------------------------------------------------------------------

    def committed(self, write_id: int, now: Instant) -> Decision:
        """A write is below the high watermark; writes are reported in their order."""
        self._book.committed(write_id, now)
        return self._book.take()

    def failed(self, write_id: int, code: ErrorCode, now: Instant, *, may_commit: bool = False) -> Decision:
        """A write was refused; or, with `may_commit`, it was appended and takes too long, and is reported once more."""
        self._book.failed(write_id, code, now, may_commit=may_commit)
        return self._book.take()

    def next_deadline_ms(self) -> int | None:
        """When, by the monotonic clock, `tick` is due."""
        return self._book.timers.next_deadline_ms()

    def tick(self, now: Instant) -> Decision:
        """Whatever is due."""
        while (name := self._book.timers.pop_due(now.monotonic_ms)) is not None:
            if name[0] == HEARTBEAT:
                self._rebalances.session_over(name[1], name[2], now)
            elif name[0] == JOIN:
                self._rebalances.join_over(name[1], now)
            else:
                self._rebalances.sync_over(name[1], now)
        return self._book.take()

    def group_states(self) -> Counter[GroupState]:
        """How many groups are in which state."""
        states = Counter(group.state for group in self._book.live.values())
        sleeping = sum(group_id not in self._book.live for group_id in self._book.table.group_ids())
        if sleeping:
            states[GroupState.EMPTY] += sleeping
        return states
