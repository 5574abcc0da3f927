"""Consumer services of one group: streams share partitions, commit delivered records and take over partitions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from kipmesh_consumer.node import ConsumerNode

from kipmesh.client import AdminClient, Consumer, NewTopic, Producer
from kipmesh.cluster import LocalCluster
from kipmesh.core.config.node import ConsumerServiceConfig
from kipmesh.testing import until

pytestmark = pytest.mark.xdist_group("consumer-groups")
PARTITIONS = 4


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    config = {"group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "1"}
    with LocalCluster(mode="single", followers=0, config=config) as cluster:
        yield cluster.bootstrap


@asynccontextmanager
async def service(bootstrap: str, group: str | None, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    values = {
        "bootstrap.servers": bootstrap,
        "heartbeat.interval.ms": 50,
        "session.timeout.ms": 120_000,
        "auto.offset.reset": "earliest",
        **({} if group is None else {"group.id": group}),
        **{key.replace("_", "."): value for key, value in config.items()},
    }
    node = ConsumerNode(ConsumerServiceConfig.parse(values))
    await node.start()
    try:
        await until(lambda: node.ready, "the service")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{node.http_port}", timeout=60) as http:
            yield http
    finally:
        await node.stop()


class Reader:
    """Reads one stream inside `async with`."""

    def __init__(self, http: httpx.AsyncClient, topic: str) -> None:
        self._http = http
        self._topic = topic
        self.records: list[dict[str, Any]] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Reader:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        async with self._http.stream("GET", f"/v1/topics/{self._topic}/records") as response:
            async for line in response.aiter_lines():
                self.records.append(json.loads(line))

    @property
    def partitions(self) -> set[int]:
        return {record["partition"] for record in self.records}


async def create_topic(bootstrap: str, name: str) -> str:
    async with AdminClient(bootstrap) as admin:
        await admin.create_topics([NewTopic(name, PARTITIONS, 1)])
    return name


async def produce(bootstrap: str, topic: str, count: int) -> None:
    async with Producer(bootstrap) as producer:
        for number in range(count):
            await producer.send(topic, b"%d" % number, partition=number % PARTITIONS)


async def committed(bootstrap: str, group: str, topic: str) -> dict[int, int]:
    async with Consumer(bootstrap, group_id=group) as consumer:
        offsets = await consumer.committed([(topic, number) for number in range(PARTITIONS)])
        return {topic_partition.partition: offset for topic_partition, offset in offsets.items()}


async def assigned(http: httpx.AsyncClient) -> int:
    text = (await http.get("/metrics")).text
    (line,) = [row for row in text.splitlines() if row.startswith("kipmesh_consumer_partitions_assigned ")]
    return int(float(line.split()[1]))


async def until_assigned(count: int, *clients: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while [await assigned(http) for http in clients] != [count] * len(clients):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_services_share_partitions_and_take_over_those_of_a_stopped_service(bootstrap: str) -> None:
    topic = await create_topic(bootstrap, "shared")
    async with service(bootstrap, "shared") as first_service, AsyncExitStack() as stack:
        second_service = await stack.enter_async_context(service(bootstrap, "shared"))
        async with Reader(first_service, topic) as first:
            await until_assigned(4, first_service)
            second = await stack.enter_async_context(Reader(second_service, topic))
            await until_assigned(2, first_service, second_service)
            await produce(bootstrap, topic, 40)
            await until(lambda: len(first.records) + len(second.records) == 40, "all records")
            assert len(first.partitions) == len(second.partitions) == 2
            assert not first.partitions & second.partitions
            await stack.aclose()  # stops the second service
            await until_assigned(4, first_service)
            await produce(bootstrap, topic, 40)
            await until(
                lambda: len(first.records) >= 60 and len(first.partitions) == 4, "the partitions of the other service"
            )


async def test_committed_offsets_outlive_the_service(bootstrap: str) -> None:
    topic = await create_topic(bootstrap, "outlive")
    await produce(bootstrap, topic, 40)
    url = f"/v1/topics/{topic}/records"
    async with service(bootstrap, "outlive") as http:
        first = [json.loads(line) for line in (await http.get(url, params={"limit": 13})).text.splitlines()]
    assert sum((await committed(bootstrap, "outlive", topic)).values()) == len(first) == 13
    async with service(bootstrap, "outlive") as http:
        # A stream with another start does not join the group.
        assert len((await http.get(url, params={"from": "earliest"})).text.splitlines()) == 40
        response = await http.get(url, params={"limit": 27}, headers={"last-event-id": "0:0,1:0,2:0,3:0"})
        rest = [json.loads(line) for line in response.text.splitlines()]
    assert sorted((record["partition"], record["offset"]) for record in first + rest) == [
        (partition, offset) for partition in range(PARTITIONS) for offset in range(10)
    ]
    assert await committed(bootstrap, "outlive", topic) == dict.fromkeys(range(PARTITIONS), 10)


async def test_records_sent_to_disconnected_reader_are_not_committed(bootstrap: str) -> None:
    topic = await create_topic(bootstrap, "gone")
    await produce(bootstrap, topic, 40)
    async with service(bootstrap, "gone", auto_commit_interval_ms=600_000) as http:
        async with Reader(http, topic) as reader:
            await until(lambda: len(reader.records) == 40, "all records")
        await until_assigned(0, http)
        assert await committed(bootstrap, "gone", topic) == {}
        async with Reader(http, topic) as reader:
            await until(lambda: len(reader.records) == 40, "all records again")


async def test_idle_stream_commits_at_the_auto_commit_interval(bootstrap: str) -> None:
    topic = await create_topic(bootstrap, "interval")
    await produce(bootstrap, topic, 40)
    config = {"auto_commit_interval_ms": 50, "stream_heartbeat_interval_ms": 50}
    async with service(bootstrap, "interval", **config) as http, Reader(http, topic) as reader:
        await until(lambda: len(reader.records) == 40, "all records")
        async with asyncio.timeout(60):
            while await committed(bootstrap, "interval", topic) != dict.fromkeys(range(PARTITIONS), 10):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_service_without_auto_commit_commits_no_offsets(bootstrap: str) -> None:
    topic = await create_topic(bootstrap, "by-hand")
    await produce(bootstrap, topic, 8)
    async with service(bootstrap, "by-hand", enable_auto_commit=False) as http:
        response = await http.get(f"/v1/topics/{topic}/records", params={"limit": 8})
    assert len(response.text.splitlines()) == 8
    assert await committed(bootstrap, "by-hand", topic) == {}


@pytest.mark.parametrize(
    ("group", "parameters"),
    [
        (None, {"from": "committed"}),
        ("errors", {"partition": 1}),
        ("errors", {"from": "committed", "follow": "false"}),
    ],
)
async def test_parameters_that_conflict_with_the_group_are_rejected(
    bootstrap: str, group: str | None, parameters: dict[str, Any]
) -> None:
    async with AdminClient(bootstrap) as admin:
        if "errors" not in {topic.name for topic in await admin.list_topics()}:
            await create_topic(bootstrap, "errors")
    async with service(bootstrap, group) as http:
        response = await http.get("/v1/topics/errors/records", params=parameters)
    assert response.status_code == 400
    assert response.json()["error"]["name"] == "INVALID_REQUEST"
    assert "from=committed" in response.json()["error"]["message"]


async def test_group_error_ends_the_stream_with_an_error_object(bootstrap: str) -> None:
    topic = await create_topic(bootstrap, "protocols")
    async with service(bootstrap, "protocols") as first_service, Reader(first_service, topic):
        await until_assigned(PARTITIONS, first_service)
        async with service(bootstrap, "protocols", partition_assignment_strategy="roundrobin") as second_service:
            response = await second_service.get(f"/v1/topics/{topic}/records")
    assert json.loads(response.text)["error"]["name"] == "INCONSISTENT_GROUP_PROTOCOL"
