"""The data source `format("kipmesh-segments")`: a row per batch of all segments, or per snapshot.

Options: `replicas` (JSON list of `"NAME=PATH"`), `topics` (comma-separated, default all), `content` (`segments` or
`snapshots`), `records` (`none`; `compacted`: of batches below a replica's cleaner checkpoint; `all`). A task reads its
segments one by one.

Every byte of a segment belongs to a row; damaged bytes have `damage` and no offsets. A missing or unreadable file is a
row, too. No read fails because of a file's content.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kipmesh.core.errors import CorruptRecordError
from kipmesh.storage.quorum.snapshot_file import SnapshotReader
from kipmesh_jobs.audit.inventory import ReadOnlyFileSystem, ReplicaLog, take_inventory, tasks_of
from kipmesh_jobs.audit.scan import GARBAGE, UNREADABLE, VANISHED, Found, digest_of, record_digests, scan
from kipmesh_jobs.frame import JobError

NAME: Final = "kipmesh-segments"
_TASK_BYTES: Final = 128 << 20
_TASK_FILES: Final = 2_000
_ROWS: Final = 10_000
_OPTIONS: Final = frozenset({"replicas", "topics", "content", "records"})
_COMPRESSIONS: Final = ("none", "gzip", "snappy", "lz4", "zstd")

_RECORD: Final = pa.struct([("offset", pa.int64()), ("timestamp", pa.int64()), ("digest", pa.binary())])
BATCHES_SCHEMA: Final = pa.schema(
    [
        ("replica", pa.string()), ("topic", pa.string()), ("partition", pa.int32()), ("file", pa.string()),
        ("segment_base", pa.int64()), ("position", pa.int64()), ("size_bytes", pa.int64()),
        ("base_offset", pa.int64()), ("last_offset", pa.int64()), ("leader_epoch", pa.int32()),
        ("record_count", pa.int32()), ("max_timestamp", pa.int64()), ("producer_id", pa.int64()),
        ("producer_epoch", pa.int32()), ("base_sequence", pa.int32()), ("is_control", pa.bool_()),
        ("compression", pa.string()), ("crc_ok", pa.bool_()), ("digest", pa.binary()), ("damage", pa.string()),
        ("text", pa.string()), ("records", pa.list_(_RECORD)),
    ]
)  # fmt: skip
SNAPSHOTS_SCHEMA: Final = pa.schema(
    [
        ("replica", pa.string()), ("topic", pa.string()), ("partition", pa.int32()), ("file", pa.string()),
        ("size_bytes", pa.int64()), ("end_offset", pa.int64()), ("epoch", pa.int32()), ("records", pa.int64()),
        ("last_contained_log_timestamp", pa.int64()), ("digest", pa.binary()), ("damage", pa.string()),
        ("text", pa.string()),
    ]
)  # fmt: skip


class FileToRead(NamedTuple):
    """A segment, or a snapshot with its end offset as `base_offset`. Only the records of batches whose base offset is
    below `records_below` are decoded.
    """

    replica: str
    topic: str
    partition: int
    path: str
    base_offset: int
    size_bytes: int
    is_last: bool = False
    records_below: int = 0
    epoch: int = -1


class FilesPartition(InputPartition):
    """The files that one Spark task reads."""

    def __init__(self, files: Sequence[FileToRead]) -> None:
        self.files = tuple(files)


class SegmentsDataSource(DataSource):
    """The Spark data source `kipmesh-segments`, for batch queries only."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)`."""
        return NAME

    def schema(self) -> StructType:
        """Return the columns of the option `content`: batches or snapshots. Raises JobError for invalid options."""
        is_snapshots = _options(self.options)["content"] == "snapshots"
        return from_arrow_schema(SNAPSHOTS_SCHEMA if is_snapshots else BATCHES_SCHEMA)

    def reader(self, schema: Any) -> DataSourceReader:
        """Return the reader of a batch query. Raises JobError for invalid options."""
        return SegmentsReader(_options(self.options))


class SegmentsReader(DataSourceReader):
    """Reader of a batch query: plans its tasks and reads their files."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def partitions(self) -> list[FilesPartition]:
        """Return the tasks of the query from `plan_tasks`. Raises JobError if a replica has no data directory."""
        return plan_tasks(self._options)

    def read(self, partition: FilesPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Yield the rows of a task's files: a row per batch or damaged range, or a row per snapshot."""
        if self._options["content"] == "snapshots":
            return _arrow(map(snapshot_row, partition.files), SNAPSHOTS_SCHEMA)
        return _arrow(chain.from_iterable(map(segment_rows, partition.files)), BATCHES_SCHEMA)


def plan_tasks(options: dict[str, str]) -> list[FilesPartition]:
    """Return the tasks of a query whose options are valid. The list has at least one task, which may be empty, because
    Spark rejects an empty list. Raises JobError if a replica has no data directory.
    """
    pairs = [tuple(text.split("=", 1)) for text in json.loads(options["replicas"])]
    topics = [topic for topic in options["topics"].split(",") if topic]
    inventory = take_inventory([(name, path) for name, path in pairs], topics)
    below = _records_below(inventory.logs, options.get("records", "none"))
    files = []
    for log in inventory.logs:
        place = (log.replica, log.topic, log.partition)
        if options["content"] == "snapshots":
            files += [
                FileToRead(*place, one.path, one.end_offset, one.size_bytes, epoch=one.epoch) for one in log.snapshots
            ]
        else:
            files += [
                FileToRead(*place, one.path, one.base_offset, one.size_bytes, one.is_last, below[place[1:]])
                for one in log.segments
            ]
    tasks = tasks_of([one.size_bytes for one in files], _TASK_BYTES, _TASK_FILES)
    return [FilesPartition([files[place] for place in task]) for task in tasks] or [FilesPartition([])]


