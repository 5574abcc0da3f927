"""A group of Kafka's classic protocol while it lives: its members, its state, and which answers they wait for.

                  members join, leave or fail                all have joined, or the time is over
    Empty, Stable, ------------------------> PreparingRebalance ------------------------> CompletingRebalance
    CompletingRebalance                               |                                          |
      ^    ^-----------------------------------------(all left)-- Empty                          |
      '-------------------- the leader's assignment is committed: Stable <-----------------------'

Nothing here knows of time, records or the network; `coordinator` does. A request that waits is a number.

Invariants: a static member's name belongs to one member; the leader is a member; `protocol_name` is one that every
member supports from CompletingRebalance on; transitions are those of `TRANSITIONS`.
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
    """The states of a group, by Kafka's names."""

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
"""State -> the states that may follow."""

CAN_REBALANCE = frozenset(state for state, nexts in TRANSITIONS.items() if GroupState.PREPARING_REBALANCE in nexts)


@dataclass(slots=True, eq=False)
class Member:
    """One member; `awaiting_join` and `awaiting_sync` are the requests it waits for, if any."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    protocols: Mapping[str, bytes]
    """Name -> metadata, in the member's order of preference (`unique`)."""
    assignment: bytes = b""
    is_new: bool = field(default=False, init=False)
    """It has had no JoinGroup response yet, and so cannot send heartbeats."""
    has_hung_up: bool = field(default=False, init=False)
    """It does not wait for the response to its JoinGroup any more: it may be dead."""
    awaiting_join: int | None = field(default=None, init=False)
    awaiting_sync: int | None = field(default=None, init=False)

    @property
    def needs_no_heartbeat(self) -> bool:
        """Whether it waits for the coordinator, which is as good as a heartbeat but for new members."""
        return not self.is_new and (self.awaiting_join is not None or self.awaiting_sync is not None)

    def matches(self, protocols: Sequence[JoinGroupRequestProtocol]) -> bool:
        """Whether it supports the same protocols with the same metadata in the same order."""
        return list(self.protocols.items()) == list(unique(protocols).items())


def unique(protocols: Sequence[JoinGroupRequestProtocol]) -> dict[str, bytes]:
    """Name -> metadata, of the first of each name."""
    found: dict[str, bytes] = {}
    for protocol in protocols:
        found.setdefault(protocol.name, protocol.metadata)
    return found


