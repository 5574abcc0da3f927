"""Any order of appends, commits, cuts, snapshots and own decisions: the image and what was published are the log's."""

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
    """What all replicas agree on, and what this one has beyond it; as batches from the first offset on."""

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

    def cut(self, offset: int) -> None:
        kept = [batch for batch in self.batches if record_batch.parse_header(batch).next_offset <= offset]
        self.batches, self.tip = [], MetadataImage()
        for batch in kept:
            self.add(batch)

    def ends(self, above: int) -> list[int]:
        ends = [record_batch.parse_header(batch).next_offset for batch in self.batches]
        return [end for end in ends if end >= above]

    def records(self) -> list[r.Record]:
        """A decision that is possible now."""
        rng, tip = self.rng, self.tip
        if not tip.brokers:
            return BROKERS
        what = rng.random()
        if what < 0.3 or not tip.topics:
            self._topics += 2
            made = topic(self._topics, rng.randint(1, 8), leader=rng.choice([1, 2, 3]))
            return made if rng.random() < 0.5 else [*made, *topic(self._topics - 1)]
        if what < 0.7:
            broker = tip.brokers[rng.choice([1, 2, 3])]
            fenced = -1 if broker.fenced else 1
            return [r.BrokerRegistrationChangeRecord(broker.broker_id, broker.broker_epoch, fenced=fenced)]
        chosen = rng.choice(list(tip.topics.values()))
        if what < 0.85:
            state = chosen.partitions[0]
            able = [member for member in state.isr if not tip.brokers[member].fenced]
            leader = rng.choice(able) if able else r.NO_LEADER
            return [change_of(chosen.topic_id, leader)]
        return [r.RemoveTopicRecord(chosen.topic_id)]


def change_of(of: bytes, leader: int) -> r.Record:
    (record,) = change(int.from_bytes(of, "big"), leader)
    assert isinstance(record, r.PartitionChangeRecord)
    assert record.topic_id == topic_id(int.from_bytes(of, "big"))
    return record


class Life:
    """One replica, leader now and then."""

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
        self.see(image, delta)
        await asyncio.sleep(0)

    def see(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """What a reader knows who only looks at what is told to have changed."""
        for gone in delta.deleted_topics:
            for key in [key for key in self.view if key[0] == gone.topic_id]:
                del self.view[key]
        for key in delta.changed_partitions:
            state = image.partition(*key)
            if state is not None:
                self.view[key] = state

    def step_own(self) -> None:
        """What an owner does between others' work."""
        if self.steps is None:
            return
        image = self.member.loader.image
        try:
            next(self.steps)
        except StopIteration as end:
            self.steps = None
            self.see(image, end.value)

    def act(self) -> None:
        """Something happens."""
        member, rng = self.member, self.rng
        match rng.choice(["append", "append", "commit", "commit", "own", "own", "cut", "install", "follow"]):
            case "append" if not self.leads:
                self.history.add(member.append(self.history.records(), self.epoch))
            case "commit":
                member.commit(rng.choice(self.history.ends(member.high_watermark) or [member.high_watermark]))
            case "own" if self.leads and self.steps is None and self.is_current:
                batch = member.append(self.history.records(), self.epoch)
                self.history.add(batch)
                self.steps = member.loader.apply_own_steps(batch)
                self.step_own()
            case "cut":
                self.depose()
                where = rng.choice(self.history.ends(member.high_watermark) or [member.high_watermark])
                self.history.cut(where)
                member.cut(where)
            case "install" if rng.random() < 0.3:
                self.depose()
                self.install()
            case "follow":
                self.depose()

    @property
    def leads(self) -> bool:
        """By its own word: after an election there is nothing that it does not know to be committed."""
        return self.epoch % 2 == 0

    @property
    def is_current(self) -> bool:
        return self.member.loader.is_loaded and self.member.loader.applied_end == self.member.end

    def depose(self) -> None:
        """Another epoch; the odd ones are others'."""
        self.epoch += 1

    def install(self) -> None:
        """Others went on, from what is committed, and their log begins later."""
        self.history.cut(self.member.high_watermark)
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
                await asyncio.sleep(0.005)  # for threads
            assert not self.member.failures, self.member.failures
        while self.steps is not None:
            self.step_own()
        self.member.commit(self.history.end)


async def live(seed: int) -> None:
    """AssertionError when something is not as the log says."""
    life = Life(seed)
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
            (each.topic_id, number): state for each in tip.topics.values() for number, state in each.partitions.items()
        }
        with suppress(TimeoutError):
            await until(lambda: life.view == wanted)  # it is published
        assert life.view == wanted
        latest = member.replica.latest_snapshot
        assert latest is None or latest.end_offset <= member.high_watermark


@pytest.mark.parametrize("seed", range(12))
async def test_the_image_and_what_was_told_of_it_are_the_logs(seed: int) -> None:
    await live(seed)
