"""Reads a topic on a Spark master with one task per executor; started by `test_spark_racks`.

``python rack_reader.py MASTER BOOTSTRAP TOPIC DIRECTORY`` prints JSON: number and bytes of the records of two reads,
and the racks of the executors that ran tasks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kipmesh.spark.session import local_session, stop_session

EXECUTORS = 2
SETTINGS = {
    "spark.cores.max": str(EXECUTORS),
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    # Run no task before both executors are registered.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
}


def racks(_rows: Iterable[Any]) -> Iterator[str]:
    """Yield the rack of the executor that runs this task."""
    yield os.environ.get("KIPMESH_CLIENT_RACK", "")


def main(master: str, bootstrap: str, topic: str, directory: str) -> None:
    """Read twice, because tasks of the second read reuse connections."""
    spark = local_session("racks", Path(directory), settings={**SETTINGS, "spark.master": master})
    try:
        reader = spark.read.format("kipmesh").option("kafka.bootstrap.servers", bootstrap).option("subscribe", topic)
        frame = reader.load()
        sums = [frame.selectExpr("count(*)", "sum(length(value))").collect()[0] for _ in range(2)]
        found = spark.sparkContext.parallelize(range(20), 20).mapPartitions(racks).collect()
        print(json.dumps({"reads": [list(row) for row in sums], "racks": sorted(set(found))}))
    finally:
        stop_session(spark)


if __name__ == "__main__":
    main(*sys.argv[1:])
