"""gRPC client and server: unary and streaming calls, errors, and invalid messages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kipmesh import messages as m
from kipmesh.core.errors import KafkaError
from kipmesh.testing import until
from kipmesh.transport.grpc.client import ConnectionPool, TransportError
from kipmesh.transport.grpc.server import PortInUseError, RequestContext, Server
from kipmesh.transport.pipeline import pipeline_of

LIMIT = 1 << 20


class Echo:
    """Returns `max_bytes` bytes for a fetch after `max_wait_ms`. Fails for session 13."""

    def __init__(self) -> None:
        self.contexts: list[RequestContext] = []

    async def fetch(self, request: m.FetchRequest, context: RequestContext) -> m.FetchResponse:
        self.contexts.append(context)
        if request.session_id == 13:
            raise RuntimeError("no")
        await asyncio.sleep(request.max_wait_ms / 1000)
        data = m.PartitionData(partition_index=3, records=b"x" * request.max_bytes)
        return m.FetchResponse(session_id=request.session_id, responses=[m.FetchableTopicResponse("t", b"", [data])])


@pytest.fixture
async def served() -> AsyncIterator[tuple[Echo, str]]:
    echo, server = Echo(), None
    server = Server(pipeline_of({"Broker": echo}), LIMIT)
    port = await server.start("127.0.0.1", 0)
    await server.set_serving(True)
    yield echo, f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def pool() -> AsyncIterator[ConnectionPool]:
    connections = ConnectionPool("tester")
    yield connections
    await connections.close()


async def test_unary_and_streaming_calls_return_same_response(served: tuple[Echo, str], pool: ConnectionPool) -> None:
    echo, address = served
    connection = pool.get(address)
    assert pool.get(address) is connection
    request = m.FetchRequest(session_id=7, max_bytes=11)
    unary = await connection.call("Broker", "Fetch", request, 60)
    stream = connection.fetch_stream("Broker")
    assert await stream.exchange(request, 60) == unary
    assert await stream.exchange(request, 60) == unary
    stream.cancel()
    assert await connection.fetch(request, 60) == unary
    assert await connection.fetch(request, 60) == unary
    assert unary.responses[0].partitions[0].records == b"x" * 11
    assert {context.client_id for context in echo.contexts} == {"tester"}


async def test_unserved_failed_and_late_calls_raise_transport_error(
    served: tuple[Echo, str], pool: ConnectionPool
) -> None:
    connection = pool.get(served[1])
    with pytest.raises(TransportError, match="UNIMPLEMENTED"):
        await connection.call("Broker", "Produce", m.ProduceRequest(), 60)
    with pytest.raises(TransportError, match="UNKNOWN"):
        await connection.call("Broker", "Fetch", m.FetchRequest(session_id=13, max_bytes=0), 60)
    with pytest.raises(TransportError) as late:
        await connection.call("Broker", "Fetch", m.FetchRequest(max_wait_ms=200_000), 0.05)
    assert late.value.timed_out
    assert (await connection.call("Broker", "Fetch", m.FetchRequest(max_bytes=1), 60)).error_code == 0


async def test_request_that_cannot_be_encoded_is_not_sent(served: tuple[Echo, str], pool: ConnectionPool) -> None:
    connection = pool.get(served[1])
    wrong_type = m.FetchRequest(session_id="x")  # type: ignore[arg-type]
    for request in (m.FetchRequest(rack_id="\udcff"), m.FetchRequest(max_bytes=2**40), wrong_type):
        with pytest.raises(KafkaError, match="INVALID_REQUEST: Fetch request cannot be encoded"):
            await connection.call("Broker", "Fetch", request, 60)
        with pytest.raises(KafkaError, match="INVALID_REQUEST"):
            await connection.fetch(request, 60)
    assert not served[0].contexts


async def test_response_that_cannot_be_decoded_raises_transport_error(pool: ConnectionPool) -> None:
    async def nonsense(data: bytes, context: object) -> bytes:
        return b"\xff" * 20

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(nonsense)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kipmesh.v1.Broker", {"Fetch": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with pytest.raises(TransportError, match="cannot be decoded"):
        await pool.get(f"127.0.0.1:{port}").call("Broker", "Fetch", m.FetchRequest(), 60)
    await server.stop(0)


async def test_call_to_closed_port_fails_immediately(pool: ConnectionPool) -> None:
    with pytest.raises(TransportError, match="UNAVAILABLE"):
        await pool.get("127.0.0.1:1").call("Broker", "Fetch", m.FetchRequest(), 60)
    with pytest.raises(TransportError):
        await pool.get("127.0.0.1:1").fetch(m.FetchRequest(), 60)


async def test_server_survives_malformed_and_oversized_messages(served: tuple[Echo, str], pool: ConnectionPool) -> None:
    address, codes = served[1], set()
    async with grpc.aio.insecure_channel(address) as channel:
        raw = channel.unary_unary("/kipmesh.v1.Broker/Fetch")
        source = random.Random(1)
        for payload in [b"\xff" * 50, b"\x52\xff\xff\xff\x0f", *(source.randbytes(64) for _ in range(50))]:
            try:
                await raw(payload, timeout=20)
            except grpc.aio.AioRpcError as error:
                codes.add(error.code())
        assert codes == {grpc.StatusCode.INVALID_ARGUMENT}
        with pytest.raises(grpc.aio.AioRpcError) as large:
            await raw(b"\x5a" + b"\x00" * (LIMIT + 1), timeout=60)
        assert large.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(TransportError) as too_large:
        await pool.get(address).call("Broker", "Fetch", m.FetchRequest(rack_id="x" * (LIMIT + 1)), 60)
    assert too_large.value.too_large
    assert (await pool.get(address).call("Broker", "Fetch", m.FetchRequest(max_bytes=1), 60)).error_code == 0


@pytest.mark.parametrize("steps", range(12))
async def test_stream_cancelled_while_opening_ends_exchange(
    served: tuple[Echo, str], pool: ConnectionPool, steps: int
) -> None:
    connection = pool.get(served[1])
    await connection.call("Broker", "Fetch", m.FetchRequest(max_bytes=1), 60)  # opens the connection
    stream = connection.fetch_stream("Broker")
    running = asyncio.create_task(stream.exchange(m.FetchRequest(max_wait_ms=200_000, max_bytes=1), 200))
    for _ in range(steps):
        await asyncio.sleep(0)
    stream.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(TransportError):
            await running


async def test_cancelled_stream_ends_exchange_without_cancelling_task(
    served: tuple[Echo, str], pool: ConnectionPool
) -> None:
    stream = pool.get(served[1]).fetch_stream("Broker")
    running = asyncio.create_task(stream.exchange(m.FetchRequest(max_wait_ms=200_000), 200))
    await until(lambda: len(served[0].contexts) == 1)
    stream.cancel()
    with pytest.raises(TransportError, match="dropped"):
        await running
    stream = pool.get(served[1]).fetch_stream("Broker")
    running = asyncio.create_task(stream.exchange(m.FetchRequest(max_wait_ms=200_000), 200))
    await until(lambda: len(served[0].contexts) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    stream.cancel()
    stream = pool.get(served[1]).fetch_stream("Broker")
    with pytest.raises(TransportError) as late:
        await stream.exchange(m.FetchRequest(max_wait_ms=200_000), 0.05)
    assert late.value.timed_out


class StreamEcho(Echo):
    """An echo handler that records the end of streams."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: asyncio.Queue[int] = asyncio.Queue()

    def stream_ended(self, context: RequestContext) -> None:
        self.ended.put_nowait(context.stream)


