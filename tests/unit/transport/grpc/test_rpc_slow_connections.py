"""gRPC connections over a network with a long round-trip time."""

from __future__ import annotations

from kipmesh import messages as m
from kipmesh.transport.grpc.client import ConnectionPool
from kipmesh.transport.grpc.server import RequestContext, Server
from kipmesh.transport.pipeline import pipeline_of
from kipmesh_chaos.links import Links

DELAY_S = 0.5
"""Delay per direction. Opening a connection takes at least three of them."""


class Broker:
    async def fetch(self, request: m.FetchRequest, _context: RequestContext) -> m.FetchResponse:
        return m.FetchResponse(session_id=request.session_id)


async def test_client_connects_over_slow_network() -> None:
    server, pool = Server(pipeline_of({"Broker": Broker()}), 1 << 20), ConnectionPool("tester")
    port = await server.start("127.0.0.1", 0)
    await server.set_serving(True)
    async with Links() as links:
        address = await links.address("client", "broker", f"127.0.0.1:{port}")
        links.delay([("client", "broker"), ("broker", "client")], DELAY_S)
        request = m.FetchRequest(session_id=7)
        response = await pool.get(address).call("Broker", "Fetch", request, 60, wait_for_ready=True)
        assert response.session_id == 7
        await pool.close()
    await server.stop(0)
