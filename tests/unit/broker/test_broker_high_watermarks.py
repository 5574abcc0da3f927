"""After a loss that the rules allow, what takes the offsets of the lost records does not pass for committed."""

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
    """Work is done at once; `before` it something else may happen, or the disk may fail."""

    def __init__(self) -> None:
        self.before: Callable[[], object] = lambda: None

    async def run(self, work: Callable[[], Result]) -> Result:
        self.before()
        return work()


class Machine:
    """One replica of a partition, and the broker's processes on its disk."""

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


async def ten_committed() -> Machine:
    machine = Machine()
    machine.lead(0, min_isr=1)
    machine.append(10)
    assert machine.replica.high_watermark == 10
    await machine.checkpoint()
    return machine


def refused(work: Callable[[], object]) -> None:
    with pytest.raises(KafkaError) as raised:
        work()
    assert raised.value.code == ErrorCode.KAFKA_STORAGE_ERROR


async def test_a_checkpoint_above_the_log_is_lowered_before_the_log_grows() -> None:
    machine = await ten_committed()
    machine.log.truncate_to(7)  # as a power cut takes what was not synced
    machine.kill()
    assert machine.replica.high_watermark == 7
    machine.lead(1, min_isr=2)
    refused(lambda: machine.append(1))
    assert machine.dirty_replicas.must_checkpoint
    await machine.checkpoint()
    assert not machine.dirty_replicas.must_checkpoint
    machine.append(2)
    assert (machine.log.log_end_offset, machine.replica.high_watermark) == (9, 7)
    machine.kill()
    assert (machine.log.log_end_offset, machine.replica.high_watermark) == (9, 7)  # 7 and 8 were never committed


async def test_a_checkpoint_within_the_log_costs_nothing() -> None:
    machine = await ten_committed()
    machine.kill()
    assert machine.replica.high_watermark == 10
    assert not machine.replica.must_checkpoint
    assert not machine.dirty_replicas.high_watermarks


async def test_a_follower_that_is_cut_below_its_high_watermark_waits_for_the_checkpoint() -> None:
    machine = await ten_committed()
    machine.follow(1)
    machine.replica.truncate_diverged(EpochEndOffset(0, 6))
    refused(lambda: machine.replicate(1, 6))
    machine.replica.append_from_leader(PartitionData(0, high_watermark=6), 1)  # no records: nothing grows
    await machine.checkpoint()
    machine.replicate(1, 6)
    machine.replicate(1, 6)
    machine.kill()
    assert (machine.log.log_end_offset, machine.replica.high_watermark) == (8, 6)


async def test_a_follower_that_starts_over_below_its_high_watermark_waits_too() -> None:
    machine = await ten_committed()
    machine.follow(1)
    machine.replica.raise_log_start(10)
    assert machine.replica.restart_in_range(4, 6)
    assert machine.replica.high_watermark == 4
    refused(lambda: machine.replicate(1, 6))
    await machine.checkpoint()
    machine.replicate(1, 4)


async def test_a_cut_above_the_high_watermark_waits_for_nothing() -> None:
    machine = await ten_committed()
    machine.follow(1)
    machine.replicate(1, 10)
    machine.replica.truncate_diverged(EpochEndOffset(0, 10))
    assert not machine.replica.must_checkpoint


async def test_a_checkpoint_that_fails_is_still_to_be_written() -> None:
    machine = await ten_committed()
    machine.follow(1)
    machine.replica.truncate_diverged(EpochEndOffset(0, 6))

    def fail() -> None:
        raise StorageError("no space left")

    machine.disk.before = fail
    with pytest.raises(StorageError):
        await machine.checkpoint()
    assert machine.dirty_replicas.must_checkpoint
    refused(lambda: machine.replicate(1, 6))


async def test_a_cut_while_the_checkpoint_is_written_needs_another_one() -> None:
    machine = await ten_committed()
    machine.follow(1)
    machine.replica.truncate_diverged(EpochEndOffset(0, 6))
    machine.disk.before = lambda: machine.replica.truncate_diverged(EpochEndOffset(0, 5))
    await machine.checkpoint()
    assert machine.dirty_replicas.must_checkpoint
    machine.disk.before = lambda: None
    await machine.checkpoint()
    assert not machine.replica.must_checkpoint
