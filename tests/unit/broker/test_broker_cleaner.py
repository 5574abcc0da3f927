"""The broker's cleaner: which logs it compacts, its limits, and how it stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.cleaner import Cleaner, StoppedError, Throttle
from kipmesh.broker.replication.replica import Disk
from kipmesh.core.config import BrokerConfig, TopicConfig
from kipmesh.storage import LogManager, RealFileSystem
from kipmesh.storage.log.log import Log
from kipmesh.testing import produced_batch

NOW = 1_700_000_000_000


class Fixture:
    """A cleaner over the logs of one folder."""

    def __init__(self, folder: Path) -> None:
        self.manager = LogManager(
            RealFileSystem(), [str(folder)], cluster_id="cluster", node_id=1, defaults=TopicConfig()
        )
        self.manager.load(NOW)
        self.replicas: dict[tuple[bytes, int], Any] = {}
        self.registry = CollectorRegistry()
        self.disk = Disk("test")
        config = BrokerConfig.parse(
            {"node.id": 1, "cluster.id": "cluster", "controller.quorum.voters": "0@h:1", "log.dirs": str(folder)}
        )
        self.cleaner = Cleaner(
            config,
            self,
            self.manager,
            self.disk,
            BrokerMetrics(self.registry),
            lambda: NOW,  # type: ignore[arg-type]
        )

    def __iter__(self) -> Any:
        return iter(list(self.replicas.values()))

    def get(self, topic_id: bytes, partition: int) -> Any:
        return self.replicas.get((topic_id, partition))

    def make(self, topic: str, **keys: object) -> Log:
        config = TopicConfig.parse({"cleanup.policy": "compact", "segment.bytes": 500} | keys)
        log = self.manager.create(topic, 0, topic.encode().ljust(16), config, NOW)
        for number in range(40):
            log.append_as_leader(produced_batch([b"v" * 50], key=b"%d" % (number % 2), timestamp_ms=NOW), 0, NOW)
        log.roll(NOW)
        log.flush()
        self.replicas[log.topic_id, 0] = SimpleNamespace(
            topic=topic, partition=0, key=(log.topic_id, 0), log=log, high_watermark=log.log_end_offset
        )
        return log

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(name)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Fixture]:
    world = Fixture(tmp_path)
    yield world
    await world.cleaner.close()
    world.disk.close()
    world.manager.close(1)


def leftovers(folder: Path) -> list[Path]:
    """Files that a compaction makes for the time being."""
    return [path for path in folder.rglob("*") if path.suffix in (".swap", ".cleaned")]


async def test_what_is_due_is_compacted_and_checkpointed(world: Fixture, tmp_path: Path) -> None:
    one, other = world.make("one"), world.make("other", **{"cleanup.policy": "delete"})
    size, others_size = one.size_bytes, other.size_bytes
    await world.cleaner.run_once()
    assert one.size_bytes < size / 4
    assert other.size_bytes == others_size
    assert (tmp_path / "cleaner-offset-checkpoint").read_text().splitlines() == ["0", "1", "one 0 40"]
    assert world.metric("kafka_log_logcleanermanager_max_dirty_percent") == 100
    await world.cleaner.run_once()
    assert world.metric("kafka_log_logcleanermanager_max_dirty_percent") == 0
    assert 0 < (world.metric("kafka_log_logcleaner_cleaner_recopy_percent") or 0) < 50
    assert leftovers(tmp_path) == []


async def test_a_damaged_log_is_left_alone(world: Fixture, tmp_path: Path) -> None:
    log = world.make("one")
    path = tmp_path / "one-0" / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    await world.cleaner.run_once()
    assert world.metric("kafka_log_logcleanermanager_uncleanable_partitions_count") == 1
    assert path.read_bytes() == data
    assert log.failed is None
    await world.cleaner.run_once()


async def test_stopping_ends_the_work(world: Fixture) -> None:
    log = world.make("one")
    size = log.size_bytes
    world.cleaner.throttle.stop()
    await world.cleaner.run_once()
    assert log.size_bytes == size


async def test_a_log_that_is_deleted_meanwhile_is_neither_kept_nor_uncleanable(world: Fixture, tmp_path: Path) -> None:
    deleted, kept = world.make("one"), world.make("two")
    size = kept.size_bytes
    running = asyncio.create_task(world.cleaner.run_once())
    await asyncio.sleep(0)
    world.manager.delete("one", 0, NOW)
    await running
    assert world.manager.get("one", 0) is None
    assert not (tmp_path / "one-0").exists()
    assert leftovers(tmp_path) == []
    assert deleted.failed is None
    assert world.metric("kafka_log_logcleanermanager_uncleanable_partitions_count") == 0
    assert kept.size_bytes < size, "the other log is compacted all the same"


def test_the_throttle_keeps_to_the_rate() -> None:
    throttle = Throttle(100_000)
    began_s = time.monotonic()
    throttle.begin()
    for _ in range(10):
        throttle(1000)
    assert time.monotonic() - began_s > 0.08
    throttle.stop()
    with pytest.raises(StoppedError):
        throttle(1)
