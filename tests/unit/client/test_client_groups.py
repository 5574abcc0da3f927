"""Consumer groups against real brokers: members share topics and resume at committed offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from kipmesh.client import Consumer, ConsumerRecord, Producer, RebalanceListener, TopicPartition, sync
from kipmesh.client.admin.admin import AdminClient
from kipmesh.client.types import NewTopic
from kipmesh.cluster import LocalCluster
from kipmesh.core.errors import ErrorCode, KafkaError

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one event loop besides the cluster's
PARTITIONS = 6
QUICK = {"heartbeat_interval_ms": 50, "session_timeout_ms": 120_000, "auto_offset_reset": "earliest"}


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    config = {"group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "2"}
    with LocalCluster(mode="single", config=config) as cluster:
        yield cluster.bootstrap


class Listener(RebalanceListener):
    """Records its callbacks."""

    def __init__(self) -> None:
        self.callbacks: list[tuple[str, list[TopicPartition]]] = []

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self.callbacks.append(("assigned", partitions))

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self.callbacks.append(("revoked", partitions))

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self.callbacks.append(("lost", partitions))


async def topic_of(bootstrap: str, name: str, partitions: int = PARTITIONS) -> str:
    async with AdminClient(bootstrap) as admin:
        await admin.create_topics([NewTopic(name, partitions, 1)])
    return name


async def produce(bootstrap: str, topic: str, count: int, first: int = 0) -> None:
    async with Producer(bootstrap) as producer:
        for number in range(first, first + count):
            await producer.send(topic, str(number).encode(), partition=number % PARTITIONS)
        await producer.flush()


def member(bootstrap: str, group: str, **config: object) -> Consumer:
    return Consumer(bootstrap, group_id=group, **{**QUICK, **config})


async def until(members: list[Consumer], condition: Callable[[], bool]) -> list[ConsumerRecord]:
    """Poll all members until the condition holds. Return the records."""
    records = []
    async with asyncio.timeout(60):
        while not condition():
            for polled in await asyncio.gather(*[consumer.poll(20) for consumer in members]):
                records += polled
    return records


def loads(members: list[Consumer]) -> list[int]:
    return sorted(len(consumer.assignment()) for consumer in members)


async def test_new_consumer_resumes_at_committed_offsets(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "resumes")
    await produce(bootstrap, topic, 60)
    async with member(bootstrap, "resumes") as first:
        first.subscribe([topic])
        records: list[ConsumerRecord] = []
        while len(records) < 60:
            records += await first.poll(1000)
    await produce(bootstrap, topic, 12, first=60)
    async with member(bootstrap, "resumes") as second:
        second.subscribe([topic])
        records = []
        while len(records) < 12:
            records += await second.poll(1000)
    assert sorted(int(record.value or b"") for record in records) == list(range(60, 72))


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "cooperative-sticky", "cooperative-sticky,range"])
async def test_members_share_partitions_and_take_over_after_leave(bootstrap: str, strategy: str) -> None:
    name = f"share-{strategy.replace(',', '-')}"
    topic = await topic_of(bootstrap, name)
    config = {"partition_assignment_strategy": strategy}
    first, second = (member(bootstrap, name, **config) for _ in range(2))
    listener = Listener()
    async with first:
        first.subscribe([topic], listener)
        await until([first], lambda: loads([first]) == [6])
        await second.start()
        second.subscribe([topic])
        await until([first, second], lambda: loads([first, second]) == [3, 3])
        assert not set(first.assignment()) & set(second.assignment())
        await second.close()
        await until([first], lambda: loads([first]) == [6])
        await produce(bootstrap, topic, 12)
        records: list[ConsumerRecord] = []
        while len(records) < 12:
            records += await first.poll(1000)
    revoked = next(partitions for kind, partitions in listener.callbacks if kind == "revoked")
    assert len(revoked) == (3 if strategy == "cooperative-sticky" else 6)
    assert "lost" not in {kind for kind, _ in listener.callbacks}


async def test_manual_commits_are_stored_and_checked(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "by-hand")
    tp = TopicPartition(topic, 1)
    await produce(bootstrap, topic, 7 * PARTITIONS)  # offset 7 is the end, so neither records nor resets move it
    async with member(bootstrap, "by-hand", enable_auto_commit=False) as consumer:
        assert await consumer.committed([tp]) == {}
        consumer.assign([tp])
        await consumer.commit({tp: 7})
        assert await consumer.committed([tp, (topic, 2)]) == {tp: 7}
        with pytest.raises(KafkaError) as caught:
            await consumer.commit({TopicPartition("nowhere", 0): 1})
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        consumer.subscribe([topic])
        with pytest.raises(KafkaError) as caught:
            await consumer.commit({tp: 8})
        assert caught.value.code is ErrorCode.UNKNOWN_MEMBER_ID
        with pytest.raises(ValueError, match="group"):
            consumer.assign([tp])
        await until([consumer], lambda: loads([consumer]) == [6])
        assert await consumer.position(tp) == 7
        await consumer.commit({tp: 8})
        outsider = member(bootstrap, "by-hand")
        async with outsider:
            with pytest.raises(KafkaError) as caught:
                await outsider.commit({tp: 9})
            assert caught.value.code is ErrorCode.UNKNOWN_MEMBER_ID
        assert await consumer.committed([tp]) == {tp: 8}


async def test_member_that_exceeds_max_poll_interval_leaves(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "silent")
    silent, other = member(bootstrap, "silent", max_poll_interval_ms=500), member(bootstrap, "silent")
    listener = Listener()
    async with silent, other:
        silent.subscribe([topic], listener)
        await until([silent], lambda: loads([silent]) == [6])
        other.subscribe([topic])
        await until([other], lambda: loads([other]) == [6])
        patient = {"max_poll_interval_ms": 300_000}  # from now on it polls, even if rarely
        silent._membership._config = silent.config.model_copy(update=patient)
        await until([silent, other], lambda: loads([silent, other]) == [3, 3])
    # All six, or fewer if a busy machine was in a rebalance.
    assert any(kind == "lost" and partitions for kind, partitions in listener.callbacks)


async def test_static_member_rejoins_without_rebalance(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "static")
    stays = member(bootstrap, "static", group_instance_id="stays")
    async with stays:
        stays.subscribe([topic])
        leaves = member(bootstrap, "static", group_instance_id="leaves")
        async with leaves:
            leaves.subscribe([topic])
            await until([stays, leaves], lambda: loads([stays, leaves]) == [3, 3])
            had = leaves.assignment()
            generation = stays._membership.generation_id
        again = member(bootstrap, "static", group_instance_id="leaves")
        async with again:
            again.subscribe([topic])
            await until([stays, again], lambda: again.assignment() == had)
            assert stays._membership.generation_id == again._membership.generation_id == generation
            twin = member(bootstrap, "static", group_instance_id="leaves")
            async with twin:
                twin.subscribe([topic])
                await until([twin], lambda: twin.assignment() == had)
                with pytest.raises(KafkaError) as caught:
                    await until([again], lambda: False)
                assert caught.value.code is ErrorCode.FENCED_INSTANCE_ID


async def test_added_partitions_are_assigned(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "grows", 2)
    consumer = member(bootstrap, "grows", metadata_max_age_ms=200)
    async with consumer, AdminClient(bootstrap) as admin:
        consumer.subscribe([topic])
        await until([consumer], lambda: loads([consumer]) == [2])
        await admin.create_partitions({topic: 4})
        await until([consumer], lambda: loads([consumer]) == [4])


async def test_group_with_other_protocol_refuses_member(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "protocols")
    first = member(bootstrap, "protocols", partition_assignment_strategy="range")
    second = member(bootstrap, "protocols", partition_assignment_strategy="roundrobin")
    async with first, second:
        first.subscribe([topic])
        await until([first], lambda: loads([first]) == [6])
        second.subscribe([topic])
        with pytest.raises(KafkaError) as caught:
            await until([second], lambda: False)
        assert caught.value.code is ErrorCode.INCONSISTENT_GROUP_PROTOCOL


async def test_blocking_consumer_joins_group(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "blocking")
    await produce(bootstrap, topic, 6)
    listener = Listener()

    def read() -> dict[TopicPartition, int]:
        with sync.Consumer(bootstrap, group_id="blocking", **QUICK, enable_auto_commit=False) as consumer:
            consumer.subscribe([topic], listener)
            records: list[ConsumerRecord] = []
            while len(records) < 6:
                records += consumer.poll(1000)
            consumer.commit()
            return consumer.committed([(topic, number) for number in range(PARTITIONS)])

    assert set((await asyncio.to_thread(read)).values()) == {1}
    assert [kind for kind, partitions in listener.callbacks if partitions] == ["assigned", "revoked"]


async def test_group_features_need_a_group_id() -> None:
    consumer = Consumer("127.0.0.1:1")
    with pytest.raises(ValueError, match=r"group\.id"):
        consumer.subscribe(["t"], RebalanceListener())
    with pytest.raises(KafkaError, match=r"partition\.assignment\.strategy"):
        Consumer("127.0.0.1:1", group_id="g", partition_assignment_strategy="best")
