"""`kafka_consumergroup_lag`: known where the group's coordinator has a replica of the partition, counted where not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.record_batch import build
from kipmesh.testing import until as eventually
from tests.unit.broker.conftest_broker import Mesh

GROUP = "readers"
RECORDS = 3
BATCH = build([(None, b"v")] * RECORDS, base_offset=0, leader_epoch=-1, timestamp_ms=1_700_000_000_000)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    it = Mesh(tmp_path, **{"offsets.topic.num.partitions": 1})
    await it.start()
    yield it
    await it.stop()


async def coordinator(mesh: Mesh) -> int:
    async with asyncio.timeout(20):
        while True:
            request = m.FindCoordinatorRequest(coordinator_keys=[GROUP])
            (found,) = (await mesh.call(1, "FindCoordinator", request, "Groups")).coordinators
            if not found.error_code:
                return int(found.node_id)
            await asyncio.sleep(0.02)


async def create(mesh: Mesh, name: str, *replicas: int) -> None:
    """A topic whose one partition is on these brokers, the first leads, with records."""
    topic = m.CreatableTopic(name, -1, -1, [m.CreatableReplicaAssignment(0, replicas)])
    (result,) = (await mesh.call(1, "CreateTopics", m.CreateTopicsRequest([topic], 10_000), "Admin")).topics
    assert result.error_code == 0, result
    for node in mesh.brokers.values():
        await eventually(lambda node=node: node.hosted_replicas.image.topic_by_name(name), f"{name} known")

    def is_led() -> bool:
        replica = mesh.brokers[replicas[0]].hosted_replicas.get(result.topic_id, 0)
        return replica is not None and replica.leader is not None

    await eventually(is_led, f"{name} led")
    answer = await mesh.produce(name, BATCH, via=replicas[0])
    assert answer.error_code == 0, answer


async def commit(mesh: Mesh, broker_id: int, topic: str, offset: int) -> None:
    partitions = [m.OffsetCommitRequestPartition(0, offset, -1, "")]
    request = m.OffsetCommitRequest(GROUP, topics=[m.OffsetCommitRequestTopic(topic, partitions)])
    again = {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE}
    async with asyncio.timeout(20):
        while True:
            (answer,) = (await mesh.call(broker_id, "OffsetCommit", request, "Groups")).topics
            if answer.partitions[0].error_code not in again:
                break
            await asyncio.sleep(0.02)
    assert answer.partitions[0].error_code == 0


async def test_lag_by_partition(mesh: Mesh) -> None:
    here = await coordinator(mesh)
    other = next(broker_id for broker_id in mesh.brokers if broker_id != here)
    await create(mesh, "led", here)
    await create(mesh, "followed", other, here)
    await create(mesh, "apart", other)
    await commit(mesh, here, "led", 1)
    await commit(mesh, here, "followed", RECORDS)
    await commit(mesh, here, "apart", 0)
    registries = {broker_id: node.registry for broker_id, node in mesh.brokers.items()}

    def lag(topic: str, broker_id: int = here) -> float | None:
        labels = {"group": GROUP, "topic": topic, "partition": "0"}
        return registries[broker_id].get_sample_value("kafka_consumergroup_lag", labels)

    def unknown(broker_id: int) -> float | None:
        return registries[broker_id].get_sample_value("kipmesh_consumergroup_unknown_lags")

    # A follower is told what is committed after those who wrote it.
    await eventually(lambda: lag("followed") == 0, "known from the follower")
    assert (lag("led"), lag("followed"), lag("apart"), unknown(here)) == (RECORDS - 1, 0, None, 1)
    assert (lag("led", other), lag("followed", other), unknown(other)) == (None, None, 0)
    assert (await mesh.produce("followed", BATCH, via=other)).error_code == 0
    await eventually(lambda: lag("followed") == RECORDS, "the follower is told of the records")
    await commit(mesh, here, "led", RECORDS + 7)
    assert lag("led") == 0
    await mesh.call(
        here, "DeleteTopics", m.DeleteTopicsRequest([m.DeleteTopicState("led")], timeout_ms=10_000), "Admin"
    )
    await eventually(lambda: lag("led") is None, "the topic is gone")
    assert unknown(here) in (1, 2)  # until its offsets are gone as well
    await eventually(lambda: unknown(here) == 1, "and its offsets")
