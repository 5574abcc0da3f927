"""Members of a group that are told of changes at awkward moments: nothing that they are told is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kipmesh.client import Consumer, ConsumerRecord, Producer, RebalanceListener, TopicPartition
from kipmesh.client.admin.admin import AdminClient
from kipmesh.client.types import NewTopic, Node
from kipmesh.cluster import LocalCluster
from kipmesh.cluster.single import SingleCluster
from kipmesh.testing import until

pytestmark = pytest.mark.asyncio(loop_scope="module")  # beside the cluster's own loop there is one only
PARTITIONS = 4


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    config = {"group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "2"}
    with LocalCluster(mode="single", config=config) as cluster:
        yield cluster.bootstrap


async def topic_of(bootstrap: str, name: str) -> str:
    async with AdminClient(bootstrap) as admin:
        await admin.create_topics([NewTopic(name, PARTITIONS, 1)])
    return name


async def produce(bootstrap: str, topic: str) -> None:
    """One record to each partition."""
    async with Producer(bootstrap) as producer:
        for partition in range(PARTITIONS):
            await producer.send(topic, b"x", partition=partition)
        await producer.flush()


def member(bootstrap: str, group: str, **config: object) -> Consumer:
    given = {"heartbeat_interval_ms": 50, "session_timeout_ms": 120_000, "auto_offset_reset": "earliest", **config}
    return Consumer(bootstrap, group_id=group, **given)


async def put_out(consumer: Consumer) -> None:
    """The coordinator forgets a member that knows nothing of it."""
    assert consumer._group is not None
    await consumer._group._leave()


class Slow(RebalanceListener):
    """Takes its first partitions for as long as it takes to lose them again."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self.told: list[str] = []

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self.told.append("assigned")
        if len(self.told) == 1:
            await put_out(self._consumer)
            while self._consumer.group_metadata().generation_id >= 0:  # noqa: ASYNC110 - a heartbeat does that
                await asyncio.sleep(0.01)

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self.told.append("revoked")

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self.told.append("lost")


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
async def test_who_is_put_out_while_taking_partitions_joins_again(bootstrap: str, strategy: str) -> None:
    topic = await topic_of(bootstrap, f"put-out-{strategy}")
    async with member(bootstrap, topic, partition_assignment_strategy=strategy) as consumer:
        listener = Slow(consumer)
        consumer.subscribe([topic], listener)
        async with asyncio.timeout(60):
            while listener.told.count("assigned") < 2:
                await consumer.poll(20)
        assert listener.told == ["assigned", "lost", "assigned"]
        assert len(consumer.assignment()) == PARTITIONS
        assert consumer.group_metadata().generation_id > 0


async def test_a_loss_that_a_commit_brings_to_light_is_over_with_the_next_join(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "old-loss")
    where = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    seldom: dict[str, object] = {"heartbeat_interval_ms": 60_000, "auto_commit_interval_ms": 600_000}
    consumer = member(bootstrap, topic, partition_assignment_strategy="range", **seldom)
    async with consumer:
        listener = Slow(consumer)
        listener.told.append("begin")  # nothing slow here
        consumer.subscribe([topic], listener)
        await produce(bootstrap, topic)
        await read(consumer, PARTITIONS)
        before = consumer.group_metadata()
        await put_out(consumer)
        consumer.subscribe([topic], listener)  # joins again, and commits before
        await read(consumer, PARTITIONS)  # what was not committed
        assert consumer.group_metadata() != before
        assert listener.told == ["begin", "assigned", "lost", "assigned"]
    async with member(bootstrap, topic) as other:
        assert await other.committed(where) == dict.fromkeys(where, 1)


async def read(consumer: Consumer, count: int) -> list[ConsumerRecord]:
    records: list[ConsumerRecord] = []
    async with asyncio.timeout(60):
        while len(records) < count:
            records += await consumer.poll(1000)
    return records


async def test_cooperative_members_read_while_others_are_waited_for(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "meanwhile")
    config = {"partition_assignment_strategy": "cooperative-sticky"}
    async with member(bootstrap, topic, **config) as first, member(bootstrap, topic, **config) as second:
        for one in (first, second):
            one.subscribe([topic])
        async with asyncio.timeout(60):
            while not len(first.assignment()) == len(second.assignment()) == PARTITIONS // 2:
                await asyncio.gather(first.poll(20), second.poll(20))
            async with member(bootstrap, topic, **config) as third, AdminClient(bootstrap) as admin:
                third.subscribe([topic])
                assert first._group is not None
                while first._group._join_task is None:  # the second one does not poll, and so does not join
                    await asyncio.gather(first.poll(20), third.poll(20))
                await produce(bootstrap, topic)
                found: set[int] = set()
                while len(found) < PARTITIONS // 2:
                    found.update(record.partition for record in await first.poll(600_000))
                assert found == {where.partition for where in first.assignment()}
                assert (await admin.describe_groups([topic]))[topic].state == "PreparingRebalance"


