"""How full the disks of a node's data folders are: `kipmesh_disk_free_bytes` and `kipmesh_disk_size_bytes`.

Asked of the file system at each scrape, on the probe server's thread. A folder that cannot be asked, as one whose disk
was taken away, has no value; that it is offline is said by `kafka_log_logmanager_logdirectoryoffline`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


def data_folders(config: object) -> tuple[str, ...]:
    """The folders that a service's configuration names: `log.dirs` and `metadata.log.dir`; () for others."""
    named = (*getattr(config, "log_dirs", ()), getattr(config, "metadata_log_dir", ""))
    return tuple(dict.fromkeys(folder for folder in named if folder))


class DiskSpaceCollector(Collector):
    """The label `logdirectory` is the folder, as in Kafka's `LogDirectoryOffline`."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders

    def describe(self) -> Iterator[Metric]:
        """The names, without touching a disk."""
        yield from _families()

    def collect(self) -> Iterator[Metric]:
        """O(folders)."""
        free, size = _families()
        for folder in self._folders:
            try:
                usage = shutil.disk_usage(folder)
            except OSError:
                continue
            free.add_metric([folder], usage.free)
            size.add_metric([folder], usage.total)
        yield free
        yield size


def _families() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
    labels = ["logdirectory"]
    return (
        GaugeMetricFamily("kipmesh_disk_free_bytes", "Bytes that this node may still write there.", labels=labels),
        GaugeMetricFamily("kipmesh_disk_size_bytes", "Bytes of that disk.", labels=labels),
    )
