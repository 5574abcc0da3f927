"""The folder of the demo: that of a job, and the cluster in it.

What an interrupted run left there, however it ended, the next one finds and removes: processes of its cluster (told by
pid and start time) are stopped first.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kipmesh.cluster import ClusterError
from kipmesh.cluster.process_cluster import ProcessCluster
from kipmesh.spark.jobs.folder import PARQUET, FolderBusyError, JobFolder


class DemoError(Exception):
    """The demo cannot go on; the message is one clear line."""


class Workspace:
    """Paths of a run in `root`."""

    def __init__(self, root: Path) -> None:
        self._folder = JobFolder(root, "demo", results=(PARQUET, "checkpoint"))
        self.root = self._folder.root
        self.cluster = self.root / "cluster"
        self.parquet = self._folder.parquet
        self.checkpoint = self._folder.work / "checkpoint"
        self.spark = self._folder.spark

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder. Raises `DemoError` when another run does."""
        try:
            with self._folder.locked():
                yield
        except FolderBusyError as error:
            raise DemoError(f"{error} (--dir)") from None

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
        shutil.rmtree(self.cluster, ignore_errors=True)
        self._folder.begin()
        return running

    def publish(self, report: str, summary: str) -> None:
        """Put the results in place of those of an earlier run, each at once and not bit by bit."""
        self._folder.publish({"report.html": report, "summary.json": summary})