def _records_below(logs: Sequence[ReplicaLog], records: str) -> dict[tuple[str, int], int]:
    below: dict[tuple[str, int], int] = {}
    for log in logs:
        to = {"none": 0, "compacted": log.cleaned_to, "all": 1 << 62}[records]
        key = (log.topic, log.partition)
        below[key] = max(below.get(key, 0), to)
    return below


def _options(raw: Any) -> dict[str, str]:
    raw_options = {str(key).lower(): str(value) for key, value in dict(raw).items()}
    unknown = sorted(raw_options.keys() - _OPTIONS)
    if unknown:
        raise JobError(f"option {unknown[0]} is unknown, use one of {', '.join(sorted(_OPTIONS))}")
    options = {"topics": "", "content": "segments", "records": "none", **raw_options}
    try:
        replicas = json.loads(options.get("replicas", ""))
        if not (isinstance(replicas, list) and all(isinstance(one, str) and "=" in one for one in replicas)):
            raise ValueError
    except ValueError:
        raise JobError('option replicas must be a JSON list of "NAME=PATH"') from None
    for name, allowed in (("content", ("segments", "snapshots")), ("records", ("none", "compacted", "all"))):
        if options[name] not in allowed:
            raise JobError(f"option {name} must be one of {', '.join(allowed)}, got {options[name]!r}")
    return options


def segment_rows(file: FileToRead) -> Iterator[dict[str, Any]]:
    """Yield a row per batch or damaged range of a segment, with the columns of `BATCHES_SCHEMA`. Missing values are
    null.

    A file that cannot be read yields one row, whose `damage` is `unreadable` or `vanished`.
    """
    head = {
        "replica": file.replica,
        "topic": file.topic,
        "partition": file.partition,
        "file": file.path,
        "segment_base": file.base_offset,
    }
    try:
        # Not memory-mapped: a running node may truncate the file, and access to a removed page kills the process.
        with open(file.path, "rb") as stream:
            data = stream.read(file.size_bytes)
        for found in scan(data, is_last=file.is_last):
            yield head | _batch_columns(data, found, file.records_below)
    except OSError as error:
        yield head | {"position": 0, "size_bytes": file.size_bytes} | _unreadable(error)


def _unreadable(error: OSError) -> dict[str, str]:
    if isinstance(error, FileNotFoundError):
        return {"damage": VANISHED, "text": "the file was deleted while this job ran"}
    return {"damage": UNREADABLE, "text": error.strerror or str(error)}


def _batch_columns(data: bytes, found: Found, records_below: int) -> dict[str, Any]:
    header, damage, text, records = found.header, found.damage, found.text, None
    columns: dict[str, Any] = {"position": found.position, "size_bytes": found.size_bytes}
    if header is not None:
        if not damage and header.base_offset < records_below:
            batch = memoryview(data[found.position : found.position + found.size_bytes])
            try:
                records = [one._asdict() for one in record_digests(batch, header)]
            except CorruptRecordError as error:
                damage, text = GARBAGE, error.message
        codec = header.compression
        columns |= {
            "base_offset": header.base_offset,
            "last_offset": header.last_offset,
            "leader_epoch": header.partition_leader_epoch,
            "record_count": header.record_count,
            "max_timestamp": header.max_timestamp,
            "producer_id": header.producer_id,
            "producer_epoch": header.producer_epoch,
            "base_sequence": header.base_sequence,
            "is_control": header.is_control,
            "compression": _COMPRESSIONS[codec] if codec < len(_COMPRESSIONS) else str(codec),
            "crc_ok": not found.damage,
            "digest": found.digest,
            "records": records,
        }
    return columns | {"damage": damage or None, "text": text or None}


def snapshot_row(file: FileToRead) -> dict[str, Any]:
    """Return the row of a snapshot, with the columns of `SNAPSHOTS_SCHEMA`. Missing values are null.

    `damage` is `garbage` for a corrupt snapshot, and `unreadable` or `vanished` for one that cannot be read. The digest
    depends only on the multiset of records, not on their order or batches.
    """
    head = {
        "replica": file.replica,
        "topic": file.topic,
        "partition": file.partition,
        "file": file.path,
        "size_bytes": file.size_bytes,
        "end_offset": file.base_offset,
        "epoch": file.epoch,
    }
    try:
        with closing(ReadOnlyFileSystem().open(file.path)) as opened:
            reader = SnapshotReader(opened, file.path.rpartition("/")[2])
            total = sum(int.from_bytes(digest_of(value), "big") for values in reader.values() for value in values)
            found = reader.summary
    except CorruptRecordError as error:
        return head | {"damage": GARBAGE, "text": error.message}
    except OSError as error:
        return head | _unreadable(error)
    return head | {
        "records": found.records,
        "last_contained_log_timestamp": found.header.last_contained_log_timestamp,
        "digest": (total % (1 << 128)).to_bytes(16, "big"),
    }


def _arrow(rows: Iterator[dict[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    while taken := list(islice(rows, _ROWS)):
        yield pa.RecordBatch.from_pylist(taken, schema)
