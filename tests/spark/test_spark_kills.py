"""The short form of `make bench-spark-kills`: SIGKILL to a streaming query and to brokers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import spark_kills
from kipmesh.spark.java import find_java

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(1500)]


def test_a_killed_query_writes_everything_once(tmp_path: Path) -> None:
    if find_java() is None:
        pytest.skip("Spark needs Java 17 or newer, and there is none here")
    # A retention that no slow machine meets; the benchmark has a short one.
    figures = spark_kills.run(2, 1, 3600, tmp_path)
    assert figures["problems"] == []
    assert figures["records"] > 1000
    assert figures["batches"] >= 4
