"""gRPC under TLS: who gets in, what only nodes may call, and certificates that change under running connections."""

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
"""Nodes and clients call them; a request with the replica id of a broker is for nodes only."""
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
    """Answers everything that the tests ask, and counts."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.news = asyncio.Event()
        self.streams_ended = 0

    async def fetch(self, request: m.FetchRequest, context: RequestContext) -> m.FetchResponse:
        self.asked.append("fetch")
        if request.max_wait_ms:
            await self.news.wait()
        return m.FetchResponse()

    async def list_offsets(self, request: m.ListOffsetsRequest, context: RequestContext) -> m.ListOffsetsResponse:
        self.asked.append("list_offsets")
        return m.ListOffsetsResponse()

    async def vote(self, request: m.VoteRequest, context: RequestContext) -> m.VoteResponse:
        self.asked.append("vote")
        return m.VoteResponse()

    async def describe_quorum(self, request: m.DescribeQuorumRequest, context: Any) -> m.DescribeQuorumResponse:
        self.asked.append("describe_quorum")
        return m.DescribeQuorumResponse()

    async def broker_heartbeat(self, request: m.BrokerHeartbeatRequest, context: Any) -> m.BrokerHeartbeatResponse:
        self.asked.append("broker_heartbeat")
        return m.BrokerHeartbeatResponse()

    def stream_ended(self, context: RequestContext) -> None:
        self.streams_ended += 1


class World:
    """A server with the certificate of `leader-1`, and pools of whom the authority knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority.make("kipmesh")
        self.pools: list[ConnectionPool] = []
        self.files: list[TlsFiles] = []
        self.handlers = Handlers()
        self.tls: ServerTls
        self.address = ""

    def issue(self, name: str, *names: str, by: Authority | None = None, trust: tuple[bytes, ...] = ()) -> Path:
        home = self.folder / name
        (by or self.authority).issue(name, names or [name], trust=trust).write(home)
        return home

    def open(self, name: str) -> TlsFiles:
        files = TlsFiles(TlsPaths(*(self.folder / name / file for file in ("tls.crt", "tls.key", "ca.crt"))))
        self.files.append(files)
        return files

    def pool(self, files: TlsFiles | None) -> ConnectionPool:
        pool = ConnectionPool("tester", files)
        self.pools.append(pool)
        return pool

    def as_(self, name: str, *names: str, **how: Any) -> ConnectionPool:
        self.issue(name, *names, **how)
        return self.pool(self.open(name))

    async def ask(self, pool: ConnectionPool, request: m.FetchRequest = FROM_CLIENT) -> None:
        await pool.get(self.address).call("Broker", "Fetch", request, 60)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    it = World(tmp_path)
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


async def test_every_method_is_for_nodes_or_for_clients_on_purpose(world: World) -> None:
    for service, methods in METHODS.items():
        for_nodes = {name for name, method in methods.items() if method.api.is_for_nodes}
        for_replicas = {name for name, method in methods.items() if method.api.has_replica_id}
        guarded = {name for name, method in methods.items() if world.tls.guard(method.api)}
        assert for_nodes == FOR_NODES.get(service, set())
        assert for_replicas == FOR_REPLICAS.get(service, set())
        assert guarded == for_nodes | for_replicas
        if service in ("Broker", "Quorum", "Controller"):
            assert set(methods) - guarded == FOR_CLIENTS.get(service, set())


async def test_nodes_may_call_everything(world: World) -> None:
    for name, alias in (("follower-1", "follower-1"), ("b", "b.nodes.test")):
        pool = world.as_(name, alias)
        connection = pool.get(world.address)
        await world.ask(pool, FROM_REPLICA)
        await connection.fetch(FROM_REPLICA, 60)
        await connection.call("Quorum", "Vote", m.VoteRequest(), 60)
        await connection.exchange("Controller", "BrokerHeartbeatStream", m.BrokerHeartbeatRequest(), 60)
    assert world.tls.refused == 0


async def test_a_clients_certificate_is_no_nodes(world: World) -> None:
    pool = world.as_("client", "client", "localhost", "x.y.nodes.test")
    connection = pool.get(world.address)
    await world.ask(pool)
    await connection.fetch(FROM_CLIENT, 60)
    await connection.call("Broker", "ListOffsets", m.ListOffsetsRequest(), 60)
    await connection.call("Quorum", "DescribeQuorum", m.DescribeQuorumRequest(), 60)
    before = list(world.handlers.asked)
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
    assert world.handlers.asked == before
    assert world.tls.refused == 8


@pytest.mark.parametrize("encrypts", [True, False])
async def test_other_listeners_let_in_whom_they_do_not_know_but_not_as_nodes(world: World, encrypts: bool) -> None:
    tls = ServerTls(world.files[0], ["leader-1"], encrypts=encrypts, requires_certificate=False)
    server = Server(pipeline_of({"Broker": world.handlers, "Controller": world.handlers}), tls=tls)
    world.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    anonymous = TlsFiles(TlsPaths(None, None, world.folder / "server" / "ca.crt"))
    world.files.append(anonymous)
    pool = world.pool(anonymous if encrypts else None)
    await world.ask(pool)
    for service, method, request in (
        ("Broker", "Fetch", FROM_REPLICA),
        ("Controller", "BrokerHeartbeat", m.BrokerHeartbeatRequest()),
    ):
        with pytest.raises(TransportError, match=r"PERMISSION_DENIED.*\(none\)"):
            await pool.get(world.address).call(service, method, request, 60)
    await server.stop(0)


