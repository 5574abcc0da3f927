"""The data directories of a node: locking, identity, and going offline.

An online directory is locked by this process and has `meta.properties` with the cluster id, node id and its own id
(`directory.id`). An offline directory failed or could not be opened: it is not read or written until the next start.

Invariants: an offline directory stays offline. The lock is held exactly while the directory is online. The directory of
the metadata log is online, or no directory is open.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from kipmesh.core.errors import CorruptRecordError, ErrorCode, InvalidConfigError, KafkaError
from kipmesh.storage import checkpoint
from kipmesh.storage.checkpoint import MetaProperties, TopicPartition, parse_uuid, uuid_text
from kipmesh.storage.fs import FileLock, FileSystem, StorageError, is_broken

_LOG = logging.getLogger(__name__)

_DIRECTORY = re.compile(r"^(?P<topic>[a-zA-Z0-9._-]{1,249})-(?P<partition>\d{1,10})$")
_DELETED_DIRECTORY = re.compile(r"^.+-\d+\.[0-9a-f]{32}-delete$")

OnDirectoryFailed = Callable[[str, StorageError], None]
"""Called with the path for each failure of a data directory's disk, on any thread."""


class DirectoryContents(NamedTuple):
    """Logs and checkpoints found in a data directory."""

    logs: Sequence[tuple[TopicPartition, int, int]]
    """(partition, checkpointed recovery point, checkpointed log start), offsets 0 if missing."""
    high_watermarks: Mapping[TopicPartition, int]
    checkpointed: Set[TopicPartition]
    """All partitions named in a checkpoint, whether their log exists or not."""


