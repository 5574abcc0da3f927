"""gRPC with TLS: authentication, methods reserved for nodes, and certificate rotation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kipmesh import messages as m
from kipmesh.core.config.security import ClientSslConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.messages.table import METHODS
from kipmesh.testing import until
from kipmesh.transport.grpc.client import ConnectionPool, TransportError
from kipmesh.transport.grpc.server import RequestContext, Server
from kipmesh.transport.grpc.tls import ServerTls
from kipmesh.transport.pipeline import pipeline_of
from kipmesh.transport.tls import TlsFiles, TlsPaths
from kipmesh.transport.tls.making import Authority

NEVER_S = 3600.0
FROM_CLIENT = m.FetchRequest(max_bytes=1)
FROM_REPLICA = m.FetchRequest(replica_id=2, max_bytes=1)
FOR_NODES = {
    "Controller": {
        "BrokerRegistration",
        "BrokerHeartbeat",
        "BrokerHeartbeatStream",
        "AlterPartition",
        "AssignReplicasToDirs",
        "AllocateProducerIds",
    },
    "Quorum": {"Vote", "BeginQuorumEpoch", "EndQuorumEpoch", "Fetch", "FetchStream", "FetchSnapshot"},
}
FOR_REPLICAS = {"Broker": {"Fetch", "FetchStream", "ListOffsets", "OffsetsForLeaderEpoch"}}
"""Methods of nodes and clients. A request with the replica id of a broker is reserved for nodes."""
FOR_CLIENTS = {
    "Broker": {
        "Produce",
        "DeleteRecords",
        "Metadata",
        "InitProducerId",
        "ListFetchSessions",
        "DescribeLogDirs",
        "DescribeProducers",
        "ListConfigResources",
    },
    "Quorum": {"DescribeQuorum"},
}


class Handlers:
    """Handlers that record their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.released = asyncio.Event()
        self.streams_ended = 0

    async def fetch(self, request: m.FetchRequest, context: RequestContext) -> m.FetchResponse:
        self.calls.append("fetch")
        if request.max_wait_ms:
            await self.released.wait()
        return m.FetchResponse()

    async def list_offsets(self, request: m.ListOffsetsRequest, context: RequestContext) -> m.ListOffsetsResponse:
        self.calls.append("list_offsets")
        return m.ListOffsetsResponse()

    async def vote(self, request: m.VoteRequest, context: RequestContext) -> m.VoteResponse:
        self.calls.append("vote")
        return m.VoteResponse()

    async def describe_quorum(self, request: m.DescribeQuorumRequest, context: Any) -> m.DescribeQuorumResponse:
        self.calls.append("describe_quorum")
        return m.DescribeQuorumResponse()

    async def broker_heartbeat(self, request: m.BrokerHeartbeatRequest, context: Any) -> m.BrokerHeartbeatResponse:
        self.calls.append("broker_heartbeat")
        return m.BrokerHeartbeatResponse()

    def stream_ended(self, context: RequestContext) -> None:
        self.streams_ended += 1


