"""Registers the kipmesh data source. PySpark imports all packages named pyspark_* and registers `DefaultSource`."""

from __future__ import annotations

from kipmesh.spark.source import KipmeshDataSource as DefaultSource

__all__ = ["DefaultSource"]
