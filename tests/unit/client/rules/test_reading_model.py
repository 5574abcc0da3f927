"""Model test of PartitionReader: elections, truncations, lagging followers, fencing and lost responses.

The reader never skips or repeats records without a reset. It reports a truncation exactly when delivered records were
truncated (392-08). Its high watermark decreases only with that report (392-10). It changes replicas a bounded number of
times (392-14). `Reading` checks the order whenever records are delivered or reported.
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
    def send(self) -> None:
        self.reading.send()

    @rule()
    def respond(self) -> None:
        self.reading.respond()

    @precondition(lambda self: self.reading.sent is not None)
    @rule()
    def lose_response(self) -> None:
        assert self.reading.sent is not None
        number, self.reading.sent = self.reading.sent[0], None
        self.reading.do(self.reading.reader.failed(number, ErrorCode.NETWORK_EXCEPTION, self.reading.now_ms))

    @rule(limit=st.integers(1, 4))
    def take(self, limit: int) -> None:
        self.reading.take(limit)

    @rule(steps=st.integers(1, 5), ms=st.sampled_from([0, 100, 1000]))
    def continue_reading(self, steps: int, ms: int) -> None:
        for _ in range(steps):
            self.reading.step(ms)

    @precondition(lambda self: self.reading.reader.state is State.HALTED)
    @rule()
    def application_seeks(self) -> None:
        reading = self.reading
        problem = reading.reader.unresolved_problem()
        assert isinstance(problem, c.RaiseError | c.TruncationFound)
        offset = self.world.leader.start
        if isinstance(problem, c.TruncationFound) and problem.end_offset is not None:
            offset = problem.end_offset
        reading.seen.clear()  # Records before a seek without an epoch cannot be checked.
        reading.do(reading.reader.seek(offset))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "reading"):
            self.reading.check()

    def teardown(self) -> None:
        """Stop all faults. The application soon has all records, and the reader keeps its replica."""
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
            self.lose_response()
        reading.wants_metadata = True
        for _ in range(QUIET_STEPS):
            if reading.reader.state is State.HALTED:
                self.application_seeks()
            reading.step(50)
            reading.check()
            if reading.reader.position == world.high_watermark and reading.reader.state is State.FETCHING:
                break
        reading.check_complete()
        self._check_stability()

    def _check_stability(self) -> None:
        """Without failures, the reader moves only at the end of a lease: to the leader and back."""
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
        # Followers that do not serve consumers are retried with exponential backoff.
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
