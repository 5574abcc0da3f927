"""A group of Kafka's classic protocol: members, state and pending requests.

                  members join, leave or fail                all have joined, or the wait timed out
    Empty, Stable, ------------------------> PreparingRebalance ------------------------> CompletingRebalance
    CompletingRebalance                               |                                          |
      ^    ^-----------------------------------------(all left)-- Empty                          |
      '-------------------- the leader's assignment is committed: Stable <-----------------------'

This module knows no clock, log or network; `coordinator` does. A pending request is identified by its request id.

Invariants: a `group.instance.id` belongs to one member; the leader is a member; from CompletingRebalance on, every
member supports `protocol_name`; transitions follow `TRANSITIONS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group import records
from kipmesh.messages import JoinGroupRequestProtocol, JoinGroupResponseMember


class GroupState(Enum):
    """States of a group, with Kafka's names."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


TRANSITIONS: dict[GroupState, frozenset[GroupState]] = {
    GroupState.EMPTY: frozenset({GroupState.PREPARING_REBALANCE, GroupState.DEAD}),
    GroupState.PREPARING_REBALANCE: frozenset({GroupState.EMPTY, GroupState.COMPLETING_REBALANCE, GroupState.DEAD}),
    GroupState.COMPLETING_REBALANCE: frozenset({GroupState.STABLE, GroupState.PREPARING_REBALANCE, GroupState.DEAD}),
    GroupState.STABLE: frozenset({GroupState.PREPARING_REBALANCE, GroupState.DEAD}),
    GroupState.DEAD: frozenset(),
}
"""State -> states that may follow."""

CAN_REBALANCE = frozenset(state for state, nexts in TRANSITIONS.items() if GroupState.PREPARING_REBALANCE in nexts)


@dataclass(slots=True, eq=False)
class Member:
    """A member of a group. `awaiting_join` and `awaiting_sync` are the ids of its pending JoinGroup and SyncGroup
    requests, or None."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    protocols: Mapping[str, bytes]
    """Protocol name -> metadata, in the member's order of preference."""
    assignment: bytes = b""
    is_new: bool = field(default=False, init=False)
    """Whether the member has received no JoinGroup response yet, and so cannot send heartbeats."""
    is_disconnected: bool = field(default=False, init=False)
    """Whether the connection of its pending JoinGroup broke, so the member may be dead."""
    awaiting_join: int | None = field(default=None, init=False)
    awaiting_sync: int | None = field(default=None, init=False)

    @property
    def needs_no_heartbeat(self) -> bool:
        """Whether a pending JoinGroup or SyncGroup replaces heartbeats; always False for new members."""
        return not self.is_new and (self.awaiting_join is not None or self.awaiting_sync is not None)

    def matches(self, protocols: Sequence[JoinGroupRequestProtocol]) -> bool:
        """Return whether the member supports the same protocols with the same metadata in the same order."""
        return list(self.protocols.items()) == list(first_per_name(protocols).items())


def first_per_name(protocols: Sequence[JoinGroupRequestProtocol]) -> dict[str, bytes]:
    """Return protocol name -> metadata. Of several entries with the same name, the first counts."""
    protocols_by_name: dict[str, bytes] = {}
    for protocol in protocols:
        protocols_by_name.setdefault(protocol.name, protocol.metadata)
    return protocols_by_name


