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
from itertools import islice
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
    """A segment or snapshot of a replica. Batches below `records_below` have their records decoded."""

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
    """Files of one task."""

    def __init__(self, files: Sequence[FileToRead]) -> None:
        self.files = tuple(files)


class SegmentsDataSource(DataSource):
    """The data source as Spark uses it."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)`."""
        return NAME

    def schema(self) -> StructType:
        """Return the columns. Raises JobError for invalid options."""
        is_snapshots = _options(self.options)["content"] == "snapshots"
        return from_arrow_schema(SNAPSHOTS_SCHEMA if is_snapshots else BATCHES_SCHEMA)

    def reader(self, schema: Any) -> DataSourceReader:
        """Return the reader of a batch query. Raises JobError for invalid options."""
        return SegmentsReader(_options(self.options))


class SegmentsReader(DataSourceReader):
    """Plans and reads tasks."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def partitions(self) -> list[FilesPartition]:
        """Plan the tasks; see `plan_tasks`."""
        return plan_tasks(self._options)

    def read(self, partition: FilesPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Yield the rows of a task's files."""
        if self._options["content"] == "snapshots":
            rows: Iterator[tuple[Any, ...]] = (snapshot_row(one) for one in partition.files)
            return _arrow(rows, SNAPSHOTS_SCHEMA)
        return _arrow((row for one in partition.files for row in segment_rows(one)), BATCHES_SCHEMA)


def plan_tasks(options: dict[str, str]) -> list[FilesPartition]:
    """Return the tasks of a query, at least one because Spark rejects an empty list. Raises JobError."""
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
    given = {str(key).lower(): str(value) for key, value in dict(raw).items()}
    unknown = sorted(given.keys() - _OPTIONS)
    if unknown:
        raise JobError(f"option {unknown[0]} is unknown, use one of {', '.join(sorted(_OPTIONS))}")
    options = {"topics": "", "content": "segments", "records": "none", **given}
    try:
        replicas = json.loads(options.get("replicas", ""))
        if not (isinstance(replicas, list) and all(isinstance(one, str) and "=" in one for one in replicas)):
            raise ValueError
    except ValueError:
        raise JobError('option replicas must be a JSON list of "NAME=PATH"') from None
    for name, values in (("content", ("segments", "snapshots")), ("records", ("none", "compacted", "all"))):
        if options[name] not in values:
            raise JobError(f"option {name} must be one of {', '.join(values)}, got {options[name]!r}")
    return options


def segment_rows(file: FileToRead) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a segment, with the columns of `BATCHES_SCHEMA`."""
    head = (file.replica, file.topic, file.partition, file.path, file.base_offset)
    try:
        # Not memory-mapped: a running node may truncate the file, and access to a removed page kills the process.
        with open(file.path, "rb") as stream:
            data = stream.read(file.size_bytes)
        for found in scan(data, is_last=file.is_last):
            yield (*head, *_batch_columns(data, found, file.records_below))
    except OSError as error:
        yield (*head, *_no_batch(Found(0, file.size_bytes, None, b"", *_why_unreadable(error))))


def _why_unreadable(error: OSError) -> tuple[str, str]:
    if isinstance(error, FileNotFoundError):
        return VANISHED, "the file was deleted while this job ran"
    return UNREADABLE, error.strerror or str(error)


def _no_batch(found: Found) -> tuple[Any, ...]:
    return (found.position, found.size_bytes, *(None,) * 12, found.damage, found.text, None)


def _batch_columns(data: bytes, found: Found, records_below: int) -> tuple[Any, ...]:
    header = found.header
    if header is None:
        return _no_batch(found)
    damage, text, records = found.damage, found.text, None
    if not damage and header.base_offset < records_below:
        batch = memoryview(data[found.position : found.position + found.size_bytes])
        try:
            records = [one._asdict() for one in record_digests(batch, header)]
        except CorruptRecordError as error:
            damage, text = GARBAGE, error.message
    codec = header.compression
    return (
        found.position,
        found.size_bytes,
        header.base_offset,
        header.last_offset,
        header.partition_leader_epoch,
        header.record_count,
        header.max_timestamp,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        header.is_control,
        _COMPRESSIONS[codec] if codec < len(_COMPRESSIONS) else str(codec),
        not found.damage,
        found.digest,
        damage or None,
        text or None,
        records,
    )


def snapshot_row(file: FileToRead) -> tuple[Any, ...]:
    """Return the row of a snapshot, with the columns of `SNAPSHOTS_SCHEMA`.

    The digest depends only on the multiset of records, not on their order or batches.
    """
    head = (file.replica, file.topic, file.partition, file.path, file.size_bytes, file.base_offset, file.epoch)
    try:
        opened = ReadOnlyFileSystem().open(file.path)
        with closing(opened):
            reader = SnapshotReader(opened, file.path.rpartition("/")[2])
            total = 0
            for values in reader.values():
                for value in values:
                    total += int.from_bytes(digest_of(value), "big")
            found = reader.summary
    except CorruptRecordError as error:
        return (*head, None, None, None, GARBAGE, error.message)
    except OSError as error:
        return (*head, None, None, None, *_why_unreadable(error))
    digest = (total % (1 << 128)).to_bytes(16, "big")
    return (*head, found.records, found.header.last_contained_log_timestamp, digest, None, None)


def _arrow(rows: Iterator[tuple[Any, ...]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    while taken := list(islice(rows, _ROWS)):
        columns = zip(zip(*taken, strict=True), schema, strict=True)
        yield pa.record_batch([pa.array(column, field.type) for column, field in columns], schema)
