"""Durability of one log: the recovery point, and flushing.

A flush may run on any thread while the log's owner appends, truncates and rolls. It works on a snapshot of the segments
and the log end offset: a write is complete before the log end passes it, so the snapshot's segments contain every batch
below its log end.

The generation detects concurrent truncations and removals of segments: it is odd during such a change and has a new
even value after it. A flush or search is void, errors included, unless the generation had one even value from before
its snapshot to its end.

A truncation below the recovery point lowers it in memory. The checkpoint on disk is updated before the next append.
Until then each batch that the old checkpoint covers is complete or missing at the end of its file, and loading detects
a segment that ends before the next one starts.

Invariants: every batch below `recovery_point` is durable, with its file names, leader epochs and topic id.
`recovery_point` and the generation change under `_lock`.
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
"""Segments and the log end offset, which is read first."""


class EpochsNotWrittenError(OSError):
    """The disk was too full for the leader epoch checkpoint. Nothing is lost: the next flush retries."""


class Durability:
    """Recovery point and generation of one log; see the module docstring.

    `unflushed_since_ms`: time of the oldest unflushed append, or None.
    """

    def __init__(self, fs: FileSystem, directory: str, recovery_point: int, unflushed_since_ms: int | None) -> None:
        self.recovery_point = recovery_point
        self.names_dirty = False
        """Whether files were created, renamed or removed since the last sync of the directory."""
        self.identity_dirty = False
        """Whether `partition.metadata` or the name of the log's directory may not be durable."""
        self._fs = fs
        self._directory = directory
        self._unflushed_since_ms = unflushed_since_ms
        self._generation = self._generation_synced = 0
        self._lowered = self._lowered_checkpointed = 0  # number of times that the recovery point was lowered
        self._cap: int | None = None
        self._lock = threading.Lock()
        self._flush_lock = threading.Lock()  # the owner takes it only to close the log

    # -- called by the owner

    def note_append(self, now_ms: int) -> None:
        """Start the `flush.ms` timer at `now_ms`, unless it is running."""
        if self._unflushed_since_ms is None:
            self._unflushed_since_ms = now_ms

    @contextmanager
    def changing_files(self) -> Iterator[None]:
        """Context manager for a change that renames, removes or truncates files. The generation is odd meanwhile.

        After an exception it stays odd, because the log must no longer be used.
        """
        self.stop()
        yield
        # Set last, because a concurrent flush may have synced the directory before the names changed.
        self.names_dirty = True
        with self._lock:
            self._generation += 1

    def stop(self) -> None:
        """Make the generation odd: running flushes no longer advance the recovery point, and later ones do nothing."""
        with self._lock:
            self._generation |= 1

    @property
    def generation(self) -> int:
        """The current generation, for `is_unchanged`."""
        return self._generation

    @property
    def has_unsynced_change(self) -> bool:
        """Whether a power failure may restore truncated or removed batches."""
        return self._generation != self._generation_synced

    def note_recovered(self, *, is_unclean: bool, is_lowered: bool) -> None:
        """Set the state after loading a log.

        `is_unclean`: the previous process may have left unsynced truncations. `is_lowered`: the checkpoint on disk is
        above the loaded recovery point.
        """
        self._generation_synced = -1 if is_unclean else 0
        self._lowered = int(is_lowered)

    def is_unchanged(self, generation: int) -> bool:
        """Return whether `generation` is even and still current.

        If so, everything read since `generation` was observed belongs to one consistent state.
        """
        return generation == self._generation and not generation & 1

    def lower(self, log_end_offset: int) -> None:
        """Lower the recovery point to the log end after a truncation. Never raises it."""
        with self._lock:
            if self.recovery_point > log_end_offset:
                self.recovery_point = log_end_offset
                self._lowered += 1

    @property
    def is_checkpoint_stale(self) -> bool:
        """Whether the recovery point on disk may be above a truncation."""
        return self._lowered != self._lowered_checkpointed

    def to_checkpoint(self) -> tuple[int, int]:
        """Return the recovery point to checkpoint, capped within `capped`, and a token for `note_checkpoint`."""
        with self._lock:
            point = self.recovery_point
            return (point if self._cap is None else min(point, self._cap)), self._lowered

    @contextmanager
    def capped(self, offset: int) -> Iterator[None]:
        """Context manager that caps checkpointed recovery points at `offset`, during a possible truncation to it."""
        with self._lock:
            self._cap = offset
        try:
            yield
        finally:
            with self._lock:
                self._cap = None

    def note_checkpoint(self, mark: int) -> None:
        """Record that the recovery point returned by `to_checkpoint` with the token `mark` is now on disk."""
        with self._lock:
            self._lowered_checkpointed = max(self._lowered_checkpointed, mark)

    def skip_to(self, offset: int) -> None:
        """Raise the recovery point to `offset`, the new start of the first segment. Never lowers it."""
        with self._lock:
            self.recovery_point = max(self.recovery_point, offset)

    def is_due(self, now_ms: int, config: TopicConfig, log_end_offset: int, active_base_offset: int) -> bool:
        """Return whether `flush.messages`, `flush.ms` or a rolled segment requires a flush; False if all is durable."""
        unflushed = log_end_offset - self.recovery_point
        if unflushed <= 0:
            return False
        if unflushed >= config.flush_messages or self.recovery_point < active_base_offset:
            return True
        since = self._unflushed_since_ms
        return since is not None and now_ms - since >= config.flush_ms

    # -- thread-safe

    def flush(self, take_snapshot: Callable[[], Snapshot], epochs: LeaderEpochs, *, sealed: bool = False) -> None:
        """Sync the segments of `take_snapshot()` and the epochs, then advance the recovery point.

        Does nothing while the generation is odd. If it changes meanwhile, the recovery point stays. `sealed`: also sync
        the indexes of the active segment, for the last flush. Raises EpochsNotWrittenError, which is transient, or
        OSError, after which the durable state is unknown.
        """
        with self._flush_lock:
            # Both are read before the snapshot, to detect later truncations and to restart the timer for later appends.
            generation = self._generation
            if generation & 1:  # another log may use the directory's path by now
                return
            since = self._unflushed_since_ms
            self._unflushed_since_ms = None
            is_done = False
            try:
                segments, end = take_snapshot()
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
        """Wait for any flush that started before `stop`. Later flushes do nothing."""
        with self._flush_lock:
            pass

    def _sync_segments(self, segments: Sequence[Segment], end: int, sealed: bool) -> None:
        for number, segment in enumerate(segments):
            is_active = number + 1 == len(segments)
            segment_end = end if is_active else segments[number + 1].base_offset
            if segment_end > self.recovery_point or segment.has_unsynced_truncation or (sealed and is_active):
                segment.sync(with_indexes=sealed or not is_active)

    def sync_identity(self) -> None:
        """Make `partition.metadata` durable. Does nothing while the generation is odd.

        The caller syncs the data directory. Raises OSError.
        """
        with self._flush_lock:
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
