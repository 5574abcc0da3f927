"""Engine of both simulators: virtual time, randomness, faulty network, invariants, and the outcome of a seed.

A world creates its parts on one `Engine` and one `Network`. Everything runs on one thread. Every random number comes
from the seed's generator or from generators seeded by it, so a seed replays exactly.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar, NoReturn

WALL_MS = 1_700_000_000_000
"""Wall-clock time at the start of a run."""

Action = Callable[[], object]


class InvariantError(AssertionError):
    """Raised when an invariant of the simulated system is violated."""


@dataclass(slots=True)
class Conditions:
    """Network and disk conditions, which faults change temporarily. The defaults are the conditions without faults.

    `loss` and `duplication` are probabilities per message.
    """

    blocked: set[tuple[int, int]] = field(default_factory=set)
    """Links (from, to) that drop all messages."""
    loss: float = 0.0
    duplication: float = 0.0
    corruption: float = 0.0
    """Share of FetchSnapshot responses with a flipped bit."""
    delay_max_ms: float = 4.0
    flush_max_ms: float = 4.0
    """Maximum duration of a flush of the metadata log."""
    disk_work_max_ms: float = 2.0
    """Maximum duration of one task of a broker's disk thread."""
    commit_max_ms: float = 5.0
    """Maximum time to commit metadata in `simulation.replicas`."""


class Engine:
    """Scheduler of one run, in virtual milliseconds from 0. Simultaneous events run in scheduling order."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.counts: Counter[str] = Counter()
        self.conditions = Conditions()
        self.now_ms = 0.0
        self.steps = 0
        self.problem: str | None = None
        """The first reported defect."""
        self._events: list[tuple[float, int, Action]] = []
        self._scheduled = 0

    def after(self, delay_ms: float, action: Action) -> None:
        """Run `action` after `delay_ms` of virtual time; a negative delay counts as 0."""
        self._scheduled += 1
        heapq.heappush(self._events, (self.now_ms + max(0.0, delay_ms), self._scheduled, action))

    def run_until(self, end_ms: float) -> None:
        """Run all events that are due until `end_ms`, then set the time to `end_ms`."""
        while self._events and self._events[0][0] <= end_ms:
            self.now_ms, _, action = heapq.heappop(self._events)
            self.steps += 1
            action()
        self.now_ms = end_ms

    def report(self, problem: str) -> None:
        """Record a defect from code that cannot raise, for `check_problems` to raise later. Keeps only the first
        defect.
        """
        self.problem = self.problem or problem

    def check_problems(self) -> None:
        """Raise InvariantError if a defect was reported."""
        if self.problem is not None:
            self.fail(self.problem)

    def fail(self, problem: str) -> NoReturn:
        """Raise InvariantError. Also report the defect, in case a task catches the exception."""
        self.report(problem)
        raise InvariantError(f"at {self.now_ms:.1f} ms: {problem}")


class Network:
    """A network that delays, duplicates, reorders or loses messages according to the engine's `Conditions`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def delays(self, source: int, target: int) -> list[float]:
        """Return the delays (ms) of the delivered copies of a message; empty if it is lost."""
        counts, conditions, rng = self.engine.counts, self.engine.conditions, self.engine.rng
        counts["messages"] += 1
        if (source, target) in conditions.blocked or (conditions.loss and rng.random() < conditions.loss):
            counts["messages lost"] += 1
            return []
        delays = [0.2 + rng.random() * conditions.delay_max_ms]
        if conditions.duplication and rng.random() < conditions.duplication:
            counts["messages duplicated"] += 1
            delays.append(0.2 + rng.random() * conditions.delay_max_ms * 3)
        return delays

    def transmit(self, source: int, target: int, arrive: Action) -> None:
        """Schedule `arrive` for each delivered copy of a message; a lost message has none."""
        for delay_ms in self.delays(source, target):
            self.engine.after(delay_ms, arrive)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run without violations."""

    seed: int
    shape: str
    counts: Counter[str]
    is_worth_counting: bool
    """Whether the run had a fault and a leader change."""


class BaseWorld:
    """One run of a simulator: all simulated parts of one seed."""

    NAME: ClassVar[str]
    """Module name, for the command that replays the seed."""
    LEADER_CHANGES: ClassVar[str]
    """Name of the counter of leader changes."""
    engine: Engine

    @property
    def shape(self) -> str:
        """Description of the drawn sizes, for messages."""
        raise NotImplementedError

    def run(self) -> None:
        """Run the simulation to its end. Raises InvariantError for a violation, or any exception of simulated code."""
        raise NotImplementedError


def run_world(world: BaseWorld) -> Outcome:
    """Run a world and return its outcome.

    Any exception becomes an InvariantError with the seed and the command that replays it.
    """
    engine = world.engine
    try:
        world.run()
    except Exception as error:
        shape = f"{world.shape}, {engine.now_ms:.1f} ms"
        replay = f"python -m {world.NAME} --seed {engine.seed}"
        raise InvariantError(
            f"seed {engine.seed} ({shape}): {type(error).__name__}: {error}; replay: {replay}"
        ) from error
    counts = engine.counts
    counts["steps"] = engine.steps
    is_worth_counting = counts["faults"] > 0 and counts[world.LEADER_CHANGES] > 0
    return Outcome(engine.seed, world.shape, counts, is_worth_counting)