@dataclass(slots=True)
class DataDirectory:
    """One data directory of a node, online or offline."""

    path: str
    directory_id: bytes = b""
    """16 bytes, or b"" if the directory could not be opened."""
    lock: FileLock | None = None
    clean_epoch: int | None = None
    """Broker epoch of the last stop if it was clean (-1: unreadable), else None."""
    log_count: int = 0
    error: StorageError | None = None
    """Why the directory is offline; None while it is online."""
    first_dirty_offsets: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Checkpointed offsets up to which the logs are compacted."""

    @property
    def is_online(self) -> bool:
        """Whether the directory was opened and has not failed since."""
        return self.error is None

    def set_offline(self, error: StorageError) -> None:
        """Take the directory offline because of `error`, and release its lock.

        If it is already offline, it keeps the first error.
        """
        self.error = self.error or error
        self.release()

    def release(self) -> None:
        """Release the lock, if it is held. Ignores errors."""
        lock, self.lock = self.lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                lock.release()

    def is_missing(self, fs: FileSystem) -> bool:
        """Return whether the directory was removed or unmounted: it has no `meta.properties`.

        Open files would still accept writes, which would be lost.
        """
        return not fs.exists(f"{self.path}/{checkpoint.META_PROPERTIES}")

    def check_exists(self, fs: FileSystem) -> None:
        """Raise FileNotFoundError if the directory was removed or unmounted.

        The caller must not recreate it, because the new directory could be below a mount point.
        """
        if self.is_missing(fs):
            raise FileNotFoundError(errno.ENOENT, "the data directory is missing", self.path)

    def read_contents(self, fs: FileSystem) -> DirectoryContents:
        """Return the logs and checkpoints in the directory. A corrupt checkpoint counts as empty.

        Also removes the directories of deleted logs and sets `first_dirty_offsets`. Raises OSError.
        """
        recovery_points = self._offsets(fs, checkpoint.RECOVERY_POINT_CHECKPOINT)
        log_starts = self._offsets(fs, checkpoint.LOG_START_CHECKPOINT)
        high_watermarks = self._offsets(fs, checkpoint.HIGH_WATERMARK_CHECKPOINT)
        self.first_dirty_offsets = self._offsets(fs, checkpoint.CLEANER_CHECKPOINT)
        logs = []
        for name, stat in sorted(fs.list_dir(self.path).items()):
            if stat.is_dir and _DELETED_DIRECTORY.match(name):
                fs.remove_tree(f"{self.path}/{name}")
            elif stat.is_dir and (match := _DIRECTORY.match(name)):
                key = (match["topic"], int(match["partition"]))
                logs.append((key, recovery_points.get(key, 0), log_starts.get(key, 0)))
        checkpointed = recovery_points.keys() | log_starts.keys() | high_watermarks.keys()
        return DirectoryContents(logs, high_watermarks, checkpointed | self.first_dirty_offsets.keys())

    def write_first_dirty(self, fs: FileSystem, offsets: Mapping[TopicPartition, int]) -> None:
        """Write the checkpoint of first dirty offsets if they changed. Omits offset 0. Raises OSError."""
        values = {key: offset for key, offset in offsets.items() if offset > 0}
        if values != self.first_dirty_offsets:
            checkpoint.write_offsets(fs, f"{self.path}/{checkpoint.CLEANER_CHECKPOINT}", values)
            self.first_dirty_offsets = values

    def _offsets(self, fs: FileSystem, name: str) -> dict[TopicPartition, int]:
        try:
            return checkpoint.read_offsets(fs, f"{self.path}/{name}")
        except CorruptRecordError as error:
            _LOG.warning("ignoring corrupt checkpoint error=%s", error.message)
            return {}


def open_directory(fs: FileSystem, path: str, cluster_id: str, node_id: int) -> DataDirectory:
    """Open a data directory: create it if missing, lock it, and remove its clean-shutdown marker.

    The result is online and has the marker's epoch. Raises OSError; StorageError if the directory is locked, usually by
    another process; CorruptRecordError if `meta.properties` is invalid; KafkaError(INCONSISTENT_CLUSTER_ID) if it
    belongs to another cluster; InvalidConfigError if it belongs to another node.
    """
    fs.make_dirs(path)
    try:
        lock = fs.lock(f"{path}/.lock")
    except BlockingIOError:
        raise StorageError(f"data directory {path} is in use by another process") from None
    try:
        directory_id = _identify(fs, path, cluster_id, node_id)
        clean_epoch = checkpoint.read_clean_shutdown(fs, path)
        checkpoint.remove_clean_shutdown(fs, path)
    except BaseException:
        lock.release()
        raise
    return DataDirectory(path, directory_id, lock, clean_epoch)


def _identify(fs: FileSystem, path: str, cluster_id: str, node_id: int) -> bytes:
    """Return the directory id. Assigns the directory to the node if it has no `meta.properties` or no id.

    Raises the errors of `open_directory`, except StorageError for a locked directory.
    """
    properties = checkpoint.read_meta_properties(fs, path)
    if properties is not None and properties.cluster_id != cluster_id:
        raise KafkaError(
            ErrorCode.INCONSISTENT_CLUSTER_ID,
            f"data directory {path} belongs to cluster {properties.cluster_id!r}, but cluster.id is {cluster_id!r}",
        )
    if properties is not None and properties.node_id != node_id:
        raise InvalidConfigError(
            f"data directory {path} belongs to node {properties.node_id}, but node.id is {node_id}"
        )
    known = parse_uuid(properties.directory_id) if properties is not None else b""
    if known:
        return known
    directory_id = uuid.uuid4().bytes
    checkpoint.write_meta_properties(fs, path, MetaProperties(cluster_id, node_id, uuid_text(directory_id)))
    if properties is None:
        _sync_parents(fs, path)
    return directory_id


def _sync_parents(fs: FileSystem, path: str) -> None:
    """Make the names of a new data directory and of its new parents durable."""
    while path not in ("", "/"):
        path = path.rpartition("/")[0] or ("/" if path.startswith("/") else ".")
        with contextlib.suppress(PermissionError):
            fs.sync_dir(path)
        if path == ".":
            return


def check_no_duplicates(logs: Iterable[tuple[str, TopicPartition]]) -> None:
    """Raise StorageError if a log is in more than one data directory. The message names all such logs.

    `logs`: pairs of data directory path and partition.
    """
    directories: dict[TopicPartition, list[str]] = {}
    for path, key in logs:
        directories.setdefault(key, []).append(path)
    found = [
        f"{topic}-{partition} in {' and '.join(paths)}"
        for (topic, partition), paths in sorted(directories.items())
        if len(paths) > 1
    ]
    if found:
        raise StorageError(
            f"logs are in more than one data directory: {', '.join(found)}; move all but the newest copy of each "
            "elsewhere, restart, and delete them when these partitions are in sync"
        )


def _check_disjoint(paths: Sequence[str]) -> None:
    """Raise InvalidConfigError if there are no paths, or if paths are repeated or nested."""
    absolute = [os.path.abspath(path) for path in paths]
    for path, where in zip(paths, absolute, strict=True):
        for other, place in zip(paths, absolute, strict=True):
            if where != place and where.startswith(place.rstrip("/") + "/"):
                raise InvalidConfigError(f"log.dirs must not be nested, but {path} is inside {other}")
    if not paths or len(set(absolute)) != len(paths):
        raise InvalidConfigError(f"log.dirs must name at least one directory and none twice, got {', '.join(paths)!r}")


class DataDirectories:
    """All data directories of a node. Changed only on the thread that loads and creates logs."""

    def __init__(
        self, fs: FileSystem, log_dirs: Sequence[str], metadata_dir: str, on_failed: OnDirectoryFailed | None
    ) -> None:
        """`log_dirs`: directories for the logs of partitions. `metadata_dir`: directory for the metadata log.

        If `metadata_dir` is "", it is the first of `log_dirs`. `on_failed`: see OnDirectoryFailed. Raises
        InvalidConfigError if `log_dirs` is empty, or has repeated or nested paths.
        """
        self.paths = [path.rstrip("/") or "/" for path in log_dirs]
        """Directories for the logs of partitions."""
        _check_disjoint(self.paths)
        self.metadata_path = (metadata_dir.rstrip("/") or "/") if metadata_dir else self.paths[0]
        """Directory of the metadata log. Updated when an existing metadata log is loaded."""
        self._fs = fs
        self._on_failed = on_failed
        self._directories: list[DataDirectory] = []

    def __iter__(self) -> Iterator[DataDirectory]:
        return iter(list(self._directories))

    def __len__(self) -> int:
        return len(self._directories)

    @property
    def online(self) -> list[DataDirectory]:
        """All online directories."""
        return [directory for directory in self._directories if directory.is_online]

    @property
    def for_partitions(self) -> list[DataDirectory]:
        """All directories for logs of partitions, online or not. Excludes a directory with only the metadata log."""
        return [directory for directory in self._directories if directory.path in self.paths]

    def open_all(self, cluster_id: str, node_id: int) -> None:
        """Open all directories. One that fails with an OSError stays offline.

        If the metadata log's directory fails, raises its OSError. Raises the KafkaErrors of `open_directory` for any
        directory.
        """
        for path in dict.fromkeys((*self.paths, self.metadata_path)):
            try:
                self._directories.append(open_directory(self._fs, path, cluster_id, node_id))
            except OSError as error:
                self._directories.append(directory := DataDirectory(path))
                self.exclude(directory, error)

    def exclude(self, directory: DataDirectory, error: OSError) -> None:
        """Take a directory offline because loading it failed.

        Raises `error` if it is the directory of the metadata log.
        """
        if directory.path == self.metadata_path:
            raise error
        why = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        failed = StorageError(f"cannot load data directory {directory.path}, it stays offline: {why}")
        _LOG.error("data directory offline error=%s", failed.message)
        directory.set_offline(failed)

    @property
    def clean_epoch(self) -> int:
        """Broker epoch of the last shutdown if it was clean in every directory, otherwise -1.

        Also -1 if a directory is offline, or if the markers have different epochs.
        """
        epochs = {directory.clean_epoch if directory.is_online else None for directory in self._directories}
        epoch = epochs.pop() if len(epochs) == 1 else None
        return -1 if epoch is None else epoch

    def for_new_log(self, *, is_metadata: bool) -> DataDirectory:
        """Return the directory for a new log: the online one with the fewest logs, or the metadata log's directory.

        Raises StorageError if no such directory is online.
        """
        paths = [self.metadata_path] if is_metadata else self.paths
        directories = [directory for directory in self.online if directory.path in paths]
        if not directories:
            raise StorageError(f"no data directory is online, configured are {', '.join(paths)}")
        return min(directories, key=lambda directory: directory.log_count)

    def report_failure(self, path: str, error: StorageError) -> None:
        """Call `on_failed`, if set, because a log in the directory failed permanently."""
        if self._on_failed:
            self._on_failed(path, error)

    def report_io_error(self, directory: DataDirectory, error: OSError, raised: StorageError) -> StorageError:
        """Call `on_failed` if `error` means that the disk failed, or if the directory is missing. Return `raised`.

        Other errors, for example a full disk, are not reported.
        """
        if is_broken(error) or directory.is_missing(self._fs):
            self.report_failure(directory.path, raised)
        return raised

    def release(self) -> None:
        """Release the locks of all directories, and forget the directories."""
        for directory in self._directories:
            directory.release()
        self._directories.clear()
