"""A node's data directories: taking them, whose they are, and what becomes of those that fail.

A directory that is online is locked by this process and has `meta.properties` with the cluster, the node and its own
id (`directory.id`). An offline one has failed, or could not be opened: nothing is read or written there until the
next start.

Invariants: what is offline stays offline; the lock is held exactly while the directory is online; the directory of the
metadata log is online, or there are none.
"""

from __future__ import annotations

import base64
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
from kipmesh.storage.checkpoint import MetaProperties, TopicPartition, uuid_text
from kipmesh.storage.fs import FileLock, FileSystem, StorageError, is_broken

_LOG = logging.getLogger(__name__)

_ID_BYTES = 16
_DIRECTORY = re.compile(r"^(?P<topic>[a-zA-Z0-9._-]{1,249})-(?P<partition>\d{1,10})$")
_DELETED_DIRECTORY = re.compile(r"^.+-\d+\.[0-9a-f]{32}-delete$")

OnDirectoryFailed = Callable[[str, StorageError], None]
"""Told of each failure of a data directory's disk, with its path, from any thread."""


class DirectoryContents(NamedTuple):
    """What a data directory holds when it is loaded."""

    logs: Sequence[tuple[TopicPartition, int, int]]
    """Each with its checkpointed recovery point and log start, 0 where there is none."""
    high_watermarks: Mapping[TopicPartition, int]
    checkpointed: Set[TopicPartition]
    """Everything that a checkpoint names, there or not."""


