"""Where pyspark looks: it imports every top-level package named pyspark_* and registers its `DefaultSource`."""

from __future__ import annotations

from kipmesh.spark.source import KipmeshDataSource as DefaultSource

__all__ = ["DefaultSource"]
