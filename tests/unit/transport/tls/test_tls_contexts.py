"""A TCP listener under TLS: who is let in, and certificates that change while it listens."""

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
Ask = Callable[[TlsFiles], Awaitable[str]]


def files_of(folder: Path) -> TlsFiles:
    return TlsFiles(TlsPaths(folder / "tls.crt", folder / "tls.key", folder / "ca.crt"), check_interval_s=NEVER_S)


@asynccontextmanager
async def listener(
    files: TlsFiles, client_auth: Literal["none", "requested", "required"], host: str = "localhost"
) -> AsyncIterator[Ask]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        certificate = writer.get_extra_info("peercert") or {}
        writer.write(",".join(name for _, name in certificate.get("subjectAltName", ())).encode() + b"\n")
        writer.close()

    context = ServerContext(files, client_auth=client_auth).reloading()
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    async def ask(mine: TlsFiles) -> str:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client_context(mine), server_hostname=host
        )
        try:
            line = await reader.readline()
            if not line:
                raise ConnectionResetError
            return line.decode().strip()
        finally:
            writer.close()

    try:
        yield ask
    finally:
        server.close()
        await server.wait_closed()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority.make("kipmesh")
    made.issue("server", ["localhost"]).write(tmp_path / "server")
    made.issue("client", ["client.example.org"]).write(tmp_path / "client")
    return made


async def test_names_of_a_client_are_known(tmp_path: Path, authority: Authority) -> None:
    client = files_of(tmp_path / "client")
    for client_auth in ("required", "requested"):
        async with listener(files_of(tmp_path / "server"), client_auth) as ask:
            assert await ask(client) == "client.example.org"
    anonymous = TlsFiles(TlsPaths(None, None, tmp_path / "client" / "ca.crt"), check_interval_s=NEVER_S)
    async with listener(files_of(tmp_path / "server"), "requested") as ask:
        assert await ask(anonymous) == ""
    async with listener(files_of(tmp_path / "server"), "required") as ask:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask(anonymous)


async def test_strangers_are_refused_both_ways(tmp_path: Path, authority: Authority) -> None:
    stranger = Authority.make("kipmesh")
    stranger.issue("client", ["client.example.org"], trust=[authority.pem]).write(tmp_path / "stranger")
    stranger.issue("server", ["localhost"], trust=[authority.pem]).write(tmp_path / "false-server")
    async with listener(files_of(tmp_path / "server"), "requested") as ask:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask(files_of(tmp_path / "stranger"))
    async with listener(files_of(tmp_path / "false-server"), "none") as ask:
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(files_of(tmp_path / "client"))
    async with listener(files_of(tmp_path / "server"), "none", host="elsewhere") as ask:
        with pytest.raises(ssl.SSLCertVerificationError, match="elsewhere"):
            await ask(files_of(tmp_path / "client"))


async def test_a_listener_takes_new_certificates_and_drops_old_authorities(
    tmp_path: Path, authority: Authority
) -> None:
    old_client = files_of(tmp_path / "client")
    server = files_of(tmp_path / "server")
    new = Authority.make("kipmesh")
    new.issue("client", ["new.example.org"]).write(tmp_path / "new-client")
    new_client = files_of(tmp_path / "new-client")
    async with listener(server, "required") as ask:
        assert await ask(old_client) == "client.example.org"
        new.issue("server", ["localhost"]).write(tmp_path / "server")
        assert server.check()
        assert await ask(new_client) == "new.example.org"
        both = TlsFiles(TlsPaths(*old_client.paths[:2], tmp_path / "new-client" / "ca.crt"), check_interval_s=NEVER_S)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask(both)


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
def test_who_is_a_node(names: list[str], patterns: list[str], expected: bool) -> None:
    assert is_node(names, patterns) is expected
