"""JoinGroup, SyncGroup, Heartbeat and LeaveGroup: Kafka's classic protocol.

A join is answered with the next generation (`rebalances`), a sync with the leader's assignment once that is committed.

Invariants: a generation has one assignment, which is in the log before any member is told of it; a request of a member
that was replaced (KIP-345) is answered FENCED_INSTANCE_ID, one of an older generation ILLEGAL_GENERATION.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.classic import ClassicGroup, GroupState, Member, unique
from kipmesh.core.group.coordinator_state import CoordinatorState
from kipmesh.core.group.rebalances import HEARTBEAT, SYNC, Rebalances
from kipmesh.core.group.records import GroupMetadataKey, GroupRecord
from kipmesh.core.group.types import Client, Instant

TEXT_BYTES_MAX = 8192
"""Of a group's, member's, client's or protocol's name: more than their records could say is refused."""


def is_too_long(*names: str | None) -> bool:
    """Whether one of the names is longer than records can hold."""
    return any(name is not None and len(name.encode()) > TEXT_BYTES_MAX for name in names)


class _Join(NamedTuple):
    """A JoinGroup request that is not answered yet."""

    request: m.JoinGroupRequest
    client: Client
    unique: str
    """A text that no other member's id has, should this one get an id."""
    request_id: int


