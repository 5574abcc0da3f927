"""What `bench.compare` has a client do, each verb in a process of its own: `python -m bench.compare_clients VERB JSON`.

librdkafka through confluent-kafka, with the same settings on every cluster. Values vary in size (half of the mean to
one and a half) and content; every step ends with a check that all was acknowledged or read, and prints one JSON object.
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

from bench.client_programs import values_of
from bench.harness import BenchError
from bench.workload import percentile

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
CREATE_AT_ONCE = 10
FAILOVER_PARTITIONS = 3
RATE = 600
"""Records a second while a leader is killed."""
WARM_S, AFTER_S = 2.5, 2.0
_WARM_SHARE = 8


def _library() -> Any:
    try:
        return importlib.import_module("confluent_kafka")
    except ImportError:
        raise BenchError("confluent-kafka is not installed") from None


def _admin(bootstrap: str) -> Any:
    return importlib.import_module("confluent_kafka.admin").AdminClient({"bootstrap.servers": bootstrap})


def brokers(bootstrap: str, timeout_s: float = 5) -> int:
    """How many a broker knows of; 0 while none answers."""
    ck = _library()
    try:
        return len(_admin(bootstrap).list_topics(timeout=timeout_s).brokers)
    except ck.KafkaException:
        return 0


def create(bootstrap: str, topics: Mapping[str, int], config: Mapping[str, str] | None = None) -> dict[str, float]:
    """Topics with three replicas; the time until all partitions have a leader and all replicas are in sync."""
    _library()
    made = importlib.import_module("confluent_kafka.admin")
    admin, names = _admin(bootstrap), list(topics)
    begin = time.perf_counter()
    for first in range(0, len(names), CREATE_AT_ONCE):
        wanted = [
            made.NewTopic(each, topics[each], 3, config=dict(config or {}))
            for each in names[first : first + CREATE_AT_ONCE]
        ]
        for done in admin.create_topics(wanted, operation_timeout=60, request_timeout=90).values():
            done.result(STEP_SECONDS_MAX)
    while time.perf_counter() - begin < STEP_SECONDS_MAX:
        found = admin.list_topics(timeout=30).topics
        if all(name in found and _is_complete(found[name], topics[name]) for name in names):
            return {"seconds": time.perf_counter() - begin}
        time.sleep(0.2)
    raise BenchError(f"create: {len(names)} topics were not complete within {STEP_SECONDS_MAX} s")


def _is_complete(topic: Any, partitions: int) -> bool:
    found = topic.partitions.values()
    return len(found) == partitions and all(each.leader >= 0 and len(each.isrs) == 3 for each in found)


def produce(bootstrap: str, topic: str, size: int, count: int) -> dict[str, float]:
    """Records of that mean size; the clock stops when the last is acknowledged."""
    producer, values = _library().Producer({"bootstrap.servers": bootstrap, **PRODUCER}), values_of(size)
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
                    raise BenchError(f"produce: {i} of {count} records within {STEP_SECONDS_MAX} s") from None
        if i % 1000 == 0:
            producer.poll(0)
    left = producer.flush(STEP_SECONDS_MAX)
    seconds = time.perf_counter() - begin
    if left or failed:
        raise BenchError(f"produce: {left} left, {len(failed)} failed: {failed[:1]}")
    return {"seconds": seconds, "bytes": volume, "records": count}


def consume(bootstrap: str, topic: str, partitions: int, count: int) -> dict[str, float]:
    """All records from the beginning; the clock starts before the first request."""
    ck = _library()
    consumer = ck.Consumer({"bootstrap.servers": bootstrap, **CONSUMER})
    seen = volume = 0
    begin = time.perf_counter()
    consumer.assign([ck.TopicPartition(topic, each, ck.OFFSET_BEGINNING) for each in range(partitions)])
    while seen < count:
        batch = consumer.consume(10_000, 10)
        if not batch or time.perf_counter() - begin > STEP_SECONDS_MAX:
            raise BenchError(f"consume: {seen} of {count} records")
        for message in batch:
            if message.error():
                raise BenchError(f"consume: {message.error()}")
            volume += len(message.value())
        seen += len(batch)
    seconds = time.perf_counter() - begin
    consumer.close()
    return {"seconds": seconds, "bytes": volume, "records": seen}


def latency(bootstrap: str, topic: str, count: int) -> dict[str, float]:
    """One record of about 100 B at a time, and the wait until it is read."""
    ck = _library()
    producer = ck.Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0})
    consumer = ck.Consumer({"bootstrap.servers": bootstrap, **CONSUMER})
    consumer.assign([ck.TopicPartition(topic, 0, 0)])
    times, values, started = [], values_of(100), time.perf_counter()
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
            raise BenchError("latency: another record came than the one that was sent")
        if time.perf_counter() - started > STEP_SECONDS_MAX:
            raise BenchError(f"latency: {i} of {count} records within {STEP_SECONDS_MAX} s")
    producer.flush(10)
    consumer.close()
    ordered = sorted(times[count // _WARM_SHARE :])
    volume = sum(len(values[i % len(values)]) for i in range(count))
    return {"p50_ms": percentile(ordered, 0.5), "p99_ms": percentile(ordered, 0.99), "bytes": volume}


def complete(bootstrap: str, topic: str, partitions: int) -> dict[str, float]:
    """The time until all partitions have a leader and three replicas in sync, as after a broker has come back."""
    _library()
    admin, begin = _admin(bootstrap), time.perf_counter()
    while not _is_complete(admin.list_topics(topic, timeout=30).topics[topic], partitions):
        if time.perf_counter() - begin > STEP_SECONDS_MAX:
            raise BenchError(f"complete: {topic} was not within {STEP_SECONDS_MAX} s")
        time.sleep(0.2)
    return {"seconds": time.perf_counter() - begin}


class Acknowledgements:
    """Of the records of each partition, which come in the order in which they were sent; times in s."""

    def __init__(self, partitions: int) -> None:
        self.sent: list[list[float]] = [[] for _ in range(partitions)]
        self.came: list[list[float]] = [[] for _ in range(partitions)]

    def is_warm(self) -> bool:
        """Whether enough came for a steady state."""
        return all(len(each) > 50 for each in self.came)

    def has_recovered(self, partition: int, killed_at: float) -> bool:
        """Whether a record was acknowledged that was sent after that: by another leader, that is."""
        came = len(self.came[partition])
        return came > 0 and self.sent[partition][came - 1] > killed_at

    def longest_gap(self, killed_at: float) -> float:
        """The longest time between two acknowledgements of one partition of which the second came after that."""
        return max(after - before for came in self.came for before, after in pairwise(came) if after > killed_at)


def failover(bootstrap: str, topic: str, delay_s: float) -> dict[str, float]:
    """Small records to each partition all the time, `RATE` in all: the longest gap around the end of a leader.

    Once it is warm and `delay_s` have passed, one line with the number of the broker that leads partition 0 is printed:
    it is to be killed then, and a line on standard input says that it was. It ends `AFTER_S` after another leader has
    acknowledged a record.
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
    told_at = killed_at = ends_at = math.inf
    while (now := time.perf_counter()) < ends_at and not failed:
        if now - begin > STEP_SECONDS_MAX:
            raise BenchError(f"failover: not over within {STEP_SECONDS_MAX} s")
        for partition in range(FAILOVER_PARTITIONS):
            producer.produce(topic, b"x" * 100, partition=partition, on_delivery=delivered)
            seen.sent[partition].append(time.perf_counter())
        due += FAILOVER_PARTITIONS / RATE
        while (left_s := due - time.perf_counter()) > 0:
            producer.poll(left_s)
        if told_at == math.inf and now - begin > WARM_S + delay_s and seen.is_warm():
            sys.stdout.write(f"{admin.list_topics(topic, timeout=30).topics[topic].partitions[0].leader}\n")
            sys.stdout.flush()
            told_at = now
        elif killed_at == math.inf and now > told_at and select.select([sys.stdin], [], [], 0)[0]:
            sys.stdin.readline()
            killed_at = time.perf_counter()
        elif ends_at == math.inf and seen.has_recovered(0, killed_at):
            ends_at = now + AFTER_S
    if producer.flush(30) or failed:
        raise BenchError(f"failover: {len(failed)} records failed: {failed[:1]}")
    return {"gap_s": seen.longest_gap(told_at), "acknowledged": sum(map(len, seen.came))}


VERBS: Mapping[str, Callable[..., dict[str, float]]] = {
    "create": create,
    "produce": produce,
    "consume": consume,
    "latency": latency,
    "complete": complete,
    "failover": failover,
}


def main(given: list[str]) -> int:
    """One verb."""
    try:
        found = VERBS[given[0]](**json.loads(given[1]))
    except BenchError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except Exception as error:  # of the library: one line says it
        sys.stderr.write(f"{given[0]}: {type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(f"{json.dumps(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
