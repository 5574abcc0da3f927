"""``format("kipmesh")`` of Spark's `read`, `readStream`, `write` and `writeStream`.

The driver plans ranges of offsets (`planning`), executors read them (`mesh`, `decode`) and hand Arrow batches to
Spark (`readers`); rows of a write go out through a producer in each task (`writers`). Spark's Python daemon forks, so
neither gRPC nor the client library is imported from here.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from kipmesh.spark.offsets import InvalidOptionError, OtherModeError
from kipmesh.spark.options import Mode, SourceOptions, parse_options
from kipmesh.spark.readers import KipmeshReader, KipmeshStreamReader
from kipmesh.spark.write_options import check_columns, parse_write_options
from kipmesh.spark.writers import KipmeshStreamWriter, KipmeshWriter


class KipmeshDataSource(DataSource):
    """The source as Spark knows it: the columns and options of Spark's Kafka connector."""

    @classmethod
    def name(cls) -> str:
        """The name that ``format(...)`` takes."""
        return "kipmesh"

    def schema(self) -> StructType:
        """The columns, and the first place where options are checked: what no mode accepts is refused at load()."""
        raw = dict(self.options)
        try:
            options = parse_options(raw, Mode.BATCH)
        except InvalidOptionError as problem:
            try:
                options = parse_options(raw, Mode.STREAM)
            except OtherModeError:
                raise problem from None
        return _columns(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of a batch query."""
        options = parse_options(dict(self.options), Mode.BATCH)
        _check_schema(schema, options)
        return KipmeshReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        """The reader of a streaming query."""
        options = parse_options(dict(self.options), Mode.STREAM)
        _check_schema(schema, options)
        return KipmeshStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """The writer of a batch query."""
        if overwrite:
            raise InvalidOptionError("mode", "cannot be overwrite: records are only appended; set append")
        options = parse_write_options(dict(self.options), Mode.BATCH)
        check_columns(_types(schema), options)
        return KipmeshWriter(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """The writer of a streaming query. Output mode complete (`overwrite`) appends each batch's whole result."""
        options = parse_write_options(dict(self.options), Mode.STREAM)
        check_columns(_types(schema), options)
        return KipmeshStreamWriter(options)


def _types(schema: StructType) -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in schema.fields}


def _columns(options: SourceOptions) -> StructType:
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
    if options.include_headers:
        columns.add("headers", ArrayType(StructType().add("key", StringType()).add("value", BinaryType())))
    if options.include_record_id:
        columns.add("recordId", StringType())
    return columns


def _check_schema(schema: StructType, options: SourceOptions) -> None:
    columns = _columns(options)
    if schema != columns:
        raise InvalidOptionError("schema", f"cannot be chosen: the columns are {columns.simpleString()}")
