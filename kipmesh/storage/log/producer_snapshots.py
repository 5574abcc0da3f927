"""The idempotent producers of one log, kept in memory and in Kafka's `<20 digits>.snapshot` files.

A snapshot says what the batches below its offset made of the producers; it is written when a segment is rolled, for the
offset where the next one begins, and when the log is closed. Loading takes the newest one that is whole and reads the
headers of the batches after it. Nothing is synced here: a snapshot that a crash tore fails its CRC, and an older one is
taken, or none and the whole log. After an unclean stop those beyond the recovery point are not looked at: they may be
of batches that were cut.

A file has one batch of a producer, its last; the batches right before the snapshot's offset are read, too, so that a
producer whose last five were in flight when the broker stopped finds all of them.

Invariants: in memory is what the batches below the log end make; the snapshots on disk are of offsets within the log.
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
from kipmesh.storage.log.segment import Segment

_LOG = logging.getLogger(__name__)

SNAPSHOT_SUFFIX = ".snapshot"
SNAPSHOT_VERSION = 1
RECALL_BYTES = 1 << 20
"""How far before a snapshot's offset batches are looked for."""

_OFFSET_DIGITS = 20
_HEAD = Struct(">hI")
_COUNT = Struct(">i")
_ENTRY = Struct(">qhiqiqiq")


def encode_snapshot(entries: Iterable[ProducerEntry]) -> bytes:
    """The bytes of a snapshot: version, CRC-32C of all that follows it, count and entries."""
    packed = [_ENTRY.pack(*entry) for entry in entries]
    body = _COUNT.pack(len(packed)) + b"".join(packed)
    return _HEAD.pack(SNAPSHOT_VERSION, crc32c(body)) + body


def decode_snapshot(data: bytes) -> list[ProducerEntry]:
    """The entries of a snapshot; CorruptRecordError when it is torn or of another version."""
    if len(data) < _HEAD.size + _COUNT.size:
        raise CorruptRecordError(f"{len(data)} bytes are no snapshot of producers")
    version, crc = _HEAD.unpack_from(data)
    if version != SNAPSHOT_VERSION:
        raise CorruptRecordError(f"a snapshot of producers of version {version}, {SNAPSHOT_VERSION} is known")
    body = memoryview(data)[_HEAD.size :]
    if crc32c(body) != crc:
        raise CorruptRecordError("wrong CRC of a snapshot of producers")
    (count,) = _COUNT.unpack_from(body)
    if len(body) - _COUNT.size != count * _ENTRY.size:
        raise CorruptRecordError(f"{len(body)} bytes are not {count} producers")
    return [ProducerEntry(*fields) for fields in _ENTRY.iter_unpack(body[_COUNT.size :])]


def snapshot_offset(name: str) -> int | None:
    """The offset in the name of a snapshot file; None if it is not one."""
    digits = name.removesuffix(SNAPSHOT_SUFFIX)
    return int(digits) if name != digits and len(digits) == _OFFSET_DIGITS and digits.isdigit() else None


