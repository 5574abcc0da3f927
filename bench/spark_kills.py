"""`python -m bench.spark_kills`: kills a streaming query and brokers repeatedly, while retention deletes records.

A producer numbers its records. A process with two streaming queries (`bench.spark_query`) copies them to Parquet files
and to a second topic. It is killed with SIGKILL, including Spark's JVM and workers, at a random time after a batch, and
restarted. Brokers are killed one at a time and restarted. At the end each acknowledged record must be once in the
files, and once in the second topic among the records with different ids (`kipmesh.batch` and `kipmesh.row`). Neither
may have other records. The exit code is 1 otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.dataset

from bench import harness
from bench.spark_query import END, FILES, TOPIC, Place
from kipmesh.client import NewTopic
from kipmesh.client.sync import AdminClient, Consumer, PendingRecord, Producer
from kipmesh.cluster import LocalCluster
from kipmesh.core.errors import KafkaError
from kipmesh.spark.row_ids import BATCH_HEADER, ROW_HEADER

PARTITIONS = 6
RECORDS_PER_S = 250
SEGMENT_BYTES = 1 << 16
BROKERS = ("leader-1", "follower-1", "follower-2")
BROKER_DOWN_S = 3.0
_STEP_SECONDS = 240.0
_POLL_SECONDS = 0.2
_END_CHARS = 2000
_LINE_CHARS = 500
_CAUSES = 10
_EXCEPTION = re.compile(r"(?!\s|at )(?=.*(?:Exception|Error|Caused by)\b)")
"""Matches a line that names an exception and is not part of a stack trace."""


class KillsError(harness.BenchError):
    """The queries failed or did not progress in time. The message includes the ends of their logs."""


class Load:
    """A thread that produces numbered records from the beginning of a `with` block until `end`."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.written: dict[int, tuple[int, int]] = {}
        """Partition and offset of acknowledged records by number."""
        self.failed: dict[int, str] = {}
        """Errors by number. Like `written`, complete after `end`."""
        self._bootstrap, self._topic = bootstrap, topic
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop producing, and wait until each record is acknowledged or has failed."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        sent: list[PendingRecord] = []
        with Producer(self._bootstrap, **{"acks": "all", "linger.ms": 20}) as producer:
            begin = time.monotonic()
            while not self._ends.wait(0.05):
                wanted = int((time.monotonic() - begin) * RECORDS_PER_S)
                for number in range(len(sent), wanted):
                    value = b"%d %s" % (number, random.Random(number).randbytes(40).hex().encode())
                    sent.append(producer.send(self._topic, value, partition=number % PARTITIONS))
            producer.flush()
        for number, future in enumerate(sent):
            try:
                done = future.result()
                self.written[number] = (done.partition, done.offset)
            except KafkaError as error:
                self.failed[number] = str(error)


class Query:
    """The process with both streaming queries, from the beginning to the end of a `with` block."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Query:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the process. Its queries resume from their checkpoints."""
        place = self._place
        command = [sys.executable, "-m", "bench.spark_query", place.bootstrap, place.source, place.sink]
        with (place.directory / "query.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(place.directory)],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for_batches(self, more: int = 1) -> None:
        """Wait until both queries have committed `more` batches. Raises KillsError if the process ends or
        after 240 s.
        """
        wanted = {query: self._place.committed(query) + more for query in (FILES, TOPIC)}
        deadline = time.monotonic() + _STEP_SECONDS
        while any(self._place.committed(query) < count for query, count in wanted.items()):
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise KillsError(f"no new batch within {_STEP_SECONDS:g} s, or the process ended: {self._log_ends()}")
            time.sleep(_POLL_SECONDS)

    def kill(self) -> None:
        """Send SIGKILL to the process group, which includes the JVM. Spark's workers end after the JVM. Does nothing if
        the process has ended.
        """
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def end(self) -> None:
        """Let the queries process all available records and wait until the process exits. Raises KillsError if it fails
        or after 240 s.
        """
        (self._place.directory / END).touch()
        try:
            if self._process is None or self._process.wait(_STEP_SECONDS):
                raise KillsError(f"the queries failed: {self._log_ends()}")
        except subprocess.TimeoutExpired:
            raise KillsError(f"the queries did not end within {_STEP_SECONDS:g} s: {self._log_ends()}") from None

    def _log_ends(self) -> str:
        logs = [self._place.directory / "query.log", self._place.directory / "spark" / "spark.log"]
        return "\n".join(gist(log.read_text(errors="replace")) for log in logs if log.exists())


def gist(log: str) -> str:
    """Return the last 2,000 characters of a log, preceded by the earlier lines that name exceptions (at most 20),
    without stack traces.
    """
    end = log[-_END_CHARS:]
    begin = log[: -len(end)].splitlines() if end else []
    causes = [line[:_LINE_CHARS] for line in begin if _EXCEPTION.match(line)]
    if len(causes) > 2 * _CAUSES:
        causes = [*causes[:_CAUSES], f"... {len(causes) - 2 * _CAUSES} more", *causes[-_CAUSES:]]
    return "\n".join([*causes, end])


@contextlib.contextmanager
def broker_down(cluster: LocalCluster, name: str) -> Iterator[None]:
    """Kill a broker, and restart it after `BROKER_DOWN_S` seconds while the block runs. Leaving the block waits for the
    restart.
    """
    cluster.kill(name)
    timer = threading.Timer(BROKER_DOWN_S, cluster.start, (name,))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def check_files(place: Place, load: Load) -> list[str]:
    """Return a message for each missing, repeated or unexpected record of the Parquet files; empty if there is none."""
    table = pyarrow.dataset.dataset(_committed_files(place.parquet), format="parquet").to_table()
    positions = zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True)
    rows = Counter(zip(positions, table["value"].to_pylist(), strict=True))
    found = Counter({(position, int(value.split()[0])): count for (position, value), count in rows.items()})
    return _differences("files", found, Counter((position, number) for number, position in load.written.items()))