async def test_a_heartbeat_without_an_answer_is_soon_repeated(bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await topic_of(bootstrap, "again-soon")
    interval_s, times = 2.0, 20
    config = {"heartbeat_interval_ms": int(interval_s * 1000), "retry_backoff_ms": 20, "retry_backoff_max_ms": 20}
    async with member(bootstrap, topic, **config) as consumer:
        consumer.subscribe([topic])
        async with asyncio.timeout(60):
            while not consumer.assignment():
                await consumer.poll(20)
        assert consumer._group is not None
        coordinator = consumer._group.coordinator
        right, once, asked_in_vain = coordinator.node, coordinator.call_once, 0

        async def ask_the_wrong_one(request: Any, timeout_s: float) -> Any:
            nonlocal asked_in_vain
            if asked_in_vain < times:
                asked_in_vain += 1
                coordinator.node = Node(99, "127.0.0.1", 1)
            return await once(request, timeout_s)

        monkeypatch.setattr(coordinator, "call_once", ask_the_wrong_one)
        await until(lambda: asked_in_vain, "the first heartbeat")
        # Each fails and forgets the coordinator, so that the next looks for it; as seldom as others all take longer.
        await until(lambda: asked_in_vain == times and coordinator.node == right, "an answer", (times - 2) * interval_s)


async def test_who_died_while_it_waited_does_not_lead() -> None:
    config = {"group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "1"}
    with LocalCluster(mode="single", leaders=1, followers=0, config=config) as cluster:
        topic = await topic_of(cluster.bootstrap, "dead-leader")
        waits: dict[str, object] = {"partition_assignment_strategy": "range", "session_timeout_ms": 600_000}
        first, second, third = (member(cluster.bootstrap, topic, **waits) for _ in range(3))

        def members() -> list[Any]:
            assert isinstance(cluster._backend, SingleCluster)
            (shard,) = cluster._backend.node_object("leader-1").parts.groups._shards.values()
            return list(shard.coordinator._state.live[topic].members.values())

        async with first, third, asyncio.timeout(60):
            await second.start()
            for one in (first, second, third):
                one.subscribe([topic])
            while not first.assignment():
                await first.poll(20)
            for count, one in ((2, second), (3, third)):  # they wait for the first one, which does not poll
                while len(members()) < count:
                    await one.poll(20)
            await second.close(commit=False, leave=False)
            while not any(one.is_disconnected for one in members()):
                await third.poll(20)
            await first.close()  # the second one was there next, and would lead
            while not third.assignment():
                await third.poll(20)


class Committing(RebalanceListener):
    """Commits what is about to go, and then fails."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        await self._consumer.commit()
        assert await self._consumer.committed(partitions) == dict.fromkeys(partitions, 1)
        raise LookupError("the listener's own")


async def test_a_listener_may_commit_what_goes_when_the_consumer_closes(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "commits-at-the-end")
    await produce(bootstrap, topic)
    consumer = member(bootstrap, topic, enable_auto_commit=False)
    await consumer.start()
    consumer.subscribe([topic], Committing(consumer))
    await read(consumer, PARTITIONS)
    with pytest.raises(LookupError, match="the listener's own"):
        await consumer.close()
    with pytest.raises(RuntimeError, match="closed"):
        await consumer.commit()
    async with AdminClient(bootstrap) as admin:
        group = (await admin.describe_groups([topic]))[topic]
    assert (group.state, len(group.members)) == ("Empty", 0)  # it has left all the same


async def test_an_automatic_commit_has_no_record_of_the_poll_that_makes_it(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "commits-what-was-read-before")
    where = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    await produce(bootstrap, topic)
    async with member(bootstrap, topic, auto_commit_interval_ms=1) as consumer:
        consumer.subscribe([topic])
        async with asyncio.timeout(60):
            while not await consumer.poll(1000, max_records=1):
                pass
            states, group = consumer._fetcher.states, consumer._group
            assert group is not None
            await until(lambda: all(each.buffer or each.position for each in states.values()), "all are buffered")
            await until(lambda: group._commit_task is None or group._commit_task.done(), "the commits so far")
            await asyncio.sleep(0.01)  # the next commit is due
            assert len(await consumer.poll(0, max_records=1)) == 1  # from the buffer: nothing is waited for
            assert group._commit_task is not None
            await group._commit_task
            assert sum((await consumer.committed(where)).values()) == 1
