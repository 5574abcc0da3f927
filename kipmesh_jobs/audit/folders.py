"""Which files the replicas have: data folders, the logs in them, their segments and snapshots, and their checkpoints.

Nothing here fails because of what a folder holds: what cannot be read is a `Finding`, and the rest is audited.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.snapshot.ids import FileKind, parse_file_name
from kipmesh.storage import checkpoint
from kipmesh.storage.fs import Buffer, File, RealFileSystem
from kipmesh_jobs.frame import JobError

METADATA_TOPIC: Final = "__cluster_metadata"
_LOG_FOLDER: Final = re.compile(r"(?P<topic>[a-zA-Z0-9._-]{1,249})-(?P<partition>\d{1,10})", re.ASCII)
_SEGMENT: Final = re.compile(r"(\d{20})\.log", re.ASCII)
_STATE: Final = "cluster.json"
_DEPTH: Final = 3
"""How many folders below a replica's own its data folders may be."""


ERROR: Final = "error"
WARNING: Final = "warning"

KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "divergence": (ERROR, "replicas differ where they must be equal"),
    "crc": (ERROR, "a batch has the wrong CRC"),
    "garbage": (ERROR, "bytes that are no batch"),
    "cut": (ERROR, "a segment that is not the last ends within a batch"),
    "gap": (ERROR, "offsets are missing: a segment, or part of one"),
    "overlap": (ERROR, "offsets come twice or go back"),
    "unreadable": (ERROR, "a file or folder cannot be read"),
    "snapshot_corrupt": (ERROR, "a snapshot has a wrong CRC, header or footer"),
    "snapshot_differs": (ERROR, "snapshots of one id have other records"),
    "snapshot_missing": (ERROR, "the log begins above 0 and no valid snapshot covers what is before it (630-06)"),
    "torn": (WARNING, "the log ends within a write; a start cuts it off"),
    "short_log": (WARNING, "the log ends below the replica's own checkpointed high watermark"),
    "missing_log": (WARNING, "a checkpoint names a log that has no folder"),
    "uncommitted": (WARNING, "replicas differ above what is committed; one of them truncates when it follows"),
    "other_topic": (WARNING, "logs of one name with other topic ids: the topic was made anew"),
    "bad_checkpoint": (WARNING, "a checkpoint cannot be read"),
    "snapshot_aside": (WARNING, "a snapshot that its replica has set aside"),
    "vanished": (WARNING, "a file went while the job ran"),
}
SCHEMA: Final = """severity string, kind string, replica string, other string, topic string, partition int,
 offset long, file string, position long, text string"""


class Finding(NamedTuple):
    """One finding, in the order of `SCHEMA`. `other` is the second replica of a difference."""

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
        """`ERROR` or `WARNING`."""
        return KINDS[self.kind][0]

    def row(self) -> dict[str, Any]:
        """For the Parquet and the summary."""
        return {"severity": self.severity, **self._asdict()}


class SegmentFile(NamedTuple):
    """A segment as it is listed; only that many bytes of it are read."""

    path: str
    base_offset: int
    size_bytes: int
    is_last: bool


class SnapshotPath(NamedTuple):
    """A complete snapshot."""

    path: str
    end_offset: int
    epoch: int
    size_bytes: int


@dataclass(slots=True)
class ReplicaLog:
    """A replica's log of a partition. Offsets are those of checkpoints, 0 where there is none."""

    replica: str
    topic: str
    partition: int
    folder: str
    topic_id: str = ""
    high_watermark: int = 0
    log_start: int = 0
    cleaned_to: int = 0
    """Compaction has seen the log up to there: batches below it differ from replica to replica, records do not."""
    segments: list[SegmentFile] = field(default_factory=list)
    snapshots: list[SnapshotPath] = field(default_factory=list)


@dataclass(slots=True)
class Inventory:
    """Everything that there is to read."""

    replicas: list[str] = field(default_factory=list)
    logs: list[ReplicaLog] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)

    @property
    def segment_bytes(self) -> int:
        """Of all segments together."""
        return sum(segment.size_bytes for log in self.logs for segment in log.segments)


