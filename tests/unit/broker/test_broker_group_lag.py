"""`kafka_consumergroup_lag` of partitions with a replica on the coordinator; a count of the other partitions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.record_batch import build
from kipmesh.testing import until as eventually
from tests.unit.broker.broker_cluster import BrokerCluster

GROUP = "readers"
RECORDS = 3
BATCH = build([(None, b"v")] * RECORDS, base_offset=0, leader_epoch=-1, timestamp_ms=1_700_000_000_000)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[BrokerCluster]:
    running = BrokerCluster(tmp_path, **{"offsets.topic.num.partitions": 1})
    await running.start()
    yield running
    await running.stop()


async def coordinator(cluster: BrokerCluster) -> int:
    async with asyncio.timeout(20):
        while True:
            request = m.FindCoordinatorRequest(coordinator_keys=[GROUP])
            (found,) = (await cluster.call(1, "FindCoordinator", request, "Groups")).coordinators
            if not found.error_code:
                return int(found.node_id)
            await asyncio.sleep(0.02)


async def create(cluster: BrokerCluster, name: str, *replicas: int) -> None:
    """Create a topic with one partition on these brokers, led by the first, and produce RECORDS records."""
    topic = m.CreatableTopic(name, -1, -1, [m.CreatableReplicaAssignment(0, replicas)])
    (result,) = (await cluster.call(1, "CreateTopics", m.CreateTopicsRequest([topic], 10_000), "Admin")).topics
    assert result.error_code == 0, result
    for node in cluster.brokers.values():
        await eventually(lambda node=node: node.hosted_replicas.image.topic_by_name(name), f"topic {name} in the image")

    def is_led() -> bool:
        replica = cluster.brokers[replicas[0]].hosted_replicas.get(result.topic_id, 0)
        return replica is not None and replica.leader is not None

    await eventually(is_led, f"a leader of {name}")
    response = await cluster.produce(name, BATCH, via=replicas[0])
    assert response.error_code == 0, response


async def commit(cluster: BrokerCluster, broker_id: int, topic: str, offset: int) -> None:
    partitions = [m.OffsetCommitRequestPartition(0, offset, -1, "")]
    request = m.OffsetCommitRequest(GROUP, topics=[m.OffsetCommitRequestTopic(topic, partitions)])
    retriable = {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE}
    async with asyncio.timeout(20):
        while True:
            (response,) = (await cluster.call(broker_id, "OffsetCommit", request, "Groups")).topics
            if response.partitions[0].error_code not in retriable:
                break
            await asyncio.sleep(0.02)
    assert response.partitions[0].error_code == 0


async def test_coordinator_exports_lag_of_partitions_it_hosts(cluster: BrokerCluster) -> None:
    here = await coordinator(cluster)
    other = next(broker_id for broker_id in cluster.brokers if broker_id != here)
    await create(cluster, "led", here)
    await create(cluster, "followed", other, here)
    await create(cluster, "apart", other)
    await commit(cluster, here, "led", 1)
    await commit(cluster, here, "followed", RECORDS)
    await commit(cluster, here, "apart", 0)
    registries = {broker_id: node.registry for broker_id, node in cluster.brokers.items()}

    def lag(topic: str, broker_id: int = here) -> float | None:
        labels = {"group": GROUP, "topic": topic, "partition": "0"}
        return registries[broker_id].get_sample_value("kafka_consumergroup_lag", labels)

    def unknown(broker_id: int) -> float | None:
        return registries[broker_id].get_sample_value("kipmesh_consumergroup_unknown_lags")

    # The follower receives the high watermark after the producer receives its response.
    await eventually(lambda: lag("followed") == 0, "the lag of the follower")
    assert (lag("led"), lag("followed"), lag("apart"), unknown(here)) == (RECORDS - 1, 0, None, 1)
    assert (lag("led", other), lag("followed", other), unknown(other)) == (None, None, 0)
    assert (await cluster.produce("followed", BATCH, via=other)).error_code == 0
    await eventually(lambda: lag("followed") == RECORDS, "the follower has the new records")
    await commit(cluster, here, "led", RECORDS + 7)
    assert lag("led") == 0
    await cluster.call(
        here, "DeleteTopics", m.DeleteTopicsRequest([m.DeleteTopicState("led")], timeout_ms=10_000), "Admin"
    )
    await eventually(lambda: lag("led") is None, "the topic is deleted")
    assert unknown(here) in (1, 2)  # 2 until the offsets are deleted
    await eventually(lambda: unknown(here) == 1, "the offsets are deleted")


async def test_metrics_are_exported_while_a_topic_is_being_deleted(cluster: BrokerCluster) -> None:
    here = await coordinator(cluster)
    await create(cluster, "led", here)
    await commit(cluster, here, "led", 1)
    node = cluster.brokers[here]
    image = node.hosted_replicas.image
    topic = image.topics.pop(image.topic_names["led"])  # a scrape on another thread may see this step of the deletion
    try:
        values = {metric.name: [sample.value for sample in metric.samples] for metric in node.parts.groups.metrics()}
    finally:
        image.topics[topic.topic_id] = topic
    assert values["kafka_consumergroup_lag"] == [RECORDS - 1]
