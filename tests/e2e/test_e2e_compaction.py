"""Compaction on a cluster of processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kipmesh.client import AdminClient, Consumer, NewTopic, Producer, TopicPartition
from kipmesh.testing import until as eventually
from tests.e2e.cli_of_tests import ClusterCli

KEYS = 5
RECORDS = 400

pytestmark = pytest.mark.timeout(300)


def sizes(directory: Path) -> list[int]:
    """Return the log size of each replica in bytes."""
    return [sum(size(path) for path in log.glob("*.log")) for log in directory.glob("*/data/kept-0")]


def size(segment: Path) -> int:
    """Return the size in bytes, or 0 if the cleaner has deleted the segment."""
    try:
        return segment.stat().st_size
    except FileNotFoundError:
        return 0


async def run(bootstrap: str, directory: Path) -> None:
    configs = {"cleanup.policy": "compact", "segment.bytes": "8000", "file.delete.delay.ms": "0"}
    async with AdminClient(bootstrap) as admin:
        await admin.create_topics([NewTopic("kept", 1, 2, configs=configs)])
    async with Producer(bootstrap, **{"batch.size": 1000}) as producer:
        for number in range(RECORDS):
            await producer.send("kept", b"value-%d" % number * 10, key=b"%d" % (number % KEYS))
        await producer.flush()
        full = RECORDS * 60

        def are_small() -> bool:
            found = sizes(directory)
            assert len(found) == 2
            return all(0 < log_bytes < full / 2 for log_bytes in found)

        await eventually(are_small, "smaller replicas", 60)
        await producer.send("kept", b"end", key=b"end")
        await producer.flush()
    seen: dict[bytes | None, bytes | None] = {}
    offsets = []
    async with Consumer(bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition("kept", 0)])
        while b"end" not in seen:
            for record in await consumer.poll(500):
                seen[record.key] = record.value
                offsets.append(record.offset)
    assert offsets == sorted(set(offsets))
    assert len(offsets) < RECORDS
    del seen[b"end"]
    assert seen == {b"%d" % (n % KEYS): b"value-%d" % n * 10 for n in range(RECORDS - KEYS, RECORDS)}


def test_compacted_topic_shrinks_on_every_replica_and_keeps_last_values(cluster: ClusterCli) -> None:
    settings = ("log.cleaner.backoff.ms=300", "log.flush.scheduler.interval.ms=200")
    cluster.local(
        "up", "--leaders", "1", "--followers", "1", *(text for setting in settings for text in ("--config", setting))
    )
    asyncio.run(run(cluster.bootstrap, cluster.directory))