class ReadOnlyFile:
    """An open file that refuses to be changed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, size: int, position: int) -> bytes:
        """At most `size` bytes; fewer at the file's end only."""
        parts = []
        while size > 0 and (part := os.pread(self._descriptor, size, position)):
            parts.append(part)
            size, position = size - len(part), position + len(part)
        return b"".join(parts)

    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def write_at(self, data: Buffer, position: int) -> None:
        """Refused."""
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), self._path)

    def truncate(self, size: int) -> None:
        """Refused."""
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), self._path)

    def sync(self) -> None:
        """Nothing was written."""


class ReadOnlyFileSystem(RealFileSystem):
    """The real one, whose files are opened for reading."""

    def open(self, path: str, *, create: bool = False) -> File:
        """FileNotFoundError also with `create`."""
        return ReadOnlyFile(path)


def parse_replicas(texts: Iterable[str]) -> list[tuple[str, str]]:
    """`NAME=PATH` texts; a name may have several folders. Raises `JobError`."""
    found = []
    for text in texts:
        name, separator, path = text.partition("=")
        if not separator or not name.strip() or not path.strip():
            raise JobError(f"--replica {text!r} is not NAME=PATH")
        if not Path(path.strip()).is_dir():
            raise JobError(f"--replica {text!r}: {path.strip()} is no folder that can be read")
        found.append((name.strip(), str(Path(path.strip()).absolute())))
    return found


