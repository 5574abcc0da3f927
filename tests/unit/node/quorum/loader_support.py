"""A metadata loader with a real replica on an in-memory disk. Tests move the log and the high watermark."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from prometheus_client import CollectorRegistry

from kipmesh.core import record_batch
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.metadata.image_writer import image_values
from kipmesh.core.raft import ElectionState, RaftConfig, State
from kipmesh.core.raft.leadership import Leadership
from kipmesh.core.raft.types import AppendAsFollower, SnapshotChanged, TruncateLog
from kipmesh.core.snapshot.retention import RetentionLimits
from kipmesh.core.snapshot.schedule import SnapshotLimits
from kipmesh.messages import SnapshotId
from kipmesh.node import monotonic_ms, wall_ms
from kipmesh.node.quorum.driver import QuorumDriver
from kipmesh.node.quorum.loader import MetadataLoader
from kipmesh.node.quorum.metrics import QuorumMetrics
from kipmesh.storage.log_manager import LogManager
from kipmesh.storage.quorum.quorum_replica import QuorumReplica, log_config
from simulation.faulty_fs import FaultyFileSystem

NEVER = SnapshotLimits(0.5, 1 << 40, 0)
"""Limits that never create a snapshot."""
ALWAYS = SnapshotLimits(0.0, 1, 0)
"""Limits that create a snapshot after every applied record."""
WAIT_S = 20.0
DIRECTORY = "/data/__cluster_metadata-0"


def topic_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def topic(number: int, partitions: int = 1, leader: int = 1) -> list[r.Record]:
    """Return the records of a new topic `t<number>`."""
    created: list[r.Record] = [r.TopicRecord(f"t{number}", topic_id(number))]
    created += [
        r.PartitionRecord(partition, topic_id(number), (1, 2, 3), (1, 2, 3), (), (), leader, 0, 0, 0, ())
        for partition in range(partitions)
    ]
    return created


def change(number: int, leader: int) -> list[r.Record]:
    return [r.PartitionChangeRecord(0, topic_id(number), leader=leader)]


async def until(condition: Callable[[], object]) -> None:
    """Wait until other tasks make the condition true."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the state of several tasks has no event
            await asyncio.sleep(0.001)


