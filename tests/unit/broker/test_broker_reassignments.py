"""Replicas move between live brokers: files go with them, writes go on, and the throttle holds only what is added."""

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
from tests.unit.broker.conftest_broker import Mesh, eventually

RATE = "follower.replication.throttled.rate"


@pytest.fixture
async def four(tmp_path: Path) -> AsyncIterator[Mesh]:
    """Brokers 1 to 4; a follower's fetch brings one batch of a partition."""
    mesh = Mesh(tmp_path, **{"replica.fetch.max.bytes": 5000})
    try:
        await mesh.start()
        await mesh.start_broker(4)
        await mesh.ready(4)
        yield mesh
    finally:
        await mesh.stop()


def batch(size: int, count: int = 1) -> bytes:
    return record_batch.build(
        [(None, b"v" * size) for _ in range(count)], base_offset=0, leader_epoch=-1, timestamp_ms=1
    )


async def reassign(mesh: Mesh, name: str, replicas: Sequence[int] | None, via: int = 2) -> int:
    asked = m.ReassignablePartition(0, None if replicas is None else tuple(replicas))
    request = m.AlterPartitionReassignmentsRequest(10_000, [m.ReassignableTopic(name, [asked])])
    response = await mesh.call(via, "AlterPartitionReassignments", request, "Admin")
    assert response.error_code == 0, response
    code: int = response.responses[0].partitions[0].error_code
    return code


async def running(mesh: Mesh, via: int = 2) -> dict[str, list[int]]:
    request = m.ListPartitionReassignmentsRequest(10_000, None)
    response = await mesh.call(via, "ListPartitionReassignments", request, "Admin")
    assert response.error_code == 0, response
    return {topic.name: [one.partition_index for one in topic.partitions] for topic in response.topics}


async def limit(mesh: Mesh, rate: int | None) -> None:
    change = m.AlterableConfig(RATE, 1) if rate is None else m.AlterableConfig(RATE, 0, str(rate))
    request = m.IncrementalAlterConfigsRequest([m.AlterConfigsResource(4, "", [change])])
    response = await mesh.call(2, "IncrementalAlterConfigs", request, "Admin")
    assert [one.error_code for one in response.responses] == [0]


def folders(mesh: Mesh, broker: int, name: str) -> list[Path]:
    return [path for path in (mesh.folder / f"broker-{broker}").glob(f"{name}-*") if not path.name.endswith("-delete")]


def metric(mesh: Mesh, broker: int, name: str) -> float:
    value = mesh.brokers[broker].registry.get_sample_value(name)
    assert value is not None, name
    return value


async def moved_to(mesh: Mesh, topic_id: bytes, replicas: tuple[int, ...], *brokers: int) -> None:
    def done() -> bool:
        states = [mesh.brokers[broker].hosted_replicas.image.partition(topic_id, 0) for broker in brokers]
        return all(
            state is not None and tuple(state.replicas) == replicas and set(state.isr) == set(replicas)
            for state in states
        )

    await eventually(done, f"replicas {replicas}")


async def test_a_leader_moves_with_all_its_records(four: Mesh) -> None:
    topic_id = await four.create("t", 1, 2)
    image = four.brokers[2].hosted_replicas.image
    old = tuple(image.topics[topic_id].partitions[0].replicas)
    target = tuple(sorted({1, 2, 3, 4} - set(old)))
    for number in range(5):
        assert (await four.produce("t", batch(100), via=old[0])).base_offset == number
    assert await reassign(four, "t", target) == 0
    await moved_to(four, topic_id, target, 1, 2, 3, 4)
    assert await running(four) == {}
    data = await four.fetch("t", 0, via=target[0])
    assert data.high_watermark == 5
    assert len(list(record_batch.iterate(data.records))) == 5
    for broker in old:
        await eventually(lambda broker=broker: not folders(four, broker, "t"), "files gone")
        assert four.brokers[broker].hosted_replicas.get(topic_id, 0) is None
        assert (await four.produce("t", batch(1), via=broker)).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (await four.produce("t", batch(100), via=target[0])).base_offset == 5
    assert metric(four, target[1], "kafka_server_brokertopicmetrics_reassignmentbytesin_total") > 500
    assert metric(four, target[1], "kipmesh_broker_throttled_replication_bytes_total") == 0


