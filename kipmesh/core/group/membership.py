"""JoinGroup, SyncGroup, Heartbeat and LeaveGroup of Kafka's classic protocol.

A JoinGroup completes with the next generation (`rebalances`), a SyncGroup once the leader's assignment is committed.

Invariants: a generation has one assignment, which is committed before any member receives it; requests of a replaced
static member (KIP-345) get FENCED_INSTANCE_ID, those of an older generation ILLEGAL_GENERATION.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.classic import ClassicGroup, GroupState, Member, first_per_name
from kipmesh.core.group.coordinator_state import CoordinatorState
from kipmesh.core.group.rebalances import HEARTBEAT, SYNC, Rebalances
from kipmesh.core.group.records import GroupMetadataKey, GroupRecord
from kipmesh.core.group.types import Client, Instant

TEXT_BYTES_MAX = 8192
"""Maximum UTF-8 bytes of a group, member, client or protocol name, because records cannot hold longer ones."""


def is_too_long(*names: str | None) -> bool:
    """Return whether any of the names exceeds TEXT_BYTES_MAX in UTF-8. None is never too long."""
    return any(name is not None and len(name.encode()) > TEXT_BYTES_MAX for name in names)


class _Join(NamedTuple):
    """A JoinGroup request that is being handled."""

    request: m.JoinGroupRequest
    client: Client
    unique: str
    """Unique suffix for a new member id."""
    request_id: int


class Membership:
    """JoinGroup, SyncGroup, Heartbeat and LeaveGroup for the groups in `state`."""

    def __init__(self, state: CoordinatorState, rebalances: Rebalances) -> None:
        self._state = state
        self._rebalances = rebalances

    # --- JoinGroup -------------------------------------------------------------------------------------------------

    def join(self, request: m.JoinGroupRequest, client: Client, unique: str, request_id: int, now: Instant) -> None:
        """Handle JoinGroup (API key 11). A member's request completes with the next generation. `unique` is a unique
        suffix for a new member id.

        Error codes: NOT_COORDINATOR, INVALID_GROUP_ID, INVALID_REQUEST (a name is too long), INVALID_SESSION_TIMEOUT,
        UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID, MEMBER_ID_REQUIRED, GROUP_MAX_SIZE_REACHED, INCONSISTENT_GROUP_PROTOCOL,
        REBALANCE_IN_PROGRESS (a newer JoinGroup of the member arrived), and for static members those of `write_error`.
        """
        self._join(_Join(request, client, unique, request_id), now)

    def _join(self, join: _Join, now: Instant) -> None:
        state, request, group_id, member_id = self._state, join.request, join.request.group_id, join.request.member_id
        code = self._error(request, join.client)
        if code:
            self._refuse(join, code)
            return
        if group_id in state.deleting:
            state.when_idle(group_id, partial(self._join, join), now)
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
            state.respond(join.request_id, m.JoinGroupResponse(error_code=ErrorCode.GROUP_MAX_SIZE_REACHED))
        elif not group.supports(request.protocol_type, request.protocols):
            self._refuse(join, ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        elif member_id:
            self._join_again(group, join, now)
        else:
            self._join_first(group, join, now)
        state.forget_if_unused(group_id)

    def _refuse(self, join: _Join, code: ErrorCode) -> None:
        self._state.respond(join.request_id, m.JoinGroupResponse(error_code=code, member_id=join.request.member_id))

    def _error(self, request: m.JoinGroupRequest, client: Client) -> ErrorCode:
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
        """Return whether `group.max.size` allows the member. In PreparingRebalance only members with a pending
        JoinGroup count, so the last ones to join are refused."""
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
            self._state.respond(join.request_id, response)
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
            # A leader joins again to force a rebalance, for example after its topics changed.
            is_same = is_same and group.leader_id != member_id
        if is_same and group.state is not GroupState.PREPARING_REBALANCE:
            self._state.respond(join.request_id, self._rebalances.join_response(group, member))
            return
        self._update(member, join)
        self._rebalances.rebalance(group, now)

    def _update(self, member: Member, join: _Join) -> None:
        """Update the member from its new JoinGroup, and hold the request until the next generation."""
        member.protocols = first_per_name(join.request.protocols)
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
            first_per_name(request.protocols),
        )
        member.is_new = True
        if group.state is GroupState.PREPARING_REBALANCE and group.previous_state is GroupState.EMPTY:
            group.new_member_added = True
        group.add(member, request.protocol_type)
        self._rebalances.park_join(member, join.request_id)
        self._rebalances.expect_heartbeat(group, member_id, self._state.settings.new_member_join_timeout_ms, now)
        self._rebalances.rebalance(group, now)

    def _replace(self, group: ClassicGroup, join: _Join, new_id: str, now: Instant) -> None:
        """Give a new member id to a static member that joined without its id, and fence the old id."""
        instance_id = join.request.group_instance_id or ""
        old_id, leader_before = group.static_members[instance_id], group.leader_id
        self._rebalances.dismiss(group.members[old_id], ErrorCode.FENCED_INSTANCE_ID)
        self._state.timers.cancel((HEARTBEAT, group.group_id, old_id))
        member = group.replace_static(instance_id, new_id)
        self._update(member, join)
        self._rebalances.expect_heartbeat(group, new_id, member.session_timeout_ms, now)
        if group.state is GroupState.STABLE and group.select_protocol() == group.protocol_name:
            assignment = {one.member_id: one.assignment for one in group.members.values()}
            outcome = partial(
                self._static_member_written, group, member, group.generation_id, join.client, leader_before or ""
            )
            self._state.write(group.group_id, [group.record(assignment)], outcome)
            return
        self._state.when_idle(group.group_id, partial(self._rewrite_member_id, group, instance_id), now)
        if group.state is GroupState.COMPLETING_REBALANCE:
            # The leader may already assign partitions to the old id.
            self._rebalances.prepare(group, now)
        else:
            self._rebalances.rebalance(group, now)

    def _rewrite_member_id(self, group: ClassicGroup, instance_id: str, now: Instant) -> None:
        """Write the static member's new id into the last generation's record, because a later coordinator would
        otherwise fence it."""
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

    def _static_member_written(
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
            return  # a rebalance in between completes the request
        response = self._rebalances.join_response(group, member)
        if code:
            response = m.JoinGroupResponse(error_code=code)
        elif client.skips_assignment:
            response = response._replace(skip_assignment=group.leader_id == member.member_id)
        else:
            # Old versions cannot skip the assignment, so the response names the old id as the leader.
            response = response._replace(leader=leader_before, members=())
        self._rebalances.respond_join(member, response)
        if code:
            self._rebalances.prepare(group, now)

    # --- SyncGroup -------------------------------------------------------------------------------------------------

    def sync(self, request: m.SyncGroupRequest, request_id: int, now: Instant) -> None:
        """Handle SyncGroup (API key 14): write the leader's assignment, then complete all members' requests.

        Error codes: NOT_COORDINATOR, INVALID_GROUP_ID, UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID, ILLEGAL_GENERATION,
        INCONSISTENT_GROUP_PROTOCOL, REBALANCE_IN_PROGRESS, and those of `write_error` if the assignment cannot be
        written.
        """
        group = self._state.group(request.group_id)
        code = self._sync_error(group, request)
        if code or group is None:
            self._state.respond(request_id, m.SyncGroupResponse(error_code=code))
            return
        member = group.members[request.member_id]
        group.pending_sync.discard(member.member_id)
        if not group.pending_sync:
            self._state.timers.cancel((SYNC, group.group_id))
        if group.state is GroupState.STABLE:
            self._state.respond(request_id, self._rebalances.sync_response(group, member))
            return
        self._rebalances.park_sync(member, request_id)
        if group.leader_id == member.member_id and not group.is_assigning:
            group.is_assigning = True
            by_member = {one.member_id: one.assignment for one in request.assignments}
            assignment = {member_id: by_member.get(member_id, b"") for member_id in group.members}
            outcome = partial(self._assigned, group, group.generation_id, assignment)
            self._state.write(group.group_id, [group.record(assignment)], outcome)

    def _check_member(self, group: ClassicGroup | None, request: m.SyncGroupRequest | m.HeartbeatRequest) -> ErrorCode:
        """Return NONE if the sender is a member of the current generation, else NOT_COORDINATOR, INVALID_GROUP_ID,
        UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID or ILLEGAL_GENERATION."""
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

    def _sync_error(self, group: ClassicGroup | None, request: m.SyncGroupRequest) -> ErrorCode:
        code = self._check_member(group, request)
        if code or group is None:
            return code
        for requested, current in (
            (request.protocol_type, group.protocol_type),
            (request.protocol_name, group.protocol_name),
        ):
            if requested is not None and current is not None and requested != current:
                return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        is_preparing = group.state is GroupState.PREPARING_REBALANCE
        return ErrorCode.REBALANCE_IN_PROGRESS if is_preparing else ErrorCode.NONE

    def _assigned(
        self, group: ClassicGroup, generation_id: int, assignment: dict[str, bytes], code: ErrorCode, now: Instant
    ) -> None:
        """Handle the outcome of writing the assignment. Ignored if a rebalance started meanwhile."""
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

    # --- Heartbeat and LeaveGroup ----------------------------------------------------------------------------------

    def heartbeat(self, request: m.HeartbeatRequest, request_id: int, now: Instant) -> None:
        """Handle Heartbeat (API key 12): restart the member's session. The error code REBALANCE_IN_PROGRESS tells the
        member to join again.

        Other error codes: NOT_COORDINATOR, INVALID_GROUP_ID, UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID, ILLEGAL_GENERATION.
        """
        group = self._state.group(request.group_id)
        code = self._check_member(group, request)
        if group is not None and not code:
            self._rebalances.reset_session(group, request.member_id, now)
            if group.state is GroupState.PREPARING_REBALANCE:
                code = ErrorCode.REBALANCE_IN_PROGRESS
        self._state.respond(request_id, m.HeartbeatResponse(error_code=code))

    def leave(self, request: m.LeaveGroupRequest, request_id: int, now: Instant) -> None:
        """Handle LeaveGroup (API key 13): remove the named members (static members also by instance id alone), and
        rebalance.

        Error codes: NOT_COORDINATOR, INVALID_GROUP_ID; per member UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID.
        """
        group = self._state.group(request.group_id)
        if self._state.is_closed or not request.group_id:
            code = ErrorCode.NOT_COORDINATOR if self._state.is_closed else ErrorCode.INVALID_GROUP_ID
            self._state.respond(request_id, m.LeaveGroupResponse(error_code=code))
            return
        responses = []
        for one in request.members:
            code = ErrorCode.UNKNOWN_MEMBER_ID if group is None else self._leave_one(group, one)
            responses.append(m.MemberResponse(one.member_id, one.group_instance_id, code))
        if group is not None and any(not response.error_code for response in responses):
            if group.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
                self._rebalances.prepare(group, now)
            else:
                self._rebalances.maybe_complete_join(group, now)
            self._state.forget_if_unused(request.group_id)
        self._state.respond(request_id, m.LeaveGroupResponse(members=responses))

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
