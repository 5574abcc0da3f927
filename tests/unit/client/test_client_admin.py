"""The admin client against in-memory brokers."""

from __future__ import annotations

import pytest

from kipmesh.client import (
    TIMESTAMP_EARLIEST,
    TIMESTAMP_LATEST,
    TIMESTAMP_MAX,
    AdminClient,
    AlterOperation,
    ConfigAlteration,
    ConfigResource,
    NewTopic,
    ResourceType,
    TopicPartition,
)
from kipmesh.client.records import encode_batch
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.testing.fake_broker import FakeCluster

FAST = {"retry.backoff.ms": 5, "retry.backoff.max.ms": 20}


async def test_topics_are_created_described_extended_and_deleted() -> None:
    async with FakeCluster(2) as cluster, AdminClient(cluster.bootstrap, **FAST) as admin:
        (created,) = await admin.create_topics([NewTopic("t", 3, configs={"retention.ms": "7"})])
        assert (created.name, created.num_partitions) == ("t", 3)
        assert created.topic_id == cluster.topics["t"].topic_id
        (described,) = await admin.describe_topics(["t"])
        assert [each.leader_id for each in described.partitions.values()] == [1, 2, 1]
        with pytest.raises(KafkaError) as caught:
            await admin.create_topics([NewTopic("u"), NewTopic("t")])
        assert caught.value.code is ErrorCode.TOPIC_ALREADY_EXISTS
        assert [topic.name for topic in await admin.list_topics()] == ["t", "u"]
        await admin.create_partitions({"t": 5})
        assert len((await admin.describe_topics(["t"]))[0].partitions) == 5
        with pytest.raises(KafkaError) as caught:
            await admin.create_partitions({"t": 4})
        assert caught.value.code is ErrorCode.INVALID_PARTITIONS
        await admin.create_topics([NewTopic("v")], validate_only=True)
        assert "v" not in cluster.topics
        await admin.delete_topics(["t", "u"])
        assert await admin.list_topics() == []
        for call in (admin.delete_topics(["t"]), admin.describe_topics(["t"])):
            with pytest.raises(KafkaError) as caught:
                await call
            assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_configs_are_altered_and_described() -> None:
    async with FakeCluster() as cluster, AdminClient(cluster.bootstrap, **FAST) as admin:
        topic = ConfigResource(ResourceType.TOPIC, "t")
        await admin.create_topics([NewTopic("t", configs={"retention.ms": "7", "segment.ms": "9"})])
        changes = [
            ConfigAlteration("retention.ms", "8"),
            ConfigAlteration("segment.ms", None, AlterOperation.DELETE),
        ]
        await admin.alter_configs({topic: changes}, validate_only=True)
        assert (await admin.describe_configs([topic], keys=["segment.ms"]))[topic]["segment.ms"].value == "9"
        await admin.alter_configs({topic: changes})
        found = (await admin.describe_configs([topic]))[topic]
        assert {name: each.value for name, each in found.items()} == {"retention.ms": "8"}
        with pytest.raises(KafkaError):
            await admin.describe_configs([ConfigResource(ResourceType.TOPIC, "nope")])


async def test_offsets_are_listed_and_records_deleted() -> None:
    async with FakeCluster(2) as cluster, AdminClient(cluster.bootstrap, **FAST) as admin:
        cluster.create_topic("t", 2)
        log = cluster.topics["t"].partitions[0]
        for timestamp in (100, 300, 200):
            log.append(encode_batch([(None, b"x")] * 10, timestamp_ms=timestamp))
        tp = TopicPartition("t", 0)
        for timestamp, offset in ((TIMESTAMP_EARLIEST, 0), (TIMESTAMP_LATEST, 30), (TIMESTAMP_MAX, 10), (150, 10)):
            found = (await admin.list_offsets({tp: timestamp}))[tp]
            assert found is not None
            assert found.offset == offset
        assert (await admin.list_offsets({tp: 999}))[tp] is None
        assert await admin.delete_records({tp: 12, ("t", 1): -1}) == {tp: 12, TopicPartition("t", 1): 0}
        with pytest.raises(KafkaError) as caught:
            await admin.delete_records({tp: 99})
        assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE


async def test_describe_cluster_returns_all_brokers() -> None:
    async with FakeCluster(3) as cluster, AdminClient(cluster.bootstrap, **FAST) as admin:
        described = await admin.describe_cluster()
        assert described.cluster_id == "fake"
        assert [node.node_id for node in described.brokers] == [1, 2, 3]
        with pytest.raises(KafkaError) as caught:
            await admin.describe_quorum()
        assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION


async def test_admin_requests_are_retried_with_another_broker_and_after_errors() -> None:
    async with FakeCluster(2) as cluster, AdminClient(cluster.bootstrap, **FAST) as admin:
        await cluster.brokers[1].stop()
        cluster.inject("CreateTopics", ErrorCode.NOT_CONTROLLER, times=2)
        cluster.inject("CreateTopics", None)
        await admin.create_topics([NewTopic("t")])
        assert "t" in cluster.topics


async def test_admin_calls_end_at_api_timeout() -> None:
    async with FakeCluster() as cluster, AdminClient(cluster.bootstrap, **FAST, default_api_timeout_ms=500) as admin:
        cluster.inject("CreateTopics", ErrorCode.NOT_CONTROLLER, times=1000)
        with pytest.raises(KafkaError) as caught:
            await admin.create_topics([NewTopic("t")])
        assert caught.value.code in (ErrorCode.NOT_CONTROLLER, ErrorCode.REQUEST_TIMED_OUT)
    with pytest.raises(KafkaError, match=r"127\.0\.0\.1:1"):
        await AdminClient("127.0.0.1:1", request_timeout_ms=100).start()
