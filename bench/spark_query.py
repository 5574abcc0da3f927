"""`python -m bench.spark_query`: the streaming queries that `bench.spark_kills` kills.

One query copies a topic to Parquet files, with the position of each record. The other copies it to a topic, whose
records carry ids (`kipmesh.batch`, `kipmesh.row`). Both resume from their checkpoints. When the file `end` appears in
the directory, they process all available records and stop.
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
    """Bootstrap addresses, topics to read and to write, and directory of the queries."""

    bootstrap: str
    source: str
    sink: str
    directory: Path

    def checkpoint(self, query: str) -> Path:
        """Return the checkpoint directory of the query FILES or TOPIC."""
        return self.directory / f"checkpoint-{query}"

    @property
    def parquet(self) -> Path:
        """Output directory of the query FILES."""
        return self.directory / "out"

    def committed(self, query: str) -> int:
        """Return the number of batches that the query FILES or TOPIC has committed; 0 before its first one."""
        commits = self.checkpoint(query) / "commits"
        return sum(each.name.isdigit() for each in commits.iterdir()) if commits.is_dir() else 0


def run(place: Place) -> None:
    """Run both queries until the file END exists, then process all available records and stop. Raises the error of a
    query that failed.
    """
    spark = local_session("spark-kills", place.directory / "spark")
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
    while not (place.directory / END).exists() and all(query.isActive for query in queries):
        time.sleep(_POLL_SECONDS)
    for query in queries:
        query.processAllAvailable()
        query.stop()
    stop_session(spark)


if __name__ == "__main__":
    given = sys.argv[1:]
    run(Place(given[0], given[1], given[2], Path(given[3])))
