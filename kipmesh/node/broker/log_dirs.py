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
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import PartitionKey
from kipmesh.core.metadata.states import LOST_DIRECTORY
from kipmesh.messages.table import ASSIGN_REPLICAS_TO_DIRS
from kipmesh.node.broker.controller_channel import RETRY_BACKOFF_S, ControllerChannel
from kipmesh.node.broker.disk import Disk
from kipmesh.node.broker.partitions import Partitions
from kipmesh.node.broker.replica import Replica
from kipmesh.rpc.client import TransportError
from kipmesh.rpc.server import RequestContext
from kipmesh.storage.data_folder import DataFolder, DataFolders
from kipmesh.storage.errors import StorageError
from kipmesh.storage.log_manager import LogManager

log = structlog.get_logger(__name__)

ASSIGNMENTS_MAX = 2000
"""Most replicas that one request puts into folders."""
CALL_TIMEOUT_S = 10.0


class LogDirs:
    """See the module."""

    def __init__(
        self,
        broker_id: int,
        log_manager: LogManager,
        disk: Disk,
        channel: ControllerChannel,
        broker_epoch: Callable[[], int],
        drop_failed: Callable[[], Iterable[PartitionKey]],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`drop_failed` takes the replicas whose logs have failed out of service, and gives them."""
        self._broker_id = broker_id
        self._log_manager = log_manager
        self._disk = disk
        self._channel = channel
        self._broker_epoch = broker_epoch
        self._drop_failed = drop_failed
        self._on_failure = on_failure
        self.on_change: Callable[[], None] = lambda: None
        """Called when `offline_ids` changed."""
        self.offline_ids: Sequence[bytes] = ()
        """Of the data folders that failed, and whose replicas the controller knows to be lost."""
        self._loop = asyncio.get_running_loop()
        self._failing: dict[str, StorageError] = {}
        # At most one entry a replica here, so this is bounded by the partitions.
        self._to_tell: dict[PartitionKey, bytes] = {}
        self._wake = asyncio.Event()

    @property
    def folders(self) -> DataFolders:
        """All of them."""
        return self._log_manager.folders

    def failed(self, path: str, error: StorageError) -> None:
        """A folder's disk failed; from any thread."""
        self._loop.call_soon_threadsafe(self._note, path, error)

    def _note(self, path: str, error: StorageError) -> None:
        left = {folder.path for folder in self.folders.online if folder.path not in self._failing}
        if path not in left:
            return
        if path == self.folders.metadata_path or not (left - {path}).intersection(self.folders.paths):
            self._on_failure(self._last_words(path, error))
            return
        self._failing[path] = error
        self._wake.set()

    def _last_words(self, path: str, error: StorageError) -> StorageError:
        if len(self.folders) == 1:
            return error
        what = "which holds the metadata log" if path == self.folders.metadata_path else "the last one"
        return StorageError(f"the data folder {path}, {what}, has failed: {error.message}")

    def found(self, replica: Replica) -> None:
        """The replica is here although the metadata calls it lost."""
        folder = self._log_manager.folder_of(replica.topic, replica.partition)
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
            await self._disk.run(partial(self._log_manager.take_offline, path, error))
            del self._failing[path]
            lost = list(self._drop_failed())
            for key in lost:
                self._tell(key, LOST_DIRECTORY)
            log.error("data folder offline", folder=path, partitions=len(lost), error=error.message)

    def _note_offline(self) -> None:
        """All that was lost is told: now, and not before, the controller may forget the folders.

        It takes a broker that registers without a folder it had for one that lost every replica. So what was not told
        when this process ends is not taken for an empty log that may be elected.
        """
        offline = [folder.directory_id for folder in self.folders if not folder.is_online and folder.directory_id]
        if offline != self.offline_ids:
            self.offline_ids = offline
            self.on_change()

    async def _exchange(self) -> bool:
        """One request and its answer; False when it is to be sent again after a pause."""
        if self._broker_epoch() < 0:
            return False
        sent = dict(islice(self._to_tell.items(), ASSIGNMENTS_MAX))
        request = self._request(sent)
        try:
            response: m.AssignReplicasToDirsResponse = await self._channel.call(
                ASSIGN_REPLICAS_TO_DIRS, request, CALL_TIMEOUT_S
            )
        except TransportError as error:
            log.warning("AssignReplicasToDirs failed", error=str(error))
            return False
        if response.error_code:
            # A stale broker epoch is for the next heartbeat to find out, which ends this process.
            log.warning("AssignReplicasToDirs refused", error=ErrorCode.of(response.error_code).name)
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
            self._broker_id,
            self._broker_epoch(),
            [
                m.AssignReplicasToDirsDirectory(
                    directory_id,
                    [m.AssignReplicasToDirsTopic(topic_id, partitions) for topic_id, partitions in topics.items()],
                )
                for directory_id, topics in by_folder.items()
            ],
        )


class LogDirsHandler:
    """DescribeLogDirs."""

    def __init__(self, folders: DataFolders, partitions: Partitions, disk: Disk) -> None:
        self._folders = folders
        self._partitions = partitions
        self._disk = disk

    async def describe_log_dirs(
        self, request: m.DescribeLogDirsRequest, context: RequestContext
    ) -> m.DescribeLogDirsResponse:
        """DescribeLogDirs (API key 35): the logs of each data folder, and why one is offline."""
        asked = {topic.topic: frozenset(topic.partitions) for topic in request.topics or ()}
        held: dict[str, dict[str, list[m.DescribeLogDirsPartition]]] = {}
        for replica in self._partitions:
            if asked and (wanted := asked.get(replica.topic)) is None:
                continue
            if asked and wanted and replica.partition not in wanted:
                continue
            lag = max(0, replica.high_watermark - replica.log.log_end_offset)
            topics = held.setdefault(replica.log.dir.rpartition("/")[0], {})
            topics.setdefault(replica.topic, []).append(
                m.DescribeLogDirsPartition(replica.partition, replica.log.size_bytes, lag)
            )
        results = [await self._describe(folder, held.get(folder.path, {})) for folder in self._folders]
        return m.DescribeLogDirsResponse(results=results)

    async def _describe(
        self, folder: DataFolder, topics: dict[str, list[m.DescribeLogDirsPartition]]
    ) -> m.DescribeLogDirsResult:
        if folder.error is not None:
            code = ErrorCode.KAFKA_STORAGE_ERROR
            return m.DescribeLogDirsResult(code, folder.path, error_message=folder.error.message)
        total, usable = await self._disk.run(partial(_space, folder.path))
        return m.DescribeLogDirsResult(
            ErrorCode.NONE,
            folder.path,
            [m.DescribeLogDirsTopic(name, sorted(partitions)) for name, partitions in sorted(topics.items())],
            total,
            usable,
        )


def _space(path: str) -> tuple[int, int]:
    """Bytes of the disk, and those that are free; -1 where that is not known. Blocks."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return -1, -1
    return usage.total, usage.free


class LogDirCollector(Collector):
    """Which data folders are offline."""

    def __init__(self, folders: DataFolders) -> None:
        self._folders = folders

    def describe(self) -> Iterator[Metric]:
        """The same metrics."""
        return self.collect()

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