def _committed_files(directory: Path) -> list[str]:
    """Return the paths that the log of Spark's file sink lists. Killed tasks leave other files."""
    log = directory / "_spark_metadata"
    newest = max((each for each in log.iterdir() if each.name.endswith(".compact")), key=_number, default=None)
    names = [newest] if newest else []
    names += [each for each in log.iterdir() if each.name.isdigit() and (not newest or _number(each) > _number(newest))]
    entries = [json.loads(line) for name in names for line in name.read_text().splitlines()[1:]]
    return [entry["path"].removeprefix("file://") for entry in entries if entry["action"] == "add"]


def _number(path: Path) -> int:
    return int(path.name.split(".")[0])


def check_topic(place: Place, load: Load) -> tuple[list[str], int]:
    """Return (problems, repeated): a message for each missing or wrong record of the second topic, and the number of
    records that repeated tasks wrote again.
    """
    numbers: dict[tuple[bytes | None, ...], int] = {}
    repeated, problems = 0, []
    with Consumer(place.bootstrap) as consumer:
        partitions = [(place.sink, index) for index in range(PARTITIONS)]
        consumer.assign(partitions)
        consumer.seek_to_beginning()
        ends = consumer.end_offsets(partitions)
        while any(consumer.position(each) < end for each, end in ends.items()):
            for record in consumer.poll(timeout_ms=1000):
                headers = dict(record.headers)
                name, number = (headers[BATCH_HEADER], headers[ROW_HEADER]), int((record.value or b"-1").split()[0])
                repeated += name in numbers
                if numbers.setdefault(name, number) != number:
                    problems.append(f"topic: id {name} has records {numbers[name]} and {number}")
    found = Counter(numbers.values())
    return problems + _differences("topic", found, Counter(load.written.keys())), repeated


def _differences(kind: str, found: Counter[Any], wanted: Counter[Any]) -> list[str]:
    """Return a message for each missing and each surplus element, at most three of each."""
    problems = []
    for text, which in (("is missing", wanted - found), ("is repeated or unexpected", found - wanted)):
        problems += [f"{kind}: {each} {text} ({len(which)} in total)" for each in sorted(which)[:3]]
    return problems


def run(kills: int, seed: int, retention_s: int, directory: Path) -> dict[str, Any]:
    """Run the test on a new cluster, and return the figures, with the violations as `problems`. Raises ClusterError,
    KafkaError, KillsError.
    """
    rng = random.Random(seed)
    config = {"log.retention.check.interval.ms": 2000, "min.insync.replicas": 2}
    with harness.three_brokers(config=config, controllers=3) as cluster:
        place = Place(cluster.bootstrap, "numbers", "copies", directory)
        deleted = {"retention.ms": str(1000 * retention_s), "segment.bytes": str(SEGMENT_BYTES)}
        with AdminClient(cluster.bootstrap) as admin:
            admin.create_topics([NewTopic(place.source, PARTITIONS, 3, deleted), NewTopic(place.sink, PARTITIONS, 3)])
        begin = time.monotonic()
        with Load(cluster.bootstrap, place.source) as load, Query(place) as query:
            for kill in range(1, kills + 1):
                query.wait_for_batches()
                time.sleep(rng.uniform(0, 3))
                broker = rng.choice(BROKERS)
                done = f"{place.committed(FILES)} batches are committed"
                harness.say(f"{kill}/{kills}: SIGKILL to the queries and to {broker}; {done}")
                with broker_down(cluster, broker):
                    time.sleep(rng.uniform(0, 1))
                    query.kill()
                    query.start()
            query.wait_for_batches(2)
            load.end()
            query.end()
        topic_problems, repeated = check_topic(place, load)
        with Consumer(cluster.bootstrap) as consumer:
            starts = consumer.beginning_offsets([(place.source, index) for index in range(PARTITIONS)])
        problems = check_files(place, load) + topic_problems
        problems += [
            f"record {number} was not acknowledged: {error}" for number, error in sorted(load.failed.items())[:3]
        ]
        return {
            "kills": kills,
            "seconds": round(time.monotonic() - begin, 1),
            "records": len(load.written),
            "deleted_by_retention": sum(starts.values()),
            "batches": place.committed(FILES),
            "written_again": repeated,
            "problems": problems,
        }


def main(given: Sequence[str]) -> int:
    """Run the test, print the figures, and return the exit code: 1 if a record is missing or repeated."""
    parser = harness.Parser("bench.spark_kills", __doc__)
    parser.number("--kills", "kills of the queries, each with a kill of a broker", 10)
    parser.number("--seed", "seed of the victims and times", 1, least=0, most=1 << 31)
    parser.number("--retention-s", "retention of the first topic in seconds", 180, least=10, most=1 << 20)
    options = parser.parse(given)
    figures: dict[str, Any] = {}

    def measure() -> None:
        with tempfile.TemporaryDirectory(prefix="kipmesh-spark-kills-") as directory:
            figures.update(run(options.kills, options.seed, options.retention_s, Path(directory)))

    def text() -> str:
        shown = {key: value for key, value in figures.items() if key != "problems"}
        return "\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in shown.items())

    return harness.run(
        options, measure, figures=lambda: figures, text=text, problems=lambda: figures.get("problems", [])
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
