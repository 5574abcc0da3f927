"""Writers of batch and streaming queries.

Each task sends its rows through an idempotent producer and ends when all are acknowledged. A retried task sends its
rows again under the same names (`kipmesh.spark.row_ids`), so that readers can remove duplicates. docs/spark.md states
the guarantees.

Spark pickles these objects between processes, so they hold options only. A task reads the id of its batch from its
properties.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from kipmesh.spark.offsets import InvalidOptionError
from kipmesh.spark.options import WriteOptions
from kipmesh.spark.row_ids import BATCH_HEADER, ROW_HEADER, Header, Row, RowNames, without_names

if TYPE_CHECKING:
    import pyarrow as pa

    from kipmesh.client.producer.pump import PendingRecord
    from kipmesh.client.sync import Producer

# Task properties that Spark's streaming engine sets.
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"
# Number of rows between checks of completed sends.
_ROWS: Final = 1000


@dataclass(frozen=True)
class RowsWritten(WriterCommitMessage):
    """Commit message of a task to the driver: the number of rows that the task wrote."""

    rows: int


class KipmeshWriter(DataSourceArrowWriter):
    """Writer of a batch query. Without the option batchId the driver generates a random batch id."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._batch = options.batch_id or uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> RowsWritten:
        """Send the rows of one task and wait for their acknowledgements. Runs on an executor.

        Raises KafkaError, InvalidOptionError and ValueError like `write_rows`.
        """
        from pyspark import TaskContext

        context = TaskContext.get()
        task = 0 if context is None else context.partitionId()
        return write_rows(self._options, self._batch, task, iterator)


class KipmeshStreamWriter(DataSourceStreamArrowWriter):
    """Writer of a streaming query. The query id and the number of the micro-batch identify each batch."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> RowsWritten:
        """Send the rows of one task of a micro-batch and wait for their acknowledgements. Runs on an executor.

        Raises KafkaError, InvalidOptionError and ValueError like `write_rows`, RuntimeError if Spark has not set the
        task properties with the query id and the batch number.
        """
        from pyspark import TaskContext

        context = TaskContext.get()
        query = batch = None
        if context is not None:
            query, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
        if context is None or query is None or batch is None:
            raise RuntimeError(f"the task properties {_QUERY_ID} and {_BATCH_ID} are missing, Spark must set them")
        return write_rows(self._options, f"{query}/{batch}", context.partitionId(), iterator)


def write_rows(options: WriteOptions, batch: str, task: int, batches: Iterator[pa.RecordBatch]) -> RowsWritten:
    """Send all rows of a task, wait for their acknowledgements and return the number of rows.

    A task without rows does not connect. Raises the KafkaError of the first row that failed, InvalidOptionError for a
    row without a topic, ValueError for an invalid header. After an error some rows may have been written.
    """
    names = RowNames(task) if options.write_ids else None
    sender: _Sender | None = None
    rows = 0
    try:
        for arrow in batches:
            for first in range(0, arrow.num_rows, _ROWS):
                part = rows_of(arrow.slice(first, _ROWS), options)
                if sender is None:  # a task without rows does not connect
                    sender = _Sender(options)
                sender.send(part, batch.encode(), names)
                rows += len(part)
        if sender is not None:
            sender.finish()
    finally:
        if sender is not None:
            sender.producer.close()
    return RowsWritten(rows)


def rows_of(arrow: pa.RecordBatch, options: WriteOptions) -> list[Row]:
    """Convert an Arrow batch to rows. Absent columns are None in each row, timestamps are in ms.

    Raises InvalidOptionError for a row without a topic, ValueError for a header that is null or has no key.
    """
    import pyarrow as pa

    count = arrow.num_rows
    nothing = [None] * count

    def column(name: str, kind: pa.DataType | None = None) -> Sequence[Any]:
        if name not in arrow.schema.names:
            return nothing
        values = arrow.column(name)
        found: list[Any] = (values if kind is None else values.cast(kind)).to_pylist()
        return found

    topics = column("topic") if options.topic is None else [options.topic] * count
    if None in topics:
        raise InvalidOptionError("topic", "is required, because a row has no topic")
    keys, values = column("key", pa.binary()), column("value", pa.binary())
    times_ms = (None if at is None else at // 1000 for at in column("timestamp", pa.int64()))
    headers = map(_headers, column("headers") if options.include_headers else nothing)
    return list(zip(topics, keys, values, column("partition"), times_ms, headers, strict=True))


def _headers(values: list[dict[str, Any] | None] | None) -> list[Header]:
    headers: list[Header] = []
    for each in values or ():
        if each is None:
            raise ValueError("the column headers has a header that is null; remove it from the array")
        if each["key"] is None:
            raise ValueError("the column headers has a header whose key is null; set a key")
        headers.append((each["key"], each["value"]))
    return headers


class _Sender:
    """A running producer and its records that are not yet acknowledged."""

    def __init__(self, options: WriteOptions) -> None:
        from kipmesh.client.sync import Producer

        self.producer: Producer = Producer(options.bootstrap, **options.client_config)
        self.producer.start()
        self._pending: deque[PendingRecord] = deque()

    def send(self, rows: list[Row], batch: bytes, names: RowNames | None) -> None:
        """Send rows; blocks while the producer's buffer is full. Adds name headers unless `names` is None.

        If a row of this or an earlier call has already failed, raises its KafkaError.
        """
        ids = [None] * len(rows) if names is None else names.take(rows)
        send, append = self.producer.send, self._pending.append
        for (topic, key, value, partition, timestamp_ms, headers), row_id in zip(rows, ids, strict=True):
            if row_id is not None:
                headers = [*without_names(headers), (BATCH_HEADER, batch), (ROW_HEADER, row_id)]
            append(send(topic, value, key, partition, timestamp_ms, headers))
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def finish(self) -> None:
        """Wait until each row is acknowledged or failed. Raises the KafkaError of the first failed row."""
        self.producer.flush()
        while self._pending:
            self._pending.popleft().result()
