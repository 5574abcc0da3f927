"""The engine of both simulators: virtual time, randomness, faulty network, invariants and the outcome of a seed.

A world composes its parts on one `Engine` and one `Network`. Everything is single-threaded, and every random draw comes
from the seed's generator or from generators that it seeded, so a seed replays exactly.
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
    """An invariant of the simulated system is broken."""


@dataclass(slots=True)
class Conditions:
    """Conditions that faults change for a while; the defaults are those without faults."""

    blocked: set[tuple[int, int]] = field(default_factory=set)
    """Links (from, to) that carry nothing."""
    loss: float = 0.0
    duplication: float = 0.0
    corruption: float = 0.0
    """Share of the FetchSnapshot responses that arrive with a flipped bit."""
    delay_max_ms: float = 4.0
    flush_max_ms: float = 4.0
    """Maximum duration of a flush of the metadata log."""
    disk_work_max_ms: float = 2.0
    """Maximum duration of one task of a broker's disk thread."""
    commit_max_ms: float = 5.0
    """Maximum time to commit metadata, where the quorum itself is not simulated."""


class Engine:
    """Virtual time in milliseconds from 0. Events that are due at the same time run in the order of scheduling."""

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
        """Run `action` after that much virtual time."""
        self._scheduled += 1
        heapq.heappush(self._events, (self.now_ms + max(0.0, delay_ms), self._scheduled, action))

    def run_until(self, end_ms: float) -> None:
        """Run all events that are due by then."""
        while self._events and self._events[0][0] <= end_ms:
            self.now_ms, _, action = heapq.heappop(self._events)
            self.steps += 1
            action()
        self.now_ms = end_ms

    def report(self, what: str) -> None:
        """Remember a defect where it cannot be raised; `check_problems` raises it."""
        self.problem = self.problem or what

    def check_problems(self) -> None:
        """Raise what was reported."""
        if self.problem is not None:
            self.fail(self.problem)

    def fail(self, what: str) -> NoReturn:
        """Stop the run: an invariant is broken. It is reported, too: a task may catch or keep the exception."""
        self.report(what)
        raise InvariantError(f"at {self.now_ms:.1f} ms: {what}")


class Network:
    """The network between nodes: messages arrive late, twice, reordered or never, as `Conditions` says."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def ways(self, source: int, target: int) -> list[float]:
        """Delays of the copies of a message that arrive; none if it is lost."""
        counts, conditions, rng = self.engine.counts, self.engine.conditions, self.engine.rng
        counts["messages"] += 1
        if (source, target) in conditions.blocked or (conditions.loss and rng.random() < conditions.loss):
            counts["messages lost"] += 1
            return []
        delays = [0.2 + rng.random() * conditions.delay_max_ms]
        if conditions.duplication and rng.random() < conditions.duplication:
            counts["messages doubled"] += 1
            delays.append(0.2 + rng.random() * conditions.delay_max_ms * 3)
        return delays

    def carry(self, source: int, target: int, arrive: Action) -> None:
        """Run `arrive` for each copy of a message that arrives."""
        for delay_ms in self.ways(source, target):
            self.engine.after(delay_ms, arrive)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a clean run."""

    seed: int
    shape: str
    counts: Counter[str]
    is_worth_counting: bool
    """Whether there was a fault and a change of leader."""


class BaseWorld:
    """All parts of one simulated seed."""

    NAME: ClassVar[str]
    """The module to run."""
    LEADER_CHANGES: ClassVar[str]
    """Name of the count of leader changes."""
    engine: Engine

    @property
    def shape(self) -> str:
        """The drawn sizes."""
        raise NotImplementedError

    def run(self) -> None:
        """Run all of it. Raises InvariantError."""
        raise NotImplementedError


def run_world(world: BaseWorld) -> Outcome:
    """Run a world; InvariantError names the seed and the command that replays it, whatever went wrong."""
    engine = world.engine
    try:
        world.run()
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        shape = f"{world.shape}, {engine.now_ms:.1f} ms"
        replay = f"python -m {world.NAME} --seed {engine.seed}"
        raise InvariantError(f"seed {engine.seed} ({shape}): {what}; replay: {replay}") from error
    counts = engine.counts
    counts["steps"] = engine.steps
    is_worth_counting = counts["faults"] > 0 and counts[world.LEADER_CHANGES] > 0
    return Outcome(engine.seed, world.shape, counts, is_worth_counting)
