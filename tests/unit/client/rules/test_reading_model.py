"""A reader through elections, truncations, lagging followers, fencing and lost answers, against dumb logs.

It never skips, never reads twice without a reset, never goes back; it reports a truncation exactly when records that
its user has seen are gone (392-08); its high watermark goes back only with such a report (392-10); it changes replicas
a bounded number of times (392-14). `Reading` checks the first three whenever records are taken or reported.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kipmesh.client.consumer.rules import values as c
from kipmesh.client.consumer.rules.states import State
from kipmesh.core.errors import ErrorCode
from tests.unit.client.rules.reading_world import MAX_AGE_MS, RACKS, Reading, World

brokers = st.sampled_from(sorted(RACKS))
QUIET_STEPS = 400


class ReadingMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from([-2, -1, None]),
        rack=st.sampled_from(["b", "b", "a", ""]),
        mode=st.sampled_from([c.SelectionMode.FETCH, c.SelectionMode.FETCH, *c.SelectionMode]),
        serves_followers=st.sampled_from([True, True, True, False]),
    )
    def begin(self, policy: int | None, rack: str, mode: c.SelectionMode, serves_followers: bool) -> None:
        self.world = World(names_rack=serves_followers)
        self.reading = Reading(self.world, rack, policy, mode=mode, prefers_replicas=True)
        if policy is None:
            self.reading.do(self.reading.reader.seek(0))

    # --- the partition

    @rule(records=st.integers(1, 4))
    def produce(self, records: int) -> None:
        for _ in range(records):
            self.world.produce()

    @rule(broker=brokers, limit=st.integers(1, 5), times=st.integers(1, 3))
    def replicate(self, broker: int, limit: int, times: int) -> None:
        for _ in range(times):
            self.world.replicate(broker, limit)

    @rule(broker=brokers)
    def elect(self, broker: int) -> None:
        if broker in self.world.isr:
            self.world.elect(broker)

    @rule(broker=brokers)
    def elect_uncleanly(self, broker: int) -> None:
        self.world.elect(broker, unclean=True)

    @rule(broker=brokers)
    def fence(self, broker: int) -> None:
        self.world.fence(broker)

    @rule(broker=brokers)
    def unfence(self, broker: int) -> None:
        self.world.fenced.discard(broker)

    @rule(broker=brokers, is_up=st.booleans())
    def stop_or_start(self, broker: int, is_up: bool) -> None:
        self.world.brokers[broker].is_up = is_up

    @rule(broker=brokers, records=st.integers(1, 3))
    def retain(self, broker: int, records: int) -> None:
        self.world.retain(broker, records)

    # --- the consumer

    @rule(ms=st.sampled_from([1, 100, 1000, 2000, 10_000, MAX_AGE_MS]))
    def time(self, ms: int) -> None:
        self.reading.now_ms += ms
        self.reading.do(self.reading.reader.tick(self.reading.now_ms))

    @rule()
    def refresh(self) -> None:
        self.reading.refresh()

    @rule()
    def ask(self) -> None:
        self.reading.ask()

    @rule()
    def answer(self) -> None:
        self.reading.answer()

    @precondition(lambda self: self.reading.sent is not None)
    @rule()
    def lose_answer(self) -> None:
        assert self.reading.sent is not None
        number, self.reading.sent = self.reading.sent[0], None
        self.reading.do(self.reading.reader.failed(number, ErrorCode.NETWORK_EXCEPTION, self.reading.now_ms))

    @rule(limit=st.integers(1, 4))
    def take(self, limit: int) -> None:
        self.reading.take(limit)

    @rule(steps=st.integers(1, 5), ms=st.sampled_from([0, 100, 1000]))
    def go_on(self, steps: int, ms: int) -> None:
        for _ in range(steps):
            self.reading.step(ms)

    @precondition(lambda self: self.reading.reader.state is State.HALTED)
    @rule()
    def user_decides(self) -> None:
        reading = self.reading
        problem = reading.reader.unresolved_problem()
        assert isinstance(problem, c.RaiseError | c.TruncationFound)
        offset = self.world.leader.start
        if isinstance(problem, c.TruncationFound) and problem.end_offset is not None:
            offset = problem.end_offset
        reading.seen.clear()  # nothing from before a seek without an epoch can be judged
        reading.do(reading.reader.seek(offset))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "reading"):
            self.reading.check()

    def teardown(self) -> None:
        """All is well again: the user soon has everything, and stays with one replica."""
        if not hasattr(self, "reading"):
            return
        world, reading = self.world, self.reading
        world.fenced.clear()
        for broker in world.brokers.values():
            broker.is_up = True
        world.produce()
        for _ in range(60):
            for broker_id in RACKS:
                world.replicate(broker_id, 5)
        assert world.isr == set(RACKS)
        if reading.sent is not None:
            self.lose_answer()
        reading.wants_metadata = True
        for _ in range(QUIET_STEPS):
            if reading.reader.state is State.HALTED:
                self.user_decides()
            reading.step(50)
            reading.check()
            if reading.reader.position == world.high_watermark and reading.reader.state is State.FETCHING:
                break
        reading.check_complete()
        self._check_calm()

    def _check_calm(self) -> None:
        """Without failures, only the ends of leases make it move: away to ask the leader, and back."""
        reading = self.reading
        reading.now_ms += 3 * MAX_AGE_MS
        for _ in range(10):
            reading.step(300)
        moves = reading.moves
        for _ in range(30):
            self.world.produce()
            for broker_id in RACKS:
                self.world.replicate(broker_id, 5)
                self.world.replicate(broker_id, 5)
            reading.step(100)
        # Followers that do not serve are tried again at ever longer intervals.
        assert reading.moves - moves <= (0 if self.world.names_rack else 4)
        near = reading.rack == "b" and self.world.names_rack and self.world.leader_id == 1
        if near:
            assert reading.served_by[-1] in (2, 3)


ReadingMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestReading = ReadingMachine.TestCase
