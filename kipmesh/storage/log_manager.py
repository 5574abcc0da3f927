"""All logs of a node: data directories, partitions, checkpoints, startup and shutdown.

All methods block. Run `load` and `close` on a worker thread. `checkpoint_*` may run on a worker thread while the owner
creates and deletes partitions. Only the owner calls the other methods.

A data directory contains `.lock` (one process at a time), `meta.properties` (one node of one cluster), four offset
checkpoints, the clean-shutdown marker, and a directory `<topic>-<partition>` per log. `close` writes the marker when
everything is durable; `load` removes it first.

`on_directory_failed` receives each data directory whose disk fails or that is missing, checked by each checkpoint and
new log. The owner then calls `take_offline`. A directory that cannot be opened is offline from the start. Logs of an
offline directory are unavailable until the next start and are not recreated elsewhere. `load` fails without the
directory of the metadata log.

Invariants: a partition is in one data directory. A checkpoint entry belongs to the current partition: a recreated
partition never gets offsets of its predecessor.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType

from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID
from kipmesh.storage import checkpoint
from kipmesh.storage.checkpoint import TopicPartition, uuid_text
from kipmesh.storage.data_directory import DataDirectories, DataDirectory, OnDirectoryFailed, check_no_duplicates
from kipmesh.storage.fs import FileSystem, OpenFiles, StorageError
from kipmesh.storage.log.log import Log, OnFailed
from kipmesh.storage.log.log_loader import open_log
from kipmesh.storage.quorum import metadata_check

_LOG = logging.getLogger(__name__)

_NAME_MAX = 255
_CLOSING_THREADS = 8


class LogManager:
    """Loads, creates, deletes, checkpoints and closes the logs of a node. See the module docstring."""

    def __init__(
        self,
        fs: FileSystem,
        log_dirs: Sequence[str],
        *,
        cluster_id: str,
        node_id: int,
        defaults: TopicConfig,
        open_files_max: int = 4000,
        on_progress: Callable[[int, int], None] | None = None,
        on_log_failed: OnFailed | None = None,
        on_directory_failed: OnDirectoryFailed | None = None,
        metadata_dir: str = "",
    ) -> None:
        """`on_progress(loaded, total)` is called by `load` after each log.

        `on_log_failed(log, error)` is called once per log, on a permanent failure, on the thread that encountered it
        (owner, flush, checkpoint or `close`). `on_directory_failed(path, error)` is then called for its directory, and
        also if a file of the directory itself cannot be written. Both must be fast and must not raise.

        `metadata_dir`: where the metadata log is created, by default the first of `log_dirs`. A directory not in
        `log_dirs` gets no other log. Raises InvalidConfigError for missing, repeated or nested directories.
        """
        self.directories = DataDirectories(fs, log_dirs, metadata_dir, on_directory_failed)
        self.fs = fs
        self.files = OpenFiles(fs, open_files_max)
        self.clean_shutdown_epoch = -1
        """Broker epoch of the last stop if it was clean in every data directory, else -1."""
        self._cluster_id = cluster_id
        self._node_id = node_id
        self._defaults = defaults
        self._on_progress = on_progress
        self._on_log_failed = on_log_failed
        self._logs: dict[TopicPartition, Log] = {}
        self._metadata_log: Log | None = None
        self.metadata_damage: str | None = None
        """Description of durable data that the metadata log lost. The log is then neither loaded nor changed."""
        self.metadata_recovery_point = 0
        """Checkpointed recovery point of the metadata log."""
        self._directory_of: dict[TopicPartition, DataDirectory] = {}
        self._offline: dict[TopicPartition, bytes] = {}  # topic ids of logs in directories that went offline
        self.high_watermarks: dict[TopicPartition, int] = {}
        """Last checkpointed high watermarks. They may exceed those of the logs."""
        self._stale: set[TopicPartition] = set()  # removed partitions that may be in a checkpoint
        self._deleted: list[tuple[int, str]] = []
        self._checkpoint_lock = threading.Lock()
        self._damaged = ""

    # -- lookup

    @property
    def logs(self) -> Mapping[TopicPartition, Log]:
        """Logs by (topic, partition), without the metadata log."""
        return MappingProxyType(self._logs)

    def get(self, topic: str, partition: int) -> Log | None:
        """Return the log, or None if it does not exist or is offline. Includes the metadata log."""
        if topic == CLUSTER_METADATA_TOPIC:
            return self._metadata_log
        return self._logs.get((topic, partition))

    def directory_of(self, topic: str, partition: int) -> DataDirectory | None:
        """Return the online data directory of the log, or None if the log does not exist or is offline."""
        return self._directory_of.get((topic, partition))

    def _every_log(self) -> list[Log]:
        return [*self._logs.values(), *([self._metadata_log] if self._metadata_log else [])]

    def _logs_in(self, directory: DataDirectory) -> list[Log]:
        return [log for log in self._every_log() if log.dir.rpartition("/")[0] == directory.path]

    # -- starting

    def load(self, now_ms: int) -> None:
        """Lock the data directories and load every log. `now_ms` is wall-clock time.

        Directories that cannot be read go offline, except that of the metadata log. Any other error is raised after all
        directories are released: StorageError if the disk of the metadata log fails, another process uses a directory
        or a log is in two directories; CorruptRecordError for an invalid `meta.properties` or an unreadable segment;
        KafkaError(INCONSISTENT_CLUSTER_ID) or InvalidConfigError if a directory belongs to another cluster or node.
        """
        try:
            self.directories.open_all(self._cluster_id, self._node_id)
            self._load_logs(now_ms)
            self.clean_shutdown_epoch = self.directories.clean_epoch
        except OSError as error:
            self.abandon()
            why = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
            raise StorageError(f"cannot load data directories {', '.join(self.directories.paths)}: {why}") from error
        except BaseException:
            self.abandon()
            raise

    def _load_logs(self, now_ms: int) -> None:
        found = []
        for directory in self.directories.online:
            try:
                contents = directory.read_contents(self.fs)
            except OSError as error:
                self.directories.exclude(directory, error)
                continue
            found += [(directory, *entry) for entry in contents.logs]
            self.high_watermarks |= contents.high_watermarks
            self._stale |= contents.checkpointed
        check_no_duplicates((directory.path, key) for directory, key, *_ in found)
        # The metadata log first, because its directory is required.
        found.sort(key=lambda item: item[1][0] != CLUSTER_METADATA_TOPIC)
        for number, (directory, key, recovery_point, log_start) in enumerate(found):
            if not directory.is_online:
                continue
            if key[0] == CLUSTER_METADATA_TOPIC and self._is_metadata_damaged(
                directory, key, recovery_point, log_start
            ):
                continue
            try:
                log = self._open(
                    directory, key, self._defaults, now_ms, recovery_point=recovery_point, log_start_offset=log_start
                )
                log.first_dirty_offset = min(directory.first_dirty_offsets.get(key, 0), log.recovery_point)
            except StorageError as error:
                if directory.path == self.directories.metadata_path or not isinstance(error.__cause__, OSError):
                    raise
                self.directories.exclude(directory, error.__cause__)
                self._drop_offline(directory, error)
                continue
            self._stale.discard(key)
            if self._on_progress:
                self._on_progress(number + 1, len(found))

    def _is_metadata_damaged(
        self, directory: DataDirectory, key: TopicPartition, recovery_point: int, log_start: int
    ) -> bool:
        self.metadata_recovery_point = recovery_point
        path = f"{directory.path}/{key[0]}-{key[1]}"
        is_clean = directory.clean_epoch is not None
        self.metadata_damage = metadata_check.find_damage(
            self.fs, path, clean=is_clean, recovery_point=recovery_point, log_start_offset=log_start
        )
        if self.metadata_damage is None:
            return False
        self._damaged = path
        return True

    def drop_damaged_metadata(self) -> None:
        """Delete the damaged metadata log with its snapshots, and clear `metadata_damage`.

        `create` then starts an empty log. Call it only if `metadata_damage` is set. Raises StorageError.
        """
        directory = self._damaged.rpartition("/")[0]
        try:
            renamed = f"{self._damaged}.{uuid.uuid4().hex}-delete"
            self.fs.rename(self._damaged, renamed)
            self.fs.sync_dir(directory)
            self.fs.remove_tree(renamed)
        except OSError as error:
            raise StorageError(f"cannot remove {self._damaged}: {error}") from error
        self.metadata_damage, self.metadata_recovery_point = None, 0

    def _open(
        self,
        directory: DataDirectory,
        key: TopicPartition,
        config: TopicConfig,
        now_ms: int,
        *,
        topic_id: bytes = b"",
        recovery_point: int = 0,
        log_start_offset: int = 0,
    ) -> Log:
        try:
            directory.check_exists(self.fs)
        except OSError as error:
            raise StorageError(f"cannot load {key[0]}-{key[1]}: {error}") from error
        log = open_log(
            self.files,
            f"{directory.path}/{key[0]}-{key[1]}",
            key[0],
            key[1],
            config,
            now_ms,
            topic_id=topic_id,
            clean=directory.clean_epoch is not None,
            recovery_point=recovery_point,
            log_start_offset=log_start_offset,
            checkpoint_recovery_point=partial(self._checkpoint_before_append, directory),
            on_failed=self._log_failed,
        )
        self._directory_of[key] = directory
        directory.log_count += 1
        if key[0] == CLUSTER_METADATA_TOPIC:
            self._metadata_log, self.directories.metadata_path = log, directory.path
        else:
            self._logs[key] = log
        return log

    # -- directories that fail

    def _log_failed(self, log: Log, error: StorageError) -> None:
        if self._on_log_failed:
            self._on_log_failed(log, error)
        self.directories.report_failure(log.dir.rpartition("/")[0], error)

    def take_offline(self, path: str, error: StorageError) -> None:
        """Stop using a data directory and its logs. Does nothing if `path` is not an online directory.

        Its logs raise `error` from now on, and `create` raises StorageError for their partitions. Call it on the thread
        that calls `create`.
        """
        for directory in self.directories.online:
            if directory.path == path:
                with self._checkpoint_lock:
                    directory.set_offline(error)
                self._drop_offline(directory, error)

    def _drop_offline(self, directory: DataDirectory, error: StorageError) -> None:
        for key in [key for key, held_in in self._directory_of.items() if held_in is directory]:
            log = self.get(*key)
            if log is not None:
                log.mark_failed(error)
                log.abandon()
                self._offline[key] = log.topic_id
            del self._directory_of[key]
            self._logs.pop(key, None)
            self.high_watermarks.pop(key, None)

    def _check_not_offline(self, key: TopicPartition, topic_id: bytes) -> None:
        """Raise StorageError if the log is in an offline directory, because a new log would lack its records."""
        if self._offline.get(key, topic_id + b"?") in (topic_id, b""):
            raise StorageError(f"{key[0]}-{key[1]} is in an offline data directory; repair the disk and restart")

    # -- partitions

    def create(self, topic: str, partition: int, topic_id: bytes, config: TopicConfig, now_ms: int) -> Log:
        """Return the log of a partition with this configuration, creating it if it does not exist.

        An existing log has no topic id if a power failure destroyed `partition.metadata`. If such a log has no records,
        it gets `topic_id`. Otherwise its directory is renamed to a `-stray` directory and a new log is created, because
        its records may belong to a deleted topic.

        Raises KafkaError(INCONSISTENT_TOPIC_ID) if the log belongs to another topic id; StorageError if the disk fails
        or is full, the log is in an offline directory, or no directory is online.
        """
        key = (topic, partition)
        self._check_not_offline(key, topic_id)
        existing = self.get(topic, partition)
        try:
            if existing and not existing.topic_id and existing.log_end_offset > existing.log_start_offset:
                _LOG.warning("log without topic id has records, setting it aside log=%s", existing.dir)
                self._set_aside(existing, "stray", f"cannot create {topic}-{partition}")
                existing = None
            if existing:
                if not existing.topic_id:
                    checkpoint.write_partition_metadata(self.fs, existing.dir, topic_id)
                    existing.topic_id, existing.durability.identity_dirty = topic_id, True
                if existing.topic_id != topic_id:
                    raise KafkaError(
                        ErrorCode.INCONSISTENT_TOPIC_ID,
                        f"topic id of {existing.dir} is {uuid_text(existing.topic_id)}, expected {uuid_text(topic_id)}",
                    )
                existing.update_config(config)
                return existing
            if key in self._stale:
                self._drop_stale()
        except OSError as error:
            raise StorageError(f"cannot create {topic}-{partition}: {error}") from error
        if topic == CLUSTER_METADATA_TOPIC:
            topic_id = CLUSTER_METADATA_TOPIC_ID
        directory = self.directories.for_new_log(is_metadata=topic == CLUSTER_METADATA_TOPIC)
        try:
            return self._open(directory, key, config, now_ms, topic_id=topic_id)
        except StorageError as error:
            if isinstance(error.__cause__, OSError):
                self.directories.report_io_error(directory, error.__cause__, error)
            raise

    def delete(self, topic: str, partition: int, now_ms: int) -> None:
        """Close the log and rename its directory to a `-delete` directory. Does nothing if there is no such log.

        `remove_deleted` removes it after `file.delete.delay.ms`. Raises StorageError.
        """
        log = self._logs.get((topic, partition))
        if log is not None:
            renamed = self._set_aside(log, "delete", f"cannot delete {topic}-{partition}")
            self._deleted.append((now_ms + log.config.file_delete_delay_ms, renamed))

    def set_aside(self, topic: str, partition: int) -> str | None:
        """Close a log that is not in the metadata and rename its directory to a `-stray` directory, for an operator.

        Returns the new path, or None if there is no such log. Raises StorageError.
        """
        log = self._logs.get((topic, partition))
        if log is None:
            return None
        renamed = self._set_aside(log, "stray", f"cannot set {topic}-{partition} aside")
        _LOG.warning("log is not in the metadata, keeping it topic=%s partition=%d path=%s", topic, partition, renamed)
        return renamed

    def _set_aside(self, log: Log, suffix: str, problem: str) -> str:
        key = (log.topic, log.partition)
        directory = self._directory_of[key]
        ending = f"-{log.partition}.{uuid.uuid4().hex}-{suffix}"
        renamed = f"{directory.path}/{log.topic[: _NAME_MAX - len(ending)]}{ending}"
        try:
            log.move_to(renamed)
        except OSError as error:
            raise StorageError(f"{problem}: {error}") from error
        del self._logs[key], self._directory_of[key]
        directory.log_count -= 1
        self.high_watermarks.pop(key, None)
        self._stale.add(key)
        return renamed

    def _drop_stale(self) -> None:
        """Rewrite all checkpoints without removed partitions, before one of them is recreated. Raises OSError."""
        for directory in self.directories.online:
            try:
                self._write_checkpoints(directory)
            except OSError as error:
                self.directories.report_io_error(
                    directory, error, StorageError(f"cannot write the checkpoints: {error}")
                )
                raise
        self._stale.clear()

    def remove_deleted(self, now_ms: int) -> int:
        """Remove directories of logs and files of segments whose `file.delete.delay.ms` has passed.

        Returns the number of directories and files. Errors are logged.
        """
        count = 0
        for due in [entry for entry in self._deleted if entry[0] <= now_ms]:
            self._deleted.remove(due)
            try:
                self.fs.remove_tree(due[1])
                count += 1
            except OSError as error:  # retried at the next start
                _LOG.warning("cannot remove deleted log path=%s error=%s", due[1], error)
        return count + sum(log.remove_deleted(now_ms) for log in list(self._logs.values()))

    # -- checkpoints

    def checkpoint_high_watermarks(self, high_watermarks: Mapping[TopicPartition, int]) -> None:
        """Write the high watermarks of these logs; other logs keep their last checkpointed value.

        First makes truncations durable. If that fails for a log, its checkpointed value is not raised. Tries all
        directories, then raises the first StorageError.
        """
        for key, value in high_watermarks.items():
            if key in self._directory_of:
                known, held = self.high_watermarks.get(key, 0), self.get(*key)
                self.high_watermarks[key] = (
                    value if held is None or held.make_truncations_durable() else min(known, value)
                )
        self._checkpoint(checkpoint.HIGH_WATERMARK_CHECKPOINT)

    def checkpoint_recovery_points(self) -> None:
        """Write the recovery points and compaction offsets of all logs, after making new logs durable.

        Tries all directories, then raises the first StorageError.
        """
        self._for_each_online(self._sync_new, "cannot sync the data directories")
        self._checkpoint(checkpoint.RECOVERY_POINT_CHECKPOINT)

    def _sync_new(self, directory: DataDirectory) -> None:
        """Make the names and topic ids of the new logs in a directory durable. Raises OSError, StorageError."""
        new = [log for log in self._logs_in(directory) if log.durability.identity_dirty and not log.failed]
        for log in new:
            log.sync_identity()
        if new:
            self.fs.sync_dir(directory.path)

    def checkpoint_log_starts(self) -> None:
        """Write the log start offsets of all logs. Tries all directories, then raises the first StorageError."""
        self._checkpoint(checkpoint.LOG_START_CHECKPOINT)

    def _checkpoint(self, name: str) -> None:
        self._for_each_online(lambda directory: self._write_checkpoints(directory, (name,)), f"cannot write {name}")

    def _for_each_online(self, action: Callable[[DataDirectory], None], problem: str) -> None:
        """Call `action` for each online directory, then raise the first error as a StorageError."""
        failed: StorageError | None = None
        for directory in self.directories.online:
            try:
                action(directory)
            except StorageError as error:
                failed = failed or error
            except OSError as error:
                raised = self.directories.report_io_error(directory, error, StorageError(f"{problem}: {error}"))
                failed = failed or raised
        if failed:
            raise failed

    def _checkpoint_before_append(self, directory: DataDirectory) -> None:
        """Write the recovery points of a directory, once for all logs that were truncated together.

        Runs on the owner's thread. Raises StorageError.
        """
        try:
            self._write_checkpoints(directory, (checkpoint.RECOVERY_POINT_CHECKPOINT,))
        except OSError as error:
            raised = StorageError(f"cannot write the recovery points: {error}")
            raise self.directories.report_io_error(directory, error, raised) from error

    @contextlib.contextmanager
    def truncating(self, log: Log, offset: int) -> Iterator[None]:
        """Context manager that encloses a truncation of `log` that keeps all records below `offset`.

        First checkpoints a recovery point of at most `offset`, if the one on disk may be higher: after a crash,
        `metadata_check` would mistake a shorter log for a damaged one. Raises StorageError.
        """
        durability = log.durability
        with durability.capped(offset):
            if durability.is_checkpoint_stale or durability.recovery_point > offset:
                self._checkpoint_before_append(self._directory_of[log.topic, log.partition])
            yield

    def _write_checkpoints(
        self, directory: DataDirectory, names: Sequence[str] = checkpoint.OFFSET_CHECKPOINTS
    ) -> None:
        """Write the named checkpoints of a directory. Raises OSError."""
        with self._checkpoint_lock:  # also guards reading the values, so that older ones never replace newer ones
            if directory.error is not None:
                return
            directory.check_exists(self.fs)
            logs = {(log.topic, log.partition): log for log in self._logs_in(directory)}
            points = {key: log.durability.to_checkpoint() for key, log in logs.items()}
            # Written before lowered recovery points, because truncated records are not clean.
            directory.write_first_dirty(self.fs, {key: log.first_dirty_offset for key, log in logs.items()})
            for name in names:
                values: Mapping[TopicPartition, int]
                if name == checkpoint.RECOVERY_POINT_CHECKPOINT:
                    values = {key: point for key, (point, _) in points.items()}
                elif name == checkpoint.LOG_START_CHECKPOINT:
                    values = {key: log.log_start_offset for key, log in logs.items() if log.log_start_offset > 0}
                else:
                    known = self.high_watermarks
                    values = {key: known[key] for key in logs if key in known}
                checkpoint.write_offsets(self.fs, f"{directory.path}/{name}", values)
                if name == checkpoint.RECOVERY_POINT_CHECKPOINT:
                    for key, log in logs.items():
                        log.durability.note_checkpoint(points[key][1])

    # -- stopping

    def close(self, broker_epoch: int) -> None:
        """Flush and close every log, write all checkpoints and release the directories. Errors are logged.

        Each online directory without errors gets a clean-shutdown marker with `broker_epoch`.
        """
        healthy = {directory.path for directory in self.directories.online}
        with ThreadPoolExecutor(_CLOSING_THREADS, thread_name_prefix="log-close") as pool:
            for log, problem in pool.map(_close_log, self._every_log()):
                if problem:
                    _LOG.error("cannot close log log=%r error=%s", log, problem)
                    healthy.discard(log.dir.rpartition("/")[0])
        for directory in self.directories.online:
            try:
                self._write_checkpoints(directory)
                if directory.path in healthy:
                    checkpoint.write_clean_shutdown(self.fs, directory.path, broker_epoch)
            except OSError as error:
                _LOG.error("cannot close data directory path=%s error=%s", directory.path, error)
        self.abandon()

    def abandon(self) -> None:
        """Close all logs and files and release the directories without writing, as a crash would."""
        for log in self._every_log():
            log.abandon()
        self.files.close()
        self.directories.release()


def _close_log(log: Log) -> tuple[Log, str]:
    """Close the log. Return the log and the error message, which is "" on success. Thread-safe."""
    try:
        log.close()
    except KafkaError as error:
        return log, error.message
    return log, ""
