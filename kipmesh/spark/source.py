"""``format("kipmesh")`` of Spark's `read`, `readStream`, `write` and `writeStream`.

The driver plans ranges of offsets (`planning`), executors read them (`mesh`, `decode`) and hand Arrow batches to
Spark (`readers`); rows of a write go out through a producer in each task (`writers`). Spark's Python daemon forks, so
neither gRPC nor the client library is imported from here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kipmesh.spark.offsets import InvalidOptionError, OtherModeError
from kipmesh.spark.options import Mode, SourceOptions, check_columns, parse_options, parse_write_options
from kipmesh.spark.readers import KipmeshReader, KipmeshStreamReader, arrow_schema
from kipmesh.spark.writers import KipmeshStreamWriter, KipmeshWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    return from_arrow_schema(
        arrow_schema(include_headers=options.include_headers, include_record_id=options.include_record_id)
    )


def _check_schema(schema: StructType, options: SourceOptions) -> None:
    columns = _columns(options)
    if schema != columns:
        raise InvalidOptionError("schema", f"cannot be chosen: the columns are {columns.simpleString()}")


# -- several streaming queries of one Spark
#
# Spark has one `PythonFunction` for each Python data source, and with it one map of environment variables for all its
# queries. The first streaming query puts four keys into it (`PythonStreamingSourceRunner.init`), and every query writes
# the map out with its tasks. Nothing synchronises that: two queries that start side by side may both add a key, after
# which the map counts one more than it has, and no task of this source can be written out any more: "Illegal size 5 of
# collection, expected 6". A map that has the keys already is only ever given other values, which harms nothing.

RUNNER_VARIABLES: Final[Mapping[str, str]] = {
    "SPARK_LOCAL_DIRS": "",
    "SPARK_AUTH_SOCKET_TIMEOUT": "",
    "SPARK_BUFFER_SIZE": "",
    "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
}
"""What Spark 4.1 and 4.2 put into the map when a streaming query starts. Empty is what all who use it set before."""

_log = logging.getLogger(__name__)


def complete_variables(spark: SparkSession, name: str) -> None:
    """Add what is missing of `RUNNER_VARIABLES` to the map of the Python data source `name`, if there is that source.

    To be called before its first query. With Spark Connect the map is out of reach, and nothing happens; so it is,
    with a warning in the log, when Spark's inner classes are not as they were in 4.1 and 4.2.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    try:
        variables = _variables(spark, name)
        for variable, value in RUNNER_VARIABLES.items() if variables is not None else ():
            if variable not in variables:
                variables[variable] = value
    except (AttributeError, TypeError, Py4JError):
        if hasattr(spark, "_jsparkSession"):
            _log.warning("Streaming queries of %s must not start side by side: see docs/spark.md", name, exc_info=True)


def _variables(spark: Any, name: str) -> Any:
    """The map itself, as py4j's view of it; None where there is no such source."""
    manager = spark._jsparkSession.sessionState().dataSourceManager()
    if not manager.dataSourceExists(name):
        return None
    return manager.lookupDataSource(name).dataSourceCls().envVars()
