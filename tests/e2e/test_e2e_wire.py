"""Clients of the Kafka protocol (aiokafka) and gRPC clients on one cluster of processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition

from kipmesh.client.sync import Consumer, Producer
from kipmesh.cluster import LocalCluster
from tests.command import run_command

PARTITION = TopicPartition("flights", 0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as running:
        yield running


async def _produce(bootstrap: str, values: list[bytes], **options: object) -> list[int]:
    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, **options
    ) as producer:
        sent = [await producer.send("flights", value, partition=0) for value in values]
        return [(await delivery).offset for delivery in sent]


async def _consume(bootstrap: str, number: int, offset: int = 0) -> list[ConsumerRecord[bytes, bytes]]:
    records: list[ConsumerRecord[bytes, bytes]] = []
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False) as consumer:
        consumer.assign([PARTITION])
        consumer.seek(PARTITION, offset)
        async with asyncio.timeout(60):
            while len(records) < number:
                records.append(await consumer.getone())
    return records


async def test_records_written_by_one_protocol_are_read_by_the_other(cluster: LocalCluster) -> None:
    bootstrap = cluster.kafka_bootstrap
    assert bootstrap is not None
    assert len(bootstrap.split(",")) == 3
    assert json.loads((cluster.dir / "cluster.json").read_text())["kafka_bootstrap"] == bootstrap
    assert await _produce(bootstrap, [b"by kafka %d" % index for index in range(100)]) == list(range(100))

    def by_grpc() -> list[bytes]:
        with Producer(cluster.bootstrap) as producer:
            producer.send("flights", b"by grpc" * 10_000, partition=0).result(60)
        with Consumer(cluster.bootstrap) as consumer:
            consumer.assign([("flights", 0)])
            consumer.seek(("flights", 0), 0)
            found: list[bytes] = []
            while len(found) < 101:
                found += [record.value or b"" for record in consumer.poll(1000)]
            return found

    values = await asyncio.to_thread(by_grpc)
    assert values == [b"by kafka %d" % index for index in range(100)] + [b"by grpc" * 10_000]
    assert [record.value for record in await _consume(bootstrap, 101)] == values


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
async def test_compressed_batches_are_read_back(cluster: LocalCluster, compression: str) -> None:
    bootstrap = str(cluster.kafka_bootstrap)
    values = [b"%d" % index * 100 for index in range(50)]
    offsets = await _produce(bootstrap, values, compression_type=compression)
    assert [record.value for record in await _consume(bootstrap, 50, offsets[0])] == values


async def test_idempotent_producer_follows_leadership_after_a_leader_is_killed(cluster: LocalCluster) -> None:
    bootstrap = str(cluster.kafka_bootstrap)
    before = await _produce(bootstrap, [b"before"])
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True) as producer:
        await producer.send_and_wait("flights", b"at first", partition=0)
        metadata = await producer.client.fetch_all_metadata()
        leader = metadata.leader_for_partition(PARTITION)
        name = next(node.name for node in cluster.nodes if node.node_id == leader)
        cluster.kill(name)
        offsets = [(await producer.send_and_wait("flights", b"%d" % index, partition=0)).offset for index in range(20)]
        assert offsets == list(range(before[0] + 2, before[0] + 22))
        cluster.start(name)
    records = await _consume(bootstrap, 22, before[0])
    assert [record.value for record in records] == [b"before", b"at first", *(b"%d" % index for index in range(20))]


def test_status_and_metrics_show_the_kafka_listener(cluster: LocalCluster) -> None:
    done = run_command("local", "status", "--dir", cluster.dir)
    assert f"kafka bootstrap: {cluster.kafka_bootstrap}\n" in done.stdout
    asyncio.run(_produce(str(cluster.kafka_bootstrap), [b"one more"]))
    texts = [httpx.get(f"http://{node.http}/metrics", timeout=60).text for node in cluster.nodes if node.role.is_broker]
    assert any('kafka_network_requestmetrics_requests_total{request="Produce"' in text for text in texts)
    assert all('kafka_server_socket_server_metrics_connection_count{listener="KAFKA"}' in text for text in texts)
