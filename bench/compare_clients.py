"""Client steps of `bench.compare`, each run in a new process: `python -m bench.compare_clients VERB JSON`.

Uses librdkafka through confluent-kafka, with the same settings for every cluster. Values vary in content and in size,
from half to one and a half of the mean. Each step checks that all records were acknowledged or read, and prints one
JSON object. BenchError if a step fails or takes more than `STEP_SECONDS_MAX`.
"""

from __future__ import annotations

import importlib
import json
import math
import select
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from bench.harness import BenchError
from bench.workload import json_values, percentile

STEP_SECONDS_MAX = 120
PRODUCER: Mapping[str, Any] = {
    "acks": "all",
    "linger.ms": 5,
    "batch.size": 262_144,
    "queue.buffering.max.messages": 500_000,
    "queue.buffering.max.kbytes": 1 << 20,
}
CONSUMER: Mapping[str, Any] = {
    "group.id": "bench",
    "enable.auto.commit": False,
    "queued.max.messages.kbytes": 65_536,
    "fetch.max.bytes": 50 << 20,
}
TOPICS_PER_REQUEST = 10
FAILOVER_PARTITIONS = 3
RATE = 600
"""Records per second while a leader is killed."""
WARM_S, AFTER_S = 2.5, 2.0
_WARM_SHARE = 8


def _library() -> Any:
    try:
        return importlib.import_module("confluent_kafka")
    except ImportError:
        raise BenchError("confluent-kafka is not installed; run: pip install confluent-kafka") from None


def _admin(bootstrap: str) -> Any:
    return importlib.import_module("confluent_kafka.admin").AdminClient({"bootstrap.servers": bootstrap})


def brokers(bootstrap: str, timeout_s: float = 5) -> int:
    """Return the number of brokers in the metadata of a cluster, or 0 if no broker responds within `timeout_s`."""
    ck = _library()
    try:
        return len(_admin(bootstrap).list_topics(timeout=timeout_s).brokers)
    except ck.KafkaException:
        return 0


def create(bootstrap: str, topics: Mapping[str, int], config: Mapping[str, str] | None = None) -> dict[str, float]:
    """Create `topics` (names with partition counts) with three replicas. Returns as `seconds` the time until all
    replicas are in sync.
    """
    _library()
    library = importlib.import_module("confluent_kafka.admin")
    admin, names = _admin(bootstrap), list(topics)
    begin = time.perf_counter()
    for first in range(0, len(names), TOPICS_PER_REQUEST):
        wanted = [
            library.NewTopic(each, topics[each], 3, config=dict(config or {}))
            for each in names[first : first + TOPICS_PER_REQUEST]
        ]
        for done in admin.create_topics(wanted, operation_timeout=60, request_timeout=90).values():
            done.result(STEP_SECONDS_MAX)
    while time.perf_counter() - begin < STEP_SECONDS_MAX:
        found = admin.list_topics(timeout=30).topics
        if all(name in found and _is_complete(found[name], topics[name]) for name in names):
            return {"seconds": time.perf_counter() - begin}
        time.sleep(0.2)
    raise BenchError(f"create: the replicas of {len(names)} topics were not in sync within {STEP_SECONDS_MAX} s")


def _is_complete(topic: Any, partitions: int) -> bool:
    found = topic.partitions.values()
    return len(found) == partitions and all(each.leader >= 0 and len(each.isrs) == 3 for each in found)


