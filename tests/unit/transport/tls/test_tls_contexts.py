"""A TCP listener with TLS: client authentication and certificate rotation."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from kipmesh.transport.grpc.tls import is_node
from kipmesh.transport.tls import ServerContext, TlsFiles, TlsPaths, client_context
from kipmesh.transport.tls.making import Authority

NEVER_S = 3600.0
Connect = Callable[[TlsFiles], Awaitable[str]]


def files_of(directory: Path) -> TlsFiles:
    return TlsFiles(
        TlsPaths(directory / "tls.crt", directory / "tls.key", directory / "ca.crt"), check_interval_s=NEVER_S
    )


@asynccontextmanager
async def listener(
    files: TlsFiles, client_auth: Literal["none", "requested", "required"], host: str = "localhost"
) -> AsyncIterator[Connect]:
    async def send_names(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        certificate = writer.get_extra_info("peercert") or {}
        writer.write(",".join(name for _, name in certificate.get("subjectAltName", ())).encode() + b"\n")
        writer.close()

    context = ServerContext(files, client_auth=client_auth).reloading()
    server = await asyncio.start_server(send_names, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    async def connect(client_files: TlsFiles) -> str:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client_context(client_files), server_hostname=host
        )
        try:
            line = await reader.readline()
            if not line:
                raise ConnectionResetError
            return line.decode().strip()
        finally:
            writer.close()

    try:
        yield connect
    finally:
        server.close()
        await server.wait_closed()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    created = Authority.make("kipmesh")
    created.issue("server", ["localhost"]).write(tmp_path / "server")
    created.issue("client", ["client.example.org"]).write(tmp_path / "client")
    return created


async def test_listener_reads_names_of_client_certificate(tmp_path: Path, authority: Authority) -> None:
    client = files_of(tmp_path / "client")
    for client_auth in ("required", "requested"):
        async with listener(files_of(tmp_path / "server"), client_auth) as connect:
            assert await connect(client) == "client.example.org"
    anonymous = TlsFiles(TlsPaths(None, None, tmp_path / "client" / "ca.crt"), check_interval_s=NEVER_S)
    async with listener(files_of(tmp_path / "server"), "requested") as connect:
        assert await connect(anonymous) == ""
    async with listener(files_of(tmp_path / "server"), "required") as connect:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await connect(anonymous)


async def test_listener_and_client_refuse_unknown_authority_and_host(tmp_path: Path, authority: Authority) -> None:
    unknown = Authority.make("kipmesh")
    unknown.issue("client", ["client.example.org"], trust=[authority.pem]).write(tmp_path / "unknown-client")
    unknown.issue("server", ["localhost"], trust=[authority.pem]).write(tmp_path / "false-server")
    async with listener(files_of(tmp_path / "server"), "requested") as connect:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await connect(files_of(tmp_path / "unknown-client"))
    async with listener(files_of(tmp_path / "false-server"), "none") as connect:
        with pytest.raises(ssl.SSLCertVerificationError):
            await connect(files_of(tmp_path / "client"))
    async with listener(files_of(tmp_path / "server"), "none", host="elsewhere") as connect:
        with pytest.raises(ssl.SSLCertVerificationError, match="elsewhere"):
            await connect(files_of(tmp_path / "client"))


async def test_listener_reloads_certificates_and_drops_old_authority(tmp_path: Path, authority: Authority) -> None:
    old_client = files_of(tmp_path / "client")
    server = files_of(tmp_path / "server")
    new = Authority.make("kipmesh")
    new.issue("client", ["new.example.org"]).write(tmp_path / "new-client")
    new_client = files_of(tmp_path / "new-client")
    async with listener(server, "required") as connect:
        assert await connect(old_client) == "client.example.org"
        new.issue("server", ["localhost"]).write(tmp_path / "server")
        assert server.check()
        assert await connect(new_client) == "new.example.org"
        both = TlsFiles(TlsPaths(*old_client.paths[:2], tmp_path / "new-client" / "ca.crt"), check_interval_s=NEVER_S)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await connect(both)


@pytest.mark.parametrize(
    ("names", "patterns", "expected"),
    [
        (["leader-1"], ["leader-1"], True),
        (["Leader-1"], ["leader-1"], True),
        (["a", "leader-1"], ["x", "leader-1"], True),
        ([], ["leader-1"], False),
        (["leader-1"], [], False),
        (["leader-10"], ["leader-1"], False),
        (["leader-1.mesh.svc"], ["*.mesh.svc"], True),
        (["a.leader-1.mesh.svc"], ["*.mesh.svc"], False),
        (["mesh.svc"], ["*.mesh.svc"], False),
        ([".mesh.svc"], ["*.mesh.svc"], False),
        (["*.mesh.svc"], ["*.mesh.svc"], False),
        (["spiffe://evil.mesh.svc"], ["*.mesh.svc"], False),
        (["spiffe://mesh/node"], ["spiffe://mesh/node"], True),
        (["127.0.0.1"], ["127.0.0.1"], True),
    ],
)
def test_is_node_matches_certificate_names_against_patterns(
    names: list[str], patterns: list[str], expected: bool
) -> None:
    assert is_node(names, patterns) is expected
