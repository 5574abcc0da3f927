"""kcat, Debian's program over an older librdkafka: a run of it a verb, or one that goes on for a group."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from typing import Any

from tests.clients.drivers import confluent_driver
from tests.clients.drivers.serving import BEGINNING, END, VerbError, data, record, serve

TIMEOUT_S = 60
_CODES = {"Offset out of range": 1, "Unknown topic or partition": 3, "Message size too large": 10}


def _raise(said: str) -> None:
    raise VerbError(next((code for words, code in _CODES.items() if words in said), -1), said.strip()[-300:])


class Reading:
    """A run of it that prints records until it is told to end."""

    def __init__(self, command: list[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
        self._lock = threading.Lock()
        self._said = ""
        self._records: list[dict[str, Any]] = []
        self._threads = []
        for stream, take in ((self._process.stdout, self._take), (self._process.stderr, self._hear)):
            self._threads.append(threading.Thread(target=self._follow, args=(stream, take), daemon=True))
            self._threads[-1].start()

    @staticmethod
    def _follow(stream: Any, take: Any) -> None:
        for line in stream:
            take(line)

    def _take(self, line: str) -> None:
        with self._lock:
            self._records.append(_of_line(line))

    def _hear(self, line: str) -> None:
        with self._lock:
            self._said += line

    def check(self) -> None:
        """VerbError when it has ended by itself, for that is an error."""
        if self._process.poll() is not None:
            for thread in self._threads:
                thread.join(10)
            _raise(self._said or f"it ended with {self._process.returncode}")

    def take(self) -> list[dict[str, Any]]:
        """What came since the last time."""
        with self._lock:
            found, self._records = self._records, []
        return found

    def close(self) -> None:
        """End it; a member of a group leaves and commits."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(20)


class Group(Reading):
    """`kcat -G`: the partitions that it says are its own, too."""

    def __init__(self, command: list[str]) -> None:
        self.assigned: list[int] = []
        super().__init__(command)

    def _hear(self, line: str) -> None:
        super()._hear(line)
        if "rebalanced" in line:  # "% Group g rebalanced (memberid m): assigned: t [0], t [1]"
            _, is_assigned, partitions = line.partition("assigned: ")
            found = [int(each.split("[")[1].split("]")[0]) for each in partitions.split(", ") if "[" in each]
            with self._lock:
                self.assigned = sorted(found) if is_assigned and "revoked" not in line else []


def _of_line(line: str) -> dict[str, Any]:
    found = json.loads(line)
    key, value = found["key"], found["payload"]
    headers = found.get("headers", [])
    pairs = [(headers[i], headers[i + 1].encode()) for i in range(0, len(headers), 2)]
    return record(
        found["partition"],
        found["offset"],
        None if key is None else key.encode(),
        None if value is None else value.encode(),
        found["ts"],
        pairs,
    )


