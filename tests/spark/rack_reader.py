"""Reads a topic on the Spark master that is named, from as many executors as it has: what `test_spark_racks` starts.

``python rack_reader.py MASTER BOOTSTRAP TOPIC FOLDER`` prints JSON: the records, their bytes, and on which executors
(by the folder of their Python worker's Spark files) tasks ran.
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
    # No task before both are there, however slow the machine is.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
}


def racks(_rows: Iterable[Any]) -> Iterator[str]:
    """Of the executor that this task runs on."""
    yield os.environ.get("KIPMESH_CLIENT_RACK", "")


def main(master: str, bootstrap: str, topic: str, folder: str) -> None:
    """Read, twice: the second time tasks find connections."""
    spark = local_session("racks", Path(folder), settings={**SETTINGS, "spark.master": master})
    try:
        reader = spark.read.format("kipmesh").option("kafka.bootstrap.servers", bootstrap).option("subscribe", topic)
        frame = reader.load()
        sums = [frame.selectExpr("count(*)", "sum(length(value))").collect()[0] for _ in range(2)]
        found = spark.sparkContext.parallelize(range(20), 20).mapPartitions(racks).collect()
        print(json.dumps({"reads": [list(each) for each in sums], "racks": sorted(set(found))}))
    finally:
        stop_session(spark)


if __name__ == "__main__":
    main(*sys.argv[1:])
