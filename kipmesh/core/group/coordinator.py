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
from collections.abc import Callable, Collection
from typing import ParamSpec

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.group import rebalances
from kipmesh.core.group.classic import GroupState
from kipmesh.core.group.coordinator_state import CoordinatorState
from kipmesh.core.group.membership import Membership
from kipmesh.core.group.offsets import Offsets
from kipmesh.core.group.table import GroupTable
from kipmesh.core.group.types import Decision, Instant, Settings

GROUP_METADATA_TOPIC = "__consumer_offsets"
INTERNAL_TOPICS = frozenset({GROUP_METADATA_TOPIC})
"""Topics that brokers write for themselves: clients may read them, and not produce to them."""
GROUP_TYPE = "classic"

Event = ParamSpec("Event")


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
        state = self._state = CoordinatorState(settings, table)
        self._rebalances = rebalances.Rebalances(state)
        membership, offsets = Membership(state, self._rebalances), Offsets(state, self._rebalances)
        self.table = table
        """What is committed."""
        self.next_deadline_ms = state.timers.next_deadline_ms
        """When, by the monotonic clock, `tick` is due."""
        # The events: those of members, of offsets, of groups and of writes.
        self.join = self._event(membership.join)
        self.sync = self._event(membership.sync)
        self.heartbeat = self._event(membership.heartbeat)
        self.leave = self._event(membership.leave)
        self.commit = self._event(offsets.commit)
        self.fetch = self._event(offsets.fetch)
        self.delete_offsets = self._event(offsets.delete)
        self.topics_deleted = self._event(offsets.topics_deleted)
        self.expire_offsets = self._event(offsets.expire)
        self.delete_group = self._event(offsets.delete_group)
        self.committed = self._event(state.committed)
        self.failed = self._event(state.failed)

    def _event(self, step: Callable[Event, None]) -> Callable[Event, Decision]:
        """A step of one of the parts as an event: with what it writes and answers."""

        def event(*args: Event.args, **values: Event.kwargs) -> Decision:
            step(*args, **values)
            return self._state.take()

        return event

    def loaded(self, now: Instant) -> Decision:
        """The first event: sessions begin now."""
        for group_id, value in self.table.groups.items():
            group = self._state.group(group_id) if value.members else None
            if group is not None:
                self._rebalances.loaded(group, now)
        return self._state.take()

    def unloaded(self, now: Instant) -> Decision:
        """The last event: this broker does not lead the partition any more. Waiting requests get NOT_COORDINATOR."""
        self._state.is_closed = True
        for group in self._state.live.values():
            self._rebalances.unloaded(group, now)
        self._state.abandon(ErrorCode.NOT_COORDINATOR, now)
        return self._state.take()

    def tick(self, now: Instant) -> Decision:
        """Whatever is due."""
        while (name := self._state.timers.pop_due(now.monotonic_ms)) is not None:
            match name:
                case (rebalances.HEARTBEAT, group_id, member_id):
                    self._rebalances.session_over(group_id, member_id, now)
                case (rebalances.JOIN, group_id):
                    self._rebalances.join_over(group_id, now)
                case (rebalances.SYNC, group_id):
                    self._rebalances.sync_over(group_id, now)
        return self._state.take()

    def hung_up(self, group_id: str, request_id: int) -> None:
        """Who sent that JoinGroup waits for the answer no more: it keeps its place, but is not to lead."""
        group = self._state.live.get(group_id)
        for member in group.members.values() if group is not None else ():
            if member.awaiting_join == request_id:
                member.has_hung_up = True

    # --- groups ----------------------------------------------------------------------------------------------------

    def list_groups(self, states: Collection[str] = (), types: Collection[str] = ()) -> list[m.ListedGroup]:
        """The groups in one of the states and of one of the types; no states or types are all."""
        wanted = {state.lower() for state in states}
        if types and GROUP_TYPE not in {type_.lower() for type_ in types}:
            return []
        listed = []
        for group_id in dict.fromkeys([*self.table.group_ids(), *self._state.live]):
            group = self._state.group(group_id)
            if group is not None and (not wanted or group.state.value.lower() in wanted):
                listed.append(m.ListedGroup(group_id, group.protocol_type or "", group.state.value, GROUP_TYPE))
        return listed

    def describe(self, group_id: str) -> m.DescribedGroup:
        """One group of DescribeGroups (API key 15); a group that there is not is Dead, which is no error."""
        group = self._state.group(group_id)
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

    def group_states(self) -> Counter[GroupState]:
        """How many groups are in which state."""
        states = Counter(group.state for group in self._state.live.values())
        sleeping = sum(group_id not in self._state.live for group_id in self.table.group_ids())
        if sleeping:
            states[GroupState.EMPTY] += sleeping
        return states