@dataclass(slots=True)
class DataDirectory:
    """See the module."""

    path: str
    directory_id: bytes = b""
    """16 bytes; b"" of a directory that could not be opened."""
    lock: FileLock | None = None
    clean_epoch: int | None = None
    """The broker epoch of the last stop if it was clean, -1 if the marker is not readable; None if it was not."""
    log_count: int = 0
    error: StorageError | None = None
    """Why it is offline; None while it is online."""
    first_dirty_offsets: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Up to where compaction has seen the logs, as its checkpoint has it."""

    @property
    def is_online(self) -> bool:
        """Whether it may be used."""
        return self.error is None

    def go_offline(self, error: StorageError) -> None:
        """Use it no more; other processes may take it."""
        self.error = self.error or error
        self.release()

    def release(self) -> None:
        """Give the lock back; idempotent."""
        lock, self.lock = self.lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                lock.release()

    def is_gone(self, fs: FileSystem) -> bool:
        """Whether it was removed or unmounted: open files go on taking writes then, which nobody finds again."""
        return not fs.exists(f"{self.path}/{checkpoint.META_PROPERTIES}")

    def check_there(self, fs: FileSystem) -> None:
        """FileNotFoundError when it is gone: nothing may make it anew, in what is below a mount point, say."""
        if self.is_gone(fs):
            raise FileNotFoundError(errno.ENOENT, "the data folder is gone", self.path)

    def contents(self, fs: FileSystem) -> DirectoryContents:
        """What is there; logs that were deleted are removed. OSError."""
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
        """Checkpoint up to where compaction has seen the logs, if that changed. OSError."""
        values = {key: offset for key, offset in offsets.items() if offset > 0}
        if values != self.first_dirty_offsets:
            checkpoint.write_offsets(fs, f"{self.path}/{checkpoint.CLEANER_CHECKPOINT}", values)
            self.first_dirty_offsets = values

    def _offsets(self, fs: FileSystem, name: str) -> dict[TopicPartition, int]:
        try:
            return checkpoint.read_offsets(fs, f"{self.path}/{name}")
        except CorruptRecordError as error:
            _LOG.warning("%s: it is taken as empty", error.message)
            return {}


def take(fs: FileSystem, path: str, cluster_id: str, node_id: int) -> DataDirectory:
    """Lock the directory, made if it is not there, and take the marker of a clean stop away. OSError.

    StorageError when another process has it; KafkaError when it is of another cluster or node.
    """
    fs.make_dirs(path)
    try:
        lock = fs.lock(f"{path}/.lock")
    except BlockingIOError:
        raise StorageError(f"the data folder {path} is in use by another process") from None
    try:
        directory_id = _identify(fs, path, cluster_id, node_id)
        clean_epoch = checkpoint.read_clean_shutdown(fs, path)
        checkpoint.remove_clean_shutdown(fs, path)
    except BaseException:
        lock.release()
        raise
    return DataDirectory(path, directory_id, lock, clean_epoch)


def _identify(fs: FileSystem, path: str, cluster_id: str, node_id: int) -> bytes:
    """The id of the directory, which is given one if it has none."""
    properties = checkpoint.read_meta_properties(fs, path)
    if properties is not None and properties.cluster_id != cluster_id:
        raise KafkaError(
            ErrorCode.INCONSISTENT_CLUSTER_ID,
            f"the data folder {path} is of cluster {properties.cluster_id!r}, not of {cluster_id!r}",
        )
    if properties is not None and properties.node_id != node_id:
        raise InvalidConfigError(f"the data folder {path} is of node {properties.node_id}, but node.id is {node_id}")
    known = _parse_id(properties.directory_id) if properties is not None else b""
    if known:
        return known
    directory_id = uuid.uuid4().bytes
    checkpoint.write_meta_properties(fs, path, MetaProperties(cluster_id, node_id, uuid_text(directory_id)))
    if properties is None:
        _sync_parents(fs, path)
    return directory_id


def _parse_id(text: str) -> bytes:
    """The id that `uuid_text` wrote; b"" for anything else."""
    try:
        directory_id = base64.urlsafe_b64decode(text + "==")
    except ValueError:
        return b""
    return directory_id if len(directory_id) == _ID_BYTES else b""


def _sync_parents(fs: FileSystem, path: str) -> None:
    """A new data directory, and the directories made above it, outlive a power cut."""
    while path not in ("", "/"):
        path = path.rpartition("/")[0] or ("/" if path.startswith("/") else ".")
        with contextlib.suppress(PermissionError):
            fs.sync_dir(path)
        if path == ".":
            return


def check_no_duplicates(logs: Iterable[tuple[str, TopicPartition]]) -> None:
    """Logs by data directory and partition; StorageError that names all that are in several directories."""
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
            f"logs are in more than one data folder: {', '.join(found)}. Move all but the newest of each somewhere "
            "else, start again, and delete them when those partitions are in sync"
        )


def _check_apart(paths: Sequence[str]) -> None:
    """InvalidConfigError when a directory is another one, or in it."""
    absolute = [os.path.abspath(path) for path in paths]
    for path, where in zip(paths, absolute, strict=True):
        for other, place in zip(paths, absolute, strict=True):
            if where != place and where.startswith(place.rstrip("/") + "/"):
                raise InvalidConfigError(f"log.dirs: {path} is inside {other}; data folders are not nested")
    if not paths or len(set(absolute)) != len(paths):
        raise InvalidConfigError("log.dirs names no folder, or one twice")


class DataDirectories:
    """All of a node's. Changed by the thread that loads and creates logs alone."""

    def __init__(
        self, fs: FileSystem, log_dirs: Sequence[str], metadata_dir: str, on_failed: OnDirectoryFailed | None
    ) -> None:
        """`metadata_dir` is where the metadata log is made, "" for the first of `log_dirs`; InvalidConfigError."""
        self.paths = [path.rstrip("/") or "/" for path in log_dirs]
        """Of the directories that partitions' logs are made in."""
        _check_apart(self.paths)
        self.metadata_path = (metadata_dir.rstrip("/") or "/") if metadata_dir else self.paths[0]
        """Where the metadata log is made; once it is loaded, where it is."""
        self._fs = fs
        self._on_failed = on_failed
        self._directories: list[DataDirectory] = []

    def __iter__(self) -> Iterator[DataDirectory]:
        return iter(list(self._directories))

    def __len__(self) -> int:
        return len(self._directories)

    @property
    def online(self) -> list[DataDirectory]:
        """Those that may be used."""
        return [directory for directory in self._directories if directory.is_online]

    @property
    def for_partitions(self) -> list[DataDirectory]:
        """All but one that is the metadata log's alone."""
        return [directory for directory in self._directories if directory.path in self.paths]

    def take_all(self, cluster_id: str, node_id: int) -> None:
        """Take them; OSError when the one of the metadata log cannot be had, KafkaError when one is not ours."""
        for path in dict.fromkeys((*self.paths, self.metadata_path)):
            try:
                self._directories.append(take(self._fs, path, cluster_id, node_id))
            except OSError as error:
                self._directories.append(directory := DataDirectory(path))
                self.leave_out(directory, error)

    def leave_out(self, directory: DataDirectory, error: OSError) -> None:
        """Go on without a directory that cannot be loaded. The error, when it holds the metadata log."""
        if directory.path == self.metadata_path:
            raise error
        why = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        failed = StorageError(f"the data folder {directory.path} cannot be loaded and stays offline: {why}")
        _LOG.error("%s", failed.message)
        directory.go_offline(failed)

    @property
    def clean_epoch(self) -> int:
        """The broker epoch of the last stop if it was clean in every one of them, else -1."""
        epochs = {directory.clean_epoch if directory.is_online else None for directory in self._directories}
        epoch = epochs.pop() if len(epochs) == 1 else None
        return -1 if epoch is None else epoch

    def for_new_log(self, *, is_metadata: bool) -> DataDirectory:
        """Where a new log goes: the directory with the fewest; the metadata log to its own. StorageError."""
        paths = [self.metadata_path] if is_metadata else self.paths
        directories = [directory for directory in self.online if directory.path in paths]
        if not directories:
            raise StorageError("no data folder is left")
        return min(directories, key=lambda directory: directory.log_count)

    def failed(self, path: str, error: StorageError) -> None:
        """A log in the directory failed for good."""
        if self._on_failed:
            self._on_failed(path, error)

    def met(self, directory: DataDirectory, error: OSError, raised: StorageError) -> StorageError:
        """Report an error of a directory's own files or a new log if the disk is at fault or gone. Return `raised`."""
        if is_broken(error) or directory.is_gone(self._fs):
            self.failed(directory.path, raised)
        return raised

    def release(self) -> None:
        """Let them go."""
        for directory in self._directories:
            directory.release()
        self._directories.clear()
