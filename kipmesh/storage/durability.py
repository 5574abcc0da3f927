"""What of one log is durable, and making it so.

A flush may run on any thread while the log's owner appends, cuts and rolls. It works on a snapshot: offsets below the
log end it saw are in files it saw, and a write is complete before the log end passes it. A cut or a removal meanwhile
changes the generation; the recovery point then stays where it is, for the flush says nothing about what came after.

Invariants: every batch below `recovery_point` is durable, with the names of its files, the epochs up to there and
the topic id; `recovery_point` moves under `_lock`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from kipmesh.core.config import TopicConfig
from kipmesh.storage.checkpoint import PARTITION_METADATA, write_epochs
from kipmesh.storage.epochs import LeaderEpochs
from kipmesh.storage.fs import FileSystem
from kipmesh.storage.segment import Segment


class Durability:
    """See the module."""

    def __init__(self, fs: FileSystem, folder: str, recovery_point: int, unflushed_since_ms: int | None) -> None:
        self.recovery_point = recovery_point
        self.names_dirty = False
        """Whether files were made, renamed or removed since the folder was last synced."""
        self.identity_dirty = False
        """Whether `partition.metadata` and the folder's own name are not known to be durable."""
        self._fs = fs
        self._folder = folder
        self._unflushed_since_ms = unflushed_since_ms
        self._generation = 0
        self._lock = threading.Lock()
        self._flushing = threading.Lock()  # one flush at a time; the owner never waits for it but to close

    # -- told by the owner

    def note_append(self, now_ms: int) -> None:
        """Something was appended."""
        if self._unflushed_since_ms is None:
            self._unflushed_since_ms = now_ms

    def note_removal(self) -> None:
        """Files are about to get other names, to go, or to be cut: what a running flush sees is void."""
        with self._lock:
            self._generation += 1
        self.names_dirty = True

    def lower(self, log_end_offset: int) -> bool:
        """The log was cut; gives whether that was below the recovery point."""
        with self._lock:
            self._generation += 1
            was_lowered = self.recovery_point > log_end_offset
            self.recovery_point = min(self.recovery_point, log_end_offset)
        return was_lowered

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

    def flush(self, segments: Sequence[Segment], end: int, epochs: LeaderEpochs, *, sealed: bool = False) -> None:
        """Make everything below `end` durable and move the recovery point. OSError: nothing is known then.

        `sealed` is for the last flush of all, after the active segment's indexes were written.
        """
        with self._flushing:
            self._unflushed_since_ms = None
            generation = self._generation
            try:
                self._sync_segments(segments, end, sealed)
                if epochs.is_dirty:
                    epochs.written = write_epochs(self._fs, self._folder, epochs.entries)
                    self.names_dirty = True
                self._sync_names(with_parent=True)
            except FileNotFoundError:
                if generation == self._generation:
                    raise
                return
            with self._lock:
                if generation == self._generation:
                    self.recovery_point = max(self.recovery_point, end)

    def _sync_segments(self, segments: Sequence[Segment], end: int, sealed: bool) -> None:
        for number, segment in enumerate(segments):
            is_active = number + 1 == len(segments)
            segment_end = end if is_active else segments[number + 1].base_offset
            if segment_end > self.recovery_point or (sealed and is_active):
                segment.sync(with_indexes=sealed or not is_active)

    def sync_identity(self) -> None:
        """Make `partition.metadata` durable; the caller syncs the folder above. OSError."""
        with self._flushing:
            generation = self._generation
            try:
                self._sync_names(with_parent=False)
            except FileNotFoundError:
                if generation == self._generation:
                    raise

    def _sync_names(self, *, with_parent: bool) -> None:
        is_new = self.identity_dirty
        if is_new and self._fs.exists(f"{self._folder}/{PARTITION_METADATA}"):
            file = self._fs.open(f"{self._folder}/{PARTITION_METADATA}")
            try:
                file.sync()
            finally:
                file.close()
        if is_new or self.names_dirty:
            self.names_dirty = False
            self._fs.sync_dir(self._folder)
        if is_new:
            if with_parent:
                self._fs.sync_dir(os.path.dirname(self._folder))
            self.identity_dirty = False
