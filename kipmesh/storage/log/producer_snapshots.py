"""Idempotent producers of one log, in memory and in Kafka's `<20 digits>.snapshot` files.

A snapshot has the producer state of the batches below its offset. It is written when a segment is rolled, for the base
offset of the next one, and when the log is closed. Loading reads the newest valid snapshot and the headers of later
batches. Snapshots are not synced: if a crash tore one, its CRC is wrong and an older one or the whole log is read.
After an unclean stop, snapshots above the recovery point are removed, because their batches may have been truncated.

A file has only the last batch of each producer. Loading also reads the batches just before the snapshot's offset, to
restore the last five of a producer.

Invariants: the state in memory matches the batches below the log end. Snapshot offsets on disk are within the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct

from crc32c import crc32c

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.producer.sequences import ProducerEntry, ProducerStates, WrittenBatch
from kipmesh.core.record_batch import BatchHeader
from kipmesh.storage.fs import FileSystem, read_file, write_file
from kipmesh.storage.log.segment import Segment, offset_of

_LOG = logging.getLogger(__name__)

SNAPSHOT_SUFFIX = ".snapshot"
SNAPSHOT_VERSION = 1
RECALL_BYTES = 1 << 20
"""Number of bytes before a snapshot's offset that are searched for recent batches."""


_HEAD = Struct(">hI")
_COUNT = Struct(">i")
_ENTRY = Struct(">qhiqiqiq")


def encode_snapshot(entries: Iterable[ProducerEntry]) -> bytes:
    """Return the content of a snapshot file: version, CRC-32C of all later bytes, count and entries."""
    packed = [_ENTRY.pack(*entry) for entry in entries]
    body = _COUNT.pack(len(packed)) + b"".join(packed)
    return _HEAD.pack(SNAPSHOT_VERSION, crc32c(body)) + body


def decode_snapshot(data: bytes) -> list[ProducerEntry]:
    """Return the entries of a snapshot file. Raises CorruptRecordError if it is torn or has another version."""
    if len(data) < _HEAD.size + _COUNT.size:
        raise CorruptRecordError(f"a producer snapshot of {len(data)} bytes is incomplete")
    version, crc = _HEAD.unpack_from(data)
    if version != SNAPSHOT_VERSION:
        raise CorruptRecordError(f"producer snapshot version must be {SNAPSHOT_VERSION}, got {version}")
    body = memoryview(data)[_HEAD.size :]
    if crc32c(body) != crc:
        raise CorruptRecordError("the CRC of a producer snapshot is wrong")
    (count,) = _COUNT.unpack_from(body)
    if len(body) - _COUNT.size != count * _ENTRY.size:
        raise CorruptRecordError(f"a producer snapshot of {len(body)} bytes cannot have {count} entries")
    return [ProducerEntry(*fields) for fields in _ENTRY.iter_unpack(body[_COUNT.size :])]


def snapshot_offset(name: str) -> int | None:
    """Return the offset in the name of a producer snapshot file, or None for other names."""
    return offset_of(name, SNAPSHOT_SUFFIX)


