"""DescribeProducers: idempotent producers of a partition on leaders and followers."""

import asyncio

from confluent_kafka import Producer

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.messages.table import find_api
from kipmesh.testing import produced_batch
from tests.unit.broker.broker_cluster import eventually
from tests.unit.broker.kafka_cluster import TopicPartition, kafka_cluster

TIMESTAMP = 1_700_000_000_000


async def describe(cluster, via: int, topic: str, *partitions: int) -> list:
    # The response describes repeated partitions once.
    request = m.DescribeProducersRequest([m.DescribeProducersTopic(topic, partitions * 2)])
    (found,) = (await cluster.call(via, "DescribeProducers", request)).topics
    assert (found.name, [partition.partition_index for partition in found.partitions]) == (topic, list(partitions))
    assert all(bool(partition.error_message) is bool(partition.error_code) for partition in found.partitions)
    return [(partition.error_code, sorted(partition.active_producers)) for partition in found.partitions]


async def test_leaders_and_followers_describe_active_producers(cluster) -> None:
    topic_id = await cluster.create("t", partitions=2)
    for producer in ((5, 0, 0), (5, 0, 2), (6, 3, 0), (-1, -1, -1), (5, 1, 0), (5, 1, 2)):
        assert (await cluster.produce("t", produced_batch([b"a", b"b"], producer=producer))).error_code == 0
    known = [m.ActiveProducer(5, 1, 3, TIMESTAMP + 1, -1, -1), m.ActiveProducer(6, 3, 1, TIMESTAMP + 1, -1, -1)]
    assert await describe(cluster, 1, "t", 1, 0) == [(0, []), (0, known)]
    logs = [cluster.brokers[broker].hosted_replicas.get(topic_id, 0).log for broker in (2, 3)]
    await eventually(lambda: all(log.log_end_offset == 12 for log in logs), "the followers have all records")
    assert await describe(cluster, 2, "t", 0) == await describe(cluster, 3, "t", 0) == [(0, known)]


async def test_describe_producers_refuses_unknown_and_remote_partitions(cluster) -> None:
    await cluster.create("t", replication_factor=1, min_insync_replicas="1")
    unknown = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, [])
    (host,) = cluster.controller.image.topic_by_name("t").partitions[0].replicas
    for broker in (1, 2, 3):
        code = 0 if broker == host else ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert await describe(cluster, broker, "t", 0, 1, -1) == [(code, []), unknown, unknown]
    assert await describe(cluster, 1, "u", 0) == [unknown]
    assert await describe(cluster, 1, "a/b", 0) == [(ErrorCode.INVALID_TOPIC_EXCEPTION, [])]


async def test_describe_producers_serves_kafka_python_client(tmp_path) -> None:
    async with kafka_cluster(tmp_path) as cluster:
        await cluster.create("t")
        producer = Producer({"bootstrap.servers": cluster.bootstrap(1), "enable.idempotence": True})
        producer.produce("t", b"a", timestamp=TIMESTAMP)
        assert await asyncio.to_thread(producer.flush, 60) == 0
        partition = TopicPartition("t", 0)
        (known,) = (await cluster.kafka_python("describe_producers", [partition]))[partition].active_producers
        assert tuple(known) == (known.producer_id, 0, 0, TIMESTAMP, -1, -1)
        assert await describe(cluster, 1, "t", 0) == [(0, [tuple(known)])]


def test_error_response_has_error_for_each_partition() -> None:
    request = m.DescribeProducersRequest([m.DescribeProducersTopic("t", [4])])
    assert find_api("DescribeProducers").error_response(request, -1, "no").topics == (("t", ((4, -1, "no", ()),)),)
