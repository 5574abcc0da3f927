"""Log directories of a broker: takes a failed one offline and reports lost replicas to the controller (KIP-858).

| event                                                 | effect                                                       |
| ----------------------------------------------------- | ------------------------------------------------------------ |
| a directory's disk fails                              | its replicas return KAFKA_STORAGE_ERROR, are reported lost   |
| it holds the metadata log, or is the last one         | the process ends                                             |
| a replica that the metadata calls lost has a log      | its directory is reported: the replica is no longer lost     |
| it has no log, and no directory is offline            | it restarts empty if another broker leads, and is reported   |

Belongs to the event loop, except for `directory_failed`. Invariant: a report is repeated until the controller has it.
See ADR 0008.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import structlog
from prometheus_client.core import GaugeMetricFamily, Metric

from kipmesh import messages as m
from kipmesh.broker.membership.controller_channel import RETRY_BACKOFF_S, ControllerChannel, try_call
from kipmesh.broker.replication.replica import Disk, Replica
from kipmesh.core.metadata.image import PartitionKey
from kipmesh.core.metadata.states import LOST_DIRECTORY
from kipmesh.messages.table import ASSIGN_REPLICAS_TO_DIRS
from kipmesh.storage.fs import StorageError
from kipmesh.storage.log_manager import LogManager

log = structlog.get_logger(__name__)

ASSIGNMENTS_MAX = 2000
"""Maximum replicas that one AssignReplicasToDirs request reports."""
CALL_TIMEOUT_S = 10.0


@dataclass(eq=False, kw_only=True)
class LogDirs:
    """Takes failed directories offline and reports lost and recovered replicas to the controller.

    Args: broker_epoch: returns the epoch of this broker's registration; on_failure: receives the error that must end
    the process; on_change: called when `offline_ids` changed.
    """

    broker_id: int
    log_manager: LogManager
    disk: Disk
    channel: ControllerChannel
    broker_epoch: Callable[[], int]
    on_failure: Callable[[BaseException], None]
    on_change: Callable[[], None]

    def __post_init__(self) -> None:
        self.offline_ids: Sequence[bytes] = ()
        """Ids of the offline directories whose lost replicas the controller knows."""
        self._loop = asyncio.get_running_loop()
        self._failing: dict[str, StorageError] = {}
        # At most one report per replica.
        self._unreported: dict[PartitionKey, bytes] = {}
        self._wake = asyncio.Event()

    def directory_failed(self, path: str, error: StorageError) -> None:
        """Record that a directory's disk failed, so that `run` takes it offline. Callable from any thread.

        Calls `on_failure` instead if it is the last online directory or has the metadata log.
        """
        self._loop.call_soon_threadsafe(self._handle_failure, path, error)

    def _handle_failure(self, path: str, error: StorageError) -> None:
        directories = self.log_manager.directories
        usable = {directory.path for directory in directories.online if directory.path not in self._failing}
        if path not in usable:
            return
        has_metadata_log = path == directories.metadata_path
        if not has_metadata_log and (usable - {path}).intersection(directories.paths):
            self._failing[path] = error
            self._wake.set()
            return
        if len(directories) > 1:
            role = "which holds the metadata log" if has_metadata_log else "the last one"
            error = StorageError(f"log directory {path}, {role}, failed: {error.message}")
        self.on_failure(error)

    def report_recovered(self, replica: Replica) -> None:
        """Tell the controller the directory of a replica that is lost according to the metadata but has an open log."""
        directory = self.log_manager.directory_of(replica.topic, replica.partition)
        if directory is not None and directory.directory_id:
            self._report(replica.key, directory.directory_id)

    def report_lost(self, key: PartitionKey) -> None:
        """Report a replica to the controller as lost, because its directory failed before the replica was hosted."""
        self._report(key, LOST_DIRECTORY)

    def _report(self, key: PartitionKey, directory_id: bytes) -> None:
        self._unreported[key] = directory_id
        self._wake.set()

    async def run(self, drop_failed: Callable[[], Iterable[PartitionKey]]) -> None:
        """Take failed directories offline and send reports, until cancelled.

        `drop_failed` stops hosting the replicas whose logs have failed and returns their keys.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._failing or self._unreported:
                if self._failing:
                    await self._take_offline(drop_failed)
                if self._unreported and not await self._exchange():
                    await asyncio.sleep(RETRY_BACKOFF_S)
            self._update_offline_ids()

    async def _take_offline(self, drop_failed: Callable[[], Iterable[PartitionKey]]) -> None:
        for path, error in list(self._failing.items()):
            await self.disk.run(partial(self.log_manager.take_offline, path, error))
            del self._failing[path]
            lost = list(drop_failed())
            for key in lost:
                self._report(key, LOST_DIRECTORY)
            log.error("log directory offline", directory=path, partitions=len(lost), error=error.message)

    def _update_offline_ids(self) -> None:
        """Publish the offline directories, now that the controller has every report.

        When a broker registers without one of its directories, the controller assumes that it lost every replica. A
        directory must therefore not disappear before its replicas are reported lost, or an empty log could be elected.
        """
        directories = self.log_manager.directories
        offline = [each.directory_id for each in directories if not each.is_online and each.directory_id]
        if offline != self.offline_ids:
            self.offline_ids = offline
            self.on_change()

    async def _exchange(self) -> bool:
        """Send one request and apply its response. Returns False if it must be sent again after a pause."""
        if self.broker_epoch() < 0:
            return False
        sent = dict(islice(self._unreported.items(), ASSIGNMENTS_MAX))
        response = await try_call(self.channel, ASSIGN_REPLICAS_TO_DIRS, self._request(sent), CALL_TIMEOUT_S)
        if response is None:
            return False
        for directory in response.directories:
            for topic in directory.topics:
                for partition in topic.partitions:
                    key = (topic.topic_id, partition.partition_index)
                    if self._unreported.get(key) == directory.id:  # an error means that the replica moved away
                        del self._unreported[key]
        return True

    def _request(self, sent: dict[PartitionKey, bytes]) -> m.AssignReplicasToDirsRequest:
        by_directory: dict[bytes, dict[bytes, list[m.AssignReplicasToDirsPartition]]] = {}
        for (topic_id, partition), directory_id in sent.items():
            topics = by_directory.setdefault(directory_id, {})
            topics.setdefault(topic_id, []).append(m.AssignReplicasToDirsPartition(partition))
        return m.AssignReplicasToDirsRequest(
            self.broker_id,
            self.broker_epoch(),
            [
                m.AssignReplicasToDirsDirectory(
                    directory_id,
                    [m.AssignReplicasToDirsTopic(topic_id, partitions) for topic_id, partitions in topics.items()],
                )
                for directory_id, topics in by_directory.items()
            ],
        )

    def metrics(self) -> Iterator[Metric]:
        """Yield how many and which log directories are offline. Callable from other threads."""
        prefix = "kafka_log_logmanager_"
        is_offline = {each.path: not each.is_online for each in list(self.log_manager.directories)}
        text = "Log directories that are offline."
        yield GaugeMetricFamily(prefix + "offlinelogdirectorycount", text, sum(is_offline.values()))
        text = "1 while this log directory is offline."
        by_directory = GaugeMetricFamily(prefix + "logdirectoryoffline", text, labels=["logdirectory"])
        for path, value in is_offline.items():
            by_directory.add_metric([path], value)
        yield by_directory