async def test_a_stream_that_began_as_a_clients_is_no_way_in(world: World) -> None:
    stream = world.as_("client").get(world.address).fetch_stream("Broker")
    await stream.exchange(FROM_CLIENT, 60)
    with pytest.raises(TransportError, match="PERMISSION_DENIED"):
        await stream.exchange(FROM_REPLICA, 60)
    stream.cancel()


async def test_plaintext_is_refused_and_says_what_may_be_wrong(world: World) -> None:
    with pytest.raises(TransportError, match=r"does it want security\.protocol=SSL"):
        await world.ask(world.pool(None))


async def test_tls_to_a_plaintext_server_says_what_may_be_wrong(world: World) -> None:
    server = Server(pipeline_of({"Broker": world.handlers}))
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    with pytest.raises(TransportError, match="does it speak TLS"):
        await world.as_("client").get(address).call("Broker", "Fetch", FROM_CLIENT, 60)
    await server.stop(0)


async def test_strangers_are_refused_both_ways(world: World) -> None:
    stranger = Authority.make("kipmesh")
    with pytest.raises(TransportError, match="does it trust this side's certificate"):
        await world.ask(world.as_("false-node", "leader-1", by=stranger, trust=(world.authority.pem,)))
    with pytest.raises(TransportError, match="its certificate is not signed by an authority in ca.crt"):
        await world.ask(world.as_("deceived", by=stranger))
    anonymous = TlsFiles(TlsPaths(None, None, world.folder / "server" / "ca.crt"))
    world.files.append(anonymous)
    with pytest.raises(TransportError, match="does it trust this side's certificate"):
        await world.ask(world.pool(anonymous))


async def test_another_host_name_is_refused(world: World) -> None:
    pool = world.as_("client")
    await pool.get(world.address.replace("127.0.0.1", "localhost")).call("Broker", "Fetch", FROM_CLIENT, 60)
    world.issue("server", "leader-1", "127.0.0.2")
    await until(lambda: world.files[0].check() or world.files[0].reloads)
    with pytest.raises(TransportError, match="does not contain the host name of this address"):
        await world.ask(world.as_("other-client"))


async def test_an_expired_certificate_is_refused(world: World) -> None:
    world.authority.issue("server", ["127.0.0.1"], days=-1 / 1440).write(world.folder / "server")
    pool = world.as_("client")
    await until(lambda: world.files[0].check() or world.files[0].reloads)
    with pytest.raises(TransportError, match="its certificate has expired"):
        await world.ask(pool)


async def test_connections_move_to_new_certificates_one_after_the_other(world: World) -> None:
    """All of a rotation: the old authority is gone in the end, what was open has gone on, and nothing failed."""
    client, server = world.as_("client"), world.files[0]
    connection = client.get(world.address)
    mine = world.files[-1]
    kept = connection.fetch_stream("Broker")
    await kept.exchange(FROM_CLIENT, 60)
    await connection.exchange("Broker", "FetchStream", FROM_CLIENT, 60)
    long = asyncio.create_task(connection.call("Broker", "Fetch", m.FetchRequest(max_wait_ms=1), 60))
    new = Authority.make("kipmesh")
    names = {"server": ["leader-1", "localhost", "127.0.0.1"], "client": ["client"]}
    old = world.authority
    for by, trust in ((old, [new.pem]), (new, [old.pem]), (new, [])):
        for name, files in (("server", server), ("client", mine)):
            before = files.current.generation
            by.issue(name, names[name], trust=trust).write(world.folder / name)
            files.check()
            await until(lambda files=files, before=before: files.current.generation > before)  # type: ignore[misc]
        await world.ask(client)
        await connection.exchange("Broker", "FetchStream", FROM_CLIENT, 60)
        await kept.exchange(FROM_CLIENT, 60)
    world.handlers.news.set()
    await long
    await until(lambda: world.handlers.streams_ended == 3)  # those of `exchange` on the channels before
    kept.cancel()
    world.issue("late", by=old, trust=(new.pem,))
    with pytest.raises(TransportError):
        await world.ask(world.pool(world.open("late")))


async def test_configuration_of_a_client(world: World) -> None:
    world.issue("client")
    config = ClientSslConfig.parse({"security.protocol": "SSL", "ssl.certificate.dir": str(world.folder / "client")})
    pool = ConnectionPool.of("tester", config)
    world.pools.append(pool)
    await world.ask(pool)
    (world.folder / "client" / "tls.key").unlink()
    with pytest.raises(InvalidConfigError, match=r"tls\.key: No such file"):
        ConnectionPool.of("tester", config)
