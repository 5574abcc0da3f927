"""How a compacted segment takes the place of others, so that a stop at any point loses nothing; as Kafka names it.

1. `.cleaned`: the copy is being written. A start removes it. When it is whole it is fsynced.
2. `begin`: it becomes `.swap`, and the folder is synced. From now on a start completes the exchange.
3. `take_over`: the others become `.deleted`, readers go on with the copy, and the folder is synced.
4. `finish`: the copy gets its plain name.

A log that is cut between 2 and 3 gives the exchange up first, durably: else a start would bring back what was cut.
Retention waits meanwhile. The syncs are for a thread, everything else for the log's owner.

Invariants: on disk there is at most one `.swap` of a log; while there is, either it or what it replaces is complete.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kipmesh.core.errors import CorruptRecordError
from kipmesh.storage.fs import FileStat
from kipmesh.storage.log import Log
from kipmesh.storage.open_files import OpenFiles
from kipmesh.storage.segment import (
    CLEANED_SUFFIX,
    LOG_SUFFIX,
    SUFFIXES,
    SWAP_SUFFIX,
    Segment,
)

_LOG = logging.getLogger(__name__)


class Swap:
    """See the module; `new` has been written and fsynced, and holds what is left of `old`."""

    def __init__(self, log: Log, old: Sequence[Segment], new: Segment, generation: int) -> None:
        """`old` are as they were at that generation of the log's durability."""
        self.log = log
        self.old = list(old)
        self.new = new
        self.generation = generation
        """Until when the log was changed by nobody else; odd when it was."""
        self._has_taken_over = False

    def begin(self) -> bool:
        """Step 2, to be synced; False when the log was changed since the copy was begun. KafkaError."""
        log = self.log
        log.check_usable()
        if log.swap is not None or not log.durability.is_unchanged(self.generation):
            return False
        try:
            self.new.move(SWAP_SUFFIX)
        except OSError as error:
            raise log.fail(error, "compact", for_good=True) from error
        log.swap = self
        return True

    def sync(self) -> None:
        """Make the names durable; for any thread. KafkaError."""
        log = self.log
        generation = log.durability.generation
        try:
            log.files.fs.sync_dir(log.dir)
        except OSError as error:
            if log.durability.is_unchanged(generation):
                raise log.fail(error, "sync the folder of", for_good=True) from error

    def give_up(self) -> None:
        """The log is about to be cut: perhaps of what made records go from the copy. OSError."""
        if not self._has_taken_over:
            self.new.move(CLEANED_SUFFIX)
            self.log.files.fs.sync_dir(self.log.dir)
            self.log.swap = None

    def take_over(self, now_ms: int) -> bool:
        """Step 3, to be synced; False when the exchange was given up. KafkaError."""
        log = self.log
        log.check_usable()
        if log.swap is not self:
            return False
        try:
            is_alone = log.durability.is_unchanged(self.generation)
            with log.durability.cutting():
                log.segments.replace(self.old, self.new, now_ms + log.config.file_delete_delay_ms)
                self._has_taken_over = True
                log.size_bytes = log.segments.size_bytes
                log.producers.merged([segment.base_offset for segment in self.old[1:]])
            self.generation = log.durability.generation if is_alone else 1
        except OSError as error:
            raise log.fail(error, "compact", for_good=True) from error
        return True

    def finish(self) -> None:
        """Step 4. KafkaError."""
        log = self.log
        log.check_usable()
        log.swap = None
        if self.new not in log.segments.items:  # cut meanwhile
            return
        try:
            is_alone = log.durability.is_unchanged(self.generation)
            with log.durability.cutting():
                self.new.move("")
                log.segments.moved()
            self.generation = log.durability.generation if is_alone else 1
        except OSError as error:
            raise log.fail(error, "compact", for_good=True) from error

    def discard(self) -> None:
        """Remove a copy that did not come into use; for any thread. OSError."""
        if not self._has_taken_over and self.log.swap is not self:
            self.new.remove()


# -- at a start


def complete_swaps(files: OpenFiles, folder: str, entries: Mapping[str, FileStat]) -> bool:
    """Remove unfinished copies and complete the exchanges that had begun; whether anything was changed. OSError."""
    fs = files.fs
    unfinished = [name for name in entries if name.endswith(CLEANED_SUFFIX)]
    for name in unfinished:
        fs.remove(f"{folder}/{name}")
    swapped = [name for name in entries if name.endswith(SWAP_SUFFIX)]
    logs = [name for name in swapped if name.endswith(LOG_SUFFIX + SWAP_SUFFIX)]
    for name in sorted(logs):
        _complete(files, folder, entries, int(name.split(".")[0]), entries[name])
    for name in swapped:  # indexes alone: they are built anew
        if fs.exists(f"{folder}/{name}"):
            fs.remove(f"{folder}/{name}")
    return bool(unfinished or swapped)


def _complete(files: OpenFiles, folder: str, entries: Mapping[str, FileStat], base: int, stat: FileStat) -> None:
    new = Segment(files, folder, base, stat.modified_ms, SWAP_SUFFIX)
    new.exists, new.size_bytes = True, stat.size_bytes
    has_old = f"{base:020d}{LOG_SUFFIX}" in entries
    try:
        end = base
        for position, header in new.batches():
            if position + header.size_bytes > stat.size_bytes:
                raise CorruptRecordError("the last batch is cut")
            end = header.next_offset
    except CorruptRecordError as error:
        _LOG.warning("%s: segment %d, compacted, is damaged: %s", folder, base, error.message)
        if has_old:
            new.remove()
            return
    _LOG.info("%s: completing the exchange of segment %d, compacted, up to offset %d", folder, base, end)
    for name in entries:
        digits = name.split(".")[0]
        if name.endswith(SUFFIXES) and digits.isdigit() and base <= int(digits) < max(end, base + 1):
            files.fs.remove(f"{folder}/{name}")
            files.forget(f"{folder}/{name}")
    files.fs.sync_dir(folder)
    new.move("")
    files.fs.sync_dir(folder)
