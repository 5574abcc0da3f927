"""Whether the metadata log on disk still has, whole, what was made durable: looked at before anything is changed.

A replica votes, leads and cuts others' logs on the word of its own, so what it promised to have must be there: each
batch from the log start on has the right CRC and epoch and follows the one before. After a clean stop that goes for
all of the log, otherwise for what is below the checkpointed recovery point; what a crash tore beyond it is cut as any
log's is.

A log that ends too early is no damage if a snapshot reaches the recovery point: that takes the log's place (630-14).

The log lowers its checkpointed recovery point before it is cut below it (`LogManager.truncating`), so a crash never
leaves what is taken for damage here.
"""

from __future__ import annotations

from contextlib import closing

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.record_batch import BatchHeader
from kipmesh.core.snapshot.ids import FileKind, parse_file_name
from kipmesh.storage.checkpoint import read_epochs
from kipmesh.storage.fs import FileSystem
from kipmesh.storage.log.segment import LOG_SUFFIX, checked_batches

_OFFSET_DIGITS = 20


def damage(fs: FileSystem, directory: str, *, clean: bool, recovery_point: int, log_start_offset: int) -> str | None:
    """Describe the damage of the log in a directory, with file and offset, for use after a colon; None if it is whole.

    Reads the log once and writes nothing. OSError.
    """
    if log_start_offset >= recovery_point and not clean:
        return None
    names = fs.list_dir(directory)
    bases = sorted(int(name[:_OFFSET_DIGITS]) for name in names if _is_segment(name))
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
            break  # the segment before it ended early
        name = f"{base:020d}{LOG_SUFFIX}"
        end = base
        try:
            with closing(fs.open(f"{directory}/{name}")) as file:
                for _, header in checked_batches(file, file.size()):
                    if header.base_offset != end or header.last_offset_delta < 0:
                        raise CorruptRecordError(f"a batch of {header.base_offset}..{header.last_offset} is there")
                    epochs.check(header)
                    end = header.next_offset
                    if not clean and end >= recovery_point:
                        break
        except CorruptRecordError as error:
            if clean or end < recovery_point:
                return f"{directory}/{name} is damaged at offset {end} ({error.message})"
        if following is not None and following != end and (clean or min(end, following) < recovery_point):
            return f"{directory}/{name} ends at offset {end}, and the next segment begins at {following}"
    end = max(end, log_start_offset)
    if end < recovery_point and snapshot_end < recovery_point:
        return f"{directory} ends at offset {end}, though everything below {recovery_point} was durable"
    return None


class _Epochs:
    """The leader epochs of a log, by its checkpoint: no CRC says whether that of a batch is right."""

    def __init__(self, fs: FileSystem, directory: str) -> None:
        try:
            self._entries = read_epochs(fs, directory)
        except CorruptRecordError:  # it is made anew of the batches
            self._entries = ()
        self._last = -1

    def check(self, header: BatchHeader) -> None:
        """CorruptRecordError when a batch has not the epoch of its offset, or a lower one than that before it."""
        epoch = header.partition_leader_epoch
        known = [entry[0] for entry in self._entries if entry[1] <= header.base_offset]
        if epoch < self._last or (known and epoch != known[-1]):
            raise CorruptRecordError(f"leader epoch {epoch}, expected {known[-1] if known else self._last}")
        self._last = epoch


def _is_segment(name: str) -> bool:
    return name.endswith(LOG_SUFFIX) and len(name) == _OFFSET_DIGITS + len(LOG_SUFFIX) and name[:-4].isdigit()
