"""The recorder, which writes the history of a run as it happens, and the settings that the run's clients share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kipmesh_chaos.history import Event, Invoke, Note, Ok, Read, ReaderKind, Unknown, to_line


class Recorder:
    """Writes all events of a run to its history file, which it replaces. Use it from one thread only and call `close`
    at the end. Raises OSError.

    `acknowledged` and `unknown` count outcomes of writes; `read` counts the records read by consumers and members.
    """

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
        """Seconds since the start of the run."""
        return time.monotonic() - self._begin

    def next_operation(self) -> int:
        """Return a new operation number, unique in this run."""
        self._operations += 1
        return self._operations

    def next_commit(self) -> int:
        """Return a new commit number, unique in this run."""
        self._commits += 1
        return self._commits

    def add(self, event: Event) -> None:
        """Write the next event. The caller adds an `Invoke` or `Commit` before it sends the request. `Invoke`, `Ok` and
        `Read` are buffered.
        """
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
        """Write a Note event. Ignores a repeated text, and every text after 1,000 different ones."""
        if text not in self._noted and len(self._noted) < 1000:
            self._noted.add(text)
            self.add(Note(self.now, text))

    def close(self) -> None:
        """Write buffered events and close the file; idempotent."""
        self._output.close()


@dataclass(frozen=True, slots=True)
class RunClients:
    """Settings that all clients of a run share."""

    bootstrap: str
    topic: str
    recorder: Recorder
    config: Mapping[str, str] = field(default_factory=dict)
    """Client configuration besides the bootstrap servers, such as TLS."""
