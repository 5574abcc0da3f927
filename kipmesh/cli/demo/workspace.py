"""The folder of the demo: one run at a time, nothing half made left in sight, nothing of an older run in the way.

A run works in ``work/`` and puts its results in place at its end, each by a rename. What an interrupted run left there,
however it ended, the next one finds and removes: processes of its cluster (told by pid and start time) are stopped
first. A lock that the system releases with its process keeps two runs apart.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kipmesh.cluster import ClusterError
from kipmesh.cluster.process_cluster import ProcessCluster


class DemoError(Exception):
    """The demo cannot go on; the message is one clear line."""


class Workspace:
    """Paths of a run in `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.cluster = self.root / "cluster"
        self.work = self.root / "work"
        self.parquet = self.work / "parquet"
        self.checkpoint = self.work / "checkpoint"
        self.spark = self.work / "spark"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder. Raises `DemoError` when another run does."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("a+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                owner = handle.read().strip() or "unknown"
                raise DemoError(f"another demo (pid {owner}) is running in {self.root}; give --dir") from None
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            yield

    def clear(self) -> int:
        """Stop the cluster of an earlier run and remove its files; how many of its processes still ran."""
        running = 0
        if (self.cluster / "cluster.json").exists():
            cluster = ProcessCluster(self.cluster)
            try:
                running = sum(status.state != "stopped" for status in cluster.status())
                cluster.down()
            except ClusterError as error:
                # Without a readable cluster.json nobody knows of processes; their folder is removed under them.
                if (self.cluster / "cluster.json").exists() and "cannot be read" not in str(error):
                    raise DemoError(f"the cluster of an earlier run does not stop: {error}") from None
        for folder in (self.cluster, self.work):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.parquet, self.checkpoint, self.spark):
            folder.mkdir(parents=True)
        return running

    def publish(self, report: str, summary: str) -> None:
        """Put the results in place of those of an earlier run, each at once and not bit by bit."""
        for folder in (self.parquet, self.checkpoint):
            target = self.root / folder.name
            old = self.work / f"old-{folder.name}"
            if target.exists():
                target.rename(old)
            folder.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        for name, text in (("report.html", report), ("summary.json", summary)):
            fresh = self.work / name
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(self.root / name)
        shutil.rmtree(self.work, ignore_errors=True)
