"""Random appends, commits, truncations, snapshots and decisions: the image and its deltas always match the log."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Generator, Iterator
from contextlib import suppress
from random import Random

import pytest

from kipmesh.core import record_batch
from kipmesh.core.metadata import image as images
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.fencing import FENCING_FEATURE
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage, PartitionKey, PartitionState
from kipmesh.core.metadata.image_writer import image_records
from kipmesh.core.snapshot.retention import RetentionLimits
from kipmesh.core.snapshot.schedule import SnapshotLimits
from kipmesh.node.quorum import loader as loaders
from kipmesh.node.quorum import pacing
from tests.unit.node.quorum.loader_support import Member, change, running, topic, topic_id, until

STEPS = 120
BROKERS: list[r.Record] = [
    r.FeatureLevelRecord(FENCING_FEATURE, 1),
    *[r.RegisterBrokerRecord(broker_id, broker_epoch=broker_id, fenced=False) for broker_id in (1, 2, 3)],
]


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(images, "STEP_PARTITIONS", 2)
    monkeypatch.setattr(images, "STEP_RECORDS", 2)
    monkeypatch.setattr(pacing, "SLICE_S", 0.0)
    monkeypatch.setattr(loaders, "APPLY_BYTES", 300)
    yield
    gc.unfreeze()


class History:
    """The expected log of the replica: all batches from offset 0."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.batches: list[bytes] = []
        self.tip = MetadataImage()
        self._topics = 0

    @property
    def end(self) -> int:
        return self.tip.offset + 1

    def add(self, batch: bytes) -> None:
        self.tip.replay(batch, MetadataDelta())
        self.batches.append(batch)

    def truncate(self, offset: int) -> None:
        kept = [batch for batch in self.batches if record_batch.parse_header(batch).next_offset <= offset]
        self.batches, self.tip = [], MetadataImage()
        for batch in kept:
            self.add(batch)

    def ends(self, above: int) -> list[int]:
        ends = [record_batch.parse_header(batch).next_offset for batch in self.batches]
        return [end for end in ends if end >= above]

    def records(self) -> list[r.Record]:
        """Return the records of a random decision that is possible now."""
        rng, tip = self.rng, self.tip
        if not tip.brokers:
            return BROKERS
        choice = rng.random()
        if choice < 0.3 or not tip.topics:
            self._topics += 2
            created = topic(self._topics, rng.randint(1, 8), leader=rng.choice([1, 2, 3]))
            return created if rng.random() < 0.5 else [*created, *topic(self._topics - 1)]
        if choice < 0.7:
            broker = tip.brokers[rng.choice([1, 2, 3])]
            fenced = -1 if broker.fenced else 1
            return [r.BrokerRegistrationChangeRecord(broker.broker_id, broker.broker_epoch, fenced=fenced)]
        chosen = rng.choice(list(tip.topics.values()))
        if choice < 0.85:
            state = chosen.partitions[0]
            eligible = [member for member in state.isr if not tip.brokers[member].fenced]
            leader = rng.choice(eligible) if eligible else r.NO_LEADER
            return [change_of(chosen.topic_id, leader)]
        return [r.RemoveTopicRecord(chosen.topic_id)]


def change_of(of: bytes, leader: int) -> r.Record:
    (record,) = change(int.from_bytes(of, "big"), leader)
    assert isinstance(record, r.PartitionChangeRecord)
    assert record.topic_id == topic_id(int.from_bytes(of, "big"))
    return record