async def test_server_reports_end_of_stream_for_every_cause() -> None:
    echo = StreamEcho()
    server = Server(pipeline_of({"Broker": echo}))
    port = await server.start("127.0.0.1", 0)
    pools = [ConnectionPool("one"), ConnectionPool("two")]
    first, second = (pool.get(f"127.0.0.1:{port}") for pool in pools)
    request = m.FetchRequest(max_bytes=1)
    streams = [first.fetch_stream("Broker"), first.fetch_stream("Broker"), second.fetch_stream("Broker")]
    numbers = []
    for stream in streams:
        for _ in range(2):
            await stream.exchange(request, 60)
        numbers.append(echo.contexts[-1].stream)
        assert echo.contexts[-2].stream == numbers[-1]
    await first.call("Broker", "Fetch", request, 60)
    assert echo.contexts[-1].stream == 0
    assert len({0, *numbers}) == 4
    async with asyncio.timeout(60):
        streams[0].cancel()
        assert await echo.ended.get() == numbers[0]
        await pools[1].close()  # closes the connection with an idle stream
        assert await echo.ended.get() == numbers[2]
        running = asyncio.create_task(streams[1].exchange(m.FetchRequest(max_wait_ms=200_000), 200))
        before = len(echo.contexts)
        await until(lambda: len(echo.contexts) > before)
        await pools[0].close()  # during a request
        assert await echo.ended.get() == numbers[1]
        with pytest.raises((TransportError, asyncio.CancelledError)):
            await running
    assert echo.ended.empty()
    await server.stop(0)


async def test_used_port_raises_port_in_use_error(served: tuple[Echo, str]) -> None:
    port = int(served[1].rpartition(":")[2])
    with pytest.raises(PortInUseError, match=rf"cannot listen on 127.0.0.1:{port}"):
        await Server(pipeline_of({"Broker": Echo()})).start("127.0.0.1", port)


async def test_server_serves_health_and_reflection(served: tuple[Echo, str]) -> None:
    async with grpc.aio.insecure_channel(served[1]) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        responses = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=60)
        names = {service.name async for response in responses for service in response.list_services_response.service}
    assert {"kipmesh.v1.Broker", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names
