"""How a group gets from one generation to the next, and what time does to it.

A join waits until all members have joined or `rebalance.timeout.ms` is over. A member that is not heard for its session
timeout is removed; one that waits for an answer is not looked for, but for new members, whose joins have
`new_member_join_timeout_ms`. The first rebalance of an empty group waits `group.initial.rebalance.delay.ms` for more
members, and again as long as some come, up to the rebalance timeout.

Invariant: who is removed or replaced is answered.
"""

from __future__ import annotations

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.classic import CAN_REBALANCE, ClassicGroup, GroupState, Member
from kipmesh.core.group.coordinator_state import CoordinatorState
from kipmesh.core.group.types import Instant
from kipmesh.messages import JoinGroupResponse, SyncGroupResponse

HEARTBEAT, JOIN, SYNC = "heartbeat", "join", "sync"


class Rebalances:
    """The groups' generations; `state` has the groups."""

    def __init__(self, state: CoordinatorState) -> None:
        self._state = state

    # --- rebalances ------------------------------------------------------------------------------------------------

    def rebalance(self, group: ClassicGroup, now: Instant) -> None:
        """Begin one, or go on with the one that is under way."""
        if group.state in CAN_REBALANCE:
            self.prepare(group, now)
        else:
            self.maybe_complete_join(group, now)

    def maybe_complete_join(self, group: ClassicGroup, now: Instant) -> None:
        """End the wait for joins if nobody is missing; the first rebalance waits for its time."""
        is_first = group.previous_state is GroupState.EMPTY
        if group.state is GroupState.PREPARING_REBALANCE and not is_first and group.has_all_joined:
            self._complete_join(group, now)

    def prepare(self, group: ClassicGroup, now: Instant) -> None:
        """Begin a rebalance: who has an assignment coming joins again."""
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
        """The next generation is of those who have joined, and of static members that are not lost yet."""
        state, group_id = self._state, group.group_id
        group.initial_wait_ms = None
        state.timers.cancel((JOIN, group_id))
        for member in list(group.members.values()):
            if member.awaiting_join is None and member.group_instance_id is None:
                group.remove(member.member_id)
                state.timers.cancel((HEARTBEAT, group_id, member.member_id))
        if not group.elect_joined_leader() and group.members:
            # Static members only, and none has joined: their sessions end the wait.
            state.timers.set((JOIN, group_id), now.monotonic_ms + group.rebalance_timeout_ms)
            return
        group.begin_generation(now.wall_ms)
        if group.state is GroupState.EMPTY:
            state.write(group_id, [group.record({})])
            return
        for member in group.members.values():
            self.answer_join(member, self.joined(group, member))
            self.expect_heartbeat(group, member.member_id, member.session_timeout_ms, now)
            member.is_new = False
        state.timers.set((SYNC, group_id), now.monotonic_ms + group.rebalance_timeout_ms)

    def propagate(self, group: ClassicGroup, code: ErrorCode, now: Instant) -> None:
        """Tell those who wait for their assignment; with an error nobody has one."""
        for member in group.members.values():
            if code:
                member.assignment = b""
            if member.awaiting_sync is not None:
                self.answer_sync(member, self.synced(group, member) if not code else SyncGroupResponse(0, code))
                # A session that ended during the wait was not looked at.
                self.expect_heartbeat(group, member.member_id, member.session_timeout_ms, now)

    # --- time ------------------------------------------------------------------------------------------------------

    def expect_heartbeat(self, group: ClassicGroup, member_id: str, within_ms: int, now: Instant) -> None:
        """Remove that member if nothing is heard of it in so many ms."""
        self._state.timers.set((HEARTBEAT, group.group_id, member_id), now.monotonic_ms + within_ms)

    def heard_of(self, group: ClassicGroup, member_id: str, now: Instant) -> None:
        """A member has shown that it lives."""
        member = group.members.get(member_id)
        if member is not None:
            self.expect_heartbeat(group, member_id, member.session_timeout_ms, now)

    def session_over(self, group_id: str, member_id: str, now: Instant) -> None:
        """A member, or one that was announced, was not heard in time."""
        group = self._state.live.get(group_id)
        if group is None:
            return
        member = group.members.get(member_id)
        if member is None:
            group.remove(member_id)
            self._join_timeless(group, now)
        elif not member.needs_no_heartbeat:
            self.remove(group, member_id)
            if group.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
                self.prepare(group, now)
            else:
                self._join_timeless(group, now)
        self._state.forget_if_unused(group_id)

    def _join_timeless(self, group: ClassicGroup, now: Instant) -> None:
        """Nobody is missing any more: also the first rebalance waits for nothing else then."""
        if group.state is GroupState.PREPARING_REBALANCE and group.has_all_joined:
            self._complete_join(group, now)

    def join_over(self, group_id: str, now: Instant) -> None:
        """The wait for members to join is over, or the first rebalance's is and may be prolonged."""
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

    def sync_over(self, group_id: str, now: Instant) -> None:
        """Members that did not ask for their assignment in time go, and the others rebalance."""
        group = self._state.live.get(group_id)
        if group is None or not group.pending_sync:
            return
        for member_id in sorted(group.pending_sync):
            self.remove(group, member_id)
        self.prepare(group, now)

    # --- answers ---------------------------------------------------------------------------------------------------

    def park_join(self, member: Member, request_id: int) -> None:
        """The join waits for the next generation; who asks twice has given up the first request."""
        self.answer_join(member, JoinGroupResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS))
        member.awaiting_join, member.has_hung_up = request_id, False

    def park_sync(self, member: Member, request_id: int) -> None:
        """The sync waits for the assignment; who asks twice has given up the first request."""
        self.answer_sync(member, SyncGroupResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS))
        member.awaiting_sync = request_id

    def answer_join(self, member: Member, response: JoinGroupResponse) -> None:
        """Answer the join that the member waits for, if it does."""
        if member.awaiting_join is not None:
            self._state.answer(member.awaiting_join, response)
            member.awaiting_join = None

    def answer_sync(self, member: Member, response: SyncGroupResponse) -> None:
        """Answer the sync that the member waits for, if it does."""
        if member.awaiting_sync is not None:
            self._state.answer(member.awaiting_sync, response)
            member.awaiting_sync = None

    def dismiss(self, member: Member, code: ErrorCode) -> None:
        """The member is no more: whatever it waits for fails."""
        self.answer_join(member, JoinGroupResponse(error_code=code, member_id=member.member_id))
        self.answer_sync(member, SyncGroupResponse(error_code=code))

    def joined(self, group: ClassicGroup, member: Member) -> JoinGroupResponse:
        """The answer to a join: the present generation, for its leader with the members."""
        is_leader = group.leader_id == member.member_id
        return JoinGroupResponse(
            generation_id=group.generation_id,
            protocol_type=group.protocol_type,
            protocol_name=group.protocol_name,
            leader=group.leader_id or "",
            member_id=member.member_id,
            members=group.join_members() if is_leader else (),
        )

    def synced(self, group: ClassicGroup, member: Member) -> SyncGroupResponse:
        """The answer to a sync: what the member is assigned."""
        return SyncGroupResponse(0, 0, group.protocol_type, group.protocol_name, member.assignment)

    def remove(self, group: ClassicGroup, member_id: str) -> None:
        """A member, or one that was announced, leaves the group."""
        member = group.members.get(member_id)
        if member is not None:
            self.dismiss(member, ErrorCode.UNKNOWN_MEMBER_ID)
        self._state.timers.cancel((HEARTBEAT, group.group_id, member_id))
        group.remove(member_id)

    # --- beginning and end -----------------------------------------------------------------------------------------

    def loaded(self, group: ClassicGroup, now: Instant) -> None:
        """The group was read from the log: its members have their session timeouts from now."""
        for member in group.members.values():
            self.expect_heartbeat(group, member.member_id, member.session_timeout_ms, now)
        if len(group.members) > self._state.settings.group_max_size:
            self.prepare(group, now)

    def unloaded(self, group: ClassicGroup, now: Instant) -> None:
        """Another broker is the coordinator: whoever waits is sent there."""
        for member in group.members.values():
            self.dismiss(member, ErrorCode.NOT_COORDINATOR)
        group.transition_to(GroupState.DEAD, now.wall_ms)
