"""Checks whether the metadata log still has everything that was durable, before it is opened.

A replica votes, leads and truncates other logs based on its own log, so that must be complete: every batch from the log
start has a valid CRC and epoch and continues the previous one. After a clean stop this holds for the whole log,
otherwise below the checkpointed recovery point. Later batches may be torn by a crash and are truncated as in any log.

A log that ends too early is not damaged if a snapshot reaches the recovery point, because the snapshot replaces it
(630-14).

The checkpointed recovery point is lowered before a truncation below it (`LogManager.truncating`), so a crash never
looks like damage.
"""

from __future__ import annotations

from contextlib import closing

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.record_batch import BatchHeader
from kipmesh.core.snapshot.ids import FileKind, parse_file_name
from kipmesh.storage.checkpoint import read_epochs
from kipmesh.storage.fs import FileSystem
from kipmesh.storage.log.segment import LOG_SUFFIX, checked_batches, offset_of


def find_damage(
    fs: FileSystem, directory: str, *, clean: bool, recovery_point: int, log_start_offset: int
) -> str | None:
    """Return a description of damage to the metadata log, or None if all durable data is intact. Raises OSError.

    Reads the log once and writes nothing. The description names the file and the offset. `clean`: the log was closed
    cleanly. `recovery_point` and `log_start_offset` are the checkpointed offsets.
    """
    if log_start_offset >= recovery_point and not clean:
        return None
    names = fs.list_dir(directory)
    bases = sorted(base for name in names if (base := offset_of(name, LOG_SUFFIX)) is not None)
    found = [parse_file_name(name) for name in names]
    snapshot_end = max([each.snapshot_id.end_offset for each in found if each and each.kind is FileKind.COMPLETE] + [0])
    end, epochs = log_start_offset, _Epochs(fs, directory)
    for number, base in enumerate(bases):
        following = bases[number + 1] if number + 1 < len(bases) else None
        if following is not None and following <= log_start_offset:
            continue
        if not clean and base >= recovery_point:
            break
        if number and base != end and base > log_start_offset:
            break  # the previous segment ended early
        name = f"{base:020d}{LOG_SUFFIX}"
        end = base
        try:
            with closing(fs.open(f"{directory}/{name}")) as file:
                for _, header in checked_batches(file, file.size()):
                    if header.base_offset != end or header.last_offset_delta < 0:
                        raise CorruptRecordError(
                            f"found a batch with offsets {header.base_offset}..{header.last_offset}"
                        )
                    epochs.check(header)
                    end = header.next_offset
                    if not clean and end >= recovery_point:
                        break
        except CorruptRecordError as error:
            if clean or end < recovery_point:
                return f"{directory}/{name} is corrupt at offset {end} ({error.message})"
        if following is not None and following != end and (clean or min(end, following) < recovery_point):
            return f"{directory}/{name} ends at offset {end}, but the next segment starts at {following}"
    end = max(end, log_start_offset)
    if end < recovery_point and snapshot_end < recovery_point:
        return f"{directory} ends at offset {end}, but everything below {recovery_point} was durable"
    return None


class _Epochs:
    """Checks leader epochs of batches against the epoch checkpoint, because no CRC covers them."""

    def __init__(self, fs: FileSystem, directory: str) -> None:
        try:
            self._entries = read_epochs(fs, directory)
        except CorruptRecordError:  # loading rebuilds it from the batches
            self._entries = ()
        self._last = -1

    def check(self, header: BatchHeader) -> None:
        """Raise CorruptRecordError if a batch's epoch differs from the checkpoint or is lower than the previous one."""
        epoch = header.partition_leader_epoch
        known = [entry[0] for entry in self._entries if entry[1] <= header.base_offset]
        if epoch < self._last or (known and epoch != known[-1]):
            raise CorruptRecordError(f"leader epoch {epoch}, expected {known[-1] if known else self._last}")
        self._last = epoch