class Producers:
    """The idempotent producers of one log, which owns this."""

    __slots__ = ("_directory", "_fs", "_offsets", "states")

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self.states = ProducerStates()
        self._fs = fs
        self._directory = directory
        self._offsets: list[int] = []
        """Of the snapshots on disk, ascending."""

    # -- batches

    def check(self, header: BatchHeader) -> WrittenBatch | None:
        """Before a batch is appended: the one that it repeats, None if it may be; KafkaError otherwise."""
        return self.states.check(header) if header.producer_id >= 0 else None

    def appended(self, header: BatchHeader, base_offset: int, now_ms: int) -> None:
        """A batch was written."""
        if header.producer_id >= 0:
            self.states.append(header, base_offset, now_ms)

    # -- files

    def _path(self, offset: int) -> str:
        return f"{self._directory}/{offset:020d}{SNAPSHOT_SUFFIX}"

    def rolled(self, offset: int) -> None:
        """A segment begins at the log end. OSError.

        Also without producers, so that a start need not read what is before.
        """
        if not self._offsets or self._offsets[-1] < offset:
            write_file(self._fs, self._path(offset), encode_snapshot(self.states.entries()), sync=False)
            self._offsets.append(offset)

    def closing(self, offset: int) -> bool:
        """The log is closed at its end; gives whether a file was written. OSError.

        A log that never had a producer gets no file: its next start is a clean one.
        """
        if not (self._offsets or len(self.states)) or (self._offsets and self._offsets[-1] >= offset):
            return False
        self.rolled(offset)
        return True

    def started_over(self) -> None:
        """The log has no batch any more, and the next one may be anywhere. OSError."""
        self.states.load(())
        self._remove([*self._offsets])

    def retired(self, first_offset: int) -> None:
        """Segments below were taken out of use. OSError.

        Producers whose batches are all gone stay until they expire, as in Kafka.
        """
        self._remove([offset for offset in self._offsets if offset < first_offset])

    def merged(self, offsets: Sequence[int]) -> None:
        """Segments that began at these offsets are part of the ones before them. OSError."""
        self._remove([offset for offset in offsets if offset in self._offsets])

    def last_offsets(self) -> Iterable[int]:
        """Of the last batch of each producer."""
        return [entry.last_offset for entry in self.states.entries()]

    def _remove(self, offsets: Sequence[int]) -> None:
        for offset in offsets:
            self._offsets.remove(offset)
            path = self._path(offset)
            if self._fs.exists(path):
                self._fs.remove(path)

    # -- building

    def truncated(self, segments: Sequence[Segment], end_offset: int) -> None:
        """The log was truncated and ends there. OSError, CorruptRecordError.

        What is in memory most often says enough; otherwise a snapshot and batches are read.
        """
        self._remove([offset for offset in self._offsets if offset > end_offset])
        if not self.states.truncate(end_offset):
            self._build(segments)
        elif len(self.states):  # where the youngest batches went, older ones are among the last five again
            self.states.recall(_headers_before(segments, end_offset))

    def load(
        self, names: Iterable[str], segments: Sequence[Segment], end_offset: int, offset_max: int, *, clean: bool
    ) -> bool:
        """Build the state of a log that was found; gives whether files were changed. OSError.

        `names` are the directory's; snapshots beyond `offset_max` are removed. `clean`: the log was closed well.
        """
        found = sorted(offset for name in names if (offset := snapshot_offset(name)) is not None)
        self._offsets = list(found)
        first = segments[0].base_offset
        self._remove([offset for offset in found if not first <= offset <= min(end_offset, offset_max)])
        if clean and not found:
            # A log from before there were snapshots, or without producers: as Kafka does, none is looked for.
            if len(segments) > 1:
                self.rolled(segments[-1].base_offset)
            return bool(self._offsets)
        self._build(segments)
        return self._offsets != found

    def _build(self, segments: Sequence[Segment]) -> None:
        """By the newest snapshot that is whole, and the batches around and after it."""
        self.states.load(())
        start = segments[0].base_offset
        for offset in reversed([*self._offsets]):
            try:
                self.states.load(decode_snapshot(read_file(self._fs, self._path(offset))))
            except (CorruptRecordError, FileNotFoundError) as error:
                _LOG.warning("%s is not used: %s", self._path(offset), error)
                self._remove([offset])
                continue
            start = offset
            if len(self.states):
                self.states.recall(_headers_before(segments, start))
            break
        for header in _headers_from(segments, start):
            if header.producer_id >= 0:
                self.states.append(header, header.base_offset, header.max_timestamp)


class NoProducers(Producers):
    """For the metadata log, whose only writer is its leader: nothing is checked and no file is written."""

    __slots__ = ()

    def check(self, header: BatchHeader) -> None:
        """Accept every batch."""

    def appended(self, header: BatchHeader, base_offset: int, now_ms: int) -> None:
        """Ignore the batch."""

    def rolled(self, offset: int) -> None:
        """Write no snapshot."""


def _headers_from(segments: Sequence[Segment], offset: int) -> Iterator[BatchHeader]:
    """Headers of the batches from `offset` on."""
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
    """Headers of the batches in about `RECALL_BYTES` before `offset`."""
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
