"""State that changes: what is read and written to keep it small, by snapshots (measured) and log compaction (computed).

Records go through a real log and are read back from it, as a replica's state machine reads them; snapshots are made
when the schedule says so. A file system counts the bytes of both kinds of files.
"""

from __future__ import annotations

import gc
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from bench.images import BROKERS, EPOCH, PARTITIONS, balanced_image
from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, MetadataDelta, MetadataImage
from kipmesh.core.metadata.image_writer import image_values
from kipmesh.core.snapshot.schedule import SnapshotLimits, SnapshotSchedule
from kipmesh.storage import LogManager, RealFileSystem
from kipmesh.storage.fs import Buffer, File
from kipmesh.storage.quorum.snapshots import SnapshotStore

STATE_BYTES = 100_000_000
LIMIT_BYTES = SnapshotLimits().record_bytes_between
TOPIC_BYTES = 1270
"""Of a snapshot, for a topic with ten partitions."""
CHANGES = 200
"""Records of a batch: about 10 kB, a hundredth of a second's change."""
SNAPSHOTS = 2
"""Made from changes, beside the first one."""
READ_BYTES = 1 << 20


class Traffic(NamedTuple):
    """Bytes read and written."""

    read: int
    written: int


class _CountedFile:
    """A file whose traffic is added to its file system's."""

    def __init__(self, file: File, fs: CountingFileSystem, kind: str) -> None:
        self._file = file
        self._fs = fs
        self._kind = kind

    def read_at(self, size: int, position: int) -> bytes:
        data = self._file.read_at(size, position)
        self._fs.add(self._kind, len(data), 0)
        return data

    def write_at(self, data: Buffer, position: int) -> None:
        self._fs.add(self._kind, 0, len(data))
        self._file.write_at(data, position)

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def size(self) -> int:
        return self._file.size()

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class CountingFileSystem(RealFileSystem):
    """The real one; counts by the kind of file: snapshots, and the log with its indexes."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = {"log": Traffic(0, 0), "snapshot": Traffic(0, 0)}

    def add(self, kind: str, read: int, written: int) -> None:
        """Bytes that moved."""
        before = self.traffic[kind]
        self.traffic[kind] = Traffic(before.read + read, before.written + written)

    def open(self, path: str, *, create: bool = False) -> File:
        """A file that counts."""
        kind = "snapshot" if ".checkpoint" in Path(path).name else "log"
        return _CountedFile(super().open(path, create=create), self, kind)


class Compaction(NamedTuple):
    """MB for each MB of change, beside the one that every replica reads to apply it."""

    map_read: float
    copy_read: float
    written: float

    @property
    def read(self) -> float:
        """In all."""
        return self.map_read + self.copy_read


def compaction(clean_bytes: float, dirty_bytes: float) -> Compaction:
    """Log compaction that begins when `dirty_bytes` of changes follow `clean_bytes` that are compacted already.

    It reads the changes to map keys to offsets, reads both to copy what lives, and writes that: the state keeps
    its size.
    """
    return Compaction(1.0, (clean_bytes + dirty_bytes) / dirty_bytes, clean_bytes / dirty_bytes)


def measure_changes(folder: Path, state_bytes: int, limit_bytes: int) -> dict[str, Any]:
    """Change the state until `SNAPSHOTS` were due, beside the first; figures in bytes, those of the first left out."""
    fs = CountingFileSystem()
    config = TopicConfig.parse({"segment.bytes": 64 << 20, "retention.ms": -1, "max.message.bytes": 1 << 24})
    manager = LogManager(fs, [str(folder)], cluster_id="bench", node_id=1, defaults=config)
    manager.load(1)
    log = manager.create(CLUSTER_METADATA_TOPIC, 0, CLUSTER_METADATA_TOPIC_ID, config, 1)
    gc.disable()
    image = balanced_image(max(state_bytes // TOPIC_BYTES // PARTITIONS, 10) * PARTITIONS)
    image.offset = -1  # the log begins after what it was made from
    gc.enable()
    gc.freeze()
    schedule = SnapshotSchedule(SnapshotLimits(record_bytes_between=limit_bytes, interval_ms_max=0), 0)
    store = SnapshotStore(fs, log.dir)
    _make(image, schedule, store)
    before, snapshot_bytes, made, records = dict(fs.traffic), 0, 0, 0
    rng, topics = Random(2), list(image.topics)
    while made < SNAPSHOTS:
        offset = log.log_end_offset
        values = [(None, r.encode_record(_change(rng, topics))) for _ in range(CHANGES)]
        batch = record_batch.build(values, base_offset=offset, leader_epoch=EPOCH, timestamp_ms=1)
        log.append_as_leader(batch, EPOCH, 1)
        delta = MetadataDelta()
        image.replay(log.read(offset, READ_BYTES, log.log_end_offset, True), delta)
        schedule.applied(delta.outdated, len(batch))
        records += CHANGES
        if schedule.due(0):
            snapshot_bytes = _make(image, schedule, store)
            made += 1
    after, log_bytes = dict(fs.traffic), log.size_bytes
    manager.close(-1)
    return {
        "records": records,
        "snapshots": made,
        "snapshot_bytes": snapshot_bytes,
        "log_bytes": log_bytes,
        **{
            f"{kind}_{what}_bytes": getattr(after[kind], what) - getattr(before[kind], what)
            for kind in after
            for what in Traffic._fields
        },
    }


def _change(rng: Random, topics: list[bytes]) -> r.PartitionChangeRecord:
    """Somebody leaves or joins an ISR, and another leads."""
    first = rng.randrange(BROKERS)
    return r.PartitionChangeRecord(
        rng.randrange(PARTITIONS), rng.choice(topics), isr=(first, (first + 1) % BROKERS), leader=first
    )


def _make(image: MetadataImage, schedule: SnapshotSchedule, store: SnapshotStore) -> int:
    """A snapshot of this moment; gives its bytes."""
    schedule.begin()
    captured = image.capture()
    writer = store.create(captured.snapshot_id, last_contained_log_timestamp=1, now_ms=1)
    for _ in writer.write(image_values(captured)):
        pass
    size = writer.freeze()
    schedule.completed(writer.records, 0)
    return size
