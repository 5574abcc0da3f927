"""The folder of a job: one run at a time, nothing half made left in sight, nothing of an older run in the way.

A run works in ``work/`` and puts its results in place at its end, each by a rename. What an interrupted run left there,
however it ended, the next one removes. A lock that the system releases with its process keeps two runs apart.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PARQUET: Final = "parquet"


class FolderBusyError(Exception):
    """Another run holds the folder; the message is one clear line."""


class JobFolder:
    """Paths of a run in `root`; `results` are the folders that `publish` puts in place."""

    def __init__(self, root: Path, what: str, results: Sequence[str] = (PARQUET,)) -> None:
        self.root = root.resolve()
        self.work = self.root / "work"
        self.parquet = self.work / PARQUET
        self.spark = self.work / "spark"
        self.left = "nothing of this run is left"
        """What an interrupt now would leave, for people."""
        self._what = what
        self._results = tuple(results)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder. Raises `FolderBusyError` when another run does, OSError where it cannot be made."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("a+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                owner = handle.read().strip() or "unknown"
                told = f"another {self._what} (pid {owner}) is running in {self.root}; give another folder"
                raise FolderBusyError(told) from None
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            yield

    def begin(self) -> None:
        """Remove what a run that did not end left, and make the folders of this one."""
        self.drop()
        for folder in (self.spark, *(self.work / name for name in self._results)):
            folder.mkdir(parents=True)

    def drop(self) -> None:
        """Remove what is not published."""
        shutil.rmtree(self.work, ignore_errors=True)

    def publish(self, texts: Mapping[str, str]) -> None:
        """Put the results in place of those of an earlier run, each at once and not bit by bit."""
        self.left = f"it was about to put its results into {self.root}: those there may be of two runs"
        for name in self._results:
            target, old = self.root / name, self.work / f"old-{name}"
            if target.exists():
                target.rename(old)
            (self.work / name).rename(target)
            shutil.rmtree(old, ignore_errors=True)
        for name, text in texts.items():
            fresh = self.work / name
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(self.root / name)
        self.left = f"its results are whole, in {self.root}"
        self.drop()
