"""DescribeProducers: what leaders and followers know of idempotent producers."""

import asyncio

from confluent_kafka import Producer

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.messages.table import find_api
from kipmesh.testing import produced_batch
from tests.unit.broker.conftest_broker import eventually
from tests.unit.broker.kafka_mesh import TopicPartition, kafka_mesh

TIMESTAMP = 1_700_000_000_000


async def describe(mesh, via: int, topic: str, *partitions: int) -> list:
    request = m.DescribeProducersRequest([m.DescribeProducersTopic(topic, partitions * 2)])  # described once
    (found,) = (await mesh.call(via, "DescribeProducers", request)).topics
    assert (found.name, [one.partition_index for one in found.partitions]) == (topic, list(partitions))
    assert all(bool(one.error_message) is bool(one.error_code) for one in found.partitions)
    return [(one.error_code, sorted(one.active_producers)) for one in found.partitions]


async def test_producers_of_a_partition(mesh) -> None:
    topic_id = await mesh.create("t", partitions=2)
    for producer in ((5, 0, 0), (5, 0, 2), (6, 3, 0), (-1, -1, -1), (5, 1, 0), (5, 1, 2)):
        assert (await mesh.produce("t", produced_batch([b"a", b"b"], producer=producer))).error_code == 0
    known = [m.ActiveProducer(5, 1, 3, TIMESTAMP + 1, -1, -1), m.ActiveProducer(6, 3, 1, TIMESTAMP + 1, -1, -1)]
    assert await describe(mesh, 1, "t", 1, 0) == [(0, []), (0, known)]
    logs = [mesh.brokers[broker].hosted_replicas.get(topic_id, 0).log for broker in (2, 3)]
    await eventually(lambda: all(log.log_end_offset == 12 for log in logs), "followers have all")
    assert await describe(mesh, 2, "t", 0) == await describe(mesh, 3, "t", 0) == [(0, known)]


async def test_partitions_that_are_not_here(mesh) -> None:
    await mesh.create("t", replication_factor=1, min_insync_replicas="1")
    unknown = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, [])
    (host,) = mesh.controller.image.topic_by_name("t").partitions[0].replicas
    for broker in (1, 2, 3):
        code = 0 if broker == host else ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert await describe(mesh, broker, "t", 0, 1, -1) == [(code, []), unknown, unknown]
    assert await describe(mesh, 1, "u", 0) == [unknown]
    assert await describe(mesh, 1, "a/b", 0) == [(ErrorCode.INVALID_TOPIC_EXCEPTION, [])]


async def test_clients_of_the_kafka_protocol(tmp_path) -> None:
    async with kafka_mesh(tmp_path) as mesh:
        await mesh.create("t")
        producer = Producer({"bootstrap.servers": mesh.kafka(1), "enable.idempotence": True})
        producer.produce("t", b"a", timestamp=TIMESTAMP)
        assert await asyncio.to_thread(producer.flush, 60) == 0
        partition = TopicPartition("t", 0)
        (known,) = (await mesh.python("describe_producers", [partition]))[partition].active_producers
        assert tuple(known) == (known.producer_id, 0, 0, TIMESTAMP, -1, -1)
        assert await describe(mesh, 1, "t", 0) == [(0, [tuple(known)])]


def test_an_error_of_the_whole_request_is_that_of_each_partition() -> None:
    request = m.DescribeProducersRequest([m.DescribeProducersTopic("t", [4])])
    assert find_api("DescribeProducers").error_response(request, -1, "no").topics == (("t", ((4, -1, "no", ()),)),)
