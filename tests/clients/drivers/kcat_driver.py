"""Driver of kcat, Debian's program with an older librdkafka: one process per verb, or per group member."""

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


def _raise(output: str) -> None:
    raise VerbError(next((code for text, code in _CODES.items() if text in output), -1), output.strip()[-300:])


class ConsumerProcess:
    """A kcat process that prints records until it is closed."""

    def __init__(self, command: list[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
        self._lock = threading.Lock()
        self._errors = ""
        self._records: list[dict[str, Any]] = []
        self._threads = []
        for stream, handle in ((self._process.stdout, self._on_record), (self._process.stderr, self._on_error)):
            self._threads.append(threading.Thread(target=self._follow, args=(stream, handle), daemon=True))
            self._threads[-1].start()

    @staticmethod
    def _follow(stream: Any, handle: Any) -> None:
        for line in stream:
            handle(line)

    def _on_record(self, line: str) -> None:
        with self._lock:
            self._records.append(_of_line(line))

    def _on_error(self, line: str) -> None:
        with self._lock:
            self._errors += line

    def check(self) -> None:
        """Raise VerbError if the process has exited."""
        if self._process.poll() is not None:
            for thread in self._threads:
                thread.join(10)
            _raise(self._errors or f"kcat exited with code {self._process.returncode}")

    def take(self) -> list[dict[str, Any]]:
        """Return the records since the last call."""
        with self._lock:
            found, self._records = self._records, []
        return found

    def close(self) -> None:
        """Stop the process. A group member commits and leaves."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(20)


class GroupMember(ConsumerProcess):
    """A `kcat -G` process and its assigned partitions."""

    def __init__(self, command: list[str]) -> None:
        self.assigned: list[int] = []
        super().__init__(command)

    def _on_error(self, line: str) -> None:
        super()._on_error(line)
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
        self._group: GroupMember | None = None

    def _run(self, *more: str, timeout_s: float = TIMEOUT_S) -> str:
        try:
            done = subprocess.run([*self._kcat, *more], capture_output=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as ended:
            return (ended.stdout or b"").decode()
        if done.returncode:
            _raise(done.stderr.decode())
        return done.stdout.decode()

    def hello(self) -> dict[str, Any]:
        return {"client": "kcat"}

    def create_topic(self, **wanted: Any) -> None:
        """Create the topic with confluent-kafka, because kcat cannot create topics."""
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
                "replicas": [node["id"] for node in each["replicas"]],
                "isr": [node["id"] for node in each["isrs"]],
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
        """Produce with one process per partition. kcat keeps the order and does not report offsets."""
        config = [
            f"-Xcompression.codec={compression}",
            f"-Xacks={acks}",
            f"-Xenable.idempotence={str(idempotent).lower()}",
        ]
        positions: list[list[int]] = [[-1, -1]] * len(records)
        for partition in sorted({each["partition"] for each in records}):
            numbers = [number for number, each in enumerate(records) if each["partition"] == partition]
            first = self.watermarks(topic, partition)[1]
            with subprocess.Popen(
                [*self._kcat, "-P", "-t", topic, "-p", str(partition), "-K\t", "-Z", "-Xlinger.ms=2", *config],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
            ) as process:
                assert process.stdin is not None
                assert process.stderr is not None
                for index, number in enumerate(numbers):
                    key, value = data(records[number].get("key")) or b"", data(records[number]["value"]) or b""
                    process.stdin.write(key + b"\t" + value + b"\n")
                    if pace_ms:
                        process.stdin.flush()
                        time.sleep(pace_ms / 1000)
                    positions[number] = [partition, first + index]
                process.stdin.close()
                errors = process.stderr.read().decode()
            if process.returncode or "Delivery failed" in errors:
                _raise(errors)
        return positions

    def consume(
        self, topic: str, partitions: dict[str, int], count: int, timeout_s: float = 30, reset: str = "earliest"
    ) -> list[dict[str, Any]]:
        """Consume with one concurrent process per partition, because only the total number of records is known."""
        config = ["-J", "-q", "-u", f"-Xauto.offset.reset={'error' if reset == 'none' else reset}", "-t", topic]
        consumers = []
        for partition, offset in partitions.items():
            start = {BEGINNING: "beginning", END: "end"}.get(offset, str(offset))
            consumers.append(ConsumerProcess([*self._kcat, "-C", *config, "-p", partition, "-o", start]))
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        try:
            while len(found) < count and time.monotonic() < deadline:
                for consumer in consumers:
                    found += consumer.take()
                    consumer.check()
                time.sleep(0.05)
        finally:
            for consumer in consumers:
                consumer.close()
        return found

    def _offset(self, topic: str, partition: int, timestamp: int) -> int:
        return int(self._run("-Q", "-t", f"{topic}:{partition}:{timestamp}").rpartition(" ")[2])

    def watermarks(self, topic: str, partition: int) -> list[int]:
        return [self._offset(topic, partition, BEGINNING), self._offset(topic, partition, END)]

    def offset_for_time(self, topic: str, partition: int, timestamp: int) -> int:
        return self._offset(topic, partition, timestamp)

    def group_open(self, group: str, topics: list[str]) -> None:
        config = ["-Xauto.offset.reset=earliest", "-Xsession.timeout.ms=10000", "-Xheartbeat.interval.ms=1000"]
        self._group = GroupMember(
            [*self._kcat, "-J", "-u", *config, "-Xauto.commit.interval.ms=100", "-G", group, *topics]
        )

    def group_poll(self, count: int, timeout_s: float) -> dict[str, Any]:
        assert self._group is not None
        time.sleep(timeout_s)
        return {"records": self._group.take(), "assigned": self._group.assigned}

    def group_commit(self) -> None:
        """Wait for an automatic commit."""
        time.sleep(0.5)

    def group_close(self) -> None:
        group, self._group = self._group, None
        assert group is not None
        group.close()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


def code_of(error: BaseException) -> int | None:
    """Return None: all errors with a code are VerbErrors."""
    return None


if __name__ == "__main__":
    serve(Driver, code_of)
