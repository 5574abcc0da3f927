"""The snapshots in the directory of `__cluster_metadata-0`: made, received, checked, read, deleted (630-12, 630-14).

A snapshot is written to `<id>.checkpoint.part`, synced, renamed and its directory synced; so a name without `.part`
is a whole file, before and after any crash. One that is deleted is renamed first; one that is corrupt is set aside
under a name of its own. Every method blocks and may fail with StorageError; `append`, `write` and `read` are short.

Invariant: nobody but this module writes these files, and a complete one never changes.
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
    """A `.part` file and how it becomes a snapshot."""

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
        """Open until it is published or discarded."""
        if self._file is None:
            raise RuntimeError(f"{self._path} is closed")
        return self._file

    def _add(self, data: bytes) -> None:
        """Write at the end; on failure the file is gone."""
        try:
            self._open_file.write_at(data, self.size_bytes)
        except OSError as error:
            self._fail(error)
        self.size_bytes += len(data)

    def _publish(self) -> None:
        """Make it a snapshot, durably; on failure there is none."""
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
        """Close and remove it; idempotent. What cannot be removed goes at the next start."""
        if self._file is not None:
            self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                self._fs.remove(self._path)

    def _fail(self, error: OSError) -> NoReturn:
        self.discard()
        raise StorageError(f"snapshot {self._path}: {error.strerror or error}") from error


class SnapshotWriter(_PartFile):
    """A snapshot that is being made, batch by batch."""

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
        """How many it has so far."""
        return self._next_offset - 1

    def append(self, values: Sequence[bytes]) -> None:
        """Add at least one record, as one batch."""
        self._add(data_batch(values, self._next_offset, self.snapshot_id.epoch, self._now_ms, self._compression))
        self._next_offset += len(values)

    def write(self, values: Iterable[bytes]) -> Iterator[int]:
        """Add all records, a batch each time the iterator is asked; gives how many there are so far."""
        for batch in batches_of(values):
            self.append(batch)
            yield self.records

    def freeze(self) -> int:
        """End it and make it durable: from now on it is one of the snapshots. Gives its bytes; belongs on a thread."""
        self._add(control_batch(SnapshotFooter(), self._next_offset, self.snapshot_id.epoch, self._now_ms))
        self._publish()
        return self.size_bytes


class ReceivedSnapshot(_PartFile):
    """A snapshot that comes from elsewhere, in bytes that need not be whole batches."""

    def write(self, position: int, data: bytes) -> None:
        """Add bytes at the end; ValueError for another position."""
        if position != self.size_bytes:
            raise ValueError(f"bytes for position {position}, the file has {self.size_bytes}")
        self._add(data)

    def complete(self) -> SnapshotSummary:
        """Check it and make it durable; belongs on a thread. CorruptRecordError, and then it is gone."""
        try:
            summary = SnapshotReader(self._open_file, file_name(self.snapshot_id)).check()
        except CorruptRecordError:
            self.discard()
            raise
        except OSError as error:
            self.discard()
            raise StorageError(f"snapshot {file_name(self.snapshot_id)}: {error.strerror or error}") from error
        self._publish()
        return summary


class SnapshotStore:
    """All snapshots of one replica."""

    def __init__(self, fs: FileSystem, directory: str) -> None:
        """The directory is there: it is the log's."""
        self.corrupt_snapshots = 0
        """How many were set aside."""
        self._fs = fs
        self._directory = directory

    def _names(self) -> dict[str, SnapshotFile]:
        with self._storage_errors():
            names = self._fs.list_dir(self._directory)
        parsed = ((name, parse_file_name(name)) for name in sorted(names))
        return {name: found for name, found in parsed if found is not None}

    def _complete(self) -> dict[SnapshotId, list[str]]:
        """The names of each; should one have two, that with Kafka's 10 digits of epoch comes first."""
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
            raise StorageError(f"snapshots in {self._directory}: {error.strerror or error}") from error

    def snapshot_ids(self) -> list[SnapshotId]:
        """Those that are there, oldest first."""
        return sorted(self._complete(), key=age_order)

    def create(
        self, snapshot_id: SnapshotId, *, last_contained_log_timestamp: int, now_ms: int, compression: str = "none"
    ) -> SnapshotWriter:
        """Begin to make one; what was left of an earlier attempt is overwritten."""
        return SnapshotWriter(
            self._fs,
            self._directory,
            snapshot_id,
            last_contained_log_timestamp=last_contained_log_timestamp,
            now_ms=now_ms,
            compression=compression,
        )

    def receive(self, snapshot_id: SnapshotId) -> ReceivedSnapshot:
        """Begin to receive one, or go on where an earlier transfer in this process broke off."""
        return ReceivedSnapshot(self._fs, self._directory, snapshot_id, keep=True)

    def open(self, snapshot_id: SnapshotId) -> SnapshotReader:
        """To read its records; the file closes itself when the reader goes. StorageError when it is not there."""
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
        """Its header. CorruptRecordError."""
        with self._storage_errors():
            return self.open(snapshot_id).read_header()

    def validate(self, snapshot_id: SnapshotId) -> SnapshotSummary:
        """Read and check all of it. CorruptRecordError."""
        with self._storage_errors():
            return self.open(snapshot_id).check()

    def size(self, snapshot_id: SnapshotId) -> int | None:
        """Its bytes, None when it is not there."""
        with self._storage_errors(), contextlib.suppress(FileNotFoundError):
            return self._open(snapshot_id).size()
        return None

    def read(self, snapshot_id: SnapshotId, position: int, size: int) -> bytes | None:
        """Bytes of the file as they are, None when it is not there (any more)."""
        with self._storage_errors(), contextlib.suppress(FileNotFoundError):
            return self._open(snapshot_id).read_at(size, position)
        return None

    def delete(self, snapshot_ids: Iterable[SnapshotId]) -> None:
        """Delete those; who reads one may go on, and another thread may delete them as well."""
        complete = self._complete()
        with self._storage_errors():
            for snapshot_id in snapshot_ids:
                deleted = f"{self._directory}/{file_name(snapshot_id, FileKind.DELETED)}"
                for name in complete.get(snapshot_id, ()):
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.rename(f"{self._directory}/{name}", deleted)
                        self._fs.remove(deleted)

    def set_aside(self, snapshot_id: SnapshotId) -> str:
        """Give a corrupt one a name under which nobody takes it for a snapshot; gives that name."""
        aside = file_name(snapshot_id, FileKind.CORRUPT)
        names = self._complete().get(snapshot_id, [file_name(snapshot_id)])
        with self._storage_errors():
            self._fs.rename(f"{self._directory}/{names[0]}", f"{self._directory}/{aside}")
            self._fs.sync_dir(self._directory)
        self.corrupt_snapshots += 1
        return aside

    def clean(self) -> list[str]:
        """Remove what was not completed or not quite deleted, on start; gives the names."""
        names = [name for name, (_, kind) in self._names().items() if kind in (FileKind.PART, FileKind.DELETED)]
        with self._storage_errors():
            for name in names:
                self._fs.remove(f"{self._directory}/{name}")
        return names

    def recover(self, log: retention.LogExtent, *, is_voter: bool) -> tuple[retention.Start, SnapshotSummary | None]:
        """What to start from, and the summary of the snapshot if there is one; cleans, sets corrupt ones aside."""
        self.clean()
        corrupt = []
        valid = summary = None
        for snapshot_id in retention.candidates(self.snapshot_ids()):
            try:
                summary = self.validate(snapshot_id)
            except CorruptRecordError as error:
                aside = self.set_aside(snapshot_id)
                _LOG.error("%s/%s: set aside: %s", self._directory, aside, error.message)
                corrupt.append(snapshot_id)
            else:
                valid = snapshot_id
                break
        decided = retention.start(valid, corrupt, log, is_voter=is_voter)
        return decided, summary if isinstance(decided, retention.StartFromSnapshot) else None