class ClassicGroup:
    """One group of the classic protocol. `wall_ms` is the creation time (wall clock, ms), -1 if unknown."""

    def __init__(self, group_id: str, wall_ms: int) -> None:
        self.group_id = group_id
        self.state = GroupState.EMPTY
        self.previous_state = GroupState.DEAD
        self.current_state_timestamp = wall_ms
        self.generation_id = 0
        self.protocol_type: str | None = None
        self.protocol_name: str | None = None
        self.leader_id: str | None = None
        self.members: dict[str, Member] = {}
        self.pending_join: set[str] = set()
        """Member ids sent with MEMBER_ID_REQUIRED whose members have not joined again yet (KIP-394)."""
        self.pending_sync: set[str] = set()
        """Members of this generation that have not sent SyncGroup."""
        self.new_member_added = False
        """Whether a member joined during the first rebalance, which extends its wait."""
        self.is_assigning = False
        """Whether the assignment of this generation is being written. There is only one per generation."""
        self.initial_wait_ms: tuple[int, int] | None = None
        """During the first rebalance: (current wait for more members, maximum wait after it)."""
        self.subscribed_topics: frozenset[str] | None = None
        """Topics of all subscriptions, or None if unknown."""
        self.static_members: dict[str, str] = {}
        """`group.instance.id` -> member id."""

    @classmethod
    def from_record(cls, group_id: str, value: records.GroupMetadataValue) -> ClassicGroup:
        """Return the group that its last record describes: Stable if it has members, else Empty."""
        group = cls(group_id, value.current_state_timestamp)
        group.generation_id = value.generation
        group.protocol_type = value.protocol_type or None
        group.protocol_name = value.protocol
        for member in value.members:
            timeout_ms = member.session_timeout if member.rebalance_timeout == -1 else member.rebalance_timeout
            group._put(
                Member(
                    member.member_id,
                    member.group_instance_id,
                    member.client_id,
                    member.client_host,
                    timeout_ms,
                    member.session_timeout,
                    {value.protocol or "": member.subscription},
                    member.assignment,
                )
            )
        group.leader_id = value.leader if value.leader in group.members else next(iter(group.members), None)
        if group.members:
            group.state = GroupState.STABLE
        group.subscribed_topics = group._subscribed_topics()
        return group

    # --- queries ---------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether the group is Empty and has no pending members (member ids that were sent but not used yet)."""
        return self.state is GroupState.EMPTY and not self.pending_join

    @property
    def is_consumer(self) -> bool:
        """Whether the protocol type is `consumer`."""
        return self.protocol_type == records.PROTOCOL_TYPE

    @property
    def has_all_joined(self) -> bool:
        """Whether every member has a pending JoinGroup and no member is pending (`pending_join`). True without
        members."""
        return not self.pending_join and all(member.awaiting_join is not None for member in self.members.values())

    @property
    def awaiting_join_count(self) -> int:
        """Number of members with a pending JoinGroup."""
        return sum(member.awaiting_join is not None for member in self.members.values())

    @property
    def rebalance_timeout_ms(self) -> int:
        """Maximum rebalance timeout of the members in ms, 0 without members."""
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def check_member(self, member_id: str, group_instance_id: str | None) -> ErrorCode:
        """Return NONE for a current member, FENCED_INSTANCE_ID if another member now has the instance id, else
        UNKNOWN_MEMBER_ID (also for an unknown instance id)."""
        if group_instance_id is not None:
            existing = self.static_members.get(group_instance_id)
            if existing is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
            if existing != member_id:
                return ErrorCode.FENCED_INSTANCE_ID
        return ErrorCode.NONE if member_id in self.members else ErrorCode.UNKNOWN_MEMBER_ID

    def check_commit(self, member_id: str, group_instance_id: str | None, generation_id: int) -> ErrorCode:
        """Return NONE if the sender may commit offsets now. With a negative generation, only an Empty group allows it.

        Other codes: UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID, ILLEGAL_GENERATION, REBALANCE_IN_PROGRESS
        (CompletingRebalance).
        """
        if generation_id < 0 and self.state is GroupState.EMPTY:
            return ErrorCode.NONE
        if generation_id < 0 and not member_id and group_instance_id is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        code = self.check_member(member_id, group_instance_id)
        if code:
            return code
        if generation_id != self.generation_id:
            return ErrorCode.ILLEGAL_GENERATION
        is_completing = self.state is GroupState.COMPLETING_REBALANCE
        return ErrorCode.REBALANCE_IN_PROGRESS if is_completing else ErrorCode.NONE

    def supports(self, protocol_type: str, protocols: Sequence[JoinGroupRequestProtocol]) -> bool:
        """Return whether a member with these protocols can join: the protocol type is the group's, and all members
        support one of the protocols. An Empty group accepts any type and protocols, but neither may be empty."""
        if self.state is GroupState.EMPTY:
            return bool(protocol_type and protocols)
        candidates = self._common_protocols()
        return self.protocol_type == protocol_type and any(protocol.name in candidates for protocol in protocols)

    def _common_protocols(self) -> set[str]:
        supported = Counter(name for member in self.members.values() for name in member.protocols)
        return {name for name, count in supported.items() if count == len(self.members)}

    def select_protocol(self) -> str:
        """Return the protocol that most members prefer among those that all support. Ties go to the earliest member.
        Requires members with a common protocol."""
        candidates = self._common_protocols()
        votes = Counter(
            next(name for name in member.protocols if name in candidates) for member in self.members.values()
        )
        return votes.most_common(1)[0][0]

    def is_subscribed(self, topic: str) -> bool:
        """Return whether a member subscribes to the topic. With unknown subscriptions, True for a consumer group and
        False for any other."""
        return self.is_consumer if self.subscribed_topics is None else topic in self.subscribed_topics

    def _subscribed_topics(self) -> frozenset[str] | None:
        if not self.is_consumer:
            return None
        topics: set[str] = set()
        for member in self.members.values():
            of_member = records.subscribed_topics(member.protocols.get(self.protocol_name or "", b""))
            if of_member is None:
                return None
            topics |= of_member
        return frozenset(topics)

    def join_members(self) -> list[JoinGroupResponseMember]:
        """Return the members for the leader's JoinGroup response, each with its metadata for the selected protocol."""
        assert self.protocol_name is not None
        return [
            JoinGroupResponseMember(member.member_id, member.group_instance_id, member.protocols[self.protocol_name])
            for member in self.members.values()
        ]

    def record(self, assignment: dict[str, bytes]) -> records.GroupRecord:
        """Return the record of the current generation. `assignment` maps member id to encoded assignment; members
        missing from it get an empty assignment."""
        name = self.protocol_name or ""
        members = [
            records.MemberMetadata(
                member.member_id,
                member.group_instance_id,
                member.client_id,
                member.client_host,
                member.rebalance_timeout_ms,
                member.session_timeout_ms,
                member.protocols[name],
                assignment.get(member.member_id, b""),
            )
            for member in self.members.values()
        ]
        return records.GroupRecord(
            records.GroupMetadataKey(self.group_id),
            records.GroupMetadataValue(
                self.protocol_type or "",
                self.generation_id,
                self.protocol_name,
                self.leader_id,
                self.current_state_timestamp,
                tuple(members),
            ),
        )

    # --- changes ---------------------------------------------------------------------------------------------------

    def transition_to(self, state: GroupState, wall_ms: int) -> None:
        """Change the state at `wall_ms`. Raises ValueError for a transition that is not in `TRANSITIONS`."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"group {self.group_id} cannot go from {self.state.value} to {state.value}")
        self.previous_state, self.state = self.state, state
        self.current_state_timestamp = wall_ms

    def add(self, member: Member, protocol_type: str) -> None:
        """Add a new member. The first member sets the protocol type. A member becomes the leader if there is none."""
        if not self.members:
            self.protocol_type = protocol_type
        self._put(member)
        if self.leader_id is None:
            self.leader_id = member.member_id
        self.pending_join.discard(member.member_id)

    def _put(self, member: Member) -> None:
        self.members[member.member_id] = member
        if member.group_instance_id is not None:
            self.static_members[member.group_instance_id] = member.member_id

    def remove(self, member_id: str) -> None:
        """Remove a member or pending member, if it exists. If it was the leader, the next member becomes the leader."""
        member = self.members.pop(member_id, None)
        if member is not None and member.group_instance_id is not None:
            self.static_members.pop(member.group_instance_id, None)
        if self.leader_id == member_id:
            self.leader_id = next(iter(self.members), None)
        self.pending_join.discard(member_id)
        self.pending_sync.discard(member_id)

    def replace_static(self, group_instance_id: str, new_member_id: str) -> Member:
        """Give the existing static member with this instance id a new member id; it keeps its position, assignment and
        leadership. Return the new member."""
        old = self.members[self.static_members[group_instance_id]]
        new = replace(old, member_id=new_member_id)
        self.members = {
            new_member_id if key == old.member_id else key: new if key == old.member_id else member
            for key, member in self.members.items()
        }
        self.static_members[group_instance_id] = new_member_id
        if self.leader_id == old.member_id:
            self.leader_id = new_member_id
        self.pending_sync.discard(old.member_id)
        return new

    def elect_joined_leader(self) -> bool:
        """Make a member with a pending JoinGroup the leader. Return False if no member has one or the group has no
        leader.

        Unlike Kafka, this prefers members that are still connected: a dead leader would assign nothing until its
        session expires. In a group with constant joins, the next leader would be dead by then, too.
        """
        joined = [member for member in self.members.values() if member.awaiting_join is not None]
        candidates = [member for member in joined if not member.is_disconnected] or joined
        if self.leader_id not in {member.member_id for member in candidates}:
            if not candidates or self.leader_id is None:
                return False
            self.leader_id = candidates[0].member_id
        return True

    def begin_generation(self, wall_ms: int) -> None:
        """Start the next generation: CompletingRebalance with the current members, or Empty without members."""
        self.generation_id += 1
        self.is_assigning = False
        self.protocol_name = self.select_protocol() if self.members else None
        self.subscribed_topics = self._subscribed_topics()
        self.transition_to(GroupState.COMPLETING_REBALANCE if self.members else GroupState.EMPTY, wall_ms)
        self.pending_sync = set(self.members)
