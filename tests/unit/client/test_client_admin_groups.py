"""Group administration against three real brokers: list, describe, reset and delete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from kipmesh.client import AdminClient, Consumer, ConsumerRecord, NewTopic, Producer, ResetTo, TopicPartition, sync
from kipmesh.client.calls import api_of
from kipmesh.client.group_coordinator import COORDINATOR_ERRORS
from kipmesh.cluster import LocalCluster
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages import DeletableGroupResult, DeleteGroupsRequest, DeleteGroupsResponse

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one event loop besides the cluster's
QUICK = {"heartbeat_interval_ms": 50, "session_timeout_ms": 120_000, "auto_offset_reset": "earliest"}
CONFIG = {"group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "4"}


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with LocalCluster(mode="single", leaders=3, followers=0, config=CONFIG) as cluster:
        yield cluster.bootstrap


@pytest_asyncio.fixture(loop_scope="module")
async def admin(bootstrap: str) -> AsyncIterator[AdminClient]:
    async with AdminClient(bootstrap) as client:
        yield client


def member(bootstrap: str, group: str, **config: object) -> Consumer:
    return Consumer(bootstrap, group_id=group, **{**QUICK, **config})


async def filled(bootstrap: str, admin: AdminClient, topic: str, partitions: int = 3, each: int = 10) -> list[int]:
    """Create a topic with `each` records per partition and return their timestamps."""
    await admin.create_topics([NewTopic(topic, partitions, 1)])
    stamps = [1_000_000 + 1000 * number for number in range(each)]
    async with Producer(bootstrap) as producer:
        for partition in range(partitions):
            for stamp in stamps:
                await producer.send(topic, b"v", partition=partition, timestamp_ms=stamp)
        await producer.flush()
    return stamps


async def joined(consumer: Consumer, topic: str, count: int) -> None:
    consumer.subscribe([topic])
    async with asyncio.timeout(60):
        while len(consumer.assignment()) < count:
            await consumer.poll(50)


def places(topic: str, *offsets: int) -> dict[TopicPartition, int]:
    return {TopicPartition(topic, partition): offset for partition, offset in enumerate(offsets)}


async def committed(admin: AdminClient, group: str) -> dict[TopicPartition, int]:
    return {tp: found.offset for tp, found in (await admin.list_group_offsets(group)).items()}


async def test_groups_of_all_brokers_are_listed(admin: AdminClient, bootstrap: str) -> None:
    await filled(bootstrap, admin, "listed")
    names = [f"listed-{number}" for number in range(8)]
    for name in names:
        await admin.alter_group_offsets(name, places("listed", 1))
    found = {listing.group_id: listing for listing in await admin.list_groups()}
    assert set(names) <= set(found)
    assert list(found) == sorted(found)
    described = await admin.describe_groups(names)
    assert len({group.coordinator.node_id for group in described.values()}) > 1
    async with member(bootstrap, "listed-0") as consumer:
        await joined(consumer, "listed", 3)
        stable = {listing.group_id: listing for listing in await admin.list_groups(states=["stable"])}
        assert stable["listed-0"].protocol_type == "consumer"
        assert "listed-1" not in stable
    assert await admin.list_groups(types=["share"]) == []
    await admin.delete_groups(names)
    assert not set(names) & {listing.group_id for listing in await admin.list_groups()}


async def test_group_members_are_described(admin: AdminClient, bootstrap: str) -> None:
    await filled(bootstrap, admin, "described")
    async with Consumer(
        bootstrap, group_id="described", client_id="me", group_instance_id="static", **QUICK
    ) as consumer:
        await joined(consumer, "described", 3)
        group = (await admin.describe_groups(["described"]))["described"]
        assert (group.state, group.protocol_type, group.partition_assignor) == ("Stable", "consumer", "range")
        assert group.coordinator.node_id in {broker.node_id for broker in (await admin.describe_cluster()).brokers}
        (member,) = group.members
        assert (member.client_id, member.host, member.group_instance_id) == ("me", "/127.0.0.1", "static")
        assert member.assignment == [TopicPartition("described", partition) for partition in range(3)]
    assert (await admin.describe_groups(["unknown"]))["unknown"].state == "Dead"


async def test_reset_moves_group_offsets_to_each_target(admin: AdminClient, bootstrap: str) -> None:
    stamps = await filled(bootstrap, admin, "reset")
    await admin.delete_records({("reset", 1): 4})
    both = list(places("reset", 0, 0))
    for to, value, expected in [
        (ResetTo.EARLIEST, 0, (0, 4)),
        (ResetTo.SHIFT_BY, 3, (3, 7)),
        (ResetTo.SHIFT_BY, -5, (0, 4)),
        (ResetTo.LATEST, 0, (10, 10)),
        (ResetTo.OFFSET, 2, (2, 4)),
        (ResetTo.OFFSET, 99, (10, 10)),
        (ResetTo.TIMESTAMP, stamps[5] - 1, (5, 5)),
        (ResetTo.TIMESTAMP, stamps[-1] + 1, (10, 10)),
        (ResetTo.TIMESTAMP, -7, (0, 4)),
    ]:
        wanted = places("reset", *expected)
        before = await committed(admin, "reset")
        assert await admin.reset_group_offsets("reset", both, to, value, dry_run=True) == wanted, to
        assert await committed(admin, "reset") == before
        assert await admin.reset_group_offsets("reset", both, to, value) == wanted
        assert await committed(admin, "reset") == wanted
    assert await admin.list_group_offsets("reset", [("reset", 2)]) == {}
    with pytest.raises(KafkaError) as caught:
        await admin.reset_group_offsets("reset", [("reset", 2)], ResetTo.SHIFT_BY, 1)
    assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
    await admin.alter_group_offsets("reset", places("reset", 8, 9, 10))
    async with member(bootstrap, "reset") as consumer:
        consumer.subscribe(["reset"])
        records: list[ConsumerRecord] = []
        while len(records) < 3:
            records += await consumer.poll(1000)
    assert sorted((record.partition, record.offset) for record in records) == [(0, 8), (0, 9), (1, 9)]


async def test_offset_changes_of_group_with_members_are_refused(admin: AdminClient, bootstrap: str) -> None:
    await filled(bootstrap, admin, "refused")
    await filled(bootstrap, admin, "refused-too")
    async with member(bootstrap, "refused") as consumer:
        await joined(consumer, "refused", 3)
        await consumer.commit({("refused", 0): 5})
        for call, code in [
            (admin.alter_group_offsets("refused", places("refused", 1)), ErrorCode.UNKNOWN_MEMBER_ID),
            (admin.reset_group_offsets("refused", [("refused", 0)], ResetTo.LATEST), ErrorCode.UNKNOWN_MEMBER_ID),
            (admin.delete_group_offsets("refused", [("refused", 0)]), ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC),
            (admin.delete_groups(["refused"]), ErrorCode.NON_EMPTY_GROUP),
        ]:
            with pytest.raises(KafkaError) as caught:
                await call
            assert caught.value.code is code
        assert (await committed(admin, "refused"))[TopicPartition("refused", 0)] == 5
    await admin.delete_group_offsets("refused", places("refused", 0, 0, 0))
    with pytest.raises(ValueError, match="negative"):
        await admin.alter_group_offsets("refused", places("refused", -1))
    with pytest.raises(KafkaError) as caught:
        await admin.alter_group_offsets("refused", {("refused", 0): 1, ("refused", 77): 1})
    assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert await committed(admin, "refused") == places("refused", 1)
    for missing in (admin.delete_groups(["refused", "there-is-none"]), admin.delete_group_offsets("none", [("t", 0)])):
        with pytest.raises(KafkaError) as caught:
            await missing
        assert caught.value.code is ErrorCode.GROUP_ID_NOT_FOUND
    assert (await admin.describe_groups(["refused"]))["refused"].state == "Dead"


async def test_not_coordinator_error_is_found_in_results() -> None:
    elsewhere = DeletableGroupResult("g", ErrorCode.NOT_COORDINATOR)
    api = api_of(DeleteGroupsRequest(["g"]))
    assert api.errors(DeleteGroupsResponse(results=[elsewhere])) == [ErrorCode.NOT_COORDINATOR]
    assert ErrorCode.NOT_COORDINATOR in COORDINATOR_ERRORS


async def test_blocking_client_administers_groups(admin: AdminClient, bootstrap: str) -> None:
    await filled(bootstrap, admin, "blocking")

    def work() -> None:
        with sync.AdminClient(bootstrap) as client:
            client.alter_group_offsets("blocking", places("blocking", 3, 4))
            assert client.list_group_offsets("blocking", [("blocking", 1)])[TopicPartition("blocking", 1)].offset == 4
            client.delete_group_offsets("blocking", [("blocking", 1)])
            assert client.reset_group_offsets("blocking", [("blocking", 0)], ResetTo.LATEST) == places("blocking", 10)
            assert client.describe_groups(["blocking"])["blocking"].state == "Empty"
            client.delete_groups(["blocking"])
            assert "blocking" not in {listing.group_id for listing in client.list_groups()}

    await asyncio.to_thread(work)
