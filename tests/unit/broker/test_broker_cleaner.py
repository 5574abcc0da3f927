"""The log cleaner of a broker: which logs it compacts, its rate limit, and how it stops."""

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


class CleanerFixture:
    """A cleaner and the logs of one log directory."""

    def __init__(self, directory: Path) -> None:
        self.manager = LogManager(
            RealFileSystem(), [str(directory)], cluster_id="cluster", node_id=1, defaults=TopicConfig()
        )
        self.manager.load(NOW)
        self.replicas: dict[tuple[bytes, int], Any] = {}
        self.registry = CollectorRegistry()
        self.disk = Disk("test")
        config = BrokerConfig.parse(
            {"node.id": 1, "cluster.id": "cluster", "controller.quorum.voters": "0@h:1", "log.dirs": str(directory)}
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
async def logs(tmp_path: Path) -> AsyncIterator[CleanerFixture]:
    fixture = CleanerFixture(tmp_path)
    yield fixture
    await fixture.cleaner.close()
    fixture.disk.close()
    fixture.manager.close(1)


def leftovers(directory: Path) -> list[Path]:
    """Return the temporary files of compactions."""
    return [path for path in directory.rglob("*") if path.suffix in (".swap", ".cleaned")]


async def test_cleaner_compacts_due_log_and_writes_checkpoint(logs: CleanerFixture, tmp_path: Path) -> None:
    compacted, deleting = logs.make("one"), logs.make("other", **{"cleanup.policy": "delete"})
    size, deleting_size = compacted.size_bytes, deleting.size_bytes
    await logs.cleaner.run_once()
    assert compacted.size_bytes < size / 4
    assert deleting.size_bytes == deleting_size
    assert (tmp_path / "cleaner-offset-checkpoint").read_text().splitlines() == ["0", "1", "one 0 40"]
    assert logs.metric("kafka_log_logcleanermanager_max_dirty_percent") == 100
    await logs.cleaner.run_once()
    assert logs.metric("kafka_log_logcleanermanager_max_dirty_percent") == 0
    assert 0 < (logs.metric("kafka_log_logcleaner_cleaner_recopy_percent") or 0) < 50
    assert leftovers(tmp_path) == []


async def test_cleaner_skips_corrupt_log_and_counts_it_as_uncleanable(logs: CleanerFixture, tmp_path: Path) -> None:
    log = logs.make("one")
    path = tmp_path / "one-0" / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    await logs.cleaner.run_once()
    assert logs.metric("kafka_log_logcleanermanager_uncleanable_partitions_count") == 1
    assert path.read_bytes() == data
    assert log.failed is None
    assert logs.metric("kafka_log_logcleanermanager_max_dirty_percent") == 100
    await logs.cleaner.run_once()
    assert logs.metric("kafka_log_logcleanermanager_max_dirty_percent") == 0, "an uncleanable log is not due again"
    assert path.read_bytes() == data


async def test_stopped_cleaner_leaves_due_log_unchanged(logs: CleanerFixture, tmp_path: Path) -> None:
    log = logs.make("one")
    size, records = log.size_bytes, log.read(0, 1 << 20, log.log_end_offset, True)
    running = asyncio.create_task(logs.cleaner.run_once())
    await asyncio.sleep(0)
    assert not running.done()
    logs.cleaner.throttle.stop()
    await running
    assert logs.metric("kafka_log_logcleanermanager_max_dirty_percent") == 100, "the log was due"
    assert (log.size_bytes, log.failed) == (size, None)
    assert log.read(0, 1 << 20, log.log_end_offset, True) == records
    assert not (tmp_path / "cleaner-offset-checkpoint").exists()
    assert logs.metric("kafka_log_logcleanermanager_uncleanable_partitions_count") == 0
    assert leftovers(tmp_path) == []


async def test_cleaner_drops_log_deleted_during_its_compaction(logs: CleanerFixture, tmp_path: Path) -> None:
    deleted, kept = logs.make("one"), logs.make("two")
    size = kept.size_bytes
    running = asyncio.create_task(logs.cleaner.run_once())
    await asyncio.sleep(0)
    assert not running.done(), "the compaction has started"
    logs.manager.delete("one", 0, NOW)
    await running
    assert logs.manager.get("one", 0) is None
    assert not (tmp_path / "one-0").exists()
    assert leftovers(tmp_path) == []
    assert deleted.failed is None
    assert logs.metric("kafka_log_logcleanermanager_uncleanable_partitions_count") == 0
    assert kept.size_bytes < size, "the other log is compacted"


def test_throttle_limits_rate_and_raises_after_stop() -> None:
    throttle = Throttle(100_000)
    began_s = time.monotonic()
    throttle.begin()
    for _ in range(10):
        throttle(1000)
    assert time.monotonic() - began_s > 0.08
    throttle.stop()
    with pytest.raises(StoppedError):
        throttle(1)
