"""Coordinator of the groups of one partition of `__consumer_offsets`, sans-IO.

Each method is an event with its time and returns a `Decision`: writes, which the driver appends in order and reports
with `committed` or `failed`, and responses by request id. Each request gets one response, from this event or a later
one. `tick` is due at `next_deadline_ms`.

`table` holds the durable state and follows from the records alone. A coordinator with a table loaded from the log
continues with the stable groups; sessions restart. A rebalance in progress is lost with the broker: its members receive
ILLEGAL_GENERATION or UNKNOWN_MEMBER_ID and join again.
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
"""Topics that only brokers write. Clients may read them but not produce to them."""
GROUP_TYPE = "classic"

Event = ParamSpec("Event")


def partition_for(group_id: str, partitions: int) -> int:
    """Return the partition of `__consumer_offsets` that stores the group, computed from Java's hash of its id, as in
    Kafka.

    `partitions` is the number of partitions of that topic.
    """
    value = 0
    for (unit,) in struct.iter_unpack(">H", group_id.encode("utf-16-be")):
        value = (31 * value + unit) & 0xFFFFFFFF
    signed = value - (1 << 32) if value >> 31 else value
    return (0 if signed == -(1 << 31) else abs(signed)) % partitions


class GroupCoordinator:
    """Coordinator of the groups of one partition of `__consumer_offsets`. `table` is the state loaded from the log."""

    def __init__(self, settings: Settings, table: GroupTable) -> None:
        state = self._state = CoordinatorState(settings, table)
        self._rebalances = rebalances.Rebalances(state)
        membership, offsets = Membership(state, self._rebalances), Offsets(state, self._rebalances)
        self.table = table
        """Committed state."""
        self.next_deadline_ms = state.timers.next_deadline_ms
        """Returns when `tick` is due (monotonic ms), or None."""
        # Events of members, offsets, groups and writes.
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
        """Wrap a step so that it returns its writes and responses as a Decision."""

        def event(*args: Event.args, **values: Event.kwargs) -> Decision:
            step(*args, **values)
            return self._state.take()

        return event

    def loaded(self, now: Instant) -> Decision:
        """Start the sessions of all members, and rebalance groups that exceed `group.max.size`. Must be the first
        event."""
        for group_id, value in self.table.groups.items():
            group = self._state.group(group_id) if value.members else None
            if group is not None:
                self._rebalances.loaded(group, now)
        return self._state.take()

    def unloaded(self, now: Instant) -> Decision:
        """Fail all pending requests with NOT_COORDINATOR, because this broker no longer leads the partition. Must be
        the last event."""
        self._state.is_closed = True
        for group in self._state.live.values():
            self._rebalances.unloaded(group, now)
        self._state.abandon(ErrorCode.NOT_COORDINATOR, now)
        return self._state.take()

    def tick(self, now: Instant) -> Decision:
        """Handle all timers that are due: sessions, join phases and missing SyncGroups."""
        while (name := self._state.timers.pop_due(now.monotonic_ms)) is not None:
            match name:
                case (rebalances.HEARTBEAT, group_id, member_id):
                    self._rebalances.session_expired(group_id, member_id, now)
                case (rebalances.JOIN, group_id):
                    self._rebalances.join_expired(group_id, now)
                case (rebalances.SYNC, group_id):
                    self._rebalances.sync_expired(group_id, now)
        return self._state.take()

    def join_disconnected(self, group_id: str, request_id: int) -> None:
        """Record that the connection of a pending JoinGroup broke: its member stays, but is not preferred as leader.
        Ignored if the request is not pending."""
        group = self._state.live.get(group_id)
        for member in group.members.values() if group is not None else ():
            if member.awaiting_join == request_id:
                member.is_disconnected = True

    # --- groups ----------------------------------------------------------------------------------------------------

    def list_groups(self, states: Collection[str] = (), types: Collection[str] = ()) -> list[m.ListedGroup]:
        """Return the groups in any of the states and of any of the types (case-insensitive). An empty filter matches
        all."""
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
        """Return the description of a group for a DescribeGroups response. An unknown group has the state Dead and no
        error. Protocol, metadata and assignments are empty unless the group is Stable."""
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
        """Return state -> number of groups, including groups that only have offsets (Empty)."""
        states = Counter(group.state for group in self._state.live.values())
        not_live = sum(group_id not in self._state.live for group_id in self.table.group_ids())
        if not_live:
            states[GroupState.EMPTY] += not_live
        return states