async def within_steps(condition: Callable[[], object]) -> None:
    """Wait like `until`, but check after each iteration of the loop, so that no step of long work is missed."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def apply_own(loader: MetadataLoader, batch: bytes) -> MetadataDelta:
    """Apply a batch in all its steps and return the delta."""
    steps = loader.apply_own_steps(batch)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            delta: MetadataDelta = end.value
            return delta


class Member:
    """One replica and its loader. Has the attributes of `QuorumDriver` that the loader uses."""

    def __init__(
        self,
        fs: FaultyFileSystem | None = None,
        *,
        snapshots: SnapshotLimits = NEVER,
        retention: RetentionLimits | None = None,
        is_voter: bool = True,
        clean_interval_s: float = 3600.0,
        segment_bytes: int = 4096,
    ) -> None:
        self.fs = fs or FaultyFileSystem()
        self.manager = LogManager(self.fs, ("/data",), cluster_id="c", node_id=1, defaults=log_config(segment_bytes))
        self.manager.load(0)
        self.replica = QuorumReplica.open(
            self.manager,
            cluster_id="c",
            voters=(1, 2, 3),
            is_voter=is_voter,
            segment_bytes=segment_bytes,
            now_ms=0,
        )
        if not self.fs.exists(
            f"{self.replica.log.dir}/quorum-state"
        ):  # every voter has this file before its first append
            self.replica.persist(self.replica.election)
        self.config = RaftConfig(1 if is_voter else 9, (1, 2, 3), "c")
        self.machine = self.replica.machine(self.config)
        self.high_watermark = max(0, self.machine.high_watermark)
        self.corrupt_snapshots = 0
        self.posted: list[SnapshotChanged] = []
        self.published: list[tuple[int, MetadataImage, MetadataDelta]] = []
        """(offset of the image at the publish, image, delta)."""
        self.failures: list[BaseException] = []
        self.idle_calls = 0
        self.registry = CollectorRegistry()
        self.metrics = QuorumMetrics(self.registry)
        self.loader = MetadataLoader(
            cast("QuorumDriver", self),
            self.publish,
            self.metrics,
            self.failures.append,
            snapshots=snapshots,
            retention=retention or RetentionLimits(),
            idle=self.idle,
            clean_interval_s=clean_interval_s,
        )

    async def publish(self, image: MetadataImage, delta: MetadataDelta) -> None:
        self.published.append((image.offset, image, delta))

    async def idle(self) -> None:
        self.idle_calls += 1

    def post(self, event: SnapshotChanged) -> None:
        self.posted.append(event)
        self.machine.latest_snapshot, self.machine.earliest_snapshot = event.latest, event.earliest or event.latest

    def lead(self, epoch: int = 1) -> Leadership:
        """Make the state machine leader of an epoch."""
        self.machine.state = State.LEADER
        self.machine.election = ElectionState(epoch, self.config.node_id)
        self.machine.leadership = Leadership(self.config, self.replica.log.log_end_offset, (1, 2), monotonic_ms())
        return self.machine.leadership

    # -- the log

    @property
    def end(self) -> int:
        return self.replica.log.log_end_offset

    def batch(self, records: Sequence[r.Record], epoch: int = 1) -> bytes:
        """Build a batch at the end of the log."""
        return record_batch.build(
            [(None, r.encode_record(record)) for record in records],
            base_offset=self.end,
            leader_epoch=epoch,
            timestamp_ms=wall_ms(),
        )

    def append(self, records: Sequence[r.Record], epoch: int = 1) -> bytes:
        batch = self.batch(records, epoch)
        self.replica.change_log(AppendAsFollower(batch), wall_ms())
        return batch

    def append_and_apply(self, records: Sequence[r.Record], epoch: int = 1) -> MetadataDelta:
        """Append a batch and apply it immediately, as the active controller does."""
        return apply_own(self.loader, self.append(records, epoch))

    def commit(self, high_watermark: int | None = None) -> None:
        self.high_watermark = self.end if high_watermark is None else high_watermark
        self.loader.committed(self.high_watermark)

    def truncate(self, offset: int) -> None:
        self.replica.change_log(TruncateLog(offset), wall_ms())
        self.loader.truncated(self.end)

    def install(self, image: MetadataImage) -> SnapshotId:
        """Install a snapshot of the leader in place of the log."""
        snapshot_id = write_snapshot(self.replica, image)
        event = self.replica.install(snapshot_id)
        self.loader.snapshot_installed(snapshot_id)
        self.post(event)
        self.commit(max(self.high_watermark, snapshot_id.end_offset))
        return snapshot_id

    async def applied(self) -> None:
        """Wait until all committed records are applied and published."""
        await until(lambda: self.failures or self.loader.applied_end >= min(self.high_watermark, self.end))
        await until(lambda: self.failures or (self.published and self.published[-1][1] is self.loader.image))

    def close(self) -> None:
        self.manager.close(-1)


@asynccontextmanager
async def running(member: Member) -> AsyncIterator[Member]:
    member.loader.start()
    try:
        yield member
    finally:
        await member.loader.stop()
        member.close()


def image_of(*batches: Sequence[r.Record], epoch: int = 1, offset: int = 0) -> MetadataImage:
    """Return the image of these records, the first of which is at `offset`."""
    image, delta = MetadataImage(offset - 1, epoch), MetadataDelta()
    for records in batches:
        for record in records:
            image.offset += 1
            image.apply(record, delta)
    image.epoch, image.timestamp_ms = epoch, 1
    return image


def write_snapshot(replica: QuorumReplica, image: MetadataImage) -> SnapshotId:
    captured = image.capture()
    writer = replica.store.create(captured.snapshot_id, last_contained_log_timestamp=1, now_ms=1)
    for _ in writer.write(image_values(captured)):
        pass
    writer.freeze()
    return captured.snapshot_id


def sample(registry: CollectorRegistry, name: str, **labels: Any) -> float | None:
    return registry.get_sample_value(name, {key: str(value) for key, value in labels.items()})
