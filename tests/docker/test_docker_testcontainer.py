"""`KipmeshContainer`: a cluster in a container whose brokers advertise the mapped ports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from kipmesh.client import NewTopic
from kipmesh.client.sync import AdminClient, Consumer, Producer
from tests.docker.docker_of_tests import docker

if TYPE_CHECKING:
    from kipmesh.testing.containers import KipmeshContainer

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def without_reaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the reaper, whose image may be unavailable. The tests remove their containers themselves."""
    testcontainers = pytest.importorskip("testcontainers.core.config")
    monkeypatch.setattr(testcontainers.testcontainers_config, "ryuk_disabled", True)


@pytest.fixture
def cluster(image: Callable[[str], str], without_reaper: None) -> Iterator[KipmeshContainer]:
    from kipmesh.testing.containers import KipmeshContainer

    with KipmeshContainer(image("single"), brokers=2, config={"num.partitions": "2"}) as container:
        yield container


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_clients_of_both_protocols_read_the_records(cluster: KipmeshContainer) -> None:
    bootstrap = cluster.get_bootstrap_server()
    with AdminClient(bootstrap) as admin:
        admin.create_topics([NewTopic("greetings", 2, 2)])
    with Producer(bootstrap) as producer:
        for number in range(20):
            producer.send("greetings", b"%d" % number, partition=number % 2).result()
    with Consumer(bootstrap, group_id="readers", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["greetings"])
        values: list[bytes] = []
        while len(values) < 20:
            values += [record.value for record in consumer.poll(timeout_ms=5000) if record.value is not None]
    assert sorted(map(int, values)) == list(range(20))
    assert _read_as_kafka(cluster.get_kafka_bootstrap_server(), "greetings", 20) == list(range(20))
    container = cluster.get_wrapped_container()
    docker("stop", "--time", "30", container.id)
    assert docker("inspect", "--format", "{{.State.ExitCode}}", container.id) == "0"


def _read_as_kafka(bootstrap: str, topic: str, count: int) -> list[int]:
    """Read the values of both partitions with aiokafka, without a group."""
    import asyncio

    from aiokafka import AIOKafkaConsumer, TopicPartition

    async def read() -> list[int]:
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", group_id=None)
        await consumer.start()
        try:
            consumer.assign([TopicPartition(topic, partition) for partition in range(2)])
            await consumer.seek_to_beginning()
            found: list[int] = []
            while len(found) < count:
                batches = await consumer.getmany(timeout_ms=1000)
                found += [int(record.value) for records in batches.values() for record in records]
            return sorted(found)
        finally:
            await consumer.stop()

    return asyncio.run(read())
