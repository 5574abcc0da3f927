"""Members join, leave, fail and act as zombies; writes fail; the coordinator moves. Each partition has one owner."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.assignors import COOPERATIVE_STICKY, RANGE, ROUND_ROBIN
from kipmesh.core.group.types import Settings
from tests.unit.core.group.group_actors import PARTITIONS, Actor, Assigned
from tests.unit.core.group.group_support import World

E = ErrorCode
ZOMBIE_CODES = {E.UNKNOWN_MEMBER_ID, E.ILLEGAL_GENERATION, E.FENCED_INSTANCE_ID}
ACTORS_MAX = 7
STABILIZING_GENERATIONS = 6
"""Generations until a group is stable: for failed members, for each moved partition and for a failed write."""


class GroupMachine(RuleBasedStateMachine):
    """One group with simulated members."""

    @initialize(assignor=st.sampled_from([RANGE, ROUND_ROBIN, COOPERATIVE_STICKY]))
    def begin(self, assignor: object) -> None:
        self.world = World(Settings(group_initial_rebalance_delay_ms=1000))
        self.world.commits = False
        self.assignor = COOPERATIVE_STICKY if assignor is COOPERATIVE_STICKY else assignor
        self.actors: list[Actor] = []
        self.zombies: list[Actor] = []
        self.assigned: Assigned = {}
        self.offset = 0
        for _ in range(3):
            self.add_member(None)
        self.all_progress(4, 1000)

    @precondition(lambda self: len(self.actors) < ACTORS_MAX)
    @rule(instance=st.sampled_from([None, None, None, "i0", "i1"]))
    def add_member(self, instance: str | None) -> None:
        self.actors.append(Actor(self.world, self.assignor, instance, self.assigned))  # type: ignore[arg-type]
        self.actors[-1].act()

    @precondition(lambda self: self.actors)
    @rule(data=st.data(), times=st.integers(1, 4))
    def act(self, data: st.DataObject, times: int) -> None:
        actor = data.draw(st.sampled_from(self.actors))
        for _ in range(times):
            actor.act()

    @rule()
    def all_act(self) -> None:
        for actor in self.actors:
            actor.act()

    @rule(rounds=st.integers(1, 4), ms=st.sampled_from([10, 1000]))
    def all_progress(self, rounds: int, ms: int) -> None:
        """Let all members act and all writes commit."""
        for _ in range(rounds):
            for actor in self.actors:
                for _ in range(3):
                    actor.act()
                    self.world.commit_all()
            self.world.pass_ms(ms)

    @precondition(lambda self: any(actor.generation >= 0 and not actor.is_current() for actor in self.actors))
    @rule(data=st.data())
    def outdated_member_sends_requests(self, data: st.DataObject) -> None:
        """Requests of a member with an outdated generation are refused."""
        outdated = [actor for actor in self.actors if actor.generation >= 0 and not actor.is_current()]
        self._check_requests_are_refused(data.draw(st.sampled_from(outdated)))

    @precondition(lambda self: self.actors)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.zombies.append(self.actors.pop(data.draw(st.integers(0, len(self.actors) - 1))))

    @precondition(lambda self: self.actors)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        actor = self.actors.pop(data.draw(st.integers(0, len(self.actors) - 1)))
        actor.leave()
        self.zombies.append(actor)

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def zombie_sends_requests(self, data: st.DataObject) -> None:
        """Requests of a member outside the current generation get their specific error."""
        zombie = data.draw(st.sampled_from(self.zombies))
        if zombie.is_current() or not zombie.member_id or zombie.generation < 0:
            return
        self._check_requests_are_refused(zombie)

    def _check_requests_are_refused(self, actor: Actor) -> None:
        world = self.world
        before = world.fetch()
        assert world.heartbeat(actor.member_id, actor.generation, actor.instance) in ZOMBIE_CODES
        commit = world.commit(10**9, actor.member_id, actor.generation, instance=actor.instance)
        # A removed group has its own error.
        assert world.commit_code(commit) in ZOMBIE_CODES | {E.GROUP_ID_NOT_FOUND}
        sync = world.sync(actor.member_id, actor.generation, {actor.member_id: b"mine"}, actor.instance)
        assert ErrorCode(world.sync_response(sync).error_code) in ZOMBIE_CODES
        assert world.fetch() == before

    @precondition(lambda self: self.actors)
    @rule(data=st.data())
    def commit_offset(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from(self.actors))
        if actor.owned and actor.generation >= 0 and actor.member_id:
            self.offset += 1
            is_current = actor.is_current()
            number = self.world.commit(
                self.offset,
                actor.member_id,
                actor.generation,
                partition=actor.owned[0][1],
                instance=actor.instance,
            )
            if not is_current:
                assert self.world.commit_code(number) in ZOMBIE_CODES | {E.GROUP_ID_NOT_FOUND}

    @precondition(lambda self: self.world.waiting)
    @rule()
    def write_is_committed(self) -> None:
        self.world.commit_one()

    @precondition(lambda self: self.world.waiting)
    @rule(code=st.sampled_from([E.NOT_ENOUGH_REPLICAS, E.KAFKA_STORAGE_ERROR]))
    def write_fails(self, code: ErrorCode) -> None:
        self.world.fail_one(code)

    @precondition(lambda self: self.world.waiting)
    @rule()
    def write_takes_too_long(self) -> None:
        world, write = self.world, self.world.waiting[0]
        world.apply(world.coordinator.failed(write.id, E.REQUEST_TIMED_OUT, world.now, may_commit=True))

    @rule(ms=st.sampled_from([1, 100, 1000, 3000, 9000, 25_000]))
    def time_passes(self, ms: int) -> None:
        self.world.pass_ms(ms)

    @rule()
    def coordinator_moves(self) -> None:
        self.world.fail_over()

    @rule()
    def stabilizes(self) -> None:
        """Without faults, live members share the partitions after a bounded number of rebalances."""
        self._stabilize()

    @invariant()
    def table_matches_log(self) -> None:
        if hasattr(self, "world"):
            assert self.world.coordinator.table == self.world.replayed()

    def _stabilize(self) -> None:
        world = self.world
        world.commit_all()
        generations = set()
        for _ in range(100):
            for actor in list(self.actors):
                for _ in range(3):
                    actor.act()
                    world.commit_all()
                if actor.is_terminated:
                    self.actors.remove(actor)
                    self.zombies.append(actor)
                generations.add(actor.generation)
            world.pass_ms(1000)
            world.commit_all()
        assert all(actor.is_stable for actor in self.actors)
        assert len({actor.generation for actor in self.actors}) <= 1
        owned = sorted(partition for actor in self.actors for partition in actor.owned)
        if self.actors:
            assert owned == [(topic, number) for topic, count in PARTITIONS.items() for number in range(count)]
            before = {actor.generation for actor in self.actors}
            for actor in self.actors:
                actor.act()
            assert {actor.generation for actor in self.actors} == before, "a stable group does not rebalance"
        assert len(generations) <= STABILIZING_GENERATIONS + len(self.actors)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self._stabilize()
        world = self.world
        world.apply(world.coordinator.unloaded(world.now))
        assert world.responses.keys() == world.request_ids, "every request has a response"


GroupMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestGroups = GroupMachine.TestCase
