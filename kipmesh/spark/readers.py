"""What Spark calls: the readers of batch and streaming queries.

Objects here travel by pickle between Python processes, so they hold options; a connection is opened in the process
that uses it and never pickled. Exactly-once is by offsets alone: the ranges of a micro-batch come from the checkpoint,
and the same range gives the same records again.

On pyspark 4.1 streaming sources have neither read limits nor Trigger.AvailableNow's preparation:
`maxOffsetsPerTrigger` and `minOffsetsPerTrigger` are refused there by name.
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
    """What one task reads: ranges of different partitions, one unless maxTasks asks for fewer tasks."""

    def __init__(self, wanted: tuple[OffsetRange, ...]) -> None:
        super().__init__(wanted)
        self.wanted = wanted


class _Executor:
    """What readers do on an executor."""

    _options: SourceOptions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task. Spark asks for an empty partition when a query has no tasks."""
        if not isinstance(partition, RangePartition):
            return
        from pyspark import TaskContext

        from kipmesh.spark.cluster import ClusterConnection
        from kipmesh.spark.decode import decode

        with ClusterConnection(self._options, keeps_consumer=TaskContext.get() is not None) as mesh:
            schema = arrow_schema(
                include_headers=self._options.include_headers, include_record_id=self._options.include_record_id
            )
            chunks = mesh.fetch(partition.wanted, DataLoss(fail=self._options.fail_on_data_loss))
            yield from decode(chunks, schema)


class KipmeshReader(_Executor, DataSourceReader):
    """A batch query."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self.pushdown = Pushdown()
        self.pushes_filters = options.push_filters
        """Spark plans a frame once: what the filters of one query leave out is missing from the frame's next ones."""

    @property
    def pushFilters(self) -> FilterTaker:  # noqa: N802 (Spark's name)
        """Takes filters, where spark.sql.python.filterPushdown.enabled lets Spark hand them down."""
        return FilterTaker(self)

    def partitions(self) -> Sequence[InputPartition]:
        """A task for each partition of the topics; more where minPartitions or maxRecordsPerPartition ask for them."""
        from kipmesh.spark.cluster import ClusterConnection

        with ClusterConnection(self._options) as mesh:
            ranges = plan_batch(self._options, mesh, DataLoss(fail=self._options.fail_on_data_loss))
            return _tasks(self._options, self.pushdown.narrow(ranges, mesh), mesh)


class FilterTaker:
    """`pushFilters` of a batch reader, which must not look like one of its own where Spark's setting is off.

    Spark refuses a reader that overrides `pushFilters` as long as spark.sql.python.filterPushdown.enabled is false,
    its default, instead of leaving the filters to itself. It tells by the function behind the method.
    """

    def __init__(self, reader: KipmeshReader) -> None:
        self._reader = reader
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: list[Filter]) -> list[Filter]:
        """Use the filters in planning, if the option pushFilters says so; those that Spark still has to check."""
        return self._reader.pushdown.take(filters) if self._reader.pushes_filters else filters


class _StreamReader(_Executor, DataSourceStreamReader):
    """A streaming query, as far as pyspark 4.1 and 4.2 agree. Lives in a process of its own beside the driver."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._loss = DataLoss(fail=options.fail_on_data_loss)
        self._open_mesh: ClusterConnection | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_mesh": None}

    @property
    def _mesh(self) -> ClusterConnection:
        if self._open_mesh is None:
            from kipmesh.spark.cluster import ClusterConnection

            self._open_mesh = ClusterConnection(self._options)
        return self._open_mesh

    def initialOffset(self) -> Json:  # noqa: N802 (Spark's name)
        """Where a query without a checkpoint begins."""
        return offsets_to_json(plan_start(self._options, self._mesh, self._loss))

    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        """The tasks of one micro-batch."""
        begin, until = offsets_from_json(start), offsets_from_json(end)
        new = self._mesh.earliest_offsets(new_partitions(begin, until))
        return _tasks(self._options, plan_stream(begin, until, new, self._loss), self._mesh)

    def commit(self, end: Json) -> None:
        """Nothing to do: the checkpoint is the only place of offsets."""

    def stop(self) -> None:
        """Close the connection."""
        if self._open_mesh is not None:
            self._open_mesh.close()
            self._open_mesh = None

    def _latest(self) -> Offsets:
        return self._mesh.latest_offsets(self._mesh.partitions())


if _HAS_READ_LIMITS:

    class KipmeshStreamReader(_StreamReader, SupportsTriggerAvailableNow):
        """A streaming query with read limits and Trigger.AvailableNow."""

        def __init__(self, options: SourceOptions) -> None:
            super().__init__(options)
            self._target: Offsets | None = None
            self._last_batch_s = -math.inf

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
            """Remember where the topics end now: the query goes there and no further."""
            self._target = self._latest()

        def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
            """What maxOffsetsPerTrigger and minOffsetsPerTrigger say.

            Both at once cannot be told to Spark; `latestOffset` looks at the least by itself.
            """
            most, least = self._options.max_offsets_per_trigger, self._options.min_offsets_per_trigger
            if most is not None:
                return ReadMaxRows(most)
            return ReadAllAvailable() if least is None else ReadMinRows(least)

        def latestOffset(self, start: Json, limit: ReadLimit) -> Json:  # noqa: N802 (Spark's name)
            """Where the next micro-batch ends; `start` itself when there is nothing new."""
            begin = offsets_from_json(start)
            latest = self._latest() if self._target is None else self._target
            new = self._mesh.earliest_offsets(new_partitions(begin, latest))
            if self._waits(begin, latest, new, limit):
                return start
            rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
            return offsets_to_json(plan_latest(begin, latest, new, rows, self._loss))

        def _waits(self, begin: Offsets, latest: Offsets, new: Offsets, limit: ReadLimit) -> bool:
            """Whether minOffsetsPerTrigger holds the next batch back. Trigger.AvailableNow and Once never wait."""
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
            """Where the topics end now, for the progress of the query."""
            return offsets_to_json(self._latest())

else:

    class KipmeshStreamReader(_StreamReader):  # type: ignore[no-redef]
        """A streaming query on pyspark 4.1: every micro-batch takes all there is."""

        def __init__(self, options: SourceOptions) -> None:
            super().__init__(options)
            refuse_read_limits(options)

        def latestOffset(self) -> Json:  # type: ignore[override]  # noqa: N802 (Spark's name)
            """Where the topics end now."""
            return offsets_to_json(self._latest())


def refuse_read_limits(options: SourceOptions) -> None:
    """What pyspark 4.1 cannot do, by name; raises `InvalidOptionError`."""
    if options.max_offsets_per_trigger is not None:
        raise InvalidOptionError("maxOffsetsPerTrigger", "needs pyspark 4.2, which has read limits")
    if options.min_offsets_per_trigger is not None:
        raise InvalidOptionError("minOffsetsPerTrigger", "needs pyspark 4.2, which has read limits")


def arrow_schema(*, include_headers: bool, include_record_id: bool = False) -> pa.Schema:
    """The columns of Spark's Kafka connector as Arrow types, exactly as Spark 4.2 expects them."""
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


def _tasks(options: SourceOptions, ranges: list[OffsetRange], mesh: ClusterConnection) -> list[InputPartition]:
    pieces = split_ranges(ranges, options.min_partitions, options.max_records_per_partition)
    leaders: dict[TopicPartition, int] = {}
    if options.max_tasks is not None and len(pieces) > options.max_tasks:
        leaders = mesh.leaders({piece.topic_partition for piece in pieces})
    return [RangePartition(group) for group in group_ranges(pieces, options.max_tasks, leaders)]
