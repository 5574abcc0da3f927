"""Simulated group members. Each call of `act` takes one step that depends on the last response."""

from __future__ import annotations

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.assignors import Assignor, GroupMember, RebalanceProtocol
from kipmesh.core.group.records import (
    Assignment,
    Partition,
    Subscription,
    by_topic,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
    flat,
)
from kipmesh.messages import JoinGroupRequestProtocol, JoinGroupResponse, SyncGroupResponse
from tests.unit.core.group.group_support import GROUP, World

E = ErrorCode
PARTITIONS = {"t": 6}
SESSION_MS = 10_000
REBALANCE_MS = 20_000

Assigned = dict[tuple[int, Partition], str]
"""(generation, partition) -> owner."""


class Actor:
    """One process with one group member."""

    def __init__(self, world: World, assignor: Assignor, instance: str | None, assigned: Assigned) -> None:
        self.world = world
        self.assignor = assignor
        self.instance = instance
        self.assigned = assigned
        self.member_id = ""
        self.generation = -1
        self.owned: list[Partition] = []
        self.is_stable = False
        self.is_terminated = False
        """Fenced, or left the group. Acts only as a zombie."""
        self._join: int | None = None
        self._sync: int | None = None
        self._members: tuple[GroupMember, ...] = ()

    @property
    def is_cooperative(self) -> bool:
        return self.assignor.protocol is RebalanceProtocol.COOPERATIVE

    def act(self) -> None:
        """Take the client's next step, unless it waits for a response."""
        if self.is_terminated:
            return
        if self._join is not None:
            self._handle_join()
        elif self._sync is not None:
            self._handle_sync()
        elif self.is_stable:
            self._handle_code(self.world.heartbeat(self.member_id, self.generation, self.instance))
        else:
            self._send_join()

    def _send_join(self) -> None:
        if not self.is_cooperative:
            self.owned = []
        generation = self.generation if self.owned else -1
        subscription = Subscription(("t",), None, by_topic(self.owned), generation)
        protocols = (JoinGroupRequestProtocol(self.assignor.name, encode_subscription(subscription)),)
        self._join = self.world.join(
            self.member_id,
            instance=self.instance,
            protocols=protocols,
            session_ms=SESSION_MS,
            rebalance_ms=REBALANCE_MS,
        )

    def _handle_join(self) -> None:
        assert self._join is not None
        response: JoinGroupResponse | None = self.world.responses.get(self._join)
        if response is None:
            return
        self._join = None
        if response.error_code == E.MEMBER_ID_REQUIRED:
            self.member_id = response.member_id
        elif response.error_code:
            self._handle_code(ErrorCode(response.error_code))
        else:
            self.member_id, self.generation = response.member_id, response.generation_id
            assignments: dict[str, bytes] = {}
            if response.leader == response.member_id and not response.skip_assignment:
                assignments = self._assign(response)
            self._sync = self.world.sync(self.member_id, self.generation, assignments, self.instance)

    def _assign(self, response: JoinGroupResponse) -> dict[str, bytes]:
        members = [
            GroupMember(member.member_id, member.group_instance_id, decode_subscription(member.metadata))
            for member in response.members
        ]
        assignments = self.assignor.assign(PARTITIONS, members)
        return {name: encode_assignment(Assignment(by_topic(owned))) for name, owned in assignments.items()}

    def _handle_sync(self) -> None:
        assert self._sync is not None
        response: SyncGroupResponse | None = self.world.responses.get(self._sync)
        if response is None:
            return
        self._sync = None
        if response.error_code:
            self._handle_code(ErrorCode(response.error_code))
            return
        before, self.owned = self.owned, flat(decode_assignment(response.assignment).assigned_partitions)
        member = self.instance or self.member_id
        for partition in self.owned:
            owner = self.assigned.setdefault((self.generation, partition), member)
            assert owner == member, f"{partition} belongs to {owner} and {member} in generation {self.generation}"
        # A cooperative member that revoked partitions rejoins, so that other members can get them.
        self.is_stable = not (self.is_cooperative and set(before) - set(self.owned))

    def _handle_code(self, code: ErrorCode) -> None:
        if code == E.NONE:
            return
        self.is_stable = False
        if code == E.FENCED_INSTANCE_ID:
            self.is_terminated = True
        elif code in (E.UNKNOWN_MEMBER_ID, E.ILLEGAL_GENERATION):
            if code == E.UNKNOWN_MEMBER_ID:
                self.member_id = ""
            self.generation, self.owned = -1, []  # The partitions are lost.

    def leave(self) -> None:
        self.world.leave(self.member_id, self.instance)
        self.is_terminated = True
        self.owned = []

    def is_current(self) -> bool:
        """Return whether the coordinator has this member in its generation."""
        group = self.world.coordinator._state.group(GROUP)
        if group is None or group.generation_id != self.generation:
            return False
        return group.check_member(self.member_id, self.instance) == E.NONE
