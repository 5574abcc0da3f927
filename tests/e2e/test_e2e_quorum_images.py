"""All nodes store the same metadata after random faults of controllers and brokers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from bench.quorum_cluster import QuorumCluster, QuorumNode
from kipmesh.client import AdminClient
from kipmesh.client.types import ConfigAlteration, ConfigResource, NewTopic
from kipmesh.core import record_batch
from kipmesh.core.config.base import ResourceType
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.metadata.image_writer import image_records
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.quorum.snapshot_file import ImageLoader
from kipmesh.storage.quorum.snapshots import SnapshotStore
from tests.e2e.quorum_of_tests import CLEANED_AT_ONCE, segments

pytestmark = pytest.mark.slow

FAULTS = 5
KEY = "retention.ms"


class Changes:
    """A client that creates, deletes and configures its topics and remembers the acknowledged state."""

    def __init__(self, number: int, brokers: list[str]) -> None:
        self._prefix = f"topic-{number}"
        self._bootstrap = ",".join(brokers[number:] + brokers[:number])
        self._rng = Random(number)
        self.existing: dict[str, str | None] = {}
        """Name -> configured value; None if it is unknown."""
        self.deleted: set[str] = set()
        self.is_ended = False

    async def run(self) -> None:
        async with AdminClient(self._bootstrap) as admin:
            count = 0
            while not self.is_ended:
                count += 1
                await self._change(admin, count)
                await asyncio.sleep(0.02)

    async def _change(self, admin: AdminClient, count: int) -> None:
        choice = self._rng.random()
        name = self._rng.choice(list(self.existing)) if self.existing else ""
        if choice < 0.5 or not name:
            await self._create(admin, f"{self._prefix}-{count}")
        elif choice < 0.7:
            del self.existing[name]
            try:
                await admin.delete_topics([name], wait=False)
                self.deleted.add(name)
            except KafkaError as error:  # the response was lost, and the retry found the topic deleted
                if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    raise
        else:
            self.existing[name] = None
            value = str(1_000_000 + count)
            await admin.alter_configs({ConfigResource(ResourceType.TOPIC, name): [ConfigAlteration(KEY, value)]})
            self.existing[name] = value

    async def _create(self, admin: AdminClient, name: str) -> None:
        try:
            await admin.create_topics([NewTopic(name, self._rng.randint(1, 4), 1)], wait=False)
        except KafkaError as error:
            if error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                raise
        self.existing[name] = None

    def check(self, image: MetadataImage) -> None:
        """Assert that the image has every acknowledged change."""
        assert not [name for name in self.existing if image.topic_by_name(name) is None]
        assert not [name for name in self.deleted if image.topic_by_name(name) is not None]
        configured = {name: value for name, value in self.existing.items() if value is not None}
        assert configured == {name: image.topic_config(name).get(KEY) for name in configured}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[QuorumCluster]:
    with QuorumCluster(tmp_path, controllers=3, brokers=2, config=CLEANED_AT_ONCE) as running:
        yield running


def fail_at_random(cluster: QuorumCluster, rng: Random) -> None:
    """Kill, stop or pause one random node at a time; controllers more often than brokers."""
    for _ in range(FAULTS):
        time.sleep(rng.uniform(0.2, 1.0))
        name = rng.choice([*cluster.controllers, *cluster.controllers, *cluster.brokers]).name
        if rng.random() < 0.4:
            cluster.pause(name)
            time.sleep(rng.uniform(0.2, 2.0))
            cluster.resume(name)
        else:
            rng.choice([cluster.kill, cluster.stop])(name)
            time.sleep(rng.uniform(0.0, 1.0))
            cluster.start(name)


def image_on_disk(node: QuorumNode, end: int) -> MetadataImage:
    """Load the newest snapshot of the node and replay its log up to offset `end`."""
    store = SnapshotStore(RealFileSystem(), str(node.metadata))
    loader = ImageLoader(store.open(newest := store.snapshot_ids()[-1]), newest)
    for _ in loader.steps():
        pass
    image = loader.image
    for segment in segments(node):
        data = segment.read_bytes()
        for position, header in record_batch.iterate(data, allow_partial=True):
            if header.next_offset <= end:
                image.replay(data[position : position + header.size_bytes], MetadataDelta())
    assert image.offset + 1 == end, node.name
    return image


def test_all_nodes_store_the_same_metadata_after_random_faults(cluster: QuorumCluster) -> None:
    clients = [Changes(number, [broker.grpc for broker in cluster.brokers]) for number in range(2)]

    async def start() -> list[asyncio.Task[None]]:
        return [asyncio.create_task(client.run()) for client in clients]

    async def finish() -> None:
        for client in clients:
            client.is_ended = True
        await asyncio.gather(*running)

    running = cluster.run(start())
    fail_at_random(cluster, Random(1))
    cluster.run(finish())
    end = cluster.wait_caught_up().high_watermark
    for name in cluster.nodes:
        cluster.kill(name)
    images = {node.name: image_on_disk(node, end) for node in cluster.nodes.values()}
    records = {name: sorted(map(repr, image_records(image.capture()))) for name, image in images.items()}
    first = records["controller-1"]
    assert all(other == first for other in records.values()), {name: len(lines) for name, lines in records.items()}
    for client in clients:
        assert client.existing
        client.check(images["controller-1"])
