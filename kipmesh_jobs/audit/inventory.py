"""Inventory of the replicas' files: data directories, logs, segments, snapshots and checkpoints.

Unreadable files become a `Finding`; the remaining files are audited.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.snapshot.ids import FileKind, parse_file_name
from kipmesh.storage import checkpoint
from kipmesh.storage.fs import File, RealFileSystem
from kipmesh_jobs.frame import JobError

METADATA_TOPIC: Final = "__cluster_metadata"
_LOG_DIRECTORY: Final = re.compile(r"(?P<topic>[a-zA-Z0-9._-]{1,249})-(?P<partition>\d{1,10})", re.ASCII)
_SEGMENT: Final = re.compile(r"(\d{20})\.log", re.ASCII)
_STATE: Final = "cluster.json"
_DEPTH: Final = 3
"""Maximum depth of data directories below a replica's directory."""


ERROR: Final = "error"
WARNING: Final = "warning"

KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "divergence": (ERROR, "replicas differ where they must be equal"),
    "crc": (ERROR, "a batch has the wrong CRC"),
    "garbage": (ERROR, "bytes that are not a batch"),
    "cut": (ERROR, "a segment other than the last ends within a batch"),
    "gap": (ERROR, "offsets are missing: a segment, or part of one"),
    "overlap": (ERROR, "offsets are repeated or not ascending"),
    "unreadable": (ERROR, "a file or directory cannot be read"),
    "snapshot_corrupt": (ERROR, "a snapshot has a wrong CRC, header or footer"),
    "snapshot_differs": (ERROR, "snapshots with the same id have different records"),
    "snapshot_missing": (ERROR, "the log begins above 0 without a valid snapshot of the offsets before (630-06)"),
    "torn": (WARNING, "the log ends within a batch, which recovery truncates"),
    "short_log": (WARNING, "the log ends below the replica's own checkpointed high watermark"),
    "missing_log": (WARNING, "a checkpoint names a log that has no directory"),
    "uncommitted": (WARNING, "replicas differ above the committed offsets; one of them will truncate"),
    "other_topic": (WARNING, "logs of one topic name have different topic ids: the topic was recreated"),
    "bad_checkpoint": (WARNING, "a checkpoint cannot be read"),
    "snapshot_aside": (WARNING, "the replica has set a corrupt snapshot aside"),
    "vanished": (WARNING, "a file was deleted while the job ran"),
}
SCHEMA: Final = """severity string, kind string, replica string, other string, topic string, partition int,
 offset long, file string, position long, text string"""


class Finding(NamedTuple):
    """One finding of an audit. `file` is the affected path, `position` a byte in it, `other` the second replica of a
    difference.
    """

    kind: str
    replica: str
    topic: str | None
    partition: int | None
    offset: int | None
    file: str
    text: str
    position: int | None = None
    other: str | None = None

    @property
    def severity(self) -> str:
        """`ERROR` or `WARNING`, from the finding's kind."""
        return KINDS[self.kind][0]

    def row(self) -> dict[str, Any]:
        """Return the finding as a row with the columns of `SCHEMA`."""
        return {"severity": self.severity, **self._asdict()}


class SegmentFile(NamedTuple):
    """A segment file, with its size when it was listed. Bytes that are appended later are not read."""

    path: str
    base_offset: int
    size_bytes: int
    is_last: bool


class SnapshotPath(NamedTuple):
    """A complete metadata snapshot: its path, id and size."""

    path: str
    end_offset: int
    epoch: int
    size_bytes: int


@dataclass(slots=True)
class ReplicaLog:
    """A replica's log of a partition. Checkpointed offsets are 0 if there is no checkpoint."""

    replica: str
    topic: str
    partition: int
    directory: str
    topic_id: str = ""
    high_watermark: int = 0
    log_start: int = 0
    cleaned_to: int = 0
    """Compaction has processed the log below this offset: batches may differ between replicas, records may not."""
    segments: list[SegmentFile] = field(default_factory=list)
    snapshots: list[SnapshotPath] = field(default_factory=list)