async def test_writes_of_a_single_replica_go_on_while_a_second_one_comes(four: Mesh) -> None:
    """`min.insync.replicas` 2 is asked of no more than the replicas from before."""
    topic_id, other = await four.create("t", 1, 1, min_insync_replicas="2"), await four.create("other", 1, 4)
    leader = four.brokers[2].hosted_replicas.image.topics[topic_id].partitions[0].leader
    other_leader = four.brokers[2].hosted_replicas.image.topics[other].partitions[0].leader
    await limit(four, 1)
    for _ in range(2):
        assert (await four.produce("t", batch(10_000), via=leader)).error_code == 0
    assert await reassign(four, "t", (leader, leader % 4 + 1)) == 0
    await eventually(
        lambda: four.brokers[leader].hosted_replicas.image.partition(topic_id, 0).adding_replicas, "the reassignment"
    )
    for _ in range(3):
        assert (await four.produce("t", batch(10_000), via=leader)).error_code == 0
    # At a byte a second: whoever waited for room would not answer.
    assert (await four.produce("other", batch(10), via=other_leader)).error_code == 0, "acks=all of other topics"
    assert await running(four) == {"t": [0]}
    assert metric(four, leader, "kafka_server_replicamanager_reassigningpartitions") == 1
    await limit(four, None)
    await moved_to(four, topic_id, (leader, leader % 4 + 1), leader)
    assert metric(four, leader, "kafka_server_replicamanager_reassigningpartitions") == 0


async def test_the_throttle_holds_what_is_added_and_nothing_else(four: Mesh) -> None:
    """3 MB at 1 MB/s with a burst of one second take about two seconds; other topics do not wait for it."""
    topic_id, other = await four.create("t", 1, 1), await four.create("other", 1, 4)
    image = four.brokers[2].hosted_replicas.image
    leader = image.topics[topic_id].partitions[0].leader
    adding = leader % 4 + 1
    other_leader = image.topics[other].partitions[0].leader
    sizes = [len(batch(500_000)) for _ in range(6)]
    for _ in sizes:
        assert (await four.produce("t", batch(500_000), via=leader)).error_code == 0
    await limit(four, 1_000_000)
    await eventually(lambda: four.brokers[adding].hosted_replicas.image.broker_config(""), "the limit")
    begun = time.monotonic()
    assert await reassign(four, "t", (adding,)) == 0
    assert (await four.produce("other", batch(10), via=other_leader)).error_code == 0
    await moved_to(four, topic_id, (adding,), 2)
    # The burst and the last batches are free.
    assert time.monotonic() - begun >= (sum(sizes) - 2 * sizes[0] - 1_000_000) / 1_000_000
    assert metric(four, adding, "kipmesh_broker_throttled_replication_bytes_total") == sum(sizes)
    assert metric(four, adding, "kipmesh_broker_adding_replicas") == 0


async def test_what_has_caught_up_is_not_held(four: Mesh) -> None:
    """Its leader may wait for it: at one byte a second, the second batch would come after hours."""
    topic_id = await four.create("t", 1, 1)
    leader = four.brokers[2].hosted_replicas.image.topics[topic_id].partitions[0].leader
    adding = leader % 4 + 1
    await limit(four, 1)
    await eventually(lambda: four.brokers[adding].hosted_replicas.image.broker_config(""), "the limit")
    assert (await four.produce("t", batch(10_000), via=leader)).error_code == 0
    assert await reassign(four, "t", (adding, leader)) == 0
    await moved_to(four, topic_id, (adding, leader), 2)


async def test_cancelled(four: Mesh) -> None:
    topic_id = await four.create("t", 1, 1)
    leader = four.brokers[2].hosted_replicas.image.topics[topic_id].partitions[0].leader
    adding = leader % 4 + 1
    await limit(four, 1)
    assert (await four.produce("t", batch(10_000), via=leader)).error_code == 0
    assert (await four.produce("t", batch(10_000), via=leader)).error_code == 0
    assert await reassign(four, "t", None) == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
    assert await reassign(four, "t", (adding,)) == 0
    await eventually(lambda: folders(four, adding, "t"), "the new replica")
    assert await reassign(four, "t", None) == 0
    await eventually(lambda: not folders(four, adding, "t"), "files gone")
    await moved_to(four, topic_id, (leader,), leader, adding)
    assert (await four.produce("t", batch(10), via=leader)).error_code == 0


