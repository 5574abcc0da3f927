"""Checkpoints of high watermarks: records that replace lost ones do not count as committed after a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from kipmesh.broker.replication.replica import DirtyReplicas, Disk, Replica
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import PartitionState
from kipmesh.core.record_batch import build
from kipmesh.messages import EpochEndOffset, PartitionData
from kipmesh.storage.fs import StorageError
from kipmesh.storage.log.log import Log
from kipmesh.storage.log_manager import LogManager
from simulation.faulty_fs import FaultyFileSystem

TOPIC_ID = b"t" * 16
Result = TypeVar("Result")


class InlineDisk(Disk):
    """A disk that runs work inline, after the hook `before`, which may change state or raise."""

    def __init__(self) -> None:
        self.before: Callable[[], object] = lambda: None

    async def run(self, work: Callable[[], Result]) -> Result:
        self.before()
        return work()


class ReplicaFixture:
    """One replica of a partition on a disk that survives restarts of the broker."""

    def __init__(self) -> None:
        self.fs = FaultyFileSystem()
        self.disk = InlineDisk()
        self.start()

    def start(self) -> None:
        self.manager = LogManager(self.fs, ("/d",), cluster_id="c", node_id=1, defaults=TopicConfig())
        self.manager.load(0)
        self.dirty_replicas = DirtyReplicas()
        self.log: Log = self.manager.create("t", 0, TOPIC_ID, TopicConfig(), 0)
        stored = self.manager.high_watermarks.get(("t", 0), 0)
        self.replica = Replica(1, self.log, stored, lambda: 0, self.dirty_replicas)
        if self.replica.must_checkpoint:
            self.dirty_replicas.high_watermarks[self.replica] = None

    def kill(self) -> None:
        self.manager.abandon()
        self.start()

    def lead(self, leader_epoch: int, *, min_isr: int) -> None:
        self.replica.become_leader(
            PartitionState((1, 2), (1,), 1, leader_epoch, leader_epoch),
            min_insync_replicas=min_isr,
            lag_max_ms=1000,
            eligible_epoch=lambda _: -1,
        )

    def follow(self, leader_epoch: int) -> None:
        self.replica.become_follower(PartitionState((1, 2), (2,), 2, leader_epoch, leader_epoch))

    def append(self, count: int, acks: int = 1) -> None:
        for _ in range(count):
            batch = build([(None, b"v")], base_offset=0, leader_epoch=-1, timestamp_ms=1)
            self.replica.append(batch, acks, 1)

    def replicate(self, leader_epoch: int, high_watermark: int) -> None:
        offset = self.log.log_end_offset
        batch = build([(None, b"w")], base_offset=offset, leader_epoch=leader_epoch, timestamp_ms=1)
        self.replica.append_from_leader(PartitionData(0, high_watermark=high_watermark, records=batch), 1)

    async def checkpoint(self) -> None:
        await self.dirty_replicas.checkpoint_high_watermarks(self.manager, self.disk)


async def with_ten_committed() -> ReplicaFixture:
    fixture = ReplicaFixture()
    fixture.lead(0, min_isr=1)
    fixture.append(10)
    assert fixture.replica.high_watermark == 10
    await fixture.checkpoint()
    return fixture


def assert_refused(work: Callable[[], object]) -> None:
    with pytest.raises(KafkaError) as raised:
        work()
    assert raised.value.code == ErrorCode.KAFKA_STORAGE_ERROR


async def test_leader_refuses_appends_until_checkpoint_above_log_end_is_lowered() -> None:
    fixture = await with_ten_committed()
    fixture.log.truncate_to(7)  # a power cut lost unsynced records
    fixture.kill()
    assert fixture.replica.high_watermark == 7
    fixture.lead(1, min_isr=2)
    assert_refused(lambda: fixture.append(1))
    assert fixture.dirty_replicas.must_checkpoint
    await fixture.checkpoint()
    assert not fixture.dirty_replicas.must_checkpoint
    fixture.append(2)
    assert (fixture.log.log_end_offset, fixture.replica.high_watermark) == (9, 7)
    fixture.kill()
    assert (fixture.log.log_end_offset, fixture.replica.high_watermark) == (9, 7)  # offsets 7 and 8 are not committed


async def test_checkpoint_within_log_needs_no_rewrite() -> None:
    fixture = await with_ten_committed()
    fixture.kill()
    assert fixture.replica.high_watermark == 10
    assert not fixture.replica.must_checkpoint
    assert not fixture.dirty_replicas.high_watermarks


async def test_follower_truncated_below_high_watermark_appends_after_checkpoint() -> None:
    fixture = await with_ten_committed()
    fixture.follow(1)
    fixture.replica.truncate_diverged(EpochEndOffset(0, 6))
    assert_refused(lambda: fixture.replicate(1, 6))
    fixture.replica.append_from_leader(PartitionData(0, high_watermark=6), 1)  # a response without records is accepted
    await fixture.checkpoint()
    fixture.replicate(1, 6)
    fixture.replicate(1, 6)
    fixture.kill()
    assert (fixture.log.log_end_offset, fixture.replica.high_watermark) == (8, 6)


async def test_follower_restarted_below_high_watermark_appends_after_checkpoint() -> None:
    fixture = await with_ten_committed()
    fixture.follow(1)
    fixture.replica.raise_log_start(10)
    assert fixture.replica.restart_in_range(4, 6)
    assert fixture.replica.high_watermark == 4
    assert_refused(lambda: fixture.replicate(1, 6))
    await fixture.checkpoint()
    fixture.replicate(1, 4)


async def test_truncation_above_high_watermark_needs_no_checkpoint() -> None:
    fixture = await with_ten_committed()
    fixture.follow(1)
    fixture.replicate(1, 10)
    fixture.replica.truncate_diverged(EpochEndOffset(0, 10))
    assert not fixture.replica.must_checkpoint


async def test_failed_checkpoint_stays_pending() -> None:
    fixture = await with_ten_committed()
    fixture.follow(1)
    fixture.replica.truncate_diverged(EpochEndOffset(0, 6))

    def fail() -> None:
        raise StorageError("no space left")

    fixture.disk.before = fail
    with pytest.raises(StorageError):
        await fixture.checkpoint()
    assert fixture.dirty_replicas.must_checkpoint
    assert_refused(lambda: fixture.replicate(1, 6))


async def test_truncation_during_checkpoint_needs_another_checkpoint() -> None:
    fixture = await with_ten_committed()
    fixture.follow(1)
    fixture.replica.truncate_diverged(EpochEndOffset(0, 6))
    fixture.disk.before = lambda: fixture.replica.truncate_diverged(EpochEndOffset(0, 5))
    await fixture.checkpoint()
    assert fixture.dirty_replicas.must_checkpoint
    fixture.disk.before = lambda: None
    await fixture.checkpoint()
    assert not fixture.replica.must_checkpoint