class Driver:
    def __init__(self, bootstrap: str, options: dict[str, Any]) -> None:
        rack = [f"-Xclient.rack={options['rack']}"] if options.get("rack") else []
        self._kcat = ["kcat", "-b", bootstrap, "-Xsocket.timeout.ms=10000", *rack]
        self._group: Group | None = None

    def _run(self, *more: str, given: bytes | None = None, timeout_s: float = TIMEOUT_S) -> str:
        try:
            done = subprocess.run(
                [*self._kcat, *more], input=given, capture_output=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as ended:
            return (ended.stdout or b"").decode()
        if done.returncode:
            _raise(done.stderr.decode())
        return done.stdout.decode()

    def hello(self) -> dict[str, Any]:
        return {"client": "kcat"}

    def create_topic(self, **wanted: Any) -> None:
        """It cannot: another client of the same library does it, so that there is something to produce to."""
        other = confluent_driver.Driver(self._kcat[2], {})
        try:
            other.create_topic(**wanted)
        finally:
            other.close()

    def list_topics(self) -> list[str]:
        return [each["topic"] for each in json.loads(self._run("-L", "-J"))["topics"]]

    def describe_topic(self, topic: str) -> list[dict[str, Any]]:
        (found,) = json.loads(self._run("-L", "-J", "-t", topic))["topics"]
        if "error" in found:
            _raise(found["error"])
        return [
            {
                "id": each["partition"],
                "leader": each["leader"],
                "replicas": [one["id"] for one in each["replicas"]],
                "isr": [one["id"] for one in each["isrs"]],
            }
            for each in found["partitions"]
        ]

    def produce(
        self,
        topic: str,
        records: list[dict[str, Any]],
        compression: str = "none",
        acks: str = "all",
        idempotent: bool = False,
        pace_ms: float = 0,
    ) -> list[list[int]]:
        """A run of it a partition, of lines: it places what it is given in order, and does not say where."""
        config = [
            f"-Xcompression.codec={compression}",
            f"-Xacks={acks}",
            f"-Xenable.idempotence={str(idempotent).lower()}",
        ]
        placed: list[list[int]] = [[-1, -1]] * len(records)
        for partition in sorted({each["partition"] for each in records}):
            mine = [number for number, each in enumerate(records) if each["partition"] == partition]
            first = self.watermarks(topic, partition)[1]
            with subprocess.Popen(
                [*self._kcat, "-P", "-t", topic, "-p", str(partition), "-K\t", "-Z", "-Xlinger.ms=2", *config],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
            ) as process:
                assert process.stdin is not None
                assert process.stderr is not None
                for at, number in enumerate(mine):
                    key, value = data(records[number].get("key")) or b"", data(records[number]["value"]) or b""
                    process.stdin.write(key + b"\t" + value + b"\n")
                    if pace_ms:
                        process.stdin.flush()
                        time.sleep(pace_ms / 1000)
                    placed[number] = [partition, first + at]
                process.stdin.close()
                said = process.stderr.read().decode()
            if process.returncode or "Delivery failed" in said:
                _raise(said)
        return placed

    def consume(
        self, topic: str, partitions: dict[str, int], count: int, timeout_s: float = 30, reset: str = "earliest"
    ) -> list[dict[str, Any]]:
        """A run of it a partition, all at once: how many records each will have is not known, only all of them."""
        config = ["-J", "-q", "-u", f"-Xauto.offset.reset={'error' if reset == 'none' else reset}", "-t", topic]
        runs = []
        for partition, offset in partitions.items():
            where = {BEGINNING: "beginning", END: "end"}.get(offset, str(offset))
            runs.append(Reading([*self._kcat, "-C", *config, "-p", partition, "-o", where]))
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        try:
            while len(found) < count and time.monotonic() < deadline:
                for one in runs:
                    found += one.take()
                    one.check()
                time.sleep(0.05)
        finally:
            for one in runs:
                one.close()
        return found

    def _offset(self, topic: str, partition: int, timestamp: int) -> int:
        return int(self._run("-Q", "-t", f"{topic}:{partition}:{timestamp}").rpartition(" ")[2])

    def watermarks(self, topic: str, partition: int) -> list[int]:
        return [self._offset(topic, partition, BEGINNING), self._offset(topic, partition, END)]

    def offset_for_time(self, topic: str, partition: int, timestamp: int) -> int:
        return self._offset(topic, partition, timestamp)

    def group_open(self, group: str, topics: list[str]) -> None:
        config = ["-Xauto.offset.reset=earliest", "-Xsession.timeout.ms=10000", "-Xheartbeat.interval.ms=1000"]
        self._group = Group([*self._kcat, "-J", "-u", *config, "-Xauto.commit.interval.ms=100", "-G", group, *topics])

    def group_poll(self, count: int, timeout_s: float) -> dict[str, Any]:
        assert self._group is not None
        time.sleep(timeout_s)
        return {"records": self._group.take(), "assigned": self._group.assigned}

    def group_commit(self) -> None:
        """It does so by itself."""
        time.sleep(0.5)

    def group_close(self) -> None:
        group, self._group = self._group, None
        assert group is not None
        group.close()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


def code_of(error: BaseException) -> int | None:
    """It has no others than those that are raised here."""
    return None


if __name__ == "__main__":
    serve(Driver, code_of)
