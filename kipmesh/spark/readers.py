"""Readers of batch and streaming queries.

Spark pickles these objects between processes, so they hold options. A connection is opened in the process that uses it
and never pickled. Exactly-once follows from offsets alone: the ranges of a micro-batch come from the checkpoint, and a
range always returns the same records.

On pyspark 4.1 streaming sources have neither read limits nor support for Trigger.AvailableNow, so
`maxOffsetsPerTrigger` and `minOffsetsPerTrigger` are rejected.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition

from kipmesh.spark.offsets import (
    InvalidOptionError,
    OffsetRange,
    Offsets,
    TopicPartition,
    group_ranges,
    offsets_from_json,
    offsets_to_json,
    split_ranges,
)
from kipmesh.spark.options import SourceOptions
from kipmesh.spark.planning import (
    DataLoss,
    count_new,
    new_partitions,
    plan_batch,
    plan_latest,
    plan_start,
    plan_stream,
)
from kipmesh.spark.pushdown import Pushdown

if TYPE_CHECKING:
    import pyarrow as pa

    from kipmesh.spark.cluster import ClusterConnection

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )

    _HAS_READ_LIMITS = True
except ImportError:  # pyspark 4.1
    _HAS_READ_LIMITS = False

Json = dict[str, dict[str, int]]


class RangePartition(InputPartition):
    """Input of one task: a single range, or ranges of different partitions if the option maxTasks requires it."""

    def __init__(self, wanted: tuple[OffsetRange, ...]) -> None:
        super().__init__(wanted)
        self.wanted = wanted


class _Executor:
    """Base class of the readers, with the code that runs on executors."""

    _options: SourceOptions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one task in Arrow batches.

        Yields nothing for an `InputPartition` that is not a `RangePartition`, which Spark passes if there are no tasks.
        Raises KafkaError, DataLossError, InvalidOptionError for a deleted topic, CorruptRecordError.
        """
        if not isinstance(partition, RangePartition):
            return
        from pyspark import TaskContext

        from kipmesh.spark.cluster import ClusterConnection
        from kipmesh.spark.decode import decode

        with ClusterConnection(self._options, keeps_consumer=TaskContext.get() is not None) as cluster:
            schema = arrow_schema(
                include_headers=self._options.include_headers, include_record_id=self._options.include_record_id
            )
            chunks = cluster.fetch(partition.wanted, DataLoss(fail=self._options.fail_on_data_loss))
            yield from decode(chunks, schema)


class KipmeshReader(_Executor, DataSourceReader):
    """Reader of a batch query: plans tasks on the driver, reads records on executors."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self.pushdown = Pushdown()
        self.pushes_filters = options.push_filters
        """Whether planning uses filters. They also limit later queries of the frame, which Spark plans only once."""

    @property
    def pushFilters(self) -> FilterTaker:  # noqa: N802 (Spark's name)
        """The callable that Spark calls with its filters if spark.sql.python.filterPushdown.enabled is true."""
        return FilterTaker(self)

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks: one per partition with records.

        There may be more because of minPartitions and maxRecordsPerPartition, or fewer because of maxTasks.
        Raises InvalidOptionError, DataLossError, KafkaError.
        """
        from kipmesh.spark.cluster import ClusterConnection

        with ClusterConnection(self._options) as cluster:
            ranges = plan_batch(self._options, cluster, DataLoss(fail=self._options.fail_on_data_loss))
            return _tasks(self._options, self.pushdown.narrow(ranges, cluster), cluster)


class FilterTaker:
    """The `pushFilters` method of a batch reader, disguised as the inherited method.

    While spark.sql.python.filterPushdown.enabled is false, the default, Spark rejects a reader that overrides
    `pushFilters`. It compares the method's `__func__` with that of the base class.
    """

    def __init__(self, reader: KipmeshReader) -> None:
        self._reader = reader
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: list[Filter]) -> list[Filter]:
        """Return the filters that Spark must apply: all, or if pushFilters is set, those not decided by planning."""
        return self._reader.pushdown.take(filters) if self._reader.pushes_filters else filters