def replicas_of_mesh(folder: Path) -> list[tuple[str, str]]:
    """The nodes of a local mesh that have data, by its ``cluster.json``. Raises `JobError`."""
    try:
        nodes = json.loads((folder / _STATE).read_text("utf-8"))["nodes"]
        places = [(str(node["name"]), Path(str(node["dir"]))) for node in nodes if node["role"] != "consumer"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobError(f"--mesh {folder}: {_STATE} cannot be read: {error}") from None
    return [(name, str(path.absolute())) for name, path in places if path.is_dir()]


def data_folders(path: str) -> list[str]:
    """The data folders in a replica's folder, itself included: they have `meta.properties`, or logs."""
    found: list[str] = []
    for folder, names, files in os.walk(path):
        depth = len(Path(folder).relative_to(path).parts)
        if checkpoint.META_PROPERTIES in files or any(_LOG_FOLDER.fullmatch(name) for name in names):
            found.append(folder)
        names[:] = [] if depth >= _DEPTH else sorted(name for name in names if not _LOG_FOLDER.fullmatch(name))
    return found


def take_inventory(replicas: Sequence[tuple[str, str]], topics: Sequence[str] = ()) -> Inventory:
    """List everything; `topics` limits it to those. Raises `JobError` when a replica has no data folder."""
    inventory = Inventory()
    for name, path in replicas:
        folders = data_folders(path)
        if not folders:
            raise JobError(f"replica {name}: {path} has no data folder (one with meta.properties, or with logs)")
        if name not in inventory.replicas:
            inventory.replicas.append(name)
        for folder in folders:
            _read_folder(inventory, name, folder, frozenset(topics))
    return inventory


def drop_gone(inventory: Inventory) -> None:
    """Leave out logs whose folder is gone by now, or another topic's: they were deleted, perhaps half read."""
    listed, inventory.logs = inventory.logs, []
    for log in listed:
        if os.path.isdir(log.folder) and (not log.topic_id or _topic_id(log.folder) in ("", log.topic_id)):
            inventory.logs.append(log)
        else:
            text = "the log was deleted while this job ran"
            place = (log.replica, log.topic, log.partition)
            inventory.problems.append(Finding("vanished", *place, None, log.folder, text))


def _read_folder(inventory: Inventory, replica: str, folder: str, topics: frozenset[str]) -> None:
    high_watermarks = _offsets(inventory, replica, folder, checkpoint.HIGH_WATERMARK_CHECKPOINT)
    log_starts = _offsets(inventory, replica, folder, checkpoint.LOG_START_CHECKPOINT)
    cleaned = _offsets(inventory, replica, folder, checkpoint.CLEANER_CHECKPOINT)
    there = set()
    for name in _entries(inventory, replica, folder):
        match = _LOG_FOLDER.fullmatch(name)
        path = f"{folder}/{name}"
        if match is None or not os.path.isdir(path):
            continue
        key = (match["topic"], int(match["partition"]))
        there.add(key)
        if topics and key[0] not in topics:
            continue
        log = ReplicaLog(replica, *key, path, _topic_id(path))
        log.high_watermark, log.log_start = high_watermarks.get(key, 0), log_starts.get(key, 0)
        log.cleaned_to = cleaned.get(key, 0)
        _read_log(inventory, log)
        inventory.logs.append(log)
    for (topic, partition), offset in sorted(high_watermarks.items()):
        if offset > 0 and (topic, partition) not in there and (not topics or topic in topics):
            text = f"its high watermark was {offset} and there is no folder"
            inventory.problems.append(
                Finding("missing_log", replica, topic, partition, offset, f"{folder}/{topic}-{partition}", text)
            )


def _read_log(inventory: Inventory, log: ReplicaLog) -> None:
    sizes: dict[str, int] = {}
    for name in _entries(inventory, log.replica, log.folder, may_go=True):  # `drop_gone` says so
        try:
            sizes[name] = os.stat(f"{log.folder}/{name}").st_size
        except OSError:  # retention, or a rename, took it away meanwhile
            continue
    bases = sorted((int(match[1]), name) for name in sizes if (match := _SEGMENT.fullmatch(name)))
    for place, (base, name) in enumerate(bases):
        is_last = place == len(bases) - 1
        log.segments.append(SegmentFile(f"{log.folder}/{name}", base, sizes[name], is_last))
    if log.topic != METADATA_TOPIC:
        return
    for name, size in sorted(sizes.items()):
        parsed = parse_file_name(name)
        if parsed is not None and parsed.kind is FileKind.COMPLETE:
            log.snapshots.append(
                SnapshotPath(f"{log.folder}/{name}", parsed.snapshot_id.end_offset, parsed.snapshot_id.epoch, size)
            )
        elif parsed is not None and parsed.kind is FileKind.CORRUPT:
            text = "the replica itself found it corrupt and set it aside"
            inventory.problems.append(_problem("snapshot_aside", log, parsed.snapshot_id.end_offset, name, text))
    # Snapshots are made of what is committed (630-03): the only word about that on disk.
    log.high_watermark = max([log.high_watermark, *(one.end_offset for one in log.snapshots)])
    log.log_start = max(log.log_start, log.segments[0].base_offset if log.segments else 0)


def _problem(kind: str, log: ReplicaLog, offset: int | None, name: str, text: str) -> Finding:
    return Finding(kind, log.replica, log.topic, log.partition, offset, f"{log.folder}/{name}", text)


def _entries(inventory: Inventory, replica: str, folder: str, *, may_go: bool = False) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if may_go and isinstance(error, FileNotFoundError):
            return []
        text = error.strerror or str(error)
        inventory.problems.append(Finding("unreadable", replica, None, None, None, folder, text))
        return []


def _offsets(inventory: Inventory, replica: str, folder: str, name: str) -> Mapping[tuple[str, int], int]:
    path = f"{folder}/{name}"
    try:
        return checkpoint.read_offsets(ReadOnlyFileSystem(), path)
    except (CorruptRecordError, OSError) as error:
        text = f"{error}: what it says is not used"
        inventory.problems.append(Finding("bad_checkpoint", replica, None, None, None, path, text))
        return {}


def _topic_id(folder: str) -> str:
    """Empty where there is none, or none that can be read."""
    try:
        content = Path(folder, checkpoint.PARTITION_METADATA).read_bytes()
    except OSError:
        return ""
    identity = checkpoint.parse_partition_metadata(content)
    return checkpoint.uuid_text(identity) if identity else ""


def tasks_of(sizes: Sequence[int], bytes_max: int, files_max: int) -> Iterator[list[int]]:
    """Places of files, as many at a time as one task should read; a larger file is a task of its own."""
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
