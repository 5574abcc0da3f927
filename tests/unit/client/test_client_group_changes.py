"""Group members that are notified of changes during callbacks, commits, joins and close."""

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

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one event loop besides the cluster's
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
    """Write one record to each partition."""
    async with Producer(bootstrap) as producer:
        for partition in range(PARTITIONS):
            await producer.send(topic, b"x", partition=partition)
        await producer.flush()


def member(bootstrap: str, group: str, **config: object) -> Consumer:
    merged = {"heartbeat_interval_ms": 50, "session_timeout_ms": 120_000, "auto_offset_reset": "earliest", **config}
    return Consumer(bootstrap, group_id=group, **merged)


async def remove_member(consumer: Consumer) -> None:
    """Remove a member at the coordinator without its knowledge."""
    assert consumer._group is not None
    await consumer._group._leave()


class SlowListener(RebalanceListener):
    """Its first assignment callback lasts until the partitions are lost."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self.callbacks: list[str] = []

    async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self.callbacks.append("assigned")
        if len(self.callbacks) == 1:
            await remove_member(self._consumer)
            while self._consumer.group_metadata().generation_id >= 0:  # noqa: ASYNC110 - a heartbeat does that
                await asyncio.sleep(0.01)

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self.callbacks.append("revoked")

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self.callbacks.append("lost")


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
async def test_member_removed_during_assignment_callback_rejoins(bootstrap: str, strategy: str) -> None:
    topic = await topic_of(bootstrap, f"removed-{strategy}")
    async with member(bootstrap, topic, partition_assignment_strategy=strategy) as consumer:
        listener = SlowListener(consumer)
        consumer.subscribe([topic], listener)
        async with asyncio.timeout(60):
            while listener.callbacks.count("assigned") < 2:
                await consumer.poll(20)
        assert listener.callbacks == ["assigned", "lost", "assigned"]
        assert len(consumer.assignment()) == PARTITIONS
        assert consumer.group_metadata().generation_id > 0


async def test_loss_detected_by_commit_ends_with_next_join(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "old-loss")
    tps = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    rare: dict[str, object] = {"heartbeat_interval_ms": 60_000, "auto_commit_interval_ms": 600_000}
    consumer = member(bootstrap, topic, partition_assignment_strategy="range", **rare)
    async with consumer:
        listener = SlowListener(consumer)
        listener.callbacks.append("begin")  # disables the slow first callback
        consumer.subscribe([topic], listener)
        await produce(bootstrap, topic)
        await read(consumer, PARTITIONS)
        before = consumer.group_metadata()
        await remove_member(consumer)
        consumer.subscribe([topic], listener)  # rejoins after a commit
        await read(consumer, PARTITIONS)  # uncommitted records
        assert consumer.group_metadata() != before
        assert listener.callbacks == ["begin", "assigned", "lost", "assigned"]
    async with member(bootstrap, topic) as other:
        assert await other.committed(tps) == dict.fromkeys(tps, 1)


async def read(consumer: Consumer, count: int) -> list[ConsumerRecord]:
    records: list[ConsumerRecord] = []
    async with asyncio.timeout(60):
        while len(records) < count:
            records += await consumer.poll(1000)
    return records


async def test_cooperative_members_read_during_rebalance(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "during-rebalance")
    config = {"partition_assignment_strategy": "cooperative-sticky"}
    async with member(bootstrap, topic, **config) as first, member(bootstrap, topic, **config) as second:
        for consumer in (first, second):
            consumer.subscribe([topic])
        async with asyncio.timeout(60):
            while not len(first.assignment()) == len(second.assignment()) == PARTITIONS // 2:
                await asyncio.gather(first.poll(20), second.poll(20))
            async with member(bootstrap, topic, **config) as third, AdminClient(bootstrap) as admin:
                third.subscribe([topic])
                assert first._group is not None
                while first._group._join_task is None:  # the second member does not poll, so it does not join
                    await asyncio.gather(first.poll(20), third.poll(20))
                await produce(bootstrap, topic)
                found: set[int] = set()
                while len(found) < PARTITIONS // 2:
                    found.update(record.partition for record in await first.poll(600_000))
                assert found == {tp.partition for tp in first.assignment()}
                assert (await admin.describe_groups([topic]))[topic].state == "PreparingRebalance"


async def test_failed_heartbeat_is_retried_after_backoff(bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        right, call_once, failed_calls = coordinator.node, coordinator.call_once, 0

        async def call_wrong_node(request: Any, timeout_s: float) -> Any:
            nonlocal failed_calls
            if failed_calls < times:
                failed_calls += 1
                coordinator.node = Node(99, "127.0.0.1", 1)
            return await call_once(request, timeout_s)

        monkeypatch.setattr(coordinator, "call_once", call_wrong_node)
        await until(lambda: failed_calls, "the first heartbeat")
        # Each failure discards the coordinator and retries soon. At the heartbeat interval, this would take longer.
        await until(lambda: failed_calls == times and coordinator.node == right, "a response", (times - 2) * interval_s)


async def test_member_that_died_while_joining_does_not_lead() -> None:
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
            for consumer in (first, second, third):
                consumer.subscribe([topic])
            while not first.assignment():
                await first.poll(20)
            for count, consumer in ((2, second), (3, third)):  # both wait for the first member, which does not poll
                while len(members()) < count:
                    await consumer.poll(20)
            await second.close(commit=False, leave=False)
            while not any(member_.is_disconnected for member_ in members()):
                await third.poll(20)
            await first.close()  # the second member joined next and would lead
            while not third.assignment():
                await third.poll(20)


class CommittingListener(RebalanceListener):
    """Commits the revoked partitions and then raises."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        await self._consumer.commit()
        assert await self._consumer.committed(partitions) == dict.fromkeys(partitions, 1)
        raise LookupError("raised by the listener")


async def test_revocation_listener_can_commit_during_close(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "commits-at-the-end")
    await produce(bootstrap, topic)
    consumer = member(bootstrap, topic, enable_auto_commit=False)
    await consumer.start()
    consumer.subscribe([topic], CommittingListener(consumer))
    await read(consumer, PARTITIONS)
    with pytest.raises(LookupError, match="raised by the listener"):
        await consumer.close()
    with pytest.raises(RuntimeError, match="closed"):
        await consumer.commit()
    async with AdminClient(bootstrap) as admin:
        group = (await admin.describe_groups([topic]))[topic]
    assert (group.state, len(group.members)) == ("Empty", 0)  # the member has left despite the error


async def test_auto_commit_excludes_records_of_current_poll(bootstrap: str) -> None:
    topic = await topic_of(bootstrap, "commits-what-was-read-before")
    tps = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    await produce(bootstrap, topic)
    async with member(bootstrap, topic, auto_commit_interval_ms=1) as consumer:
        consumer.subscribe([topic])
        async with asyncio.timeout(60):
            while not await consumer.poll(1000, max_records=1):
                pass
            states, group = consumer._fetcher.states, consumer._group
            assert group is not None
            await until(
                lambda: all(state.buffer or state.position for state in states.values()), "all partitions are buffered"
            )
            await until(lambda: group._commit_task is None or group._commit_task.done(), "earlier commits")
            await asyncio.sleep(0.01)  # the next commit is due
            assert len(await consumer.poll(0, max_records=1)) == 1  # from the buffer, without waiting
            assert group._commit_task is not None
            await group._commit_task
            assert sum((await consumer.committed(tps)).values()) == 1
