"""Snapshot files in the directory of `__cluster_metadata-0`: create, receive, validate, read, delete (630-12, 630-14).

A snapshot is written to `<id>.checkpoint.part`, synced, renamed, and its directory synced. A name without `.part` is
therefore a complete file, also after a crash. A deleted snapshot is renamed before removal; a corrupt one is renamed
and kept. All methods block and may raise StorageError. `append`, `write` and `read` are fast.

Invariant: only this module writes these files, and a complete file never changes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from kipmesh.core.control_records import SnapshotFooter, SnapshotHeader
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.snapshot import retention
from kipmesh.core.snapshot.ids import FileKind, SnapshotFile, age_order, file_name, parse_file_name
from kipmesh.messages import SnapshotId
from kipmesh.storage.fs import File, FileSystem, StorageError
from kipmesh.storage.quorum.snapshot_file import (
    COMPRESSIONS,
    SnapshotReader,
    SnapshotSummary,
    batches_of,
    control_batch,
    data_batch,
)

_LOG = logging.getLogger(__name__)


class _PartFile:
    """An open `.part` file, until it is published as a snapshot or discarded."""

    def __init__(self, fs: FileSystem, directory: str, snapshot_id: SnapshotId, *, keep: bool) -> None:
        self.snapshot_id = snapshot_id
        self.size_bytes = 0
        self._fs = fs
        self._directory = directory
        self._path = f"{directory}/{file_name(snapshot_id, FileKind.PART)}"
        self._file: File | None = None
        try:
            self._file = fs.open(self._path, create=True)
            if keep:
                self.size_bytes = self._file.size()
            else:
                self._file.truncate(0)
        except OSError as error:
            self._fail(error)

    @property
    def _open_file(self) -> File:
        """The open file. Raises RuntimeError once it is published or discarded."""
        if self._file is None:
            raise RuntimeError(f"{self._path} is closed")
        return self._file

    def _add(self, data: bytes) -> None:
        """Append `data`. On failure, discards the file and raises StorageError."""
        try:
            self._open_file.write_at(data, self.size_bytes)
        except OSError as error:
            self._fail(error)
        self.size_bytes += len(data)

    def _publish(self) -> None:
        """Rename the file to its final name, durably. On failure, raises StorageError and leaves no snapshot."""
        final = f"{self._directory}/{file_name(self.snapshot_id)}"
        is_renamed = False
        try:
            self._open_file.sync()
            self._open_file.close()
            self._fs.rename(self._path, final)
            is_renamed = True
            self._fs.sync_dir(self._directory)
        except OSError as error:
            if is_renamed:
                with contextlib.suppress(OSError):
                    self._fs.remove(final)
            self._fail(error)
        self._file = None

    def discard(self) -> None:
        """Close and remove the file. Idempotent. If that fails, the next start removes it."""
        if self._file is not None:
            self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                self._fs.remove(self._path)

    def _fail(self, error: OSError) -> NoReturn:
        self.discard()
        raise StorageError(f"cannot write snapshot {self._path}: {error.strerror or error}") from error


class SnapshotWriter(_PartFile):
    """A `.part` file into which this replica writes a snapshot, batch by batch."""

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        snapshot_id: SnapshotId,
        *,
        last_contained_log_timestamp: int,
        now_ms: int,
        compression: str = "none",
    ) -> None:
        super().__init__(fs, directory, snapshot_id, keep=False)
        self._compression = COMPRESSIONS[compression]
        self._now_ms = now_ms
        self._next_offset = 1
        self._add(control_batch(SnapshotHeader(0, last_contained_log_timestamp), 0, snapshot_id.epoch, now_ms))

    @property
    def records(self) -> int:
        """Number of data records written."""
        return self._next_offset - 1

    def append(self, values: Sequence[bytes]) -> None:
        """Write `values`, at least one, as the records of one batch. Raises StorageError."""
        self._add(data_batch(values, self._next_offset, self.snapshot_id.epoch, self._now_ms, self._compression))
        self._next_offset += len(values)

    def write(self, values: Iterable[bytes]) -> Iterator[int]:
        """Write all records, one batch per iteration. Yield the total number of records written so far.

        Raises StorageError.
        """
        for batch in batches_of(values):
            self.append(batch)
            yield self.records

    def freeze(self) -> int:
        """Complete the snapshot durably. Return its size in bytes. Run it on a worker thread. Raises StorageError."""
        self._add(control_batch(SnapshotFooter(), self._next_offset, self.snapshot_id.epoch, self._now_ms))
        self._publish()
        return self.size_bytes


class ReceivedSnapshot(_PartFile):
    """A `.part` file that receives a snapshot from the leader, in chunks of arbitrary size."""

    def write(self, position: int, data: bytes) -> None:
        """Append a chunk.

        Raises ValueError unless `position` is the current size of the file, StorageError if the disk fails.
        """
        if position != self.size_bytes:
            raise ValueError(f"position must be the size of the file, {self.size_bytes}, got {position}")
        self._add(data)

    def complete(self) -> SnapshotSummary:
        """Validate the snapshot, make it durable and return its summary. Run it on a worker thread.

        Raises CorruptRecordError if it is invalid, StorageError if the disk fails; the file is then deleted.
        """
        try:
            summary = SnapshotReader(self._open_file, file_name(self.snapshot_id)).check()
        except CorruptRecordError:
            self.discard()
            raise
        except OSError as error:
            self.discard()
            raise StorageError(
                f"cannot read snapshot {file_name(self.snapshot_id)}: {error.strerror or error}"
            ) from error
        self._publish()
        return summary


class SnapshotStore:
    """All snapshots of one replica. Methods raise StorageError if the disk fails."""

    def __init__(self, fs: FileSystem, directory: str) -> None:
        """`directory`: the existing directory of the log."""
        self.corrupt_snapshots = 0
        """Number of snapshots that were set aside."""
        self._fs = fs
        self._directory = directory

    def _names(self) -> dict[str, SnapshotFile]:
        with self._storage_errors():
            names = self._fs.list_dir(self._directory)
        parsed = ((name, parse_file_name(name)) for name in sorted(names))
        return {name: found for name, found in parsed if found is not None}

    def _complete(self) -> dict[SnapshotId, list[str]]:
        """Return a dict of snapshot id to file names.

        If a snapshot has two files, the one whose epoch has 10 digits, as in Kafka, is first.
        """
        complete: dict[SnapshotId, list[str]] = {}
        for name, (found, kind) in self._names().items():
            if kind is FileKind.COMPLETE:
                complete.setdefault(found, []).append(name)
        return complete

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot access snapshots in {self._directory}: {error.strerror or error}") from error

    def snapshot_ids(self) -> list[SnapshotId]:
        """Return the ids of all complete snapshots, oldest first. Raises StorageError."""
        return sorted(self._complete(), key=age_order)

    def create(
        self, snapshot_id: SnapshotId, *, last_contained_log_timestamp: int, now_ms: int, compression: str = "none"
    ) -> SnapshotWriter:
        """Return a writer for a new snapshot, replacing an incomplete one. `compression`: a key of COMPRESSIONS.

        Raises StorageError; KeyError for an unknown compression.
        """
        return SnapshotWriter(
            self._fs,
            self._directory,
            snapshot_id,
            last_contained_log_timestamp=last_contained_log_timestamp,
            now_ms=now_ms,
            compression=compression,
        )

    def receive(self, snapshot_id: SnapshotId) -> ReceivedSnapshot:
        """Return a file that receives a snapshot. An interrupted transfer of this process is resumed.

        Raises StorageError.
        """
        return ReceivedSnapshot(self._fs, self._directory, snapshot_id, keep=True)

    def open(self, snapshot_id: SnapshotId) -> SnapshotReader:
        """Return a reader of a snapshot. Dropping the reader closes the file.

        Raises StorageError if the snapshot does not exist or the disk fails.
        """
        with self._storage_errors():
            return SnapshotReader(self._open(snapshot_id), file_name(snapshot_id))

    def _open(self, snapshot_id: SnapshotId) -> File:
        name = file_name(snapshot_id)
        try:
            return self._fs.open(f"{self._directory}/{name}")
        except FileNotFoundError:
            other = self._complete().get(snapshot_id, [name])
            return self._fs.open(f"{self._directory}/{other[0]}")

    def header(self, snapshot_id: SnapshotId) -> SnapshotHeader:
        """Return the header of a snapshot.

        Raises CorruptRecordError if it is invalid; StorageError if the snapshot does not exist or the disk fails.
        """
        with self._storage_errors():
            return self.open(snapshot_id).read_header()

    def validate(self, snapshot_id: SnapshotId) -> SnapshotSummary:
        """Read and check a whole snapshot. Return its summary.

        Raises CorruptRecordError if it is invalid; StorageError if it does not exist or the disk fails.
        """
        with self._storage_errors():
            return self.open(snapshot_id).check()

    def size(self, snapshot_id: SnapshotId) -> int | None:
        """Return the size in bytes, or None if the snapshot does not exist."""
        with self._storage_errors(), contextlib.suppress(FileNotFoundError):
            return self._open(snapshot_id).size()
        return None

    def read(self, snapshot_id: SnapshotId, position: int, size: int) -> bytes | None:
        """Return up to `size` bytes of the file at `position`, fewer at its end.

        Returns None if the snapshot does not exist or has been deleted. Raises StorageError.
        """
        with self._storage_errors(), contextlib.suppress(FileNotFoundError):
            return self._open(snapshot_id).read_at(size, position)
        return None

    def delete(self, snapshot_ids: Iterable[SnapshotId]) -> None:
        """Delete these snapshots, if they exist. Open readers remain usable. Raises StorageError.

        Other threads may delete the same snapshots.
        """
        complete = self._complete()
        with self._storage_errors():
            for snapshot_id in snapshot_ids:
                deleted = f"{self._directory}/{file_name(snapshot_id, FileKind.DELETED)}"
                for name in complete.get(snapshot_id, ()):
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.rename(f"{self._directory}/{name}", deleted)
                        self._fs.remove(deleted)

    def set_aside(self, snapshot_id: SnapshotId) -> str:
        """Rename a corrupt snapshot so that it no longer counts as one. Return the new name. Raises StorageError."""
        aside = file_name(snapshot_id, FileKind.CORRUPT)
        names = self._complete().get(snapshot_id, [file_name(snapshot_id)])
        with self._storage_errors():
            self._fs.rename(f"{self._directory}/{names[0]}", f"{self._directory}/{aside}")
            self._fs.sync_dir(self._directory)
        self.corrupt_snapshots += 1
        return aside

    def clean(self) -> list[str]:
        """Remove incomplete and partly deleted snapshot files, at startup. Return their names. Raises StorageError."""
        names = [name for name, (_, kind) in self._names().items() if kind in (FileKind.PART, FileKind.DELETED)]
        with self._storage_errors():
            for name in names:
                self._fs.remove(f"{self._directory}/{name}")
        return names

    def recover(self, log: retention.LogExtent, *, is_voter: bool) -> tuple[retention.Start, SnapshotSummary | None]:
        """Decide what the replica starts from (630-14). Return (decision, summary of the snapshot to load or None).

        Removes incomplete files and sets corrupt snapshots aside. Raises StorageError.
        """
        self.clean()
        corrupt = []
        valid = summary = None
        for snapshot_id in retention.candidates(self.snapshot_ids()):
            try:
                summary = self.validate(snapshot_id)
            except CorruptRecordError as error:
                aside = self.set_aside(snapshot_id)
                _LOG.error("corrupt snapshot set aside path=%s/%s error=%s", self._directory, aside, error.message)
                corrupt.append(snapshot_id)
            else:
                valid = snapshot_id
                break
        decided = retention.start(valid, corrupt, log, is_voter=is_voter)
        return decided, summary if isinstance(decided, retention.StartFromSnapshot) else None
