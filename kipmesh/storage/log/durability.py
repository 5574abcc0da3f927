"""What of one log is durable, and making it so.

A flush may run on any thread while the log's owner appends, cuts and rolls. It works on a snapshot: offsets below the
log end it saw are in files it saw, and a write is complete before the log end passes it. While segments are cut or
removed the generation is odd, and afterwards another even number: a flush, or a search, that did not see one and the
same even generation from before its snapshot to its end says nothing, and errors that it met say nothing either.

A cut below the recovery point lowers it at once in memory. The checkpoint on disk may be behind until the next append,
which writes it first: until then every batch that the old checkpoint vouches for is either whole or gone from its
file's end, and a segment that ends before the next one begins is found when the log is loaded.

Invariants: every batch below `recovery_point` is durable, with the names of its files, the epochs up to there and
the topic id; `recovery_point` and the generation move under `_lock`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from kipmesh.core.config import TopicConfig
from kipmesh.storage.checkpoint import PARTITION_METADATA, write_epochs
from kipmesh.storage.fs import FileSystem, is_no_space
from kipmesh.storage.log.epochs import LeaderEpochs
from kipmesh.storage.log.segment import Segment

Snapshot = tuple[Sequence[Segment], int]
"""Segments and the log end offset, the latter taken first."""


class EpochsNotWrittenError(OSError):
    """The disk had no room for the leader epochs: nothing was lost, and the next flush tries again."""


class Durability:
    """See the module."""

    def __init__(self, fs: FileSystem, directory: str, recovery_point: int, unflushed_since_ms: int | None) -> None:
        self.recovery_point = recovery_point
        self.names_dirty = False
        """Whether files were made, renamed or removed since the directory was last synced."""
        self.identity_dirty = False
        """Whether `partition.metadata` and the directory's own name are not known to be durable."""
        self._fs = fs
        self._directory = directory
        self._unflushed_since_ms = unflushed_since_ms
        self._generation = self._generation_synced = 0
        self._lowered = self._lowered_checkpointed = 0  # how often the recovery point was lowered
        self._cap: int | None = None
        self._lock = threading.Lock()
        self._flushing = threading.Lock()  # one flush at a time; the owner never waits for it but to close

    # -- told by the owner

    def note_append(self, now_ms: int) -> None:
        """Something was appended."""
        if self._unflushed_since_ms is None:
            self._unflushed_since_ms = now_ms

    @contextmanager
    def changing_files(self) -> Iterator[None]:
        """Around a change of what there is: files get other names, go, or become shorter.

        After an exception the generation stays odd, for the log is not to be used any more.
        """
        self.end()
        yield
        # Only now: a flush that began meanwhile may have synced the directory before the names changed.
        self.names_dirty = True
        with self._lock:
            self._generation += 1

    def end(self) -> None:
        """From now on no flush moves the recovery point."""
        with self._lock:
            self._generation |= 1

    @property
    def generation(self) -> int:
        """To be compared by `is_unchanged`."""
        return self._generation

    @property
    def has_unsynced_change(self) -> bool:
        """Whether a power failure may bring back what was cut or removed."""
        return self._generation != self._generation_synced

    def note_unclean(self) -> None:
        """The process before this one may have cut or removed something."""
        self._generation_synced = -1

    def is_unchanged(self, generation: int) -> bool:
        """Whether what was seen since then was of one state."""
        return generation == self._generation and not generation & 1

    def lower(self, log_end_offset: int) -> None:
        """The log was cut: what is appended there is not durable."""
        with self._lock:
            if self.recovery_point > log_end_offset:
                self.recovery_point = log_end_offset
                self._lowered += 1

    def note_lowered(self) -> None:
        """The checkpoint on disk has a higher recovery point than the log that was found."""
        self._lowered += 1

    @property
    def is_checkpoint_stale(self) -> bool:
        """Whether the checkpoint on disk may have a recovery point from before a cut below it."""
        return self._lowered != self._lowered_checkpointed

    def to_checkpoint(self) -> tuple[int, int]:
        """The recovery point, and a mark for `note_checkpoint`."""
        with self._lock:
            point = self.recovery_point
            return (point if self._cap is None else min(point, self._cap)), self._lowered

    @contextmanager
    def capped(self, offset: int) -> Iterator[None]:
        """Meanwhile no checkpoint has a recovery point above `offset`: the log may be cut there."""
        with self._lock:
            self._cap = offset
        try:
            yield
        finally:
            with self._lock:
                self._cap = None

    def note_checkpoint(self, mark: int) -> None:
        """What `to_checkpoint` gave with that mark is on disk."""
        with self._lock:
            self._lowered_checkpointed = max(self._lowered_checkpointed, mark)

    def skip_to(self, offset: int) -> None:
        """Nothing below `offset` exists any more."""
        with self._lock:
            self.recovery_point = max(self.recovery_point, offset)

    def is_due(self, now_ms: int, config: TopicConfig, log_end_offset: int, active_base_offset: int) -> bool:
        """Whether `flush.messages`, `flush.ms` or a rolled segment ask for a flush."""
        unflushed = log_end_offset - self.recovery_point
        if unflushed <= 0:
            return False
        if unflushed >= config.flush_messages or self.recovery_point < active_base_offset:
            return True
        since = self._unflushed_since_ms
        return since is not None and now_ms - since >= config.flush_ms

    # -- from any thread

    def flush(self, take: Callable[[], Snapshot], epochs: LeaderEpochs, *, sealed: bool = False) -> None:
        """Make everything that `take` gives durable and move the recovery point. OSError: nothing is known then.

        EpochsNotWrittenError passes. `sealed` is for the last flush, after the active segment's indexes were written.
        """
        with self._flushing:
            generation = self._generation  # before the snapshot: a cut since then is seen
            if generation & 1:  # it would say nothing, and the directory's name may be another log's by now
                return
            since = self._unflushed_since_ms  # and so is this: an append that the snapshot lacks begins anew
            self._unflushed_since_ms = None
            is_done = False
            try:
                segments, end = take()
                self._sync_all(segments, end, epochs, sealed)
                with self._lock:
                    is_done = self.is_unchanged(generation)
                    if is_done:
                        self.recovery_point = max(self.recovery_point, end)
                        self._generation_synced = generation
            except FileNotFoundError:
                if self.is_unchanged(generation):
                    raise
            finally:
                if not is_done and since is not None:
                    self._unflushed_since_ms = since

    def _sync_all(self, segments: Sequence[Segment], end: int, epochs: LeaderEpochs, sealed: bool) -> None:
        self._sync_segments(segments, end, sealed)
        if epochs.is_dirty:
            try:
                epochs.written = write_epochs(self._fs, self._directory, epochs.entries)
            except OSError as error:
                if is_no_space(error):
                    raise EpochsNotWrittenError(*error.args) from error
                raise
            self.names_dirty = True
        self._sync_names(with_parent=True)

    def wait_for_flush(self) -> None:
        """Until no flush runs any more that began before `end`; later ones touch nothing."""
        with self._flushing:
            pass

    def _sync_segments(self, segments: Sequence[Segment], end: int, sealed: bool) -> None:
        for number, segment in enumerate(segments):
            is_active = number + 1 == len(segments)
            segment_end = end if is_active else segments[number + 1].base_offset
            if segment_end > self.recovery_point or segment.has_unsynced_truncation or (sealed and is_active):
                segment.sync(with_indexes=sealed or not is_active)

    def sync_identity(self) -> None:
        """Make `partition.metadata` durable; the caller syncs the directory above. OSError."""
        with self._flushing:
            generation = self._generation
            if generation & 1:
                return
            try:
                self._sync_names(with_parent=False)
            except FileNotFoundError:
                if self.is_unchanged(generation):
                    raise

    def _sync_names(self, *, with_parent: bool) -> None:
        is_new = self.identity_dirty
        if is_new and self._fs.exists(f"{self._directory}/{PARTITION_METADATA}"):
            with closing(self._fs.open(f"{self._directory}/{PARTITION_METADATA}")) as file:
                file.sync()
        if is_new or self.names_dirty:
            self.names_dirty = False
            self._fs.sync_dir(self._directory)
        if is_new:
            if with_parent:
                self._fs.sync_dir(os.path.dirname(self._directory))
            self.identity_dirty = False