class Producers:
    """Idempotent producers of one log: their state in memory and their snapshots. Owned by that log."""

    __slots__ = ("_directory", "_fs", "_offsets", "states")

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self.states = ProducerStates()
        self._fs = fs
        self._directory = directory
        self._offsets: list[int] = []
        """Offsets of the snapshots on disk, ascending."""

    # -- batches

    def check(self, header: BatchHeader) -> WrittenBatch | None:
        """Return the written batch that this one repeats, or None if it may be appended.

        Returns None for a batch without a producer id. Raises KafkaError: INVALID_RECORD (negative sequence or epoch,
        or transactional), INVALID_PRODUCER_EPOCH (older epoch), OUT_OF_ORDER_SEQUENCE_NUMBER (a gap).
        """
        return self.states.check(header) if header.producer_id >= 0 else None

    def append(self, header: BatchHeader, base_offset: int, now_ms: int) -> None:
        """Update the state for an appended batch. Ignores a batch without a producer id."""
        if header.producer_id >= 0:
            self.states.append(header, base_offset, now_ms)

    # -- files

    def _path(self, offset: int) -> str:
        return f"{self._directory}/{offset:020d}{SNAPSHOT_SUFFIX}"

    def write_snapshot(self, offset: int) -> None:
        """Write a snapshot at `offset`, the log end, unless there is one. Raises OSError.

        Writes even an empty snapshot, so that a restart need not read earlier batches.
        """
        if not self._offsets or self._offsets[-1] < offset:
            write_file(self._fs, self._path(offset), encode_snapshot(self.states.entries()), sync=False)
            self._offsets.append(offset)

    def write_final_snapshot(self, offset: int) -> bool:
        """Write a snapshot at the log end when the log is closed. Return whether a file was written. Raises OSError.

        Returns False if the snapshot exists, or if the log never had an idempotent producer. Without any snapshot, the
        next start assumes no producers after a clean shutdown, and otherwise reads all batches.
        """
        if not (self._offsets or len(self.states)) or (self._offsets and self._offsets[-1] >= offset):
            return False
        self.write_snapshot(offset)
        return True

    def clear(self) -> None:
        """Forget all producers and delete all snapshots, for a log that was emptied. Raises OSError."""
        self.states.load(())
        self.delete_snapshots([*self._offsets])

    def delete_snapshots_before(self, first_offset: int) -> None:
        """Delete the snapshots below `first_offset`, the start of the first segment. Raises OSError.

        As in Kafka, producers without remaining batches stay until they expire.
        """
        self.delete_snapshots([offset for offset in self._offsets if offset < first_offset])

    def delete_snapshots(self, offsets: Sequence[int]) -> None:
        """Delete the snapshots at these offsets, if they exist. Raises OSError."""
        for offset in offsets:
            if offset in self._offsets:
                self._offsets.remove(offset)
                path = self._path(offset)
                if self._fs.exists(path):
                    self._fs.remove(path)

    def last_offsets(self) -> Iterable[int]:
        """Return the last offset of each producer."""
        return [entry.last_offset for entry in self.states.entries()]

    # -- building

    def truncate(self, segments: Sequence[Segment], end_offset: int) -> None:
        """Restore the state for a log truncated to `end_offset`. Raises OSError, CorruptRecordError.

        The state in memory usually suffices. Otherwise a snapshot and later batches are read.
        """
        self.delete_snapshots([offset for offset in self._offsets if offset > end_offset])
        if not self.states.truncate(end_offset):
            self._build(segments)
        elif len(self.states):  # older batches are among a producer's last five again
            self.states.add_history(_headers_before(segments, end_offset))

    def load(
        self, names: Iterable[str], segments: Sequence[Segment], end_offset: int, offset_max: int, *, clean: bool
    ) -> bool:
        """Load the state of an existing log. Return whether files were written or deleted.

        `names`: files in the directory. Snapshots above `offset_max` are deleted. `clean`: the log was closed cleanly.
        Raises OSError, CorruptRecordError.
        """
        found = sorted(offset for name in names if (offset := snapshot_offset(name)) is not None)
        self._offsets = list(found)
        first = segments[0].base_offset
        self.delete_snapshots([offset for offset in found if not first <= offset <= min(end_offset, offset_max)])
        if clean and not found:
            # As in Kafka: a log without snapshots is assumed to have no idempotent producers.
            if len(segments) > 1:
                self.write_snapshot(segments[-1].base_offset)
            return bool(self._offsets)
        self._build(segments)
        return self._offsets != found

    def _build(self, segments: Sequence[Segment]) -> None:
        """Load the newest valid snapshot, and the batches around and after it. Raises OSError, CorruptRecordError."""
        self.states.load(())
        start = segments[0].base_offset
        for offset in reversed([*self._offsets]):
            try:
                self.states.load(decode_snapshot(read_file(self._fs, self._path(offset))))
            except (CorruptRecordError, FileNotFoundError) as error:
                _LOG.warning("ignoring invalid producer snapshot path=%s error=%s", self._path(offset), error)
                self.delete_snapshots([offset])
                continue
            start = offset
            if len(self.states):
                self.states.add_history(_headers_before(segments, start))
            break
        for header in _headers_from(segments, start):
            if header.producer_id >= 0:
                self.states.append(header, header.base_offset, header.max_timestamp)


class NoProducers(Producers):
    """A `Producers` for the metadata log that accepts every batch and writes no file.

    The only writer of that log is the leader of the quorum.
    """

    __slots__ = ()

    def check(self, header: BatchHeader) -> None:
        """Accept every batch."""

    def append(self, header: BatchHeader, base_offset: int, now_ms: int) -> None:
        """Ignore the batch."""

    def write_snapshot(self, offset: int) -> None:
        """Do nothing."""


def _headers_from(segments: Sequence[Segment], offset: int) -> Iterator[BatchHeader]:
    """Yield the headers of the batches from the one that contains `offset`. Raises OSError, CorruptRecordError."""
    for number, segment in enumerate(segments):
        if not segment.exists or (number + 1 < len(segments) and segments[number + 1].base_offset <= offset):
            continue
        position = 0
        if segment.base_offset < offset:
            found = segment.find(offset)
            if found is None:
                continue
            position = found[0]
        for _, header in segment.batches(position):
            yield header


def _headers_before(segments: Sequence[Segment], offset: int) -> Iterator[BatchHeader]:
    """Yield the headers of the batches in about `RECALL_BYTES` before `offset`. Raises OSError, CorruptRecordError."""
    left, places = RECALL_BYTES, []
    for segment in reversed(segments):
        if segment.base_offset >= offset or not segment.exists:
            continue
        following = segment.find(offset)
        end = segment.size_bytes if following is None else following[0]
        places.append((segment, segment.indexed_position(end - left, field=1), end))
        left -= end
        if left <= 0:
            break
    for segment, start, end in reversed(places):
        for position, header in segment.batches(start):
            if position >= end:
                break
            yield header
