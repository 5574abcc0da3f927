"""`python -m bench.spark_query`: the streaming queries that `bench.spark_kills` kills; see there.

Two queries on one topic: one into Parquet files, with each record's place, and one into another topic, whose records
have names (`kipmesh.batch`, `kipmesh.row`). They go on where their checkpoints say. When the file `end` appears in
the folder, they take all that is there and stop.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

from kipmesh.spark.session import local_session, stop_session

END = "end"
FILES = "files"
TOPIC = "topic"
RECORDS_A_BATCH = 20_000
_POLL_SECONDS = 0.2


class Place(NamedTuple):
    """Where the queries read and write."""

    bootstrap: str
    source: str
    sink: str
    folder: Path

    def checkpoint(self, query: str) -> Path:
        """Of the query FILES or TOPIC."""
        return self.folder / f"checkpoint-{query}"

    @property
    def parquet(self) -> Path:
        """What FILES writes."""
        return self.folder / "out"

    def committed(self, query: str) -> int:
        """How many batches are done."""
        commits = self.checkpoint(query) / "commits"
        return sum(each.name.isdigit() for each in commits.iterdir()) if commits.is_dir() else 0


def run(place: Place) -> None:
    """Until END is there; raises what a query failed with."""
    spark = local_session("spark-kills", place.folder / "spark")
    frame = (
        spark.readStream.format("kipmesh")
        .option("kafka.bootstrap.servers", place.bootstrap)
        .option("subscribe", place.source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", RECORDS_A_BATCH)
        .load()
    )
    files = frame.select("partition", "offset", "value").writeStream.format("parquet")
    topic = frame.select("key", "value").writeStream.format("kipmesh")
    queries = [
        files.option("path", str(place.parquet)).option("checkpointLocation", str(place.checkpoint(FILES))).start(),
        topic.option("kafka.bootstrap.servers", place.bootstrap)
        .option("topic", place.sink)
        .option("checkpointLocation", str(place.checkpoint(TOPIC)))
        .start(),
    ]
    while not (place.folder / END).exists() and all(query.isActive for query in queries):
        time.sleep(_POLL_SECONDS)
    for query in queries:
        query.processAllAvailable()
        query.stop()
    stop_session(spark)


if __name__ == "__main__":
    given = sys.argv[1:]
    run(Place(given[0], given[1], given[2], Path(given[3])))