@dataclass(slots=True)
class Inventory:
    """All replicas and logs to audit, and problems found while listing the files."""

    replicas: list[str] = field(default_factory=list)
    logs: list[ReplicaLog] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)

    @property
    def segment_bytes(self) -> int:
        """Total size of all segments in bytes."""
        return sum(segment.size_bytes for log in self.logs for segment in log.segments)


class ReadOnlyFileSystem(RealFileSystem):
    """The real file system with files opened read-only. A write to an open file raises OSError (EBADF)."""

    access = os.O_RDONLY

    def open(self, path: str, *, create: bool = False) -> File:
        """Open an existing file read-only. `create` is ignored. Raises OSError, such as FileNotFoundError."""
        return super().open(path)


def parse_replicas(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Parse `NAME=PATH` strings into (name, absolute path). A name may occur with several directories. Raises JobError
    for a malformed string or a path that is not a directory.
    """
    found = []
    for text in texts:
        name, separator, path = text.partition("=")
        name, path = name.strip(), path.strip()
        if not separator or not name or not path:
            raise JobError(f"--replica must be NAME=PATH, got {text!r}")
        if not Path(path).is_dir():
            raise JobError(f"--replica {text!r}: {path} is not a readable directory")
        found.append((name, str(Path(path).absolute())))
    return found


def replicas_of_cluster(directory: Path) -> list[tuple[str, str]]:
    """Return (name, directory) of each controller and broker of a local cluster whose directory exists.

    Raises JobError if the cluster's `cluster.json` cannot be read.
    """
    try:
        nodes = json.loads((directory / _STATE).read_text("utf-8"))["nodes"]
        places = [(str(node["name"]), Path(str(node["dir"]))) for node in nodes if node["role"] != "consumer"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobError(f"--mesh {directory}: {_STATE} cannot be read: {error}") from None
    return [(name, str(path.absolute())) for name, path in places if path.is_dir()]


def data_directories(path: str) -> list[str]:
    """Return the data directories at or up to three levels below `path`: those with `meta.properties` or partition
    logs. Empty if there are none.
    """
    found: list[str] = []
    for directory, names, files in os.walk(path):
        depth = len(Path(directory).relative_to(path).parts)
        if checkpoint.META_PROPERTIES in files or any(_LOG_DIRECTORY.fullmatch(name) for name in names):
            found.append(directory)
        names[:] = [] if depth >= _DEPTH else sorted(name for name in names if not _LOG_DIRECTORY.fullmatch(name))
    return found


def take_inventory(replicas: Sequence[tuple[str, str]], topics: Sequence[str] = ()) -> Inventory:
    """List the files of all replicas, which are given as (name, path). If `topics` is not empty, lists only the files
    of these topics.

    An unreadable file or directory becomes a finding. Raises JobError if a path has no data directory.
    """
    inventory = Inventory()
    for name, path in replicas:
        directories = data_directories(path)
        if not directories:
            raise JobError(
                f"replica {name}: no data directory in {path}; a data directory has meta.properties or partition logs"
            )
        if name not in inventory.replicas:
            inventory.replicas.append(name)
        for directory in directories:
            _read_folder(inventory, name, directory, frozenset(topics))
    return inventory


def drop_deleted(inventory: Inventory) -> None:
    """Remove logs that were deleted or recreated since they were listed, because they may be only partly read. Adds a
    `vanished` finding for each.
    """
    listed, inventory.logs = inventory.logs, []
    for log in listed:
        if os.path.isdir(log.directory) and (not log.topic_id or _topic_id(log.directory) in ("", log.topic_id)):
            inventory.logs.append(log)
        else:
            text = "the log was deleted while this job ran"
            place = (log.replica, log.topic, log.partition)
            inventory.problems.append(Finding("vanished", *place, None, log.directory, text))


def _read_folder(inventory: Inventory, replica: str, directory: str, topics: frozenset[str]) -> None:
    files = (checkpoint.HIGH_WATERMARK_CHECKPOINT, checkpoint.LOG_START_CHECKPOINT, checkpoint.CLEANER_CHECKPOINT)
    offsets = [_offsets(inventory, replica, directory, name) for name in files]
    existing = set()
    for name in _entries(inventory, replica, directory):
        match = _LOG_DIRECTORY.fullmatch(name)
        path = f"{directory}/{name}"
        if match is None or not os.path.isdir(path):
            continue
        key = (match["topic"], int(match["partition"]))
        existing.add(key)
        if topics and key[0] not in topics:
            continue
        high_watermark, log_start, cleaned_to = (by_log.get(key, 0) for by_log in offsets)
        log = ReplicaLog(replica, *key, path, _topic_id(path), high_watermark, log_start, cleaned_to)
        _read_log(inventory, log)
        inventory.logs.append(log)
    for (topic, partition), offset in sorted(offsets[0].items()):
        if offset > 0 and (topic, partition) not in existing and (not topics or topic in topics):
            text = f"the checkpoint has high watermark {offset}, but the log has no directory"
            inventory.problems.append(
                Finding("missing_log", replica, topic, partition, offset, f"{directory}/{topic}-{partition}", text)
            )


def _read_log(inventory: Inventory, log: ReplicaLog) -> None:
    sizes: dict[str, int] = {}
    for name in _entries(inventory, log.replica, log.directory, may_vanish=True):  # `drop_deleted` reports that
        with suppress(OSError):  # retention may delete or rename files meanwhile
            sizes[name] = os.stat(f"{log.directory}/{name}").st_size
    bases = sorted((int(match[1]), name) for name in sizes if (match := _SEGMENT.fullmatch(name)))
    for base, name in bases:
        log.segments.append(SegmentFile(f"{log.directory}/{name}", base, sizes[name], name == bases[-1][1]))
    if log.topic != METADATA_TOPIC:
        return
    for name, size in sorted(sizes.items()):
        parsed = parse_file_name(name)
        if parsed is not None and parsed.kind is FileKind.COMPLETE:
            log.snapshots.append(
                SnapshotPath(f"{log.directory}/{name}", parsed.snapshot_id.end_offset, parsed.snapshot_id.epoch, size)
            )
        elif parsed is not None and parsed.kind is FileKind.CORRUPT:
            place = (log.replica, log.topic, log.partition, parsed.snapshot_id.end_offset, f"{log.directory}/{name}")
            inventory.problems.append(Finding("snapshot_aside", *place, "the replica itself detected the corruption"))
    # A snapshot contains only committed records (630-03), and no other file states the committed offset.
    log.high_watermark = max([log.high_watermark, *(one.end_offset for one in log.snapshots)])
    log.log_start = max(log.log_start, log.segments[0].base_offset if log.segments else 0)


def _entries(inventory: Inventory, replica: str, directory: str, *, may_vanish: bool = False) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        if may_vanish and isinstance(error, FileNotFoundError):
            return []
        text = error.strerror or str(error)
        inventory.problems.append(Finding("unreadable", replica, None, None, None, directory, text))
        return []


def _offsets(inventory: Inventory, replica: str, directory: str, name: str) -> Mapping[tuple[str, int], int]:
    path = f"{directory}/{name}"
    try:
        return checkpoint.read_offsets(ReadOnlyFileSystem(), path)
    except (CorruptRecordError, OSError) as error:
        text = f"{error}; the checkpoint is ignored"
        inventory.problems.append(Finding("bad_checkpoint", replica, None, None, None, path, text))
        return {}


def _topic_id(directory: str) -> str:
    """Return the topic id of a log directory, or an empty string if its file is missing or invalid."""
    try:
        content = Path(directory, checkpoint.PARTITION_METADATA).read_bytes()
    except OSError:
        return ""
    identity = checkpoint.parse_partition_metadata(content)
    return checkpoint.uuid_text(identity) if identity else ""


def tasks_of(sizes: Sequence[int], bytes_max: int, files_max: int) -> Iterator[list[int]]:
    """Yield for each task the indexes of its files, given the sizes of all files in order. A task has at most
    `files_max` files and `bytes_max` bytes; a larger file has its own task.
    """
    task: list[int] = []
    size = 0
    for place, one in enumerate(sizes):
        if task and (size + one > bytes_max or len(task) == files_max):
            yield task
            task, size = [], 0
        task.append(place)
        size += one
    if task:
        yield task
