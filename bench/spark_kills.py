"""`python -m bench.spark_kills`: a streaming query is killed again and again, and so are brokers, while retention runs.

A producer numbers its records. A process with two streaming queries (`bench.spark_query`) copies them into Parquet
files and into a second topic. It is killed with SIGKILL, Spark's JVM and workers included, at a random moment after it
has done a batch, and started again; meanwhile brokers are killed one at a time and come back. At the end each
acknowledged record must be once in the files, and once in the second topic among the records of different names
(`kipmesh.batch` and `kipmesh.row`), and nothing else may be in either. The exit code is 1 when it is not so.
Progress goes to standard error, the figures to standard output.
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

MODULE = "bench.spark_kills"

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
"""A line that is not of a stack and names an exception."""


class KillsError(RuntimeError):
    """It did not come to an end."""


class Load:
    """A thread that sends numbers at a rate until `end`, and then knows where each is."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.written: dict[int, tuple[int, int]] = {}
        """Number -> partition and offset, of those that were acknowledged."""
        self.failed: dict[int, str] = {}
        self._bootstrap, self._topic = bootstrap, topic
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Everything is sent, and has an outcome."""
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
    """The process of the queries; it has ended at the end of the block."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Query:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Another process, which goes on."""
        place = self._place
        command = [sys.executable, "-m", "bench.spark_query", place.bootstrap, place.source, place.sink]
        with (place.folder / "query.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(place.folder)],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for_batches(self, more: int = 1) -> None:
        """Until both queries have done so many more; KillsError when they end before, or take too long."""
        wanted = {query: self._place.committed(query) + more for query in (FILES, TOPIC)}
        deadline = time.monotonic() + _STEP_SECONDS
        while any(self._place.committed(query) < count for query, count in wanted.items()):
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise KillsError(f"no more batches: {self._said()}")
            time.sleep(_POLL_SECONDS)

    def kill(self) -> None:
        """SIGKILL to it and to the JVM; Spark's workers end when the JVM is gone."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def end(self) -> None:
        """Let it take the rest and stop; KillsError when it fails."""
        (self._place.folder / END).touch()
        try:
            if self._process is None or self._process.wait(_STEP_SECONDS):
                raise KillsError(f"the query failed: {self._said()}")
        except subprocess.TimeoutExpired:
            raise KillsError(f"the query does not end: {self._said()}") from None

    def _said(self) -> str:
        logs = [self._place.folder / "query.log", self._place.folder / "spark" / "spark.log"]
        return "\n".join(gist(log.read_text(errors="replace")) for log in logs if log.exists())


def gist(log: str) -> str:
    """The end of a log, after the lines before it that name exceptions: what follows those is mostly stacks."""
    end = log[-_END_CHARS:]
    begin = log[: -len(end)].splitlines() if end else []
    causes = [line[:_LINE_CHARS] for line in begin if _EXCEPTION.match(line)]
    if len(causes) > 2 * _CAUSES:
        causes = [*causes[:_CAUSES], f"... {len(causes) - 2 * _CAUSES} more", *causes[-_CAUSES:]]
    return "\n".join([*causes, end])


@contextlib.contextmanager
def broker_down(cluster: LocalCluster, name: str) -> Iterator[None]:
    """SIGKILL to a broker; it comes back after a while, at the latest at the end of the block."""
    cluster.kill(name)
    timer = threading.Timer(BROKER_DOWN_S, cluster.start, (name,))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def check_files(place: Place, load: Load) -> list[str]:
    """What is wrong with the Parquet files."""
    table = pyarrow.dataset.dataset(_committed_files(place.parquet), format="parquet").to_table()
    places = zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True)
    rows = Counter(zip(places, table["value"].to_pylist(), strict=True))
    found = Counter({(where, int(value.split()[0])): count for (where, value), count in rows.items()})
    return _differences("files", found, Counter((where, number) for number, where in load.written.items()))


def _committed_files(folder: Path) -> list[str]:
    """Those in the log of Spark's file sink: others were left by tasks that were killed."""
    log = folder / "_spark_metadata"
    newest = max((each for each in log.iterdir() if each.name.endswith(".compact")), key=_number, default=None)
    names = [newest] if newest else []
    names += [each for each in log.iterdir() if each.name.isdigit() and (not newest or _number(each) > _number(newest))]
    entries = [json.loads(line) for name in names for line in name.read_text().splitlines()[1:]]
    return [entry["path"].removeprefix("file://") for entry in entries if entry["action"] == "add"]


def _number(path: Path) -> int:
    return int(path.name.split(".")[0])


def check_topic(place: Place, load: Load) -> tuple[list[str], int]:
    """What is wrong with the second topic, and how many of its records a repeated task wrote again."""
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
                    problems.append(f"topic: {name} names {numbers[name]} and {number}")
    found = Counter(numbers.values())
    return problems + _differences("topic", found, Counter(load.written.keys())), repeated


def _differences(what: str, found: Counter[Any], wanted: Counter[Any]) -> list[str]:
    """Elements that are missing, or too often there; a few of each are named."""
    problems = []
    for text, which in (("is missing", wanted - found), ("is once too often there", found - wanted)):
        problems += [f"{what}: {each} {text} ({len(which)} such)" for each in sorted(which)[:3]]
    return problems


def run(kills: int, seed: int, retention_s: int, folder: Path) -> dict[str, Any]:
    """All of it; the figures and the problems."""
    rng = random.Random(seed)
    config = {"log.retention.check.interval.ms": 2000, "min.insync.replicas": 2}
    with LocalCluster(mode="processes", controllers=3, leaders=1, followers=2, config=config) as cluster:
        place = Place(cluster.bootstrap, "numbers", "copies", folder)
        deleted = {"retention.ms": str(1000 * retention_s), "segment.bytes": str(SEGMENT_BYTES)}
        with AdminClient(cluster.bootstrap) as admin:
            admin.create_topics([NewTopic(place.source, PARTITIONS, 3, deleted), NewTopic(place.sink, PARTITIONS, 3)])
        begin = time.monotonic()
        with Load(cluster.bootstrap, place.source) as load, Query(place) as query:
            for turn in range(1, kills + 1):
                query.wait_for_batches()
                time.sleep(rng.uniform(0, 3))
                broker = rng.choice(BROKERS)
                harness.say(
                    MODULE,
                    f"{turn}/{kills}: SIGKILL to the query and to {broker}; {place.committed(FILES)} batches are done",
                )
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
        problems += [f"{number} was not written: {error}" for number, error in sorted(load.failed.items())[:3]]
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
    """Run, and print the figures."""
    parser = harness.parser(MODULE, __doc__)
    parser.add_argument("--kills", type=int, default=10, help="of the query, each with one of a broker (10)")
    parser.add_argument("--seed", type=int, default=1, help="of what is killed when (1)")
    parser.add_argument("--retention-s", type=int, default=180, help="how long the first topic keeps records (180)")
    options = parser.parse_args(given)
    if not 1 <= options.kills <= 1000 or options.retention_s < 10:
        parser.error("kills from 1 to 1000, and at least 10 s of retention")
    figures: dict[str, Any] = {}

    def measure() -> None:
        with tempfile.TemporaryDirectory(prefix="kipmesh-spark-kills-") as folder:
            figures.update(run(options.kills, options.seed, options.retention_s, Path(folder)))

    def text() -> str:
        shown = {key: value for key, value in figures.items() if key != "problems"}
        return "\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in shown.items())

    return harness.run(
        MODULE, options, measure, figures=lambda: figures, text=text, problems=lambda: figures.get("problems", [])
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
