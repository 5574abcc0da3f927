"""MetadataPublisher applies images from snapshots: logs, roles, and replicas to delete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kipmesh.broker.membership.publisher import MetadataPublisher
from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import DirtyReplicas, Disk
from kipmesh.broker.replication.replica_manager import ReplicaManager
from kipmesh.core.config import BrokerConfig
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage, difference
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.log_manager import LogManager
from kipmesh.transport.grpc.client import ConnectionPool
from tests.unit.broker.broker_images import ImageBuilder, topic_id_of

BROKER_ID = 1
A, B, C = (topic_id_of(number) for number in (1, 2, 3))


class Broker:
    """Logs, replicas and publisher of broker 1, without a network."""

    def __init__(self, directory: Path) -> None:
        config = BrokerConfig.parse(
            {
                "node.id": BROKER_ID,
                "cluster.id": "c",
                "controller.quorum.voters": "100@127.0.0.1:1",
                "log.dirs": str(directory),
                "replica.fetch.backoff.ms": 10_000,
            }
        )
        self.directory = directory
        self.pool = ConnectionPool("tests")
        self.disk = Disk("tests")
        self.hosted_replicas = HostedReplicas(MetadataImage())
        self.logs = LogManager(
            RealFileSystem(), (str(directory),), cluster_id="c", node_id=BROKER_ID, defaults=config.topic_defaults()
        )
        self.logs.load(0)
        log_dirs: Any = None  # no directory fails
        self.replicas = ReplicaManager(
            config=config,
            hosted_replicas=self.hosted_replicas,
            dirty_replicas=DirtyReplicas(),
            log_manager=self.logs,
            disk=self.disk,
            pool=self.pool,
            metrics=BrokerMetrics(CollectorRegistry()),
            now_ms=lambda: 0,
            monotonic_ms=lambda: 0,
            broker_epoch=lambda: 0,
            on_task_done=lambda task: None,
            log_dirs=log_dirs,
        )
        self.published = 0
        self.publisher = MetadataPublisher(BROKER_ID, self.replicas, self._published)

    async def _published(self) -> None:
        self.published += 1

    async def stop(self) -> None:
        await self.replicas.stop(is_clean=False)
        self.disk.close()
        self.logs.abandon()
        await self.pool.close()

    async def replace(self, image: MetadataImage) -> None:
        """Publish an image as the loader does after a snapshot."""
        await self.publisher.publish(image, difference(self.hosted_replicas.image, image))

    def hosted(self) -> dict[tuple[bytes, int], tuple[bool, int]]:
        """Return (is_leader, leader_epoch) of each hosted partition."""
        return {
            (replica.topic_id, replica.partition): (replica.leader is not None, replica.leader_epoch)
            for replica in self.hosted_replicas
        }

    def directories(self, suffix: str = "") -> set[str]:
        return {path.name.partition(".")[0] for path in self.directory.iterdir() if path.name.endswith(suffix)}


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    running = Broker(tmp_path)
    yield running
    await running.stop()


def first_image() -> ImageBuilder:
    builder = ImageBuilder(1, 2, 3)
    builder.topic("a", A, [(1, 2), (2, 1), (2, 3)], {"segment.bytes": "1000"})
    builder.topic("b", B, [(1, 2)])
    return builder


async def test_publisher_withholds_images_without_registration_of_broker(broker: Broker) -> None:
    builder = first_image()
    early = asyncio.create_task(broker.publisher.publish(builder.image, builder.delta))
    await asyncio.sleep(0)
    broker.publisher.registered(builder.image.offset + 1)
    await early
    assert not broker.publisher.has_published
    assert broker.hosted() == {}
    builder.broker(1)
    await broker.publisher.publish(builder.image, MetadataDelta(changed_brokers={1}))
    assert broker.publisher.published_offset == builder.image.offset
    assert broker.hosted() == {(A, 0): (True, 0), (A, 1): (False, 0), (B, 0): (True, 0)}, (
        "the withheld image is applied"
    )


async def test_publisher_accepts_registration_from_snapshot(broker: Broker) -> None:
    """The image ends after the registration, and the delta does not have it."""
    builder = first_image()
    epoch = builder.broker(1)
    builder.topic("c", C, [(3, 1)])
    broker.publisher.registered(epoch)
    await broker.publisher.publish(builder.image, MetadataDelta())
    assert broker.hosted().keys() == {(A, 0), (A, 1), (B, 0), (C, 0)}
    assert broker.published == 1


async def test_first_publish_renames_logs_missing_from_image_to_stray(broker: Broker) -> None:
    config = broker.replicas._defaults
    for name, topic_id in (("a", A), ("b", C), ("gone", topic_id_of(9))):  # the image has `b` with a different id
        broker.logs.create(name, 0, topic_id, config, 0)
    broker.publisher.registered(0)
    await broker.publisher.publish(first_image().image, MetadataDelta())
    assert broker.directories("-stray") == {"b-0", "gone-0"}
    assert broker.hosted()[B, 0] == (True, 0)
    assert broker.logs.get("b", 0).topic_id == B  # type: ignore[union-attr]


async def test_publisher_applies_accumulated_changes_of_snapshot(broker: Broker) -> None:
    """Topics were deleted, recreated, reassigned and reconfigured between two snapshots."""
    broker.publisher.registered(0)
    await broker.publisher.publish(first_image().image, MetadataDelta())
    kept = broker.hosted_replicas.get(A, 1)
    after = ImageBuilder(1, 2, 3)
    # Partition 0 moved away, partition 2 moved here.
    after.topic("a", A, [(2, 3), (2, 1), (1, 3)], {"segment.bytes": "2000"})
    after.topic("b", C, [(3, 1)])  # deleted and recreated
    after.image.offset = 100
    await broker.replace(after.image)
    assert broker.hosted_replicas.image is after.image
    assert broker.hosted() == {(A, 1): (False, 0), (A, 2): (True, 0), (C, 0): (False, 0)}
    assert broker.hosted_replicas.get(A, 1) is kept
    assert kept is not None
    assert kept.log.config.segment_bytes == 2000
    assert broker.directories("-delete") == {"a-0", "b-0"}
    assert broker.directories("-stray") == set()
    assert broker.logs.get("b", 0).topic_id == C  # type: ignore[union-attr]


async def test_publisher_applies_leader_changes_of_snapshot(broker: Broker) -> None:
    broker.publisher.registered(0)
    builder = ImageBuilder(1, 2)
    builder.topic("a", A, [(1, 2), (2, 1)])
    await broker.publisher.publish(builder.image, MetadataDelta())
    after = ImageBuilder(1, 2)
    after.topic("a", A, [(1, 2), (2, 1)])
    after.partition(A, 0, (2, 1), epoch=5)
    after.partition(A, 1, (1, 2), epoch=7)
    after.image.offset = 100
    await broker.replace(after.image)
    assert broker.hosted() == {(A, 0): (False, 5), (A, 1): (True, 7)}


async def test_fetcher_uses_new_address_of_leader_after_snapshot(broker: Broker) -> None:
    broker.publisher.registered(0)
    builder = ImageBuilder(1, 2)
    builder.topic("a", A, [(2, 1)])
    await broker.publisher.publish(builder.image, MetadataDelta())
    after = ImageBuilder(1)
    after.broker(2, port=2)
    after.topic("a", A, [(2, 1)])
    after.image.offset = 100
    await broker.replace(after.image)
    (fetcher,) = broker.replicas._fetchers.values()
    assert fetcher.address == "127.0.0.1:2"


async def test_publisher_yields_to_other_tasks_during_large_image(broker: Broker) -> None:
    """Partitions without a local replica cause no work, and other tasks run during the publish."""
    broker.publisher.registered(0)
    builder = ImageBuilder(1, 2, 3)
    builder.topic("mine", A, [(2, 1)] * 300)
    builder.topic("others", B, [(2, 3)] * 3000)
    runs = 0

    async def count() -> None:
        nonlocal runs
        while True:
            await asyncio.sleep(0)
            runs += 1

    other = asyncio.create_task(count())
    await broker.replace(builder.image)
    other.cancel()
    assert len(broker.hosted()) == 300
    assert runs > 1


async def test_wait_until_returns_when_metadata_is_published(broker: Broker) -> None:
    broker.publisher.registered(0)
    waiting = asyncio.create_task(
        broker.publisher.wait_until(lambda: broker.hosted_replicas.image.topic_by_name("a") is not None, 20)
    )
    await asyncio.sleep(0)
    await broker.publisher.publish(first_image().image, MetadataDelta())
    assert await waiting
    assert not await broker.publisher.wait_until(lambda: False, 0.01)