class ReplicaLife:
    """One replica that is sometimes the leader."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.history = History(self.rng)
        self.member = Member(
            snapshots=SnapshotLimits(0.0, 600, 0), retention=RetentionLimits(bytes_max=1), clean_interval_s=0.01
        )
        self.member.loader.publish = self.publish
        self.epoch = 1
        self.steps: Generator[None, None, MetadataDelta] | None = None
        self.view: dict[PartitionKey, PartitionState] = {}

    async def publish(self, image: MetadataImage, delta: MetadataDelta) -> None:
        assert not image.is_within_batch
        self.apply_delta(image, delta)
        await asyncio.sleep(0)

    def apply_delta(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """Update the view of a reader that only reads what a delta names."""
        for deleted in delta.deleted_topics:
            for key in [key for key in self.view if key[0] == deleted.topic_id]:
                del self.view[key]
        for key in delta.changed_partitions:
            state = image.partition(*key)
            if state is not None:
                self.view[key] = state

    def step_own(self) -> None:
        """Run the next step of an own batch."""
        if self.steps is None:
            return
        image = self.member.loader.image
        try:
            next(self.steps)
        except StopIteration as end:
            self.steps = None
            self.apply_delta(image, end.value)

    def act(self) -> None:
        """Do one random action."""
        member, rng = self.member, self.rng
        match rng.choice(["append", "append", "commit", "commit", "own", "own", "truncate", "install", "follow"]):
            case "append" if not self.leads:
                self.history.add(member.append(self.history.records(), self.epoch))
            case "commit":
                member.commit(rng.choice(self.history.ends(member.high_watermark) or [member.high_watermark]))
            case "own" if self.leads and self.steps is None and self.is_current:
                batch = member.append(self.history.records(), self.epoch)
                self.history.add(batch)
                self.steps = member.loader.apply_own_steps(batch)
                self.step_own()
            case "truncate":
                self.depose()
                offset = rng.choice(self.history.ends(member.high_watermark) or [member.high_watermark])
                self.history.truncate(offset)
                member.truncate(offset)
            case "install" if rng.random() < 0.3:
                self.depose()
                self.install()
            case "follow":
                self.depose()

    @property
    def leads(self) -> bool:
        """Whether the replica leads the current epoch."""
        return self.epoch % 2 == 0

    @property
    def is_current(self) -> bool:
        return self.member.loader.is_loaded and self.member.loader.applied_end == self.member.end

    def depose(self) -> None:
        """Start a new epoch. Other replicas lead the odd epochs."""
        self.epoch += 1

    def install(self) -> None:
        """Install a snapshot of a log that continued from the committed offset on other replicas."""
        self.history.truncate(self.member.high_watermark)
        for _ in range(self.rng.randint(1, 5)):
            self.history.add(
                record_batch.build(
                    [(None, r.encode_record(record)) for record in self.history.records()],
                    base_offset=self.history.end,
                    leader_epoch=self.epoch,
                    timestamp_ms=1,
                )
            )
        self.member.install(self.history.tip)

    async def live(self) -> None:
        for _ in range(STEPS):
            self.act()
            for _ in range(self.rng.choice([0, 0, 1, 3, 10, 40])):
                self.step_own()
                await asyncio.sleep(0)
            if self.rng.random() < 0.1:
                await asyncio.sleep(0.005)  # time for threads
            assert not self.member.failures, self.member.failures
        while self.steps is not None:
            self.step_own()
        self.member.commit(self.history.end)


async def live(seed: int) -> None:
    """Run the actions of a seed and compare the image, the view and the snapshot with the log."""
    life = ReplicaLife(seed)
    member = life.member
    async with running(member):
        async with asyncio.timeout(60):
            await life.live()
            while member.loader.applied_end != life.history.end:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        image, tip = member.loader.image, life.history.tip
        assert not member.failures
        assert sorted(map(repr, image_records(image.capture()))) == sorted(map(repr, image_records(tip.capture())))
        wanted = {
            (topic.topic_id, number): state
            for topic in tip.topics.values()
            for number, state in topic.partitions.items()
        }
        with suppress(TimeoutError):
            await until(lambda: life.view == wanted)  # the last delta is published
        assert life.view == wanted
        latest = member.replica.latest_snapshot
        assert latest is None or latest.end_offset <= member.high_watermark


@pytest.mark.parametrize("seed", range(12))
async def test_image_and_published_deltas_match_log(seed: int) -> None:
    await live(seed)