async def test_the_adding_broker_dies_and_comes_back(four: Mesh) -> None:
    topic_id = await four.create("t", 1, 1)
    leader = four.brokers[2].hosted_replicas.image.topics[topic_id].partitions[0].leader
    adding = next(broker for broker in (4, 3) if broker != leader)
    via = next(broker for broker in (2, 3, 4) if broker != adding)
    await limit(four, 1)
    for _ in range(2):
        assert (await four.produce("t", batch(10_000), via=leader)).error_code == 0
    assert await reassign(four, "t", (adding,), via) == 0
    await eventually(lambda: folders(four, adding, "t"), "the new replica")
    await four.brokers.pop(adding).abort()
    await limit(four, None)
    await four.start_broker(adding)
    await moved_to(four, topic_id, (adding,), via, adding)
    assert (await four.fetch("t", 0, via=adding)).high_watermark == 2


async def test_drained_and_unregistered_by_a_client(four: Mesh) -> None:
    for name in ("t", "u"):
        await four.create(name, 5, 3)
    bootstrap = [f"127.0.0.1:{four.ports[broker]}" for broker in (2, 3)]
    said: list[DrainProgress] = []
    async with AdminClient(bootstrap, default_api_timeout_ms=60_000) as admin:
        with pytest.raises(KafkaError) as refused:
            await admin.unregister_broker(1)
        assert refused.value.code is ErrorCode.POLICY_VIOLATION
        done = await admin.drain_broker(1, on_progress=said.append)
        assert (done.left, done.leaving, done.total) == (0, 0, said[0].left)
        assert said[0].leaving == 0
        assert not await admin.list_partition_reassignments()
        for topic in await admin.describe_topics(["t", "u"]):
            assert [sorted(one.replicas) for one in topic.partitions.values()] == [[2, 3, 4]] * 5
        assert await admin.drain_broker(1) == (0, 0, 0)
        with pytest.raises(KafkaError) as refused:
            await admin.unregister_broker(1)
        assert refused.value.code is ErrorCode.INVALID_REQUEST
        await four.brokers.pop(1).stop()
        await admin.unregister_broker(1)
        await eventually(lambda: 1 not in four.brokers[2].hosted_replicas.image.brokers, "broker 1 forgotten")
        with pytest.raises(KafkaError) as refused:
            await admin.drain_broker(2)
        assert refused.value.code is ErrorCode.INVALID_REPLICATION_FACTOR
        with pytest.raises(KafkaError) as refused:
            await admin.drain_broker(1)
        assert refused.value.code is ErrorCode.BROKER_ID_NOT_REGISTERED


async def test_a_client_moves_and_cancels(four: Mesh) -> None:
    topic_id = await four.create("t", 1, 1)
    leader = four.brokers[2].hosted_replicas.image.topics[topic_id].partitions[0].leader
    adding = leader % 4 + 1
    await limit(four, 1)
    for _ in range(2):
        assert (await four.produce("t", batch(10_000), via=leader)).error_code == 0
    moved: list[tuple[int, int]] = []
    async with AdminClient([f"127.0.0.1:{four.ports[2]}"]) as admin:
        results = await admin.alter_partition_reassignments({("t", 0): [adding], ("t", 9): [1], ("no", 0): None})
        codes = {where: error and error.code for where, error in results.items()}
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert codes == {("t", 0): None, ("t", 9): unknown, ("no", 0): unknown}
        running = await admin.list_partition_reassignments([("t", 0), ("t", 9), ("no", 0)])
        assert running == {("t", 0): ((adding, leader), (adding,), (leader,))}
        assert await admin.alter_partition_reassignments({("t", 0): None}) == {("t", 0): None}
        await admin.wait_reassigned([("t", 0)], lambda done, total: moved.append((done, total)))
        assert moved == [(1, 1)]
