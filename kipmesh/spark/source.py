"""The data source `format("kipmesh")` of Spark's `read`, `readStream`, `write` and `writeStream`.

The driver plans offset ranges (`planning`). Executors read them (`cluster`), decode them to Arrow batches (`decode`)
and pass those to Spark (`readers`). Each task of a write has a producer (`writers`). Spark's Python daemon forks, so
this module imports neither gRPC nor the client library.
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
    """The data source `format("kipmesh")`, with the columns and options of Spark's Kafka connector."""

    @classmethod
    def name(cls) -> str:
        """Return `kipmesh`, the name for `format(...)`."""
        return "kipmesh"

    def schema(self) -> StructType:
        """Return the columns of a read.

        Spark calls this at load(), before the mode is known. Raises InvalidOptionError for options that are valid
        neither in a batch nor in a streaming query.
        """
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
        """Return the reader of a batch query. Raises InvalidOptionError, also for a user-defined schema."""
        options = parse_options(dict(self.options), Mode.BATCH)
        _check_schema(schema, options)
        return KipmeshReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        """Return the reader of a streaming query. Raises InvalidOptionError, also for a user-defined schema."""
        options = parse_options(dict(self.options), Mode.STREAM)
        _check_schema(schema, options)
        return KipmeshStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch query.

        Raises InvalidOptionError, also for `overwrite`. Raises ValueError if the column `value` is missing or a column
        has the wrong type.
        """
        if overwrite:
            raise InvalidOptionError("mode", "must be append, got overwrite: a topic can only be appended to")
        options = parse_write_options(dict(self.options), Mode.BATCH)
        check_columns(_types(schema), options)
        return KipmeshWriter(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return the writer of a streaming query. In output mode `complete`, each batch appends its whole result.

        `overwrite` is ignored. Raises InvalidOptionError, or ValueError if the column `value` is missing or a column
        has the wrong type.
        """
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
        raise InvalidOptionError("schema", f"must be left out: the columns are {columns.simpleString()}")


# -- concurrent streaming queries of one Spark session
#
# Spark has one `PythonFunction` per Python data source, and all its queries share its map of environment variables.
# A streaming query adds four keys (`PythonStreamingSourceRunner.init`), and every query serialises the map with its
# tasks, without synchronisation. When two queries start concurrently, both may add a key, which leaves a wrong size in
# the map. Then no task of the source can be serialised: "Illegal size 5 of collection, expected 6". Updates of existing
# keys are safe, so the keys are added in advance.

RUNNER_VARIABLES: Final[Mapping[str, str]] = {
    "SPARK_LOCAL_DIRS": "",
    "SPARK_AUTH_SOCKET_TIMEOUT": "",
    "SPARK_BUFFER_SIZE": "",
    "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
}
"""Keys that Spark 4.1 and 4.2 add when a streaming query starts, with the values that Spark assumes without them."""

_log = logging.getLogger(__name__)


def complete_variables(spark: SparkSession, name: str) -> None:
    """Add missing `RUNNER_VARIABLES` to the environment map of the Python data source `name`, if it exists.

    Call it before the first query. Does nothing with Spark Connect. Logs a warning if Spark's internal classes are not
    those of 4.1 or 4.2.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    try:
        variables = _variables(spark, name)
        for variable, value in RUNNER_VARIABLES.items() if variables is not None else ():
            if variable not in variables:
                variables[variable] = value
    except (AttributeError, TypeError, Py4JError):
        if hasattr(spark, "_jsparkSession"):
            _log.warning(
                "streaming queries must not start concurrently, see docs/spark.md query=%s", name, exc_info=True
            )


def _variables(spark: Any, name: str) -> Any:
    """Return py4j's view of the environment map of the source, or None if the source does not exist."""
    manager = spark._jsparkSession.sessionState().dataSourceManager()
    if not manager.dataSourceExists(name):
        return None
    return manager.lookupDataSource(name).dataSourceCls().envVars()
