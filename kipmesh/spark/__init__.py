"""Apache Spark support: the Python data source `format("kipmesh")`.

Spark discovers the source through the package `pyspark_kipmesh`. If discovery is off, call `register(spark)`. Importing
this package loads neither pyspark nor gRPC: Spark's Python daemon forks its workers, and a process that forks must not
load gRPC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["KipmeshDataSource", "register"]


_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(spark: SparkSession) -> None:
    """Register `format("kipmesh")` with a Spark session. Idempotent.

    Enables Spark's filter pushdown for Python sources unless the session configures it, and makes it safe to start
    several streaming queries concurrently (see `kipmesh.spark.source`).
    """
    from kipmesh.spark.source import KipmeshDataSource, complete_variables

    name = KipmeshDataSource.name()
    complete_variables(spark, name)  # for the source that Spark discovered, which other sessions use
    spark.dataSource.register(KipmeshDataSource)
    complete_variables(spark, name)
    if spark.conf.get(_PUSHDOWN, None) is None:
        spark.conf.set(_PUSHDOWN, "true")


def __getattr__(name: str) -> Any:
    if name == "KipmeshDataSource":
        from kipmesh.spark.source import KipmeshDataSource

        return KipmeshDataSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
