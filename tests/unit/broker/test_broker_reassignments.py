"""Reassignments between running brokers: moved replicas, continuing writes, and the throttle of added replicas."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kipmesh import messages as m
from kipmesh.client import AdminClient
from kipmesh.client.admin.reassignments import DrainProgress
from kipmesh.core import record_batch
from kipmesh.core.errors import ErrorCode, KafkaError
from tests.unit.broker.broker_cluster import BrokerCluster, eventually

RATE = "follower.replication.throttled.rate"


@pytest.fixture
async def four_brokers(tmp_path: Path) -> AsyncIterator[BrokerCluster]:
    """Brokers 1 to 4. A follower fetch returns one batch per partition."""
    cluster = BrokerCluster(tmp_path, **{"replica.fetch.max.bytes": 5000})
    try:
        await cluster.start()
        await cluster.start_broker(4)
        await cluster.ready(4)
        yield cluster
    finally:
        await cluster.stop()


def batch(size: int, count: int = 1) -> bytes:
    return record_batch.build(
        [(None, b"v" * size) for _ in range(count)], base_offset=0, leader_epoch=-1, timestamp_ms=1
    )


async def reassign(cluster: BrokerCluster, name: str, replicas: Sequence[int] | None, via: int = 2) -> int:
    requested = m.ReassignablePartition(0, None if replicas is None else tuple(replicas))
    request = m.AlterPartitionReassignmentsRequest(10_000, [m.ReassignableTopic(name, [requested])])
    response = await cluster.call(via, "AlterPartitionReassignments", request, "Admin")
    assert response.error_code == 0, response
    code: int = response.responses[0].partitions[0].error_code
    return code


async def list_reassignments(cluster: BrokerCluster, via: int = 2) -> dict[str, list[int]]:
    request = m.ListPartitionReassignmentsRequest(10_000, None)
    response = await cluster.call(via, "ListPartitionReassignments", request, "Admin")
    assert response.error_code == 0, response
    return {topic.name: [partition.partition_index for partition in topic.partitions] for topic in response.topics}


async def set_throttle(cluster: BrokerCluster, rate: int | None) -> None:
    change = m.AlterableConfig(RATE, 1) if rate is None else m.AlterableConfig(RATE, 0, str(rate))
    request = m.IncrementalAlterConfigsRequest([m.AlterConfigsResource(4, "", [change])])
    response = await cluster.call(2, "IncrementalAlterConfigs", request, "Admin")
    assert [result.error_code for result in response.responses] == [0]


def log_directories(cluster: BrokerCluster, broker: int, name: str) -> list[Path]:
    return [
        path for path in (cluster.directory / f"broker-{broker}").glob(f"{name}-*") if not path.name.endswith("-delete")
    ]


def metric(cluster: BrokerCluster, broker: int, name: str) -> float:
    value = cluster.brokers[broker].registry.get_sample_value(name)
    assert value is not None, name
    return value


async def wait_until_moved(cluster: BrokerCluster, topic_id: bytes, replicas: tuple[int, ...], *brokers: int) -> None:
    def done() -> bool:
        states = [cluster.brokers[broker].hosted_replicas.image.partition(topic_id, 0) for broker in brokers]
        return all(
            state is not None and tuple(state.replicas) == replicas and set(state.isr) == set(replicas)
            for state in states
        )

    await eventually(done, f"replicas {replicas}")


async def test_reassignment_moves_leader_with_its_records(four_brokers: BrokerCluster) -> None:
    topic_id = await four_brokers.create("t", 1, 2)
    image = four_brokers.brokers[2].hosted_replicas.image
    old = tuple(image.topics[topic_id].partitions[0].replicas)
    target = tuple(sorted({1, 2, 3, 4} - set(old)))
    for number in range(5):
        assert (await four_brokers.produce("t", batch(100), via=old[0])).base_offset == number
    assert await reassign(four_brokers, "t", target) == 0
    await wait_until_moved(four_brokers, topic_id, target, 1, 2, 3, 4)
    assert await list_reassignments(four_brokers) == {}
    data = await four_brokers.fetch("t", 0, via=target[0])
    assert data.high_watermark == 5
    assert len(list(record_batch.iterate(data.records))) == 5
    for broker in old:
        await eventually(
            lambda broker=broker: not log_directories(four_brokers, broker, "t"), "the log directory is deleted"
        )
        assert four_brokers.brokers[broker].hosted_replicas.get(topic_id, 0) is None
        assert (await four_brokers.produce("t", batch(1), via=broker)).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (await four_brokers.produce("t", batch(100), via=target[0])).base_offset == 5
    assert metric(four_brokers, target[1], "kafka_server_brokertopicmetrics_reassignmentbytesin_total") > 500
    assert metric(four_brokers, target[1], "kipmesh_broker_throttled_replication_bytes_total") == 0


async def test_writes_continue_while_reassignment_adds_second_replica(four_brokers: BrokerCluster) -> None:
    """`min.insync.replicas` 2 does not apply until the partition has a second replica."""
    topic_id, other = (
        await four_brokers.create("t", 1, 1, min_insync_replicas="2"),
        await four_brokers.create("other", 1, 4),
    )
    leader = four_brokers.brokers[2].hosted_replicas.image.topics[topic_id].partitions[0].leader
    other_leader = four_brokers.brokers[2].hosted_replicas.image.topics[other].partitions[0].leader
    await set_throttle(four_brokers, 1)
    for _ in range(2):
        assert (await four_brokers.produce("t", batch(10_000), via=leader)).error_code == 0
    assert await reassign(four_brokers, "t", (leader, leader % 4 + 1)) == 0
    await eventually(
        lambda: four_brokers.brokers[leader].hosted_replicas.image.partition(topic_id, 0).adding_replicas,
        "the reassignment",
    )
    for _ in range(3):
        assert (await four_brokers.produce("t", batch(10_000), via=leader)).error_code == 0
    # At 1 byte/s, a throttled fetch would not finish within the test.
    assert (await four_brokers.produce("other", batch(10), via=other_leader)).error_code == 0, (
        "acks=all of other topics"
    )
    assert await list_reassignments(four_brokers) == {"t": [0]}
    assert metric(four_brokers, leader, "kafka_server_replicamanager_reassigningpartitions") == 1
    await set_throttle(four_brokers, None)
    await wait_until_moved(four_brokers, topic_id, (leader, leader % 4 + 1), leader)
    assert metric(four_brokers, leader, "kafka_server_replicamanager_reassigningpartitions") == 0


async def test_throttle_limits_only_added_replicas(four_brokers: BrokerCluster) -> None:
    """3 MB at 1 MB/s with a burst of 1 s take about 2 s. Other topics are not delayed."""
    topic_id, other = await four_brokers.create("t", 1, 1), await four_brokers.create("other", 1, 4)
    image = four_brokers.brokers[2].hosted_replicas.image
    leader = image.topics[topic_id].partitions[0].leader
    adding = leader % 4 + 1
    other_leader = image.topics[other].partitions[0].leader
    sizes = [len(batch(500_000)) for _ in range(6)]
    for _ in sizes:
        assert (await four_brokers.produce("t", batch(500_000), via=leader)).error_code == 0
    await set_throttle(four_brokers, 1_000_000)
    await eventually(lambda: four_brokers.brokers[adding].hosted_replicas.image.broker_config(""), "the throttled rate")
    started_s = time.monotonic()
    assert await reassign(four_brokers, "t", (adding,)) == 0
    assert (await four_brokers.produce("other", batch(10), via=other_leader)).error_code == 0
    await wait_until_moved(four_brokers, topic_id, (adding,), 2)
    # The burst and the last batches are not delayed.
    assert time.monotonic() - started_s >= (sum(sizes) - 2 * sizes[0] - 1_000_000) / 1_000_000
    assert metric(four_brokers, adding, "kipmesh_broker_throttled_replication_bytes_total") == sum(sizes)
    assert metric(four_brokers, adding, "kipmesh_broker_adding_replicas") == 0


async def test_throttle_does_not_limit_caught_up_replica(four_brokers: BrokerCluster) -> None:
    """The leader may wait for the replica. At 1 byte/s, the second batch would take hours."""
    topic_id = await four_brokers.create("t", 1, 1)
    leader = four_brokers.brokers[2].hosted_replicas.image.topics[topic_id].partitions[0].leader
    adding = leader % 4 + 1
    await set_throttle(four_brokers, 1)
    await eventually(lambda: four_brokers.brokers[adding].hosted_replicas.image.broker_config(""), "the throttled rate")
    assert (await four_brokers.produce("t", batch(10_000), via=leader)).error_code == 0
    assert await reassign(four_brokers, "t", (adding, leader)) == 0
    await wait_until_moved(four_brokers, topic_id, (adding, leader), 2)


async def test_cancelled_reassignment_deletes_added_replica(four_brokers: BrokerCluster) -> None:
    topic_id = await four_brokers.create("t", 1, 1)
    leader = four_brokers.brokers[2].hosted_replicas.image.topics[topic_id].partitions[0].leader
    adding = leader % 4 + 1
    await set_throttle(four_brokers, 1)
    assert (await four_brokers.produce("t", batch(10_000), via=leader)).error_code == 0
    assert (await four_brokers.produce("t", batch(10_000), via=leader)).error_code == 0
    assert await reassign(four_brokers, "t", None) == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
    assert await reassign(four_brokers, "t", (adding,)) == 0
    await eventually(lambda: log_directories(four_brokers, adding, "t"), "the new replica")
    assert await reassign(four_brokers, "t", None) == 0
    await eventually(lambda: not log_directories(four_brokers, adding, "t"), "the log directory is deleted")
    await wait_until_moved(four_brokers, topic_id, (leader,), leader, adding)
    assert (await four_brokers.produce("t", batch(10), via=leader)).error_code == 0


async def test_reassignment_completes_after_added_broker_restarts(four_brokers: BrokerCluster) -> None:
    topic_id = await four_brokers.create("t", 1, 1)
    leader = four_brokers.brokers[2].hosted_replicas.image.topics[topic_id].partitions[0].leader
    adding = next(broker for broker in (4, 3) if broker != leader)
    via = next(broker for broker in (2, 3, 4) if broker != adding)
    await set_throttle(four_brokers, 1)
    for _ in range(2):
        assert (await four_brokers.produce("t", batch(10_000), via=leader)).error_code == 0
    assert await reassign(four_brokers, "t", (adding,), via) == 0
    await eventually(lambda: log_directories(four_brokers, adding, "t"), "the new replica")
    await four_brokers.brokers.pop(adding).abort()
    await set_throttle(four_brokers, None)
    await four_brokers.start_broker(adding)
    await wait_until_moved(four_brokers, topic_id, (adding,), via, adding)
    assert (await four_brokers.fetch("t", 0, via=adding)).high_watermark == 2


async def test_admin_client_drains_and_unregisters_broker(four_brokers: BrokerCluster) -> None:
    for name in ("t", "u"):
        await four_brokers.create(name, 5, 3)
    bootstrap = [f"127.0.0.1:{four_brokers.ports[broker]}" for broker in (2, 3)]
    progress: list[DrainProgress] = []
    async with AdminClient(bootstrap, default_api_timeout_ms=60_000) as admin:
        with pytest.raises(KafkaError) as refused:
            await admin.unregister_broker(1)
        assert refused.value.code is ErrorCode.POLICY_VIOLATION
        done = await admin.drain_broker(1, on_progress=progress.append)
        assert (done.left, done.leaving, done.total) == (0, 0, progress[0].left)
        assert progress[0].leaving == 0
        assert not await admin.list_partition_reassignments()
        for topic in await admin.describe_topics(["t", "u"]):
            assert [sorted(partition.replicas) for partition in topic.partitions.values()] == [[2, 3, 4]] * 5
        assert await admin.drain_broker(1) == (0, 0, 0)
        with pytest.raises(KafkaError) as refused:
            await admin.unregister_broker(1)
        assert refused.value.code is ErrorCode.INVALID_REQUEST
        await four_brokers.brokers.pop(1).stop()
        await admin.unregister_broker(1)
        await eventually(
            lambda: 1 not in four_brokers.brokers[2].hosted_replicas.image.brokers, "broker 1 is unregistered"
        )
        with pytest.raises(KafkaError) as refused:
            await admin.drain_broker(2)
        assert refused.value.code is ErrorCode.INVALID_REPLICATION_FACTOR
        with pytest.raises(KafkaError) as refused:
            await admin.drain_broker(1)
        assert refused.value.code is ErrorCode.BROKER_ID_NOT_REGISTERED


async def test_admin_client_starts_lists_and_cancels_reassignments(four_brokers: BrokerCluster) -> None:
    topic_id = await four_brokers.create("t", 1, 1)
    leader = four_brokers.brokers[2].hosted_replicas.image.topics[topic_id].partitions[0].leader
    adding = leader % 4 + 1
    await set_throttle(four_brokers, 1)
    for _ in range(2):
        assert (await four_brokers.produce("t", batch(10_000), via=leader)).error_code == 0
    moved: list[tuple[int, int]] = []
    async with AdminClient([f"127.0.0.1:{four_brokers.ports[2]}"]) as admin:
        results = await admin.alter_partition_reassignments({("t", 0): [adding], ("t", 9): [1], ("no", 0): None})
        codes = {where: error and error.code for where, error in results.items()}
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert codes == {("t", 0): None, ("t", 9): unknown, ("no", 0): unknown}
        running = await admin.list_partition_reassignments([("t", 0), ("t", 9), ("no", 0)])
        assert running == {("t", 0): ((adding, leader), (adding,), (leader,))}
        assert await admin.alter_partition_reassignments({("t", 0): None}) == {("t", 0): None}
        await admin.wait_reassigned([("t", 0)], lambda done, total: moved.append((done, total)))
        assert moved == [(1, 1)]
