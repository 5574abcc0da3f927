"""The flights into the topic, and what the topic must hold afterwards.

What is expected is built from the CSV and not from what the producer says: a flight's partition follows from its
carrier (Kafka's murmur2), its place there from the order of scheduled departure.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from kipmesh.cli.demo.workspace import DemoError
from kipmesh.client import AdminClient, Consumer, Delivery, NewTopic, Producer, TopicPartition
from kipmesh.client.partitioner import partition_of_key
from kipmesh.client.records import decode_columns
from kipmesh.spark.jobs.flights.dataset import Flight

_WINDOW: Final = 2_000
"""Flights between two looks at failed deliveries and at the progress bar."""
_READ_TIMEOUT_MS: Final = 30_000


class SequenceDigest:
    """Records of one partition in their order: their number and a SHA-256 over keys and values."""

    def __init__(self) -> None:
        self.records = 0
        self._hash = hashlib.sha256()

    def add(self, flights: Sequence[tuple[bytes | None, bytes | None]]) -> None:
        """Append records. Lengths are not hashed: neither keys nor values contain a zero byte or a line feed."""
        self._hash.update(b"".join([b"%b\0%b\n" % (key or b"", value or b"") for key, value in flights]))
        self.records += len(flights)

    def hexdigest(self) -> str:
        """The digest so far."""
        return self._hash.hexdigest()


class Produced(NamedTuple):
    """What was sent and acknowledged, and what each partition must hold."""

    records: int
    payload_bytes: int
    seconds: float
    expected: tuple[SequenceDigest, ...]


async def create_topic(bootstrap: str, topic: str, partitions: int, replication_factor: int) -> None:
    """Create the topic of the demo."""
    async with AdminClient(bootstrap) as admin:
        new = NewTopic(topic, partitions, replication_factor, {"min.insync.replicas": str(min(2, replication_factor))})
        await admin.create_topics([new])


async def produce(
    bootstrap: str, topic: str, partitions: int, flights: Iterable[Flight], report: Callable[[int], None]
) -> Produced:
    """Send all flights with acks=all, in their order; returns when every one is acknowledged.

    Raises the KafkaError of the first flight that could not be delivered.
    """
    expected = tuple(SequenceDigest() for _ in range(partitions))
    begin = time.monotonic()
    records = payload_bytes = 0
    pending: deque[Delivery] = deque()
    async with Producer(bootstrap, acks="all", linger_ms=20, batch_size=128 * 1024) as producer:
        for window in _windows(flights):
            for flight in window:
                pending.append(await producer.send(topic, flight.value, flight.key))
            _expect(window, expected)
            records += len(window)
            payload_bytes += sum(len(key) + len(value) for key, value in window)
            while pending and pending[0].done():
                pending.popleft().result()
            report(records)
        await producer.flush()
        for delivery in pending:
            delivery.result()
    return Produced(records, payload_bytes, time.monotonic() - begin, expected)


async def read_topic(bootstrap: str, topic: str, partitions: int) -> tuple[SequenceDigest, ...]:
    """What is in the topic now, partition by partition, as a consumer reads it."""
    found = tuple(SequenceDigest() for _ in range(partitions))
    wanted = [(topic, partition) for partition in range(partitions)]
    async with Consumer(bootstrap, auto_offset_reset="earliest", max_partition_fetch_bytes=4 << 20) as consumer:
        ends = await consumer.end_offsets(wanted)
        consumer.assign(wanted)
        left = {where.partition for where, end in ends.items() if end > 0}
        while left:
            batches = await consumer.fetch_batches(timeout_ms=_READ_TIMEOUT_MS)
            if not batches:
                raise DemoError(f"no records of {topic}-{min(left)} within {_READ_TIMEOUT_MS / 1000:g} s")
            for each in batches:
                columns = decode_columns(each.records)
                found[each.partition].add(list(zip(columns.keys, columns.values, strict=True)))
                if each.next_position >= ends[TopicPartition(topic, each.partition)]:
                    left.discard(each.partition)
    return found


def _windows(flights: Iterable[Flight]) -> Iterator[list[Flight]]:
    source = iter(flights)
    while window := list(islice(source, _WINDOW)):
        yield window


def _expect(window: Sequence[Flight], expected: Sequence[SequenceDigest]) -> None:
    by_partition: dict[int, list[Flight]] = {}
    for flight in window:
        by_partition.setdefault(partition_of_key(flight.key, len(expected)), []).append(flight)
    for partition, flights in by_partition.items():
        expected[partition].add(flights)
