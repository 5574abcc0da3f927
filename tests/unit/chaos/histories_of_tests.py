"""Clean histories by a tiny mesh that does everything right, and ways to spoil them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

from kipmesh_chaos.history import (
    Begin,
    Dump,
    End,
    Event,
    FaultBegan,
    FaultEnded,
    Invoke,
    Limits,
    Ok,
    Phase,
    PhaseBegan,
    Read,
    ReaderKind,
    Unknown,
)

E = TypeVar("E")
REPLICAS = (1, 2, 3)
CONSUMERS = ("consumer-rack-a", "consumer-rack-b")
LIMITS = Limits(write_gap_s=5, read_delay_s=5)


class Mesh:
    """Logs of some partitions; each step is something that clients or replicas do, one event loop's view of it."""

    def __init__(self, source: random.Random, partitions: int, producers: int, exactly_once: bool) -> None:
        self.source = source
        self.exactly_once = exactly_once
        self.partitions = partitions
        self.logs: list[list[str]] = [[] for _ in range(partitions)]
        self.watermarks = [0] * partitions
        self.events: list[Event] = [
            Begin(0, "test", 1, partitions, LIMITS, CONSUMERS, (), exactly_once),
            PhaseBegan(0, Phase.FAULTS),
        ]
        self.t = 0.0
        self.operations = 0
        self.in_flight: dict[str, tuple[int, int, str]] = {}
        self.producers = [f"producer-{number}" for number in range(1, producers + 1)]
        self.positions = {(reader, partition): 0 for reader in CONSUMERS for partition in range(partitions)}
        self.late: list[tuple[int, str]] = []

    def step(self) -> None:
        self.t += self.source.random() * 0.05
        self.source.choices([self.produce, self.read, self.probe, self.late_write], [6, 3, 1, 1])[0]()

    def produce(self) -> None:
        producer = self.source.choice(self.producers)
        if producer not in self.in_flight:
            where, self.operations = self.source.randrange(self.partitions), self.operations + 1
            self.in_flight[producer] = (self.operations, where, f"{self.operations}")
            self.events.append(Invoke(self.t, self.operations, producer, where, f"{self.operations}"))
        else:
            self.finish(producer)

    def finish(self, producer: str) -> None:
        operation, where, value = self.in_flight.pop(producer)
        log = self.logs[where]
        # Where producers are idempotent, a late write is refused.
        chances = ["lost", "unknown"] if self.exactly_once else ["twice", "lost", "late", "unknown"]
        match self.source.choice(["ok"] * 8 + chances):
            case "ok" | "twice" as how:
                log.extend([value] * (2 if how == "twice" else 1))  # a retry after an answer that was lost
                self.watermarks[where] = len(log)
                self.events.append(Ok(self.t, operation, len(log) - 1))
            case "late":
                self.late.append((where, value))
                self.events.append(Unknown(self.t, operation, "REQUEST_TIMED_OUT"))
            case how:
                if how == "unknown":
                    log.append(value)
                    self.watermarks[where] = len(log)
                self.events.append(Unknown(self.t, operation, "REQUEST_TIMED_OUT"))

    def late_write(self) -> None:
        """What was in the network when its producer gave up."""
        if self.late:
            where, value = self.late.pop()
            self.logs[where].append(value)
            self.watermarks[where] = len(self.logs[where])

    def read(self, reader: str = "", where: int = -1, count: int = 0) -> None:
        reader = reader or self.source.choice(CONSUMERS)
        where = where if where >= 0 else self.source.randrange(self.partitions)
        start, end = self.positions[reader, where], self.watermarks[where]
        stop = min(start + (count or self.source.randint(0, 5)), end)
        records = list(enumerate(self.logs[where]))[start:stop]
        self.positions[reader, where] = stop
        self.events.append(Read(self.t, reader, ReaderKind.CONSUMER, where, records, end))

    def probe(self) -> None:
        where, replica = self.source.randrange(self.partitions), self.source.choice(REPLICAS)
        end = self.watermarks[where]
        start = self.source.randint(0, end)
        records = list(enumerate(self.logs[where]))[start:end][:3]
        self.events.append(Read(self.t, f"probe-{replica}", ReaderKind.REPLICA, where, records, end, replica, 1))

    def end(self) -> list[Event]:
        self.events.append(PhaseBegan(self.t, Phase.RECOVERY))
        for producer in list(self.in_flight):
            self.finish(producer)
        while self.late:
            self.late_write()
        self.events.append(PhaseBegan(self.t, Phase.FINAL))
        for where, log in enumerate(self.logs):
            for reader in CONSUMERS:
                self.read(reader, where, len(log) + 1)
            self.events.append(Read(self.t, "final", ReaderKind.FINAL, where, list(enumerate(log)), len(log)))
            self.events.append(End(self.t, where, len(log), REPLICAS, REPLICAS))
            batches = [(offset, offset, zlib.crc32(value.encode()), 1) for offset, value in enumerate(log)]
            for replica in REPLICAS:
                half = len(log) // 2
                for part in (slice(None, half), slice(half, None)):
                    records = list(enumerate(log))[part]
                    self.events.append(Dump(self.t, replica, where, 0, len(log), records, batches[part]))
        self.events.append(PhaseBegan(self.t, Phase.END))
        return self.events


def clean_history(
    seed: int, *, partitions: int = 2, producers: int = 3, steps: int = 300, exactly_once: bool = False
) -> list[Event]:
    """A history without an anomaly: failures that write included, and where producers are not idempotent also retries
    that write twice, and late writes."""
    mesh = Mesh(random.Random(seed), partitions, producers, exactly_once)
    for _ in range(steps):
        mesh.step()
    return mesh.end()


def with_fault(events: Sequence[Event], since: float, until: float, *, halts: bool, settle_s: float = 0) -> list[Event]:
    """The same under a fault, in the order of time."""
    fault = FaultBegan(since, 1, "kill", ["leader-1"], "kill leader-1", halts, settle_s)
    first, *others = events
    return [first, *sorted([*others, fault, FaultEnded(until, 1)], key=lambda event: event.t)]


def indexes(events: Iterable[Event], kind: type[E]) -> list[int]:
    """Where the events of a type are."""
    return [index for index, event in enumerate(events) if isinstance(event, kind)]