class Membership:
    """Who is in which group; `state` has the groups."""

    def __init__(self, state: CoordinatorState, rebalances: Rebalances) -> None:
        self._state = state
        self._rebalances = rebalances

    # --- joining ---------------------------------------------------------------------------------------------------

    def join(self, request: m.JoinGroupRequest, client: Client, unique: str, request_id: int, now: Instant) -> None:
        """JoinGroup (API key 11); `unique` makes a new member's id unique."""
        self._join(_Join(request, client, unique, request_id), now)

    def _join(self, join: _Join, now: Instant) -> None:
        state, request, group_id, member_id = self._state, join.request, join.request.group_id, join.request.member_id
        code = self._refusal(request, join.client)
        if code:
            self._refuse(join, code)
            return
        if group_id in state.deleting:
            state.when_quiet(group_id, partial(self._join, join), now)
            return
        group = state.group(group_id)
        if group is None and member_id:
            self._refuse(join, ErrorCode.UNKNOWN_MEMBER_ID)
            return
        if group is None:
            group = state.live[group_id] = ClassicGroup(group_id, now.wall_ms)
        if not self._has_room(group, member_id):
            group.remove(member_id)
            state.timers.cancel((HEARTBEAT, group_id, member_id))
            state.answer(join.request_id, m.JoinGroupResponse(error_code=ErrorCode.GROUP_MAX_SIZE_REACHED))
        elif not group.supports(request.protocol_type, request.protocols):
            self._refuse(join, ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        elif member_id:
            self._join_again(group, join, now)
        else:
            self._join_first(group, join, now)
        state.forget_if_unused(group_id)

    def _refuse(self, join: _Join, code: ErrorCode) -> None:
        self._state.answer(join.request_id, m.JoinGroupResponse(error_code=code, member_id=join.request.member_id))

    def _refusal(self, request: m.JoinGroupRequest, client: Client) -> ErrorCode:
        settings = self._state.settings
        if self._state.is_closed:
            return ErrorCode.NOT_COORDINATOR
        if not request.group_id or is_too_long(request.group_id):
            return ErrorCode.INVALID_GROUP_ID
        names = [protocol.name for protocol in request.protocols]
        if is_too_long(request.group_instance_id, request.protocol_type, client.client_id, client.host, *names):
            return ErrorCode.INVALID_REQUEST
        shortest, longest = settings.group_min_session_timeout_ms, settings.group_max_session_timeout_ms
        is_allowed = shortest <= request.session_timeout_ms <= longest
        return ErrorCode.NONE if is_allowed else ErrorCode.INVALID_SESSION_TIMEOUT

    def _has_room(self, group: ClassicGroup, member_id: str) -> bool:
        """While a group is rebalanced those who wait count, so that the last to come back go when it is too large."""
        limit, member = self._state.settings.group_max_size, group.members.get(member_id)
        if group.state is GroupState.EMPTY:
            return True
        if group.state is GroupState.PREPARING_REBALANCE:
            return (member is not None and member.awaiting_join is not None) or group.awaiting_join_count < limit
        return member is not None or len(group.members) < limit

    def _join_first(self, group: ClassicGroup, join: _Join, now: Instant) -> None:
        request, instance_id = join.request, join.request.group_instance_id
        new_id = f"{join.client.client_id if instance_id is None else instance_id}-{join.unique}"
        if instance_id in group.static_members:
            self._replace(group, join, new_id, now)
        elif instance_id is None and join.client.requires_member_id:
            group.pending_join.add(new_id)
            within_ms = min(request.session_timeout_ms, self._state.settings.pending_join_timeout_ms)
            self._rebalances.expect_heartbeat(group, new_id, within_ms, now)
            response = m.JoinGroupResponse(error_code=ErrorCode.MEMBER_ID_REQUIRED, member_id=new_id)
            self._state.answer(join.request_id, response)
        else:
            self._add(group, join, new_id, now)

    def _join_again(self, group: ClassicGroup, join: _Join, now: Instant) -> None:
        request, member_id = join.request, join.request.member_id
        if member_id in group.pending_join and request.group_instance_id is None:
            self._add(group, join, member_id, now)
            return
        code = group.check_member(member_id, request.group_instance_id)
        if code or group.state is GroupState.EMPTY:
            self._refuse(join, code or ErrorCode.UNKNOWN_MEMBER_ID)
            return
        member = group.members[member_id]
        is_same = member.matches(request.protocols)
        if group.state is GroupState.STABLE:
            # The leader asks for a rebalance by joining: topics may have changed, which nobody's metadata says.
            is_same = is_same and group.leader_id != member_id
        if is_same and group.state is not GroupState.PREPARING_REBALANCE:
            self._state.answer(join.request_id, self._rebalances.joined(group, member))
            return
        self._update(member, join)
        self._rebalances.rebalance(group, now)

    def _update(self, member: Member, join: _Join) -> None:
        """The member joins again: what it says of itself holds, and it waits for the next generation."""
        member.protocols = unique(join.request.protocols)
        member.rebalance_timeout_ms = _rebalance_timeout_ms(join.request)
        member.session_timeout_ms = join.request.session_timeout_ms
        self._rebalances.park_join(member, join.request_id)

    def _add(self, group: ClassicGroup, join: _Join, member_id: str, now: Instant) -> None:
        request = join.request
        member = Member(
            member_id,
            request.group_instance_id,
            join.client.client_id,
            join.client.host,
            _rebalance_timeout_ms(request),
            request.session_timeout_ms,
            unique(request.protocols),
        )
        member.is_new = True
        if group.state is GroupState.PREPARING_REBALANCE and group.previous_state is GroupState.EMPTY:
            group.new_member_added = True
        group.add(member, request.protocol_type)
        self._rebalances.park_join(member, join.request_id)
        self._rebalances.expect_heartbeat(group, member_id, self._state.settings.new_member_join_timeout_ms, now)
        self._rebalances.rebalance(group, now)

    def _replace(self, group: ClassicGroup, join: _Join, new_id: str, now: Instant) -> None:
        """A static member came back without its id: it gets a new one, and who has the old one is fenced."""
        instance_id = join.request.group_instance_id or ""
        old_id, leader_before = group.static_members[instance_id], group.leader_id
        self._rebalances.dismiss(group.members[old_id], ErrorCode.FENCED_INSTANCE_ID)
        self._state.timers.cancel((HEARTBEAT, group.group_id, old_id))
        member = group.replace_static(instance_id, new_id)
        self._update(member, join)
        self._rebalances.expect_heartbeat(group, new_id, member.session_timeout_ms, now)
        if group.state is GroupState.STABLE and group.select_protocol() == group.protocol_name:
            assignment = {one.member_id: one.assignment for one in group.members.values()}
            outcome = partial(self._replaced, group, member, group.generation_id, join.client, leader_before or "")
            self._state.write(group.group_id, [group.record(assignment)], outcome)
            return
        self._state.when_quiet(group.group_id, partial(self._keep_name, group, instance_id), now)
        if group.state is GroupState.COMPLETING_REBALANCE:
            # The leader may assign to the old id already, which is nobody now.
            self._rebalances.prepare(group, now)
        else:
            self._rebalances.rebalance(group, now)

    def _keep_name(self, group: ClassicGroup, instance_id: str, now: Instant) -> None:
        """Between generations: the last one's record gets the new id, or the next coordinator would fence it."""
        value, new_id = self._state.table.groups.get(group.group_id), group.static_members.get(instance_id)
        if self._state.is_closed or value is None or new_id is None:
            return
        old = next((one for one in value.members if one.group_instance_id == instance_id), None)
        if old is None or old.member_id == new_id:
            return
        members = tuple([one._replace(member_id=new_id) if one is old else one for one in value.members])
        leader = new_id if value.leader == old.member_id else value.leader
        record = GroupRecord(GroupMetadataKey(group.group_id), value._replace(members=members, leader=leader))
        self._state.write(group.group_id, [record])

    def _replaced(
        self,
        group: ClassicGroup,
        member: Member,
        generation_id: int,
        client: Client,
        leader_before: str,
        code: ErrorCode,
        now: Instant,
    ) -> None:
        is_current = group.members.get(member.member_id) is member and group.generation_id == generation_id
        if group.state is not GroupState.STABLE or not is_current:
            return  # the rebalance that came between has answered, or will
        response = self._rebalances.joined(group, member)
        if code:
            response = m.JoinGroupResponse(error_code=code)
        elif client.skips_assignment:
            response = response._replace(skip_assignment=group.leader_id == member.member_id)
        else:
            # It cannot be told to leave the assignment alone: so it is not told that it leads (its old id does).
            response = response._replace(leader=leader_before, members=())
        self._rebalances.answer_join(member, response)
        if code:
            self._rebalances.prepare(group, now)

    # --- syncing ---------------------------------------------------------------------------------------------------

    def sync(self, request: m.SyncGroupRequest, request_id: int, now: Instant) -> None:
        """SyncGroup (API key 14): the leader's assignment is written, then everybody has theirs."""
        group = self._state.group(request.group_id)
        code = self._sync_refusal(group, request)
        if code or group is None:
            self._state.answer(request_id, m.SyncGroupResponse(error_code=code))
            return
        member = group.members[request.member_id]
        group.pending_sync.discard(member.member_id)
        if not group.pending_sync:
            self._state.timers.cancel((SYNC, group.group_id))
        if group.state is GroupState.STABLE:
            self._state.answer(request_id, self._rebalances.synced(group, member))
            return
        self._rebalances.park_sync(member, request_id)
        if group.leader_id == member.member_id and not group.is_assigning:
            group.is_assigning = True
            given = {one.member_id: one.assignment for one in request.assignments}
            assignment = {member_id: given.get(member_id, b"") for member_id in group.members}
            outcome = partial(self._assigned, group, group.generation_id, assignment)
            self._state.write(group.group_id, [group.record(assignment)], outcome)

    def _check_member(self, group: ClassicGroup | None, request: m.SyncGroupRequest | m.HeartbeatRequest) -> ErrorCode:
        """Whether a member of this generation sends the request."""
        if self._state.is_closed:
            return ErrorCode.NOT_COORDINATOR
        if not request.group_id:
            return ErrorCode.INVALID_GROUP_ID
        if group is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        code = group.check_member(request.member_id, request.group_instance_id)
        if not code and request.generation_id != group.generation_id:
            return ErrorCode.ILLEGAL_GENERATION
        return code

    def _sync_refusal(self, group: ClassicGroup | None, request: m.SyncGroupRequest) -> ErrorCode:
        code = self._check_member(group, request)
        if code or group is None:
            return code
        for asked, has in (
            (request.protocol_type, group.protocol_type),
            (request.protocol_name, group.protocol_name),
        ):
            if asked is not None and has is not None and asked != has:
                return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        is_preparing = group.state is GroupState.PREPARING_REBALANCE
        return ErrorCode.REBALANCE_IN_PROGRESS if is_preparing else ErrorCode.NONE

    def _assigned(
        self, group: ClassicGroup, generation_id: int, assignment: dict[str, bytes], code: ErrorCode, now: Instant
    ) -> None:
        """The leader's assignment is committed, or is not; if a rebalance came between, it is history."""
        if group.state is not GroupState.COMPLETING_REBALANCE or group.generation_id != generation_id:
            return
        if code:
            self._rebalances.propagate(group, code, now)
            self._rebalances.prepare(group, now)
            return
        for member in group.members.values():
            member.assignment = assignment[member.member_id]
        self._rebalances.propagate(group, ErrorCode.NONE, now)
        group.transition_to(GroupState.STABLE, now.wall_ms)

    # --- heartbeats and leaving ------------------------------------------------------------------------------------

    def heartbeat(self, request: m.HeartbeatRequest, request_id: int, now: Instant) -> None:
        """Heartbeat (API key 12): the member lives, and learns of a rebalance."""
        group = self._state.group(request.group_id)
        code = self._check_member(group, request)
        if group is not None and not code:
            self._rebalances.heard_of(group, request.member_id, now)
            if group.state is GroupState.PREPARING_REBALANCE:
                code = ErrorCode.REBALANCE_IN_PROGRESS
        self._state.answer(request_id, m.HeartbeatResponse(error_code=code))

    def leave(self, request: m.LeaveGroupRequest, request_id: int, now: Instant) -> None:
        """LeaveGroup (API key 13): members that leave, or static ones that an administrator removes by name."""
        group = self._state.group(request.group_id)
        if self._state.is_closed or not request.group_id:
            code = ErrorCode.NOT_COORDINATOR if self._state.is_closed else ErrorCode.INVALID_GROUP_ID
            self._state.answer(request_id, m.LeaveGroupResponse(error_code=code))
            return
        answers = []
        for one in request.members:
            code = ErrorCode.UNKNOWN_MEMBER_ID if group is None else self._leave_one(group, one)
            answers.append(m.MemberResponse(one.member_id, one.group_instance_id, code))
        if group is not None and any(not answer.error_code for answer in answers):
            if group.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
                self._rebalances.prepare(group, now)
            else:
                self._rebalances.maybe_complete_join(group, now)
            self._state.forget_if_unused(request.group_id)
        self._state.answer(request_id, m.LeaveGroupResponse(members=answers))

    def _leave_one(self, group: ClassicGroup, one: m.MemberIdentity) -> ErrorCode:
        member_id = one.member_id
        if not member_id:
            member_id = group.static_members.get(one.group_instance_id or "", "")
            if not member_id:
                return ErrorCode.UNKNOWN_MEMBER_ID
        elif member_id not in group.pending_join:
            code = group.check_member(member_id, one.group_instance_id)
            if code:
                return code
        self._rebalances.remove(group, member_id)
        return ErrorCode.NONE


def _rebalance_timeout_ms(request: m.JoinGroupRequest) -> int:
    return request.session_timeout_ms if request.rebalance_timeout_ms < 0 else request.rebalance_timeout_ms