def produce(bootstrap: str, topic: str, size: int, count: int) -> dict[str, float]:
    """Produce `count` records of mean size `size`. Returns `seconds` until the last acknowledgement, `bytes` of values
    and `records`.
    """
    producer, values = _library().Producer({"bootstrap.servers": bootstrap, **PRODUCER}), json_values(size)
    failed: list[Any] = []
    volume = sum(len(values[i % len(values)]) for i in range(count))

    def delivered(error: Any, _message: Any) -> None:
        if error:
            failed.append(error)

    producer.list_topics(topic, timeout=30)
    begin = time.perf_counter()
    for i in range(count):
        while True:
            try:
                producer.produce(topic, values[i % len(values)], on_delivery=delivered)
                break
            except BufferError:
                producer.poll(0.05)
                if time.perf_counter() - begin > STEP_SECONDS_MAX:
                    raise BenchError(f"produce: only {i} of {count} records within {STEP_SECONDS_MAX} s") from None
        if i % 1000 == 0:
            producer.poll(0)
    left = producer.flush(STEP_SECONDS_MAX)
    seconds = time.perf_counter() - begin
    if left or failed:
        raise BenchError(f"produce: {left} records pending, {len(failed)} failed: {failed[:1]}")
    return {"seconds": seconds, "bytes": volume, "records": count}


def consume(bootstrap: str, topic: str, partitions: int, count: int) -> dict[str, float]:
    """Read `count` records of a topic from its beginning. Returns `seconds` since just before the first request,
    `bytes` of values and `records`.
    """
    ck = _library()
    consumer = ck.Consumer({"bootstrap.servers": bootstrap, **CONSUMER})
    seen = volume = 0
    begin = time.perf_counter()
    consumer.assign([ck.TopicPartition(topic, each, ck.OFFSET_BEGINNING) for each in range(partitions)])
    while seen < count:
        batch = consumer.consume(10_000, 10)
        if not batch or time.perf_counter() - begin > STEP_SECONDS_MAX:
            raise BenchError(f"consume: only {seen} of {count} records")
        for message in batch:
            if message.error():
                raise BenchError(f"consume: {message.error()}")
            volume += len(message.value())
        seen += len(batch)
    seconds = time.perf_counter() - begin
    consumer.close()
    return {"seconds": seconds, "bytes": volume, "records": seen}