class ClassicGroup:
    """One group."""

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
        """Member ids given out by a MEMBER_ID_REQUIRED, whose owners have not come back yet (KIP-394)."""
        self.pending_sync: set[str] = set()
        """Members of this generation that have not asked for their assignment."""
        self.new_member_added = False
        """A member came during the first rebalance, which may wait a little more for others."""
        self.is_assigning = False
        """The assignment of this generation is being written: there is no other one."""
        self.initial_wait_ms: tuple[int, int] | None = None
        """During the first rebalance: the present wait for more members, and what may be left after it."""
        self.subscribed_topics: frozenset[str] | None = None
        """The topics of all subscriptions; None where they are not known."""
        self.static_members: dict[str, str] = {}
        """`group.instance.id` -> member id."""

    @classmethod
    def from_record(cls, group_id: str, value: records.GroupMetadataValue) -> ClassicGroup:
        """The group as its last record says: Stable with its members, or Empty."""
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

    # --- questions -------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Without members, and with nobody about to become one."""
        return self.state is GroupState.EMPTY and not self.pending_join

    @property
    def is_consumer(self) -> bool:
        """Whether its members speak the consumers' protocol."""
        return self.protocol_type == records.PROTOCOL_TYPE

    @property
    def has_all_joined(self) -> bool:
        """Whether every member waits for the next generation, and nobody else is announced."""
        return not self.pending_join and all(member.awaiting_join is not None for member in self.members.values())

    @property
    def awaiting_join_count(self) -> int:
        """Members that wait for the next generation."""
        return sum(member.awaiting_join is not None for member in self.members.values())

    @property
    def rebalance_timeout_ms(self) -> int:
        """The longest of the members'."""
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def check_member(self, member_id: str, group_instance_id: str | None) -> ErrorCode:
        """UNKNOWN_MEMBER_ID, or FENCED_INSTANCE_ID where another has taken the name since."""
        if group_instance_id is not None:
            existing = self.static_members.get(group_instance_id)
            if existing is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
            if existing != member_id:
                return ErrorCode.FENCED_INSTANCE_ID
        return ErrorCode.NONE if member_id in self.members else ErrorCode.UNKNOWN_MEMBER_ID

    def check_commit(self, member_id: str, group_instance_id: str | None, generation_id: int) -> ErrorCode:
        """Whether who says so may commit offsets now; whoever has no generation, only while the group is empty."""
        if generation_id < 0 and self.state is GroupState.EMPTY:
            return ErrorCode.NONE
        if generation_id < 0 and not member_id and group_instance_id is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        code = self.check_member(member_id, group_instance_id)
        if code:
            return code
        if generation_id != self.generation_id:
            return ErrorCode.ILLEGAL_GENERATION
        in_between = self.state is GroupState.COMPLETING_REBALANCE
        return ErrorCode.REBALANCE_IN_PROGRESS if in_between else ErrorCode.NONE

    def supports(self, protocol_type: str, protocols: Sequence[JoinGroupRequestProtocol]) -> bool:
        """Whether a member with these could be in the group: one of them is supported by all that are."""
        if self.state is GroupState.EMPTY:
            return bool(protocol_type and protocols)
        candidates = self._candidates()
        return self.protocol_type == protocol_type and any(protocol.name in candidates for protocol in protocols)

    def _candidates(self) -> set[str]:
        supported = Counter(name for member in self.members.values() for name in member.protocols)
        return {name for name, count in supported.items() if count == len(self.members)}

    def select_protocol(self) -> str:
        """Of those that all support, the one that most like best; ties go to who joined first."""
        candidates = self._candidates()
        votes = Counter(
            next(name for name in member.protocols if name in candidates) for member in self.members.values()
        )
        return votes.most_common(1)[0][0]

    def is_subscribed(self, topic: str) -> bool:
        """Whether members read that topic; a consumer group that nobody understands reads all."""
        return self.is_consumer if self.subscribed_topics is None else topic in self.subscribed_topics

    def _subscribed_topics(self) -> frozenset[str] | None:
        if not self.is_consumer:
            return None
        topics: set[str] = set()
        for member in self.members.values():
            found = records.subscribed_topics(member.protocols.get(self.protocol_name or "", b""))
            if found is None:
                return None
            topics |= found
        return frozenset(topics)

    def join_members(self) -> list[JoinGroupResponseMember]:
        """What the leader is told of the members."""
        assert self.protocol_name is not None
        return [
            JoinGroupResponseMember(member.member_id, member.group_instance_id, member.protocols[self.protocol_name])
            for member in self.members.values()
        ]

    def record(self, assignment: dict[str, bytes]) -> records.GroupRecord:
        """The record of the present generation with this assignment (member id -> bytes)."""
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
        """Go on to `state`; raises ValueError where that may not follow."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"group {self.group_id}: {state.value} does not follow {self.state.value}")
        self.previous_state, self.state = self.state, state
        self.current_state_timestamp = wall_ms

    def add(self, member: Member, protocol_type: str) -> None:
        """A new member; the first one brings the protocol type and leads."""
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
        """A member, or one that was announced, is gone; another one leads."""
        member = self.members.pop(member_id, None)
        if member is not None and member.group_instance_id is not None:
            self.static_members.pop(member.group_instance_id, None)
        if self.leader_id == member_id:
            self.leader_id = next(iter(self.members), None)
        self.pending_join.discard(member_id)
        self.pending_sync.discard(member_id)

    def replace_static(self, group_instance_id: str, new_member_id: str) -> Member:
        """The member of that name gets a new id, and keeps its place, its assignment and the lead if it had it."""
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
        """See to it that the leader is one that has joined; whether there is one.

        One that waits is preferred to one that hung up: a dead leader would assign nothing until its session ends, and
        where members come and go all the time the next one would be dead by then, too. Kafka does not look at that.
        """
        joined = [member for member in self.members.values() if member.awaiting_join is not None]
        candidates = [member for member in joined if not member.has_hung_up] or joined
        if self.leader_id not in {member.member_id for member in candidates}:
            if not candidates or self.leader_id is None:
                return False
            self.leader_id = candidates[0].member_id
        return True

    def begin_generation(self, wall_ms: int) -> None:
        """The next generation: of those who are members now, or an empty one."""
        self.generation_id += 1
        self.is_assigning = False
        self.protocol_name = self.select_protocol() if self.members else None
        self.subscribed_topics = self._subscribed_topics()
        self.transition_to(GroupState.COMPLETING_REBALANCE if self.members else GroupState.EMPTY, wall_ms)
        self.pending_sync = set(self.members)