class TlsServer:
    """A server with the certificate of `leader-1`, and connection pools of clients with certificates."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority.make("kipmesh")
        self.pools: list[ConnectionPool] = []
        self.files: list[TlsFiles] = []
        self.handlers = Handlers()
        self.tls: ServerTls
        self.address = ""

    def issue(self, name: str, *names: str, by: Authority | None = None, trust: tuple[bytes, ...] = ()) -> Path:
        home = self.directory / name
        (by or self.authority).issue(name, names or [name], trust=trust).write(home)
        return home

    def open(self, name: str) -> TlsFiles:
        files = TlsFiles(TlsPaths(*(self.directory / name / file for file in ("tls.crt", "tls.key", "ca.crt"))))
        self.files.append(files)
        return files

    def pool(self, files: TlsFiles | None) -> ConnectionPool:
        pool = ConnectionPool("tester", files)
        self.pools.append(pool)
        return pool

    def as_(self, name: str, *names: str, **how: Any) -> ConnectionPool:
        self.issue(name, *names, **how)
        return self.pool(self.open(name))

    async def fetch(self, pool: ConnectionPool, request: m.FetchRequest = FROM_CLIENT) -> None:
        await pool.get(self.address).call("Broker", "Fetch", request, 60)


@pytest.fixture
async def tls_server(tmp_path: Path) -> AsyncIterator[TlsServer]:
    it = TlsServer(tmp_path)
    it.issue("server", "leader-1", "localhost", "127.0.0.1")
    it.tls = ServerTls(it.open("server"), ["leader-1", "follower-1", "*.nodes.test"])
    services = {"Broker": it.handlers, "Quorum": it.handlers, "Controller": it.handlers}
    server = Server(pipeline_of(services), tls=it.tls)
    it.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    yield it
    for pool in it.pools:
        await pool.close()
    await server.stop(0)
    for files in it.files:
        files.close()


async def test_every_method_is_assigned_to_nodes_replicas_or_clients(tls_server: TlsServer) -> None:
    for service, methods in METHODS.items():
        for_nodes = {name for name, method in methods.items() if method.api.is_for_nodes}
        for_replicas = {name for name, method in methods.items() if method.api.has_replica_id}
        guarded = {name for name, method in methods.items() if tls_server.tls.guard(method.api)}
        assert for_nodes == FOR_NODES.get(service, set())
        assert for_replicas == FOR_REPLICAS.get(service, set())
        assert guarded == for_nodes | for_replicas
        if service in ("Broker", "Quorum", "Controller"):
            assert set(methods) - guarded == FOR_CLIENTS.get(service, set())


async def test_node_certificate_may_call_all_methods(tls_server: TlsServer) -> None:
    for name, alias in (("follower-1", "follower-1"), ("b", "b.nodes.test")):
        pool = tls_server.as_(name, alias)
        connection = pool.get(tls_server.address)
        await tls_server.fetch(pool, FROM_REPLICA)
        await connection.fetch(FROM_REPLICA, 60)
        await connection.call("Quorum", "Vote", m.VoteRequest(), 60)
        await connection.exchange("Controller", "BrokerHeartbeatStream", m.BrokerHeartbeatRequest(), 60)
    assert tls_server.tls.refused == 0


async def test_client_certificate_is_denied_node_methods(tls_server: TlsServer) -> None:
    pool = tls_server.as_("client", "client", "localhost", "x.y.nodes.test")
    connection = pool.get(tls_server.address)
    await tls_server.fetch(pool)
    await connection.fetch(FROM_CLIENT, 60)
    await connection.call("Broker", "ListOffsets", m.ListOffsetsRequest(), 60)
    await connection.call("Quorum", "DescribeQuorum", m.DescribeQuorumRequest(), 60)
    before = list(tls_server.handlers.calls)
    for service, method, request in (
        ("Broker", "Fetch", FROM_REPLICA),
        ("Broker", "ListOffsets", m.ListOffsetsRequest(replica_id=0)),
        ("Quorum", "Vote", m.VoteRequest()),
        ("Quorum", "Fetch", FROM_CLIENT),
        ("Controller", "BrokerHeartbeat", m.BrokerHeartbeatRequest()),
    ):
        with pytest.raises(TransportError, match=r"PERMISSION_DENIED.*is for nodes.*client, localhost") as refused:
            await connection.call(service, method, request, 60)
        assert refused.value.denied
    for service, method in (("Broker", "FetchStream"), ("Quorum", "FetchStream")):
        with pytest.raises(TransportError, match="PERMISSION_DENIED"):
            await connection.exchange(service, method, FROM_REPLICA, 60)
    with pytest.raises(TransportError, match="PERMISSION_DENIED"):
        await connection.exchange("Controller", "BrokerHeartbeatStream", m.BrokerHeartbeatRequest(), 60)
    assert tls_server.handlers.calls == before
    assert tls_server.tls.refused == 8


@pytest.mark.parametrize("encrypts", [True, False])
async def test_listener_without_required_certificate_denies_node_methods(tls_server: TlsServer, encrypts: bool) -> None:
    tls = ServerTls(tls_server.files[0], ["leader-1"], encrypts=encrypts, requires_certificate=False)
    server = Server(pipeline_of({"Broker": tls_server.handlers, "Controller": tls_server.handlers}), tls=tls)
    tls_server.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    anonymous = TlsFiles(TlsPaths(None, None, tls_server.directory / "server" / "ca.crt"))
    tls_server.files.append(anonymous)
    pool = tls_server.pool(anonymous if encrypts else None)
    await tls_server.fetch(pool)
    for service, method, request in (
        ("Broker", "Fetch", FROM_REPLICA),
        ("Controller", "BrokerHeartbeat", m.BrokerHeartbeatRequest()),
    ):
        with pytest.raises(TransportError, match=r"PERMISSION_DENIED.*\(none\)"):
            await pool.get(tls_server.address).call(service, method, request, 60)
    await server.stop(0)


async def test_client_stream_is_denied_replica_fetch(tls_server: TlsServer) -> None:
    stream = tls_server.as_("client").get(tls_server.address).fetch_stream("Broker")
    await stream.exchange(FROM_CLIENT, 60)
    with pytest.raises(TransportError, match="PERMISSION_DENIED"):
        await stream.exchange(FROM_REPLICA, 60)
    stream.cancel()


async def test_plaintext_client_is_refused_with_hint(tls_server: TlsServer) -> None:
    with pytest.raises(TransportError, match=r"does it want security\.protocol=SSL"):
        await tls_server.fetch(tls_server.pool(None))


async def test_tls_client_of_plaintext_server_fails_with_hint(tls_server: TlsServer) -> None:
    server = Server(pipeline_of({"Broker": tls_server.handlers}))
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    with pytest.raises(TransportError, match="does it speak TLS"):
        await tls_server.as_("client").get(address).call("Broker", "Fetch", FROM_CLIENT, 60)
    await server.stop(0)


async def test_rpc_client_and_server_refuse_unknown_authority(tls_server: TlsServer) -> None:
    unknown = Authority.make("kipmesh")
    with pytest.raises(TransportError, match="does it trust this side's certificate"):
        await tls_server.fetch(tls_server.as_("false-node", "leader-1", by=unknown, trust=(tls_server.authority.pem,)))
    with pytest.raises(TransportError, match=r"its certificate is not signed by an authority in ca\.crt"):
        await tls_server.fetch(tls_server.as_("deceived", by=unknown))
    anonymous = TlsFiles(TlsPaths(None, None, tls_server.directory / "server" / "ca.crt"))
    tls_server.files.append(anonymous)
    with pytest.raises(TransportError, match="does it trust this side's certificate"):
        await tls_server.fetch(tls_server.pool(anonymous))


async def test_client_refuses_certificate_for_other_host(tls_server: TlsServer) -> None:
    pool = tls_server.as_("client")
    await pool.get(tls_server.address.replace("127.0.0.1", "localhost")).call("Broker", "Fetch", FROM_CLIENT, 60)
    tls_server.issue("server", "leader-1", "127.0.0.2")
    await until(lambda: tls_server.files[0].check() or tls_server.files[0].reloads)
    with pytest.raises(TransportError, match="does not contain the host name of this address"):
        await tls_server.fetch(tls_server.as_("other-client"))


async def test_client_refuses_expired_certificate(tls_server: TlsServer) -> None:
    tls_server.authority.issue("server", ["127.0.0.1"], days=-1 / 1440).write(tls_server.directory / "server")
    pool = tls_server.as_("client")
    await until(lambda: tls_server.files[0].check() or tls_server.files[0].reloads)
    with pytest.raises(TransportError, match="its certificate has expired"):
        await tls_server.fetch(pool)


async def test_connections_survive_certificate_rotation(tls_server: TlsServer) -> None:
    """A full rotation: open streams and calls continue, and the old authority is refused at the end."""
    client, server = tls_server.as_("client"), tls_server.files[0]
    connection = client.get(tls_server.address)
    client_files = tls_server.files[-1]
    kept = connection.fetch_stream("Broker")
    await kept.exchange(FROM_CLIENT, 60)
    await connection.exchange("Broker", "FetchStream", FROM_CLIENT, 60)
    long_call = asyncio.create_task(connection.call("Broker", "Fetch", m.FetchRequest(max_wait_ms=1), 60))
    new = Authority.make("kipmesh")
    names = {"server": ["leader-1", "localhost", "127.0.0.1"], "client": ["client"]}
    old = tls_server.authority
    for by, trust in ((old, [new.pem]), (new, [old.pem]), (new, [])):
        for name, files in (("server", server), ("client", client_files)):
            before = files.current.generation
            by.issue(name, names[name], trust=trust).write(tls_server.directory / name)
            files.check()
            await until(lambda files=files, before=before: files.current.generation > before)  # type: ignore[misc]
        await tls_server.fetch(client)
        await connection.exchange("Broker", "FetchStream", FROM_CLIENT, 60)
        await kept.exchange(FROM_CLIENT, 60)
    tls_server.handlers.released.set()
    await long_call
    await until(lambda: tls_server.handlers.streams_ended == 3)  # the streams of `exchange` on the old channels
    kept.cancel()
    tls_server.issue("late", by=old, trust=(new.pem,))
    with pytest.raises(TransportError):
        await tls_server.fetch(tls_server.pool(tls_server.open("late")))


async def test_connection_pool_uses_tls_settings_of_client(tls_server: TlsServer) -> None:
    tls_server.issue("client")
    config = ClientSslConfig.parse(
        {"security.protocol": "SSL", "ssl.certificate.dir": str(tls_server.directory / "client")}
    )
    pool = ConnectionPool.of("tester", config)
    tls_server.pools.append(pool)
    await tls_server.fetch(pool)
    (tls_server.directory / "client" / "tls.key").unlink()
    with pytest.raises(InvalidConfigError, match=r"tls\.key: No such file"):
        ConnectionPool.of("tester", config)
