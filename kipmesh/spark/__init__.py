"""Apache Spark on the mesh: the Python Data Source ``format("kipmesh")`` and the jobs that use it.

Spark finds the source by itself through the package `pyspark_kipmesh`; where that is switched off, call
`register(spark)`. Nothing here imports pyspark or gRPC before it is needed: Spark's Python daemon forks its workers,
and gRPC must not be loaded in a process that forks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["KipmeshDataSource", "register"]


_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(spark: SparkSession) -> None:
    """Make ``format("kipmesh")`` known to `spark`; harmless when it is known already.

    Turns on that Spark hands filters to Python sources, unless the session says something about it already, and makes
    it safe to start several streaming queries side by side (`kipmesh.spark.source`).
    """
    from kipmesh.spark.source import KipmeshDataSource, complete_variables

    name = KipmeshDataSource.name()
    complete_variables(spark, name)  # of the source that Spark has found, which other sessions use
    spark.dataSource.register(KipmeshDataSource)
    complete_variables(spark, name)
    if spark.conf.get(_PUSHDOWN, None) is None:
        spark.conf.set(_PUSHDOWN, "true")


def __getattr__(name: str) -> Any:
    if name == "KipmeshDataSource":
        from kipmesh.spark.source import KipmeshDataSource

        return KipmeshDataSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
