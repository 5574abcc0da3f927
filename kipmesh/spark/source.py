"""``spark.read.format("kipmesh")`` and ``spark.readStream.format("kipmesh")``.

The driver plans ranges of offsets (`planning`), executors read them (`mesh`, `decode`) and hand Arrow batches to
Spark (`readers`). Spark's Python daemon forks, so neither gRPC nor the client library is imported from here.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from kipmesh.spark.offsets import InvalidOptionError
from kipmesh.spark.options import Mode, parse_options
from kipmesh.spark.readers import KipmeshReader, KipmeshStreamReader


class KipmeshDataSource(DataSource):
    """The source as Spark knows it: the columns and options of Spark's Kafka connector, for reads."""

    @classmethod
    def name(cls) -> str:
        """The name that ``format(...)`` takes."""
        return "kipmesh"

    def schema(self) -> StructType:
        """The columns, and the first place where options are checked: what no mode accepts is refused at load()."""
        raw = dict(self.options)
        try:
            options = parse_options(raw, Mode.BATCH)
        except InvalidOptionError:
            options = parse_options(raw, Mode.STREAM)
        return _columns(include_headers=options.include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of a batch query."""
        options = parse_options(dict(self.options), Mode.BATCH)
        _check_schema(schema, include_headers=options.include_headers)
        return KipmeshReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        """The reader of a streaming query."""
        options = parse_options(dict(self.options), Mode.STREAM)
        _check_schema(schema, include_headers=options.include_headers)
        return KipmeshStreamReader(options)


def _columns(*, include_headers: bool) -> StructType:
    columns = (
        StructType()
        .add("key", BinaryType())
        .add("value", BinaryType())
        .add("topic", StringType())
        .add("partition", IntegerType())
        .add("offset", LongType())
        .add("timestamp", TimestampType())
        .add("timestampType", IntegerType())
    )
    if include_headers:
        columns.add("headers", ArrayType(StructType().add("key", StringType()).add("value", BinaryType())))
    return columns


def _check_schema(schema: StructType, *, include_headers: bool) -> None:
    columns = _columns(include_headers=include_headers)
    if schema != columns:
        raise InvalidOptionError("schema", f"cannot be chosen: the columns are {columns.simpleString()}")
