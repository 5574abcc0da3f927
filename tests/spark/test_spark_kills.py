"""A short run of `make bench-spark-kills`: SIGKILL to a streaming query and to brokers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import spark_kills
from kipmesh.spark.java import find_java

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(1500)]


def test_killed_query_writes_each_record_once(tmp_path: Path) -> None:
    if find_java() is None:
        pytest.skip("Spark needs Java 17 or newer")
    # Longer retention than in the benchmark, so that no record expires on a slow machine.
    figures = spark_kills.run(2, 1, 3600, tmp_path)
    assert figures["problems"] == []
    assert figures["records"] > 1000
    assert figures["batches"] >= 4