class _StreamReader(_Executor, DataSourceStreamReader):
    """The part of a streaming reader common to pyspark 4.1 and 4.2. Spark runs it in a process next to the driver."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._loss = DataLoss(fail=options.fail_on_data_loss)
        self._open_cluster: ClusterConnection | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_cluster": None}

    @property
    def _cluster(self) -> ClusterConnection:
        if self._open_cluster is None:
            from kipmesh.spark.cluster import ClusterConnection

            self._open_cluster = ClusterConnection(self._options)
        return self._open_cluster

    def initialOffset(self) -> Json:  # noqa: N802 (Spark's name)
        """Return the start offsets of a query without a checkpoint.

        Raises InvalidOptionError, DataLossError, KafkaError.
        """
        return offsets_to_json(plan_start(self._options, self._cluster, self._loss))

    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        """Plan the tasks of a micro-batch, which read from `start` to `end`.

        Raises DataLossError, KafkaError, InvalidOptionError if the topic of a new partition was deleted.
        """
        begin, until = offsets_from_json(start), offsets_from_json(end)
        new = self._cluster.earliest_offsets(new_partitions(begin, until))
        return _tasks(self._options, plan_stream(begin, until, new, self._loss), self._cluster)

    def commit(self, end: Json) -> None:
        """Do nothing: only the checkpoint stores offsets."""

    def stop(self) -> None:
        """Close the connection, if one is open."""
        if self._open_cluster is not None:
            self._open_cluster.close()
            self._open_cluster = None

    def _latest(self) -> Offsets:
        return self._cluster.latest_offsets(self._cluster.partitions())


if _HAS_READ_LIMITS:

    class KipmeshStreamReader(_StreamReader, SupportsTriggerAvailableNow):
        """Streaming reader with read limits and Trigger.AvailableNow."""

        def __init__(self, options: SourceOptions) -> None:
            super().__init__(options)
            self._target: Offsets | None = None
            self._last_batch_s = -math.inf

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
            """Store the current high watermarks, at which the query will end. Raises InvalidOptionError, KafkaError."""
            self._target = self._latest()

        def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
            """Return the limit of maxOffsetsPerTrigger, else of minOffsetsPerTrigger, else no limit.

            If both are set, `latestOffset` applies the minimum.
            """
            most, least = self._options.max_offsets_per_trigger, self._options.min_offsets_per_trigger
            if most is not None:
                return ReadMaxRows(most)
            return ReadAllAvailable() if least is None else ReadMinRows(least)

        def latestOffset(self, start: Json, limit: ReadLimit) -> Json:  # noqa: N802 (Spark's name)
            """Return the end of the next micro-batch, or `start` while minOffsetsPerTrigger delays it.

            Raises InvalidOptionError if a topic does not exist, DataLossError, KafkaError.
            """
            begin = offsets_from_json(start)
            latest = self._latest() if self._target is None else self._target
            new = self._cluster.earliest_offsets(new_partitions(begin, latest))
            if self._waits(begin, latest, new, limit):
                return start
            rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
            return offsets_to_json(plan_latest(begin, latest, new, rows, self._loss))

        def _waits(self, begin: Offsets, latest: Offsets, new: Offsets, limit: ReadLimit) -> bool:
            """Whether minOffsetsPerTrigger delays the next micro-batch; never with Trigger.AvailableNow and Once."""
            least = self._options.min_offsets_per_trigger
            if least is None or self._target is not None or isinstance(limit, ReadAllAvailable):
                return False
            count, now = count_new(begin, latest, new), time.monotonic()
            if count == 0:
                return False
            if count < least and (now - self._last_batch_s) * 1000 < self._options.max_trigger_delay_ms:
                return True
            self._last_batch_s = now
            return False

        def reportLatestOffset(self) -> Json:  # noqa: N802 (Spark's name)
            """Return the current high watermarks, for the query's progress. Raises InvalidOptionError, KafkaError."""
            return offsets_to_json(self._latest())

else:

    class KipmeshStreamReader(_StreamReader):  # type: ignore[no-redef]
        """Streaming reader for pyspark 4.1, where each micro-batch reads all available records."""

        def __init__(self, options: SourceOptions) -> None:
            super().__init__(options)
            refuse_read_limits(options)

        def latestOffset(self) -> Json:  # type: ignore[override]  # noqa: N802 (Spark's name)
            """Return the current high watermarks. Raises InvalidOptionError if a topic does not exist, KafkaError."""
            return offsets_to_json(self._latest())


def refuse_read_limits(options: SourceOptions) -> None:
    """Raise InvalidOptionError if maxOffsetsPerTrigger or minOffsetsPerTrigger is set: they need pyspark 4.2."""
    limits = {
        "maxOffsetsPerTrigger": options.max_offsets_per_trigger,
        "minOffsetsPerTrigger": options.min_offsets_per_trigger,
    }
    for name, limit in limits.items():
        if limit is not None:
            raise InvalidOptionError(name, "needs pyspark 4.2, which has read limits")


def arrow_schema(*, include_headers: bool, include_record_id: bool = False) -> pa.Schema:
    """Return the columns of Spark's Kafka connector as an Arrow schema, and the column recordId if wanted."""
    import pyarrow as pa

    fields = [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("timestampType", pa.int32()),
    ]
    if include_headers:
        header = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
        fields.append(pa.field("headers", pa.list_(header)))
    if include_record_id:
        fields.append(pa.field("recordId", pa.string()))
    return pa.schema(fields)


def _tasks(options: SourceOptions, ranges: list[OffsetRange], cluster: ClusterConnection) -> list[InputPartition]:
    pieces = split_ranges(ranges, options.min_partitions, options.max_records_per_partition)
    leaders: dict[TopicPartition, int] = {}
    if options.max_tasks is not None and len(pieces) > options.max_tasks:
        leaders = cluster.leaders({piece.topic_partition for piece in pieces})
    return [RangePartition(group) for group in group_ranges(pieces, options.max_tasks, leaders)]
