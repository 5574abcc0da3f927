"""Certificates of a local cluster with TLS, in its directory `certs`.

`certs/authority` signs the others, `certs/client` is for clients, `certs/NODE` for each node. Only certificates of
brokers and controllers contain `NODE_NAME`, by which nodes authenticate each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from kipmesh.cluster.layout import NODE_NAME, ClusterError, NodeInfo, Role
from kipmesh.cluster.ports import HOST

CLIENT = "client"
RENEW_BEFORE_S = 30 * 86_400.0
CLIENT_PROPERTIES = "client.properties"


def ensure(directory: Path, nodes: Iterable[NodeInfo]) -> None:
    """Create missing certificates and renew those that expire within RENEW_BEFORE_S (30 days).

    Covers the nodes that have TLS, and clients; does nothing if no node has TLS. Creates a missing authority but never
    renews it. Also writes `client.properties`. Raises ClusterError if the authority is invalid or a file cannot be read
    or written.
    """
    tls_nodes = [node for node in nodes if node.certs is not None]
    if not tls_nodes:
        return
    from kipmesh.core.errors import InvalidConfigError
    from kipmesh.transport.tls.making import CERTIFICATE_FILE, Authority, replace_file

    certs = directory / "certs"
    try:
        home = certs / "authority"
        if (home / CERTIFICATE_FILE).exists():
            authority = Authority.read(home)
        else:
            authority = Authority.make(f"kipmesh {directory.name}"[:64])
            authority.write(home)
        for node in tls_nodes:
            own = Path(node.certs or "")
            if not is_good(own):
                names = [node.name, "localhost", HOST]
                authority.issue(node.name, names if node.role is Role.CONSUMER else [*names, NODE_NAME]).write(own)
        if not is_good(certs / CLIENT):
            authority.issue(CLIENT, [CLIENT]).write(certs / CLIENT)
        lines = [f"{key}={value}\n" for key, value in client_config(tls_nodes).items()]
        text = "# for clients and `kipmesh --command-config`\n" + "".join(lines)
        replace_file(directory / CLIENT_PROPERTIES, text.encode())  # atomic: a client may be reading it
    except InvalidConfigError as error:
        raise ClusterError(error.message) from None
    except OSError as error:
        raise ClusterError(f"{error.filename}: {error.strerror}") from None


def is_good(home: Path) -> bool:
    """Return whether `home` contains a certificate, key and CA file that are valid for longer than RENEW_BEFORE_S.

    False if a file is missing or invalid.
    """
    from kipmesh.core.errors import InvalidConfigError
    from kipmesh.transport.tls.files import TlsFiles, TlsPaths
    from kipmesh.transport.tls.making import AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE

    try:
        files = TlsFiles(TlsPaths(home / CERTIFICATE_FILE, home / KEY_FILE, home / AUTHORITIES_FILE))
    except InvalidConfigError:
        return False
    files.close()
    return (files.current.not_after_s or 0) > time.time() + RENEW_BEFORE_S


def client_config(nodes: Iterable[NodeInfo]) -> Mapping[str, str]:
    """Return the client settings for a cluster's TLS, by key; empty without TLS."""
    for node in nodes:
        if node.certs is not None:
            return {"security.protocol": "SSL", "ssl.certificate.dir": str(Path(node.certs).parent / CLIENT)}
    return {}
