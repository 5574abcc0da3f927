"""A broker's data folders: one that fails is taken offline, and the controller is told (KIP-858, ADR 8).

| what happens                                      | then                                                            |
| ------------------------------------------------- | --------------------------------------------------------------- |
| a folder's disk fails                             | its replicas answer KAFKA_STORAGE_ERROR and are told as lost    |
| it holds the metadata log, or is the last one     | the process ends                                                |
| a replica that the metadata calls lost has a log  | the controller is told its folder: it is not lost any more      |
| one has none, and no folder is offline            | it begins anew where another broker leads, and is told as above |

A lost replica without a log is not made anew where nobody else leads, nor while a folder is offline that may have it:
what was acknowledged may be there alone.

Belongs to the event loop, but for `failed`. Invariant: what is to be told is told until the controller has taken it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kipmesh import messages as m
from kipmesh.broker.membership.controller_channel import RETRY_BACKOFF_S, ControllerChannel, try_call
from kipmesh.broker.replication.replica import Disk, Replica
from kipmesh.core.metadata.image import PartitionKey
from kipmesh.core.metadata.states import LOST_DIRECTORY
from kipmesh.messages.table import ASSIGN_REPLICAS_TO_DIRS
from kipmesh.storage.data_directory import DataDirectories
from kipmesh.storage.fs import StorageError
from kipmesh.storage.log_manager import LogManager

log = structlog.get_logger(__name__)

ASSIGNMENTS_MAX = 2000
"""Most replicas that one request puts into folders."""
CALL_TIMEOUT_S = 10.0


@dataclass(eq=False)
class LogDirs:
    """See the module.

    `drop_failed` takes the replicas whose logs have failed out of service, and gives them.
    """

    broker_id: int
    log_manager: LogManager
    disk: Disk
    channel: ControllerChannel
    broker_epoch: Callable[[], int]
    drop_failed: Callable[[], Iterable[PartitionKey]]
    on_failure: Callable[[BaseException], None]

    def __post_init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called when `offline_ids` changed."""
        self.offline_ids: Sequence[bytes] = ()
        """Of the data folders that failed, and whose replicas the controller knows to be lost."""
        self._loop = asyncio.get_running_loop()
        self._failing: dict[str, StorageError] = {}
        # At most one entry a replica here, so this is bounded by the partitions.
        self._to_tell: dict[PartitionKey, bytes] = {}
        self._wake = asyncio.Event()

    def failed(self, path: str, error: StorageError) -> None:
        """A folder's disk failed; from any thread."""
        self._loop.call_soon_threadsafe(self._note, path, error)

    def _note(self, path: str, error: StorageError) -> None:
        directories = self.log_manager.directories
        left = {folder.path for folder in directories.online if folder.path not in self._failing}
        if path not in left:
            return
        has_metadata_log = path == directories.metadata_path
        if not has_metadata_log and (left - {path}).intersection(directories.paths):
            self._failing[path] = error
            self._wake.set()
            return
        if len(directories) > 1:
            what = "which holds the metadata log" if has_metadata_log else "the last one"
            error = StorageError(f"the data folder {path}, {what}, has failed: {error.message}")
        self.on_failure(error)

    def found(self, replica: Replica) -> None:
        """The replica is here although the metadata calls it lost."""
        folder = self.log_manager.directory_of(replica.topic, replica.partition)
        if folder is not None and folder.directory_id:
            self._tell((replica.topic_id, replica.partition), folder.directory_id)

    def lost(self, key: PartitionKey) -> None:
        """The replica's folder has failed, and `drop_failed` does not give it."""
        self._tell(key, LOST_DIRECTORY)

    def _tell(self, key: PartitionKey, directory_id: bytes) -> None:
        self._to_tell[key] = directory_id
        self._wake.set()

    async def run(self) -> None:
        """Take failed folders offline, and tell the controller, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._failing or self._to_tell:
                if self._failing:
                    await self._take_offline()
                if self._to_tell and not await self._exchange():
                    await asyncio.sleep(RETRY_BACKOFF_S)
            self._note_offline()

    async def _take_offline(self) -> None:
        for path, error in list(self._failing.items()):
            await self.disk.run(partial(self.log_manager.take_offline, path, error))
            del self._failing[path]
            lost = list(self.drop_failed())
            for key in lost:
                self._tell(key, LOST_DIRECTORY)
            log.error("data folder offline", folder=path, partitions=len(lost), error=error.message)

    def _note_offline(self) -> None:
        """All that was lost is told: now, and not before, the controller may forget the folders.

        It takes a broker that registers without a folder it had for one that lost every replica. So what was not told
        when this process ends is not taken for an empty log that may be elected.
        """
        offline = [
            folder.directory_id
            for folder in self.log_manager.directories
            if not folder.is_online and folder.directory_id
        ]
        if offline != self.offline_ids:
            self.offline_ids = offline
            self.on_change()

    async def _exchange(self) -> bool:
        """One request and its answer; False when it is to be sent again after a pause."""
        if self.broker_epoch() < 0:
            return False
        sent = dict(islice(self._to_tell.items(), ASSIGNMENTS_MAX))
        response = await try_call(self.channel, ASSIGN_REPLICAS_TO_DIRS, self._request(sent), CALL_TIMEOUT_S)
        if response is None:
            return False
        for directory in response.directories:
            for topic in directory.topics:
                for partition in topic.partitions:
                    key = (topic.topic_id, partition.partition_index)
                    if self._to_tell.get(key) == directory.id:  # an error says that it is not ours any more
                        del self._to_tell[key]
        return True

    def _request(self, sent: dict[PartitionKey, bytes]) -> m.AssignReplicasToDirsRequest:
        by_folder: dict[bytes, dict[bytes, list[m.AssignReplicasToDirsPartition]]] = {}
        for (topic_id, partition), directory_id in sent.items():
            topics = by_folder.setdefault(directory_id, {})
            topics.setdefault(topic_id, []).append(m.AssignReplicasToDirsPartition(partition))
        return m.AssignReplicasToDirsRequest(
            self.broker_id,
            self.broker_epoch(),
            [
                m.AssignReplicasToDirsDirectory(
                    directory_id,
                    [m.AssignReplicasToDirsTopic(topic_id, partitions) for topic_id, partitions in topics.items()],
                )
                for directory_id, topics in by_folder.items()
            ],
        )


class LogDirCollector(Collector):
    """Which data folders are offline."""

    def __init__(self, folders: DataDirectories) -> None:
        self._folders = folders

    def collect(self) -> Iterator[Metric]:
        """O(folders)."""
        folders = list(self._folders)
        prefix = "kafka_log_logmanager_"
        yield GaugeMetricFamily(
            prefix + "offlinelogdirectorycount",
            "Data folders that are offline.",
            sum(not folder.is_online for folder in folders),
        )
        each = GaugeMetricFamily(
            prefix + "logdirectoryoffline", "1 while this data folder is offline.", labels=["logdirectory"]
        )
        for folder in folders:
            each.add_metric([folder.path], not folder.is_online)
        yield each
