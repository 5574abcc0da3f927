"""The recorder of a run, which writes its history as it happens, and what the run's clients share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kipmesh_chaos.history import Event, Invoke, Note, Ok, Read, ReaderKind, Unknown, to_line


class Recorder:
    """The one place that events go to; for one thread. `close` at the end."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.acknowledged = 0
        self.unknown = 0
        self.read = 0
        self._begin = time.monotonic()
        self._output = file.open("w", encoding="utf-8")
        self._operations = self._commits = 0
        self._noted: set[str] = set()

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._begin

    def next_operation(self) -> int:
        """A number that no other operation of this run has."""
        self._operations += 1
        return self._operations

    def next_commit(self) -> int:
        """A number that no other commit of this run has."""
        self._commits += 1
        return self._commits

    def add(self, event: Event) -> None:
        """The next event. Those of an operation are written before they can have an effect."""
        match event:
            case Ok():
                self.acknowledged += 1
            case Unknown():
                self.unknown += 1
            case Read(kind=ReaderKind.CONSUMER | ReaderKind.MEMBER):
                self.read += len(event.records)
        self._output.write(to_line(event) + "\n")
        if not isinstance(event, Invoke | Ok | Read):
            self._output.flush()

    def note(self, text: str) -> None:
        """Something for people; the same text is kept once."""
        if text not in self._noted and len(self._noted) < 1000:
            self._noted.add(text)
            self.add(Note(self.now, text))

    def close(self) -> None:
        """Write what is left; idempotent."""
        self._output.close()


@dataclass(frozen=True, slots=True)
class RunClients:
    """What all clients of a run share."""

    bootstrap: str
    topic: str
    recorder: Recorder
    config: Mapping[str, str] = field(default_factory=dict)
    """How brokers are reached, beside their addresses (TLS)."""
