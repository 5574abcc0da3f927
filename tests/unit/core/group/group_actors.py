"""Simple members of a group under test: each acts when told to, by what it was answered last."""

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

Told = dict[tuple[int, Partition], str]
"""(generation, partition) -> who was told to own it then."""


class Actor:
    """One process with one member."""

    def __init__(self, world: World, assignor: Assignor, instance: str | None, told: Told) -> None:
        self.world = world
        self.assignor = assignor
        self.instance = instance
        self.told = told
        self.member_id = ""
        self.generation = -1
        self.owned: list[Partition] = []
        self.is_stable = False
        self.is_over = False
        """It was fenced, or it left: nobody acts for it but as a zombie."""
        self._join: int | None = None
        self._sync: int | None = None
        self._members: tuple[GroupMember, ...] = ()

    @property
    def is_cooperative(self) -> bool:
        return self.assignor.protocol is RebalanceProtocol.COOPERATIVE

    def act(self) -> None:
        """The next thing that a client would do, if it does not wait for an answer."""
        if self.is_over:
            return
        if self._join is not None:
            self._take_join()
        elif self._sync is not None:
            self._take_sync()
        elif self.is_stable:
            self._take_code(self.world.beat(self.member_id, self.generation, self.instance))
        else:
            self._ask_to_join()

    def _ask_to_join(self) -> None:
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

    def _take_join(self) -> None:
        assert self._join is not None
        answer: JoinGroupResponse | None = self.world.answers.get(self._join)
        if answer is None:
            return
        self._join = None
        if answer.error_code == E.MEMBER_ID_REQUIRED:
            self.member_id = answer.member_id
        elif answer.error_code:
            self._take_code(ErrorCode(answer.error_code))
        else:
            self.member_id, self.generation = answer.member_id, answer.generation_id
            given: dict[str, bytes] = {}
            if answer.leader == answer.member_id and not answer.skip_assignment:
                given = self._assign(answer)
            self._sync = self.world.sync(self.member_id, self.generation, given, self.instance)

    def _assign(self, answer: JoinGroupResponse) -> dict[str, bytes]:
        members = [
            GroupMember(one.member_id, one.group_instance_id, decode_subscription(one.metadata))
            for one in answer.members
        ]
        assigned = self.assignor.assign(PARTITIONS, members)
        return {name: encode_assignment(Assignment(by_topic(owned))) for name, owned in assigned.items()}

    def _take_sync(self) -> None:
        assert self._sync is not None
        answer: SyncGroupResponse | None = self.world.answers.get(self._sync)
        if answer is None:
            return
        self._sync = None
        if answer.error_code:
            self._take_code(ErrorCode(answer.error_code))
            return
        before, self.owned = self.owned, flat(decode_assignment(answer.assignment).assigned_partitions)
        who = self.instance or self.member_id
        for partition in self.owned:
            owner = self.told.setdefault((self.generation, partition), who)
            assert owner == who, f"{partition} belongs to {owner} and {who} in generation {self.generation}"
        # Who has given something up joins again, so that it can go to somebody else.
        self.is_stable = not (self.is_cooperative and set(before) - set(self.owned))

    def _take_code(self, code: ErrorCode) -> None:
        if code == E.NONE:
            return
        self.is_stable = False
        if code == E.FENCED_INSTANCE_ID:
            self.is_over = True
        elif code in (E.UNKNOWN_MEMBER_ID, E.ILLEGAL_GENERATION):
            if code == E.UNKNOWN_MEMBER_ID:
                self.member_id = ""
            self.generation, self.owned = -1, []  # they are lost

    def leave(self) -> None:
        self.world.leave(self.member_id, self.instance)
        self.is_over = True
        self.owned = []

    def is_current(self) -> bool:
        """Whether the coordinator has this very member in this very generation."""
        group = self.world.coordinator._state.group(GROUP)
        if group is None or group.generation_id != self.generation:
            return False
        return group.check_member(self.member_id, self.instance) == E.NONE
