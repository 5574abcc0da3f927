"""Rebalances: how a group gets from one generation to the next, and its timeouts.

A JoinGroup waits until all members have joined or the rebalance timeout expires. A member without a heartbeat for its
session timeout is removed. A pending request replaces heartbeats, except for new members, whose JoinGroup waits at most
`new_member_join_timeout_ms`. The first rebalance of an empty group waits `group.initial.rebalance.delay.ms` for more
members, and again while more join, up to the rebalance timeout.

Invariant: a removed or replaced member gets a response to its pending requests.
"""

from __future__ import annotations

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.classic import CAN_REBALANCE, ClassicGroup, GroupState, Member
from kipmesh.core.group.coordinator_state import CoordinatorState
from kipmesh.core.group.types import Instant
from kipmesh.messages import JoinGroupResponse, SyncGroupResponse

HEARTBEAT, JOIN, SYNC = "heartbeat", "join", "sync"


class Rebalances:
    """Rebalances and timeouts of the groups in `state`."""

    def __init__(self, state: CoordinatorState) -> None:
        self._state = state

    # --- rebalances ------------------------------------------------------------------------------------------------

    def rebalance(self, group: ClassicGroup, now: Instant) -> None:
        """Start a rebalance, or complete the join phase of the running one if all members have joined."""
        if group.state in CAN_REBALANCE:
            self.prepare(group, now)
        else:
            self.maybe_complete_join(group, now)

    def maybe_complete_join(self, group: ClassicGroup, now: Instant) -> None:
        """Complete the join phase if all members have joined, except in the first rebalance of an empty group, which
        waits for its delay."""
        is_first = group.previous_state is GroupState.EMPTY
        if group.state is GroupState.PREPARING_REBALANCE and not is_first and group.has_all_joined:
            self._complete_join(group, now)

    def prepare(self, group: ClassicGroup, now: Instant) -> None:
        """Start a rebalance. Pending SyncGroups get REBALANCE_IN_PROGRESS. Raises ValueError unless the group is Empty,
        Stable or CompletingRebalance."""
        if group.state is GroupState.COMPLETING_REBALANCE:
            self.propagate(group, ErrorCode.REBALANCE_IN_PROGRESS, now)
        group.pending_sync.clear()
        self._state.timers.cancel((SYNC, group.group_id))
        is_first = group.state is GroupState.EMPTY
        group.transition_to(GroupState.PREPARING_REBALANCE, now.wall_ms)
        if is_first:
            delay_ms = self._state.settings.group_initial_rebalance_delay_ms
            group.new_member_added = False
            self._wait_for_more(group, delay_ms, max(group.rebalance_timeout_ms - delay_ms, 0), now)
        elif group.has_all_joined:
            self._complete_join(group, now)
        else:
            self._state.timers.set((JOIN, group.group_id), now.monotonic_ms + group.rebalance_timeout_ms)

    def _wait_for_more(self, group: ClassicGroup, delay_ms: int, remaining_ms: int, now: Instant) -> None:
        group.initial_wait_ms = (delay_ms, remaining_ms)
        self._state.timers.set((JOIN, group.group_id), now.monotonic_ms + delay_ms)

    def _complete_join(self, group: ClassicGroup, now: Instant) -> None:
        """Start the next generation with the members that have joined and all static members; other members are
        removed. If only static members are left and none has joined, wait again."""
        state, group_id = self._state, group.group_id
        group.initial_wait_ms = None
        state.timers.cancel((JOIN, group_id))
        for member in list(group.members.values()):
            if member.awaiting_join is None and member.group_instance_id is None:
                group.remove(member.member_id)
                state.timers.cancel((HEARTBEAT, group_id, member.member_id))
        if not group.elect_joined_leader() and group.members:
            # Only static members are left and none has joined: wait until their sessions expire.
            state.timers.set((JOIN, group_id), now.monotonic_ms + group.rebalance_timeout_ms)
            return
        group.begin_generation(now.wall_ms)
        if group.state is GroupState.EMPTY:
            state.write(group_id, [group.record({})])
            return
        for member in group.members.values():
            self.respond_join(member, self.join_response(group, member))
            self.expect_heartbeat(group, member.member_id, member.session_timeout_ms, now)
            member.is_new = False
        state.timers.set((SYNC, group_id), now.monotonic_ms + group.rebalance_timeout_ms)

    def propagate(self, group: ClassicGroup, code: ErrorCode, now: Instant) -> None:
        """Complete all pending SyncGroups: with the member's assignment if `code` is NONE, else with `code`. An error
        also clears all assignments."""
        for member in group.members.values():
            if code:
                member.assignment = b""
            if member.awaiting_sync is not None:
                self.respond_sync(member, self.sync_response(group, member) if not code else SyncGroupResponse(0, code))
                # Sessions are not checked during the wait.
                self.expect_heartbeat(group, member.member_id, member.session_timeout_ms, now)

    # --- timeouts --------------------------------------------------------------------------------------------------

    def expect_heartbeat(self, group: ClassicGroup, member_id: str, within_ms: int, now: Instant) -> None:
        """Restart the member's session timer: `session_expired` is called after `within_ms` unless the timer is
        restarted before then."""
        self._state.timers.set((HEARTBEAT, group.group_id, member_id), now.monotonic_ms + within_ms)

    def reset_session(self, group: ClassicGroup, member_id: str, now: Instant) -> None:
        """Restart the member's session timeout. Ignored for an unknown member."""
        member = group.members.get(member_id)
        if member is not None:
            self.expect_heartbeat(group, member_id, member.session_timeout_ms, now)

    def session_expired(self, group_id: str, member_id: str, now: Instant) -> None:
        """Remove a member or pending member whose session has expired, and rebalance. Ignored while a pending request
        replaces heartbeats."""
        group = self._state.live.get(group_id)
        if group is None:
            return
        member = group.members.get(member_id)
        if member is None:
            group.remove(member_id)
            self._complete_join_if_all_joined(group, now)
        elif not member.needs_no_heartbeat:
            self.remove(group, member_id)
            if group.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
                self.prepare(group, now)
            else:
                self._complete_join_if_all_joined(group, now)
        self._state.forget_if_unused(group_id)

    def _complete_join_if_all_joined(self, group: ClassicGroup, now: Instant) -> None:
        """Complete the join phase if all have joined, even in the first rebalance."""
        if group.state is GroupState.PREPARING_REBALANCE and group.has_all_joined:
            self._complete_join(group, now)

    def join_expired(self, group_id: str, now: Instant) -> None:
        """Handle the expired join timer: complete the join phase. The first rebalance extends the wait if new members
        joined. Ignored outside PreparingRebalance."""
        group = self._state.live.get(group_id)
        if group is None or group.state is not GroupState.PREPARING_REBALANCE:
            return
        if group.initial_wait_ms is not None:
            delay_ms, remaining_ms = group.initial_wait_ms
            if group.new_member_added and remaining_ms:
                group.new_member_added = False
                again_ms = min(self._state.settings.group_initial_rebalance_delay_ms, remaining_ms)
                self._wait_for_more(group, again_ms, max(remaining_ms - delay_ms, 0), now)
                return
        self._complete_join(group, now)

    def sync_expired(self, group_id: str, now: Instant) -> None:
        """Handle the expired sync timer: remove members that sent no SyncGroup, and rebalance. Ignored if all have sent
        it."""
        group = self._state.live.get(group_id)
        if group is None or not group.pending_sync:
            return
        for member_id in sorted(group.pending_sync):
            self.remove(group, member_id)
        self.prepare(group, now)

    # --- responses -------------------------------------------------------------------------------------------------

    def park_join(self, member: Member, request_id: int) -> None:
        """Hold a JoinGroup until the next generation. An earlier pending JoinGroup gets REBALANCE_IN_PROGRESS."""
        self.respond_join(member, JoinGroupResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS))
        member.awaiting_join, member.is_disconnected = request_id, False

    def park_sync(self, member: Member, request_id: int) -> None:
        """Hold a SyncGroup until the assignment is committed. An earlier pending SyncGroup gets
        REBALANCE_IN_PROGRESS."""
        self.respond_sync(member, SyncGroupResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS))
        member.awaiting_sync = request_id

    def respond_join(self, member: Member, response: JoinGroupResponse) -> None:
        """Complete the member's pending JoinGroup, if any."""
        if member.awaiting_join is not None:
            self._state.respond(member.awaiting_join, response)
            member.awaiting_join = None

    def respond_sync(self, member: Member, response: SyncGroupResponse) -> None:
        """Complete the member's pending SyncGroup, if any."""
        if member.awaiting_sync is not None:
            self._state.respond(member.awaiting_sync, response)
            member.awaiting_sync = None

    def dismiss(self, member: Member, code: ErrorCode) -> None:
        """Respond with `code` to the pending requests of a member that is removed or replaced."""
        self.respond_join(member, JoinGroupResponse(error_code=code, member_id=member.member_id))
        self.respond_sync(member, SyncGroupResponse(error_code=code))

    def join_response(self, group: ClassicGroup, member: Member) -> JoinGroupResponse:
        """Return the member's JoinGroup response for the current generation. Only the leader's response contains the
        member list."""
        is_leader = group.leader_id == member.member_id
        return JoinGroupResponse(
            generation_id=group.generation_id,
            protocol_type=group.protocol_type,
            protocol_name=group.protocol_name,
            leader=group.leader_id or "",
            member_id=member.member_id,
            members=group.join_members() if is_leader else (),
        )

    def sync_response(self, group: ClassicGroup, member: Member) -> SyncGroupResponse:
        """Return the SyncGroup response with the member's assignment and no error."""
        return SyncGroupResponse(0, 0, group.protocol_type, group.protocol_name, member.assignment)

    def remove(self, group: ClassicGroup, member_id: str) -> None:
        """Remove a member or pending member, and fail its pending requests with UNKNOWN_MEMBER_ID."""
        member = group.members.get(member_id)
        if member is not None:
            self.dismiss(member, ErrorCode.UNKNOWN_MEMBER_ID)
        self._state.timers.cancel((HEARTBEAT, group.group_id, member_id))
        group.remove(member_id)

    # --- loading and unloading -------------------------------------------------------------------------------------

    def loaded(self, group: ClassicGroup, now: Instant) -> None:
        """Start the sessions of a group that was loaded from the log, and rebalance it if it exceeds
        `group.max.size`."""
        for member in group.members.values():
            self.expect_heartbeat(group, member.member_id, member.session_timeout_ms, now)
        if len(group.members) > self._state.settings.group_max_size:
            self.prepare(group, now)

    def unloaded(self, group: ClassicGroup, now: Instant) -> None:
        """Fail all pending requests of the group with NOT_COORDINATOR and make it Dead."""
        for member in group.members.values():
            self.dismiss(member, ErrorCode.NOT_COORDINATOR)
        group.transition_to(GroupState.DEAD, now.wall_ms)