def latency(bootstrap: str, topic: str, count: int) -> dict[str, float]:
    """Send single records of about 100 B, each after the previous one was read. Returns `p50_ms`, `p99_ms` and `bytes`
    of all values. The first eighth of the records is a warm-up.
    """
    ck = _library()
    producer = ck.Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0})
    consumer = ck.Consumer({"bootstrap.servers": bootstrap, **CONSUMER})
    consumer.assign([ck.TopicPartition(topic, 0, 0)])
    times, values, started = [], json_values(100), time.perf_counter()
    for i in range(count):
        begin = time.perf_counter()
        producer.produce(topic, values[i % len(values)], partition=0)
        producer.poll(0)
        while True:
            message = consumer.poll(1)
            producer.poll(0)
            if message is not None and not message.error():
                break
            if time.perf_counter() - begin > 30:
                raise BenchError("latency: a record did not arrive within 30 s")
        times.append((time.perf_counter() - begin) * 1e3)
        if message.value() != values[i % len(values)]:
            raise BenchError("latency: read another record than the one sent")
        if time.perf_counter() - started > STEP_SECONDS_MAX:
            raise BenchError(f"latency: only {i} of {count} records within {STEP_SECONDS_MAX} s")
    producer.flush(10)
    consumer.close()
    ordered = sorted(times[count // _WARM_SHARE :])
    volume = sum(len(values[i % len(values)]) for i in range(count))
    return {"p50_ms": percentile(ordered, 0.5), "p99_ms": percentile(ordered, 0.99), "bytes": volume}


def complete(bootstrap: str, topic: str, partitions: int) -> dict[str, float]:
    """Wait until all partitions have a leader and three replicas in sync. Returns the time as `seconds`."""
    _library()
    admin, begin = _admin(bootstrap), time.perf_counter()
    while not _is_complete(admin.list_topics(topic, timeout=30).topics[topic], partitions):
        if time.perf_counter() - begin > STEP_SECONDS_MAX:
            raise BenchError(f"complete: the replicas of {topic} were not in sync within {STEP_SECONDS_MAX} s")
        time.sleep(0.2)
    return {"seconds": time.perf_counter() - begin}


class Acknowledgements:
    """Times (`time.perf_counter`, s) of sending and of acknowledgement by partition, in the order of sending."""

    def __init__(self, partitions: int) -> None:
        self.sent: list[list[float]] = [[] for _ in range(partitions)]
        self.came: list[list[float]] = [[] for _ in range(partitions)]

    def is_warm(self) -> bool:
        """Whether each partition has more than 50 acknowledgements."""
        return all(len(each) > 50 for each in self.came)

    def has_recovered(self, partition: int, killed_at: float) -> bool:
        """Whether a new leader has acknowledged a record, that is, one sent after `killed_at`."""
        came = len(self.came[partition])
        return came > 0 and self.sent[partition][came - 1] > killed_at

    def longest_gap(self, killed_at: float) -> float:
        """Return the longest time in seconds between two acknowledgements of a partition, the second of them after
        `killed_at`. Raises ValueError if there is none.
        """
        return max(after - before for came in self.came for before, after in pairwise(came) if after > killed_at)


def failover(bootstrap: str, topic: str, delay_s: float) -> dict[str, float]:
    """Produce small records at `RATE` while the leader of partition 0 is killed. Returns the longest gap as `gap_s`,
    and the number of `acknowledged` records.

    After a warm-up and `delay_s` seconds, prints the id of the leader of partition 0. The parent process kills that
    broker and confirms with a line on standard input. Ends `AFTER_S` after a new leader has acknowledged a record.
    Raises BenchError if no new leader acknowledges in time or a record fails.
    """
    config = {"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0, "enable.idempotence": True}
    producer, admin = _library().Producer(config), _admin(bootstrap)
    seen, failed = Acknowledgements(FAILOVER_PARTITIONS), list[Any]()

    def delivered(error: Any, message: Any) -> None:
        if error:
            failed.append(error)
        else:
            seen.came[message.partition()].append(time.perf_counter())

    begin = due = time.perf_counter()
    printed_at = killed_at = ends_at = math.inf
    while (now := time.perf_counter()) < ends_at and not failed:
        if now - begin > STEP_SECONDS_MAX:
            raise BenchError(f"failover: no new leader within {STEP_SECONDS_MAX} s")
        for partition in range(FAILOVER_PARTITIONS):
            producer.produce(topic, b"x" * 100, partition=partition, on_delivery=delivered)
            seen.sent[partition].append(time.perf_counter())
        due += FAILOVER_PARTITIONS / RATE
        while (left_s := due - time.perf_counter()) > 0:
            producer.poll(left_s)
        if printed_at == math.inf and now - begin > WARM_S + delay_s and seen.is_warm():
            sys.stdout.write(f"{admin.list_topics(topic, timeout=30).topics[topic].partitions[0].leader}\n")
            sys.stdout.flush()
            printed_at = now
        elif killed_at == math.inf and now > printed_at and select.select([sys.stdin], [], [], 0)[0]:
            sys.stdin.readline()
            killed_at = time.perf_counter()
        elif ends_at == math.inf and seen.has_recovered(0, killed_at):
            ends_at = now + AFTER_S
    if producer.flush(30) or failed:
        raise BenchError(f"failover: {len(failed)} records failed: {failed[:1]}")
    return {"gap_s": seen.longest_gap(printed_at), "acknowledged": sum(map(len, seen.came))}


VERBS: Mapping[str, Callable[..., dict[str, float]]] = {
    step.__name__: step for step in (create, produce, consume, latency, complete, failover)
}


def main(given: list[str]) -> int:
    """Run one step and print its result as JSON. Return 0, or 1 after one line on standard error if the step failed."""
    try:
        found = VERBS[given[0]](**json.loads(given[1]))
    except BenchError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except Exception as error:  # an error of the library
        sys.stderr.write(f"{given[0]}: {type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(f"{json.dumps(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
