"""HTTP interface of the consumer service, with a cluster in this process."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator, Sequence

import httpx
import pytest
from kipmesh_consumer.node import ConsumerNode

from kipmesh.client import AdminClient, NewTopic, Producer
from kipmesh.cluster import LocalCluster
from kipmesh.core.config.node import ConsumerServiceConfig
from kipmesh.testing import until

pytestmark = pytest.mark.xdist_group("consumer-service")

STREAMS_MAX = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    # Brokers have the key `fetch.max.bytes`, too. A small value does not affect them.
    config = {"streams.max": STREAMS_MAX, "stream.heartbeat.interval.ms": 300, "fetch.max.bytes": 200_000}
    with LocalCluster(mode="single", followers=0, consumers=1, config=config) as local_cluster:
        yield local_cluster


@pytest.fixture
async def http(cluster: LocalCluster) -> AsyncIterator[httpx.AsyncClient]:
    address = cluster.node("consumer-1").http
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
        yield client


async def make_topic(cluster: LocalCluster, name: str, values: Sequence[bytes], partitions: int = 1) -> str:
    async with AdminClient(cluster.bootstrap) as admin:
        await admin.create_topics([NewTopic(name, partitions, 1)])
    await produce(cluster, name, values, partitions)
    return name


async def produce(cluster: LocalCluster, name: str, values: Sequence[bytes], partitions: int = 1) -> None:
    async with Producer(cluster.bootstrap) as producer:
        sent = [await producer.send(name, value, partition=i % partitions) for i, value in enumerate(values)]
        await producer.flush()
        for delivery in sent:
            await delivery


def lines(response: httpx.Response) -> list[dict[str, object]]:
    return [json.loads(line) for line in response.text.splitlines()]


async def test_ndjson_stream_ends_at_end_of_topic(cluster: LocalCluster, http: httpx.AsyncClient) -> None:
    topic = await make_topic(cluster, "all", [b"%d" % number for number in range(2000)], partitions=3)
    response = await http.get(f"/v1/topics/{topic}/records")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/x-ndjson"
    records = lines(response)
    assert sorted(int(str(record["value"])) for record in records) == list(range(2000))
    for partition in range(3):
        offsets = [record["offset"] for record in records if record["partition"] == partition]
        assert offsets == list(range(len(offsets)))
    assert set(records[0]) == {
        *("topic", "partition", "offset", "timestamp", "timestamp_type", "key", "value", "headers", "leader_epoch")
    }


async def test_parameters_select_start_partition_and_limit(cluster: LocalCluster, http: httpx.AsyncClient) -> None:
    topic = await make_topic(cluster, "some", [b"%d" % number for number in range(20)], partitions=2)
    url = f"/v1/topics/{topic}/records"
    assert len(lines(await http.get(url, params={"limit": 7}))) == 7
    found = lines(await http.get(url, params={"from": "0:8,1:9"}))
    assert sorted((record["partition"], record["offset"]) for record in found) == [(0, 8), (0, 9), (1, 9)]
    found = lines(await http.get(url, params={"partition": 1, "from": "earliest"}))
    assert [record["offset"] for record in found] == list(range(10))
    assert lines(await http.get(url, params={"from": "latest"})) == []
    assert lines(await http.get(url, params={"from": "0:10"})) == []


async def test_binary_values_are_sent_as_base64(cluster: LocalCluster, http: httpx.AsyncClient) -> None:
    topic = await make_topic(cluster, "binary", [b"\xff\x00"])
    (record,) = lines(await http.get(f"/v1/topics/{topic}/records"))
    assert record["value_b64"] == "/wA="
    assert "value" not in record


@pytest.mark.parametrize(
    ("path", "status", "name"),
    [
        ("/v1/topics/missing/records", 404, "UNKNOWN_TOPIC_OR_PARTITION"),
        ("/v1/topics/errors/records?partition=1", 404, "UNKNOWN_TOPIC_OR_PARTITION"),
        ("/v1/topics/errors/records?from=0:2", 416, "OFFSET_OUT_OF_RANGE"),
        ("/v1/topics/errors/records?from=never", 400, "INVALID_REQUEST"),
        ("/v1/topics/errors/records?limit=0", 400, "INVALID_REQUEST"),
        ("/v1/topics/errors/records?format=xml", 400, "INVALID_REQUEST"),
        ("/v1/topics/errors/records?follow=perhaps", 400, "INVALID_REQUEST"),
        ("/v1/topics/errors/records?offset=1", 400, "INVALID_REQUEST"),
        ("/v1/topics?limit=1", 400, "INVALID_REQUEST"),
        ("/v1/lag?topics=errors", 400, "INVALID_REQUEST"),
        ("/v2/topics", 404, "INVALID_REQUEST"),
    ],
)
async def test_error_responses_have_status_and_kafka_name(
    cluster: LocalCluster, http: httpx.AsyncClient, path: str, status: int, name: str
) -> None:
    async with AdminClient(cluster.bootstrap) as admin:
        if "errors" not in [topic.name for topic in await admin.list_topics()]:
            await make_topic(cluster, "errors", [b"x"])
    response = await http.get(path)
    assert response.status_code == status
    assert response.json()["error"]["name"] == name
    assert response.json()["error"]["message"]


async def test_method_other_than_get_is_rejected(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/topics")
    assert response.status_code == 405
    assert response.headers["allow"] == "GET"
    assert response.json()["error"] == {
        "code": 42,
        "name": "INVALID_REQUEST",
        "message": "POST /v1/topics: method not allowed",
    }


async def test_sse_stream_follows_topic_and_resumes_at_last_event_id(
    cluster: LocalCluster, http: httpx.AsyncClient
) -> None:
    topic = await make_topic(cluster, "sse", [b"a", b"b"])
    url = f"/v1/topics/{topic}/records?follow=true"
    received: list[str] = []
    async with http.stream("GET", url, headers={"accept": "text/event-stream"}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            received.append(line)
            if line == ": keep-alive" and len(received) < 20:
                await produce(cluster, topic, [b"c"])
            if line.startswith("id: 0:3"):
                break
    values = [json.loads(line[6:])["value"] for line in received if line.startswith("data: ")]
    assert values[:2] == ["a", "b"]
    resumed = await http.get(f"/v1/topics/{topic}/records?limit=1&format=sse", headers={"last-event-id": "0:2"})
    events = resumed.text.split("\n\n")
    assert json.loads(events[0].splitlines()[1][6:])["value"] == "c"
    assert events[1] == 'event: end\ndata: {"reason":"limit"}'


async def test_timeout_ends_idle_stream(cluster: LocalCluster, http: httpx.AsyncClient) -> None:
    topic = await make_topic(cluster, "quiet", [b"a"])
    response = await http.get(f"/v1/topics/{topic}/records?follow=true&timeout_ms=400&format=sse")
    assert 'event: end\ndata: {"reason":"timeout"}' in response.text


async def test_service_returns_topics_lag_openapi_and_metrics(cluster: LocalCluster, http: httpx.AsyncClient) -> None:
    topic = await make_topic(cluster, "lagging", [b"%d" % number for number in range(10)])
    topics = {entry["name"]: entry for entry in (await http.get("/v1/topics")).json()["topics"]}
    assert topics[topic]["partitions"] == [0]
    assert (await http.get("/v1/lag", params={"topic": topic})).json() == {"partitions": [], "streams": []}
    await http.get(f"/v1/topics/{topic}/records?limit=4")
    lag = (await http.get("/v1/lag", params={"topic": topic})).json()
    assert lag["partitions"] == [{"topic": topic, "partition": 0, "position": 4, "end_offset": 10, "lag": 6}]
    async with AdminClient(cluster.bootstrap) as admin:
        await admin.delete_topics([topic])
    assert (await http.get("/v1/lag", params={"topic": topic})).json() == {"partitions": [], "streams": []}
    assert "/v1/topics/{topic}/records" in (await http.get("/openapi.json")).json()["paths"]
    assert (await http.get("/docs")).status_code == 200
    assert "kipmesh_consumer_streams_open" in (await http.get("/metrics")).text
    assert (await http.get("/healthz")).status_code == (await http.get("/readyz")).status_code == 200


async def open_streams(http: httpx.AsyncClient) -> int:
    text = (await http.get("/metrics")).text
    (line,) = [line for line in text.splitlines() if line.startswith("kipmesh_consumer_streams_open ")]
    return int(float(line.split()[1]))


async def test_metrics_count_fetches_and_open_sessions(cluster: LocalCluster, http: httpx.AsyncClient) -> None:
    topic = await make_topic(cluster, "sessions", [b"a"])
    await wait_until_streams_close(http)

    async def values() -> dict[str, float]:
        text = (await http.get("/metrics")).text
        lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("kipmesh_consumer_fetch")]
        return {name: float(value) for name, _, value in lines}

    async def wait_for_sessions(count: int) -> dict[str, float]:
        async with asyncio.timeout(60):
            while (found := await values())["kipmesh_consumer_fetch_sessions_open"] != count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return found

    before = await wait_for_sessions(0)
    url = f"/v1/topics/{topic}/records?follow=true"
    reader = await http.send(http.build_request("GET", url), stream=True)
    try:
        await wait_for_sessions(1)
    finally:
        await reader.aclose()
    full = 'kipmesh_consumer_fetches_total{kind="full"}'
    assert (await wait_for_sessions(0))[full] == before[full] + 1


async def wait_until_streams_close(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while await open_streams(http):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_streams_above_limit_are_rejected_until_readers_disconnect(
    cluster: LocalCluster, http: httpx.AsyncClient
) -> None:
    topic = await make_topic(cluster, "many", [b"a"])
    await wait_until_streams_close(http)
    url = f"/v1/topics/{topic}/records?follow=true"
    readers = [await http.send(http.build_request("GET", url), stream=True) for _ in range(STREAMS_MAX)]
    rejected = await http.get(url)
    assert rejected.status_code == 503
    assert rejected.headers["retry-after"] == "1"
    assert rejected.json()["error"]["name"] == "STREAMS_EXHAUSTED"
    lag = (await http.get("/v1/lag", params={"topic": topic})).json()
    assert len(lag["streams"]) == STREAMS_MAX
    for reader in readers:
        await reader.aclose()
    await wait_until_streams_close(http)


async def test_slow_reader_limits_records_read_ahead(cluster: LocalCluster, http: httpx.AsyncClient) -> None:
    """A reader that does not read limits the service to one poll, one fetch and the socket buffers."""
    values = [b"%05d " % number + b"x" * 5000 for number in range(8000)]
    topic = await make_topic(cluster, "slow", values)
    await wait_until_streams_close(http)
    host, _, port = str(cluster.node("consumer-1").http).rpartition(":")
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        reader.connect((host, int(port)))
        reader.sendall(f"GET /v1/topics/{topic}/records HTTP/1.0\r\n\r\n".encode())
        position = -1
        async with asyncio.timeout(60):
            while True:
                await asyncio.sleep(0.5)
                streams = (await http.get("/v1/lag", params={"topic": topic})).json()["streams"]
                if streams and streams[0]["position"] == position > 0:
                    break
                position = streams[0]["position"] if streams else -1
        assert position < 4000  # 20 of 40 MB: far from the end, whatever the size of the socket buffers
        reader.setblocking(False)
        loop = asyncio.get_running_loop()
        rest = bytearray()
        while chunk := await loop.sock_recv(reader, 1 << 20):
            rest += chunk
    records = [json.loads(line) for line in bytes(rest).partition(b"\r\n\r\n")[2].splitlines()]
    assert [record["offset"] for record in records] == list(range(8000))


async def test_service_starts_without_cluster() -> None:
    node = ConsumerNode(ConsumerServiceConfig.parse({"bootstrap.servers": "127.0.0.1:1"}))
    await node.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{node.http_port}", timeout=60) as http:
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).status_code == 503
        response = await http.get("/v1/topics")
        assert response.status_code == 503
        assert response.json()["error"]["name"] == "BROKER_NOT_AVAILABLE"
    await node.stop()
    await node.stop()


async def test_stop_ends_open_streams_with_shutdown_event(cluster: LocalCluster) -> None:
    topic = await make_topic(cluster, "stopping", [b"a"])
    node = ConsumerNode(ConsumerServiceConfig.parse({"bootstrap.servers": cluster.bootstrap}))
    await node.start()
    await until(lambda: node.ready)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{node.http_port}", timeout=60) as http:
        url = f"/v1/topics/{topic}/records?follow=true&format=sse"
        async with http.stream("GET", url) as response:
            chunks = response.aiter_text()
            text = await anext(chunks)
            stop = asyncio.create_task(node.stop())
            async for chunk in chunks:
                text += chunk
        assert text.endswith('event: end\ndata: {"reason":"shutdown"}\n\n')
        await stop
