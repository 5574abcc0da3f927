"""Controllers and brokers fail at random while metadata changes: what each node has on its disk is the same state."""

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
    """One client that creates, deletes and configures topics of its own; what it was told is what must be."""

    def __init__(self, number: int, brokers: list[str]) -> None:
        self._prefix = f"topic-{number}"
        self._bootstrap = ",".join(brokers[number:] + brokers[:number])
        self._rng = Random(number)
        self.there: dict[str, str | None] = {}
        """Name -> what was configured; None where nothing is known of that."""
        self.gone: set[str] = set()
        self.ends = False

    async def run(self) -> None:
        async with AdminClient(self._bootstrap) as admin:
            count = 0
            while not self.ends:
                count += 1
                await self._one(admin, count)
                await asyncio.sleep(0.02)

    async def _one(self, admin: AdminClient, count: int) -> None:
        what = self._rng.random()
        name = self._rng.choice(list(self.there)) if self.there else ""
        if what < 0.5 or not name:
            await self._create(admin, f"{self._prefix}-{count}")
        elif what < 0.7:
            del self.there[name]
            try:
                await admin.delete_topics([name], wait=False)
                self.gone.add(name)
            except KafkaError as error:  # its answer was lost, and it was done before it was repeated
                if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    raise
        else:
            self.there[name] = None
            value = str(1_000_000 + count)
            await admin.alter_configs({ConfigResource(ResourceType.TOPIC, name): [ConfigAlteration(KEY, value)]})
            self.there[name] = value

    async def _create(self, admin: AdminClient, name: str) -> None:
        try:
            await admin.create_topics([NewTopic(name, self._rng.randint(1, 4), 1)], wait=False)
        except KafkaError as error:
            if error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                raise
        self.there[name] = None

    def check(self, image: MetadataImage) -> None:
        """Nothing that was acknowledged is lost."""
        assert not [name for name in self.there if image.topic_by_name(name) is None]
        assert not [name for name in self.gone if image.topic_by_name(name) is not None]
        told = {name: value for name, value in self.there.items() if value is not None}
        assert told == {name: image.topic_config(name).get(KEY) for name in told}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[QuorumCluster]:
    with QuorumCluster(tmp_path, controllers=3, brokers=2, config=CLEANED_AT_ONCE) as it:
        yield it


def fail_at_random(mesh: QuorumCluster, rng: Random) -> None:
    """A node at a time is killed, stopped or held for a while, controllers more often."""
    for _ in range(FAULTS):
        time.sleep(rng.uniform(0.2, 1.0))
        name = rng.choice([*mesh.controllers, *mesh.controllers, *mesh.brokers]).name
        if rng.random() < 0.4:
            mesh.pause(name)
            time.sleep(rng.uniform(0.2, 2.0))
            mesh.resume(name)
        else:
            rng.choice([mesh.kill, mesh.stop])(name)
            time.sleep(rng.uniform(0.0, 1.0))
            mesh.start(name)


def image_on_disk(node: QuorumNode, end: int) -> MetadataImage:
    """By its newest snapshot and the log after it, up to an offset."""
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


def test_all_disks_have_one_state_after_many_faults(mesh: QuorumCluster) -> None:
    clients = [Changes(number, [broker.grpc for broker in mesh.brokers]) for number in range(2)]

    async def begin() -> list[asyncio.Task[None]]:
        return [asyncio.create_task(client.run()) for client in clients]

    async def finish() -> None:
        for client in clients:
            client.ends = True
        await asyncio.gather(*running)

    running = mesh.run(begin())
    fail_at_random(mesh, Random(1))
    mesh.run(finish())
    end = mesh.wait_caught_up().high_watermark
    for name in mesh.nodes:
        mesh.kill(name)
    images = {node.name: image_on_disk(node, end) for node in mesh.nodes.values()}
    records = {name: sorted(map(repr, image_records(image.capture()))) for name, image in images.items()}
    first = records["controller-1"]
    assert all(other == first for other in records.values()), {name: len(each) for name, each in records.items()}
    for client in clients:
        assert client.there
        client.check(images["controller-1"])
