"""Opens a `Log` from its directory: creates it, loads it after a clean stop, or recovers it.

- A new partition consists of a directory and a small `partition.metadata`. Neither is synced on creation (9,000 fsyncs
  for 3,000 partitions), only before the recovery point first advances and by the periodic checkpoint. A power failure
  may therefore lose the directory or empty the file; the topic id is then b"" and `LogManager.create` decides.
- The first append creates the `.log` file. An empty partition has no segment and starts at its checkpointed log start.
- After an unclean stop, every batch from the recovery point is checked. The log is truncated at the first batch that is
  torn, out of order or of a lower leader epoch, and later segments are removed. Indexes and epochs are rebuilt from
  there. Below the recovery point, only the index and the last batches of a segment are checked. A segment that ends
  before the next one starts was truncated; the segments after it are removed, because a power failure restored them.
- Compaction leaves `.cleaned` and `.swap` files, see `kipmesh.storage.log.compaction.Swap`.
- A missing or implausible index is always rebuilt.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID
from kipmesh.storage.checkpoint import (
    PARTITION_METADATA,
    parse_partition_metadata,
    read_epochs,
    write_partition_metadata,
)
from kipmesh.storage.fs import FileStat, FileSystem, OpenFiles, StorageError, read_file
from kipmesh.storage.log.durability import Durability
from kipmesh.storage.log.epochs import LeaderEpochs
from kipmesh.storage.log.log import Log, OnFailed
from kipmesh.storage.log.producer_snapshots import NoProducers, Producers
from kipmesh.storage.log.segment import (
    CLEANED_SUFFIX,
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SUFFIXES,
    SWAP_SUFFIX,
    TIME_INDEX_SUFFIX,
    Segment,
    offset_of,
)
from kipmesh.storage.log.segment_list import SegmentList

_LOG = logging.getLogger(__name__)


def open_log(
    files: OpenFiles | FileSystem,
    directory: str,
    topic: str,
    partition: int,
    config: TopicConfig,
    now_ms: int,
    *,
    topic_id: bytes = b"",
    clean: bool = False,
    recovery_point: int = 0,
    log_start_offset: int = 0,
    checkpoint_recovery_point: Callable[[], None] | None = None,
    on_failed: OnFailed | None = None,
) -> Log:
    """Load or recover the log in `directory` and return it. Create the log if the directory does not exist.

    `topic_id`: for a new directory; an existing one keeps its id. `clean`: the log was closed cleanly, so nothing is
    checked; otherwise everything from `recovery_point` is. `checkpoint_recovery_point`: makes the recovery point
    durable, called before the first append after a truncation below it. `on_failed`: see OnFailed.

    Raises StorageError if the disk fails or is full, CorruptRecordError if a segment below the recovery point cannot be
    read. After a StorageError, a new directory is removed.
    """
    files = files if isinstance(files, OpenFiles) else OpenFiles(files)
    is_metadata = topic == CLUSTER_METADATA_TOPIC
    topic_id = CLUSTER_METADATA_TOPIC_ID if is_metadata else topic_id
    was_there = True
    try:
        was_there = files.fs.exists(directory)
        is_new = not was_there
        if is_new:
            files.fs.make_dirs(directory)
        loading = _Loading(files, directory, config, now_ms, {} if is_new else files.fs.list_dir(directory))
        loading.run(clean, recovery_point, log_start_offset)
        if topic_id and not loading.topic_id and loading.log_end_offset == loading.log_start_offset:
            write_partition_metadata(files.fs, directory, topic_id)  # new, or of an earlier attempt
            loading.topic_id, is_new = topic_id, True
        producers = NoProducers(files.fs, directory) if is_metadata else loading.producers(clean=clean)
    except OSError as error:
        if not was_there:
            _remove_new_log(files, directory)
        raise StorageError(f"cannot load {topic}-{partition}: {error}") from error
    unflushed_since_ms = now_ms if loading.recovery_point < loading.log_end_offset else None
    durability = Durability(files.fs, directory, loading.recovery_point, unflushed_since_ms)
    durability.note_recovered(is_unclean=was_there and not clean, is_lowered=recovery_point > loading.recovery_point)
    # Data that a killed process wrote is readable, but may not be durable.
    durability.identity_dirty = is_new or not clean
    durability.names_dirty = loading.names_changed or not clean
    return Log(
        files,
        directory,
        topic,
        partition,
        topic_id=CLUSTER_METADATA_TOPIC_ID if is_metadata else loading.topic_id,
        config=config,
        segments=SegmentList(files, directory, loading.segments),
        epochs=loading.epochs,
        producers=producers,
        durability=durability,
        log_start_offset=loading.log_start_offset,
        log_end_offset=loading.log_end_offset,
        checkpoint_recovery_point=checkpoint_recovery_point,
        on_failed=on_failed,
    )


def _remove_new_log(files: OpenFiles, directory: str) -> None:
    """Remove a new log that failed, because the next attempt may use another data directory. Ignores errors."""
    with contextlib.suppress(OSError):
        for name in files.fs.list_dir(directory):
            files.forget(f"{directory}/{name}")
        files.fs.remove_tree(directory)


@dataclass(slots=True)
class _Loading:
    """The loading of one directory. The fields from `segments` on are the results."""

    files: OpenFiles
    directory: str
    config: TopicConfig
    now_ms: int
    entries: Mapping[str, FileStat]
    segments: list[Segment] = field(default_factory=list)
    epochs: LeaderEpochs = field(default_factory=LeaderEpochs)
    topic_id: bytes = b""
    log_start_offset: int = 0
    log_end_offset: int = 0
    recovery_point: int = 0
    names_changed: bool = False

    def run(self, clean: bool, recovery_point: int, log_start_offset: int) -> None:
        """Load the log and set the results. Raises OSError, CorruptRecordError."""
        self._remove_leftovers()
        if PARTITION_METADATA in self.entries:
            self.topic_id = parse_partition_metadata(read_file(self.files.fs, f"{self.directory}/{PARTITION_METADATA}"))
        stored: tuple[tuple[int, int], ...] | None
        try:
            stored = read_epochs(self.files.fs, self.directory)
        except CorruptRecordError as error:
            _LOG.warning("corrupt leader epochs, rebuilding from batches error=%s", error.message)
            stored, clean, recovery_point = None, False, 0
        bases = sorted(base for name in self.entries if (base := offset_of(name, LOG_SUFFIX)) is not None)
        if stored and bases and stored[0][1] > max(log_start_offset, bases[0]):
            _LOG.info("leader epochs start after log start, rebuilding from batches log=%s", self.directory)
            stored, clean, recovery_point = None, False, 0
        epochs = list(stored or ())
        self.log_end_offset = self._load_segments(bases, clean, recovery_point, epochs)
        if not self.segments:
            self.segments.append(Segment(self.files, self.directory, log_start_offset, self.now_ms))
            self.log_end_offset = log_start_offset
        self.log_start_offset = max(log_start_offset, self.segments[0].base_offset)
        self.epochs = LeaderEpochs(tuple(epochs))
        self.epochs.written = stored
        if self.log_end_offset < self.log_start_offset:
            self._reset()
        self.epochs.truncate_from_end(self.log_end_offset)
        self.epochs.truncate_from_start(self.log_start_offset)
        self.recovery_point = self.log_end_offset if clean else min(recovery_point, self.log_end_offset)

    def producers(self, *, clean: bool) -> Producers:
        """Return the loaded idempotent producers. Call it after `run`. Raises OSError, CorruptRecordError."""
        producers = Producers(self.files.fs, self.directory)
        offset_max = self.log_end_offset if clean else self.recovery_point
        if producers.load(self.entries, self.segments, self.log_end_offset, offset_max, clean=clean):
            self.names_changed = True
        return producers

    def _remove_leftovers(self) -> None:
        if _complete_swaps(self.files, self.directory, self.entries):
            self.entries = self.files.fs.list_dir(self.directory)
            self.names_changed = True
        for name in self.entries:
            bases = (offset_of(name, suffix) for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX))
            is_orphan = any(base is not None and f"{base:020d}{LOG_SUFFIX}" not in self.entries for base in bases)
            if name.endswith((DELETED_SUFFIX, ".tmp")) or is_orphan:
                self.files.fs.remove(f"{self.directory}/{name}")
                self.names_changed = True

    def _load_segments(self, bases: list[int], clean: bool, recovery_point: int, epochs: list[tuple[int, int]]) -> int:
        """Load or recover the segments, up to the first that ends early. Return the log end offset."""
        sizes = {name: stat.size_bytes for name, stat in self.entries.items()}
        end = 0
        recovering = False
        for number, base in enumerate(bases):
            segment = Segment(self.files, self.directory, base, self.entries[f"{base:020d}{LOG_SUFFIX}"].modified_ms)
            following = bases[number + 1] if number + 1 < len(bases) else None
            if not clean and (following is None or following > recovery_point):
                if not recovering:  # later epochs are read from the batches
                    recovering = True
                    epochs[:] = [entry for entry in epochs if entry[1] < base]
                segment.exists, segment.size_bytes = True, sizes[f"{base:020d}{LOG_SUFFIX}"]
                end, whole = self._recover(segment, epochs)
            else:
                end, whole = self._load(segment, sizes, following if clean else None)
            if not clean and (following is None or following >= recovery_point):
                segment.truncations += 1  # the previous process may have truncated it
            self.segments.append(segment)
            if not whole or (following is not None and end != following):
                if following is not None:
                    _LOG.warning(
                        "removing segments log=%s end_offset=%d bases=%s", self.directory, end, bases[number + 1 :]
                    )
                    self._remove_segments(bases[number + 1 :])
                break
            if following is not None:
                segment.seal()
        return end

    def _load(self, segment: Segment, sizes: dict[str, int], known_end: int | None) -> tuple[int, bool]:
        """Load a segment without recovery. Return its end offset, `known_end` if given, and whether it is complete."""
        try:
            segment.load(sizes)
            return (segment.end_offset() if known_end is None else known_end), True
        except CorruptRecordError as error:
            _LOG.warning(
                "rebuilding indexes log=%s segment=%d error=%s", self.directory, segment.base_offset, error.message
            )
            segment.exists, segment.size_bytes = True, sizes[f"{segment.base_offset:020d}{LOG_SUFFIX}"]
            end, whole = self._recover(segment, [])
            segment.seal()
            segment.sync(with_indexes=True)  # flushes skip segments below the recovery point
            self.names_changed = True
            return end, whole

    def _recover(self, segment: Segment, epochs: list[tuple[int, int]]) -> tuple[int, bool]:
        end, size_bytes, problem = segment.recover(self.config.index_interval_bytes, epochs)
        self.names_changed = True
        if problem:
            _LOG.warning(
                "truncating segment log=%s segment=%d end_offset=%d bytes=%d bytes_before=%d error=%s",
                self.directory,
                segment.base_offset,
                end,
                size_bytes,
                segment.size_bytes,
                problem,
            )
            self.files.get(segment.path).truncate(size_bytes)
            segment.truncations += 1
            segment.size_bytes = size_bytes
        return end, not problem

    def _remove_segments(self, bases: list[int]) -> None:
        for base in reversed(bases):
            for suffix in SUFFIXES:
                name = f"{base:020d}{suffix}"
                if name in self.entries:
                    self.files.fs.remove(f"{self.directory}/{name}")

    def _reset(self) -> None:
        """Replace all segments, which end before the log start, with an empty one at the log start."""
        _LOG.warning(
            "log end is before log start log=%s log_end=%d log_start=%d",
            self.directory,
            self.log_end_offset,
            self.log_start_offset,
        )
        for segment in self.segments:
            segment.remove()
        segment = Segment(self.files, self.directory, self.log_start_offset, self.now_ms)
        segment.create()
        self.segments[:] = [segment]
        self.log_end_offset = self.log_start_offset
        self.names_changed = True
        self.epochs.clear()


def _complete_swaps(files: OpenFiles, directory: str, entries: Mapping[str, FileStat]) -> bool:
    """Remove unfinished copies and complete started swaps. Return whether files changed. Raises OSError."""
    fs = files.fs
    unfinished = [name for name in entries if name.endswith(CLEANED_SUFFIX)]
    for name in unfinished:
        fs.remove(f"{directory}/{name}")
    swapped = [name for name in entries if name.endswith(SWAP_SUFFIX)]
    logs = [name for name in swapped if name.endswith(LOG_SUFFIX + SWAP_SUFFIX)]
    for name in sorted(logs):
        _complete_swap(files, directory, entries, int(name.split(".")[0]), entries[name])
    for name in swapped:  # indexes, which are rebuilt
        if fs.exists(f"{directory}/{name}"):
            fs.remove(f"{directory}/{name}")
    return bool(unfinished or swapped)


def _complete_swap(
    files: OpenFiles, directory: str, entries: Mapping[str, FileStat], base: int, stat: FileStat
) -> None:
    new = Segment(files, directory, base, stat.modified_ms, SWAP_SUFFIX)
    new.exists, new.size_bytes = True, stat.size_bytes
    has_old = f"{base:020d}{LOG_SUFFIX}" in entries
    try:
        end = base
        for position, header in new.batches():
            if position + header.size_bytes > stat.size_bytes:
                raise CorruptRecordError("the last batch is incomplete")
            end = header.next_offset
    except CorruptRecordError as error:
        _LOG.warning("compacted segment is corrupt log=%s segment=%d error=%s", directory, base, error.message)
        if has_old:
            new.remove()
            return
    _LOG.info("completing swap of compacted segment log=%s segment=%d end_offset=%d", directory, base, end)
    for name in entries:
        digits = name.split(".")[0]
        if name.endswith(SUFFIXES) and digits.isdigit() and base <= int(digits) < max(end, base + 1):
            files.fs.remove(f"{directory}/{name}")
            files.forget(f"{directory}/{name}")
    files.fs.sync_dir(directory)
    new.move("")
    files.fs.sync_dir(directory)
