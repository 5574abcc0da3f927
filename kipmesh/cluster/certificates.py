"""Certificates of a local cluster with TLS, in the folder `certs` beside its nodes.

`certs/authority` signs and is nobody else's business, `certs/client` is for clients, `certs/NODE` for each node.
Brokers and controllers have `NODE_NAME` as a further name, by which they know each other; others do not.
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


def ensure(folder: Path, nodes: Iterable[NodeInfo]) -> None:
    """Make what is missing or soon expires, for nodes that have TLS; raises ClusterError."""
    wanted = [node for node in nodes if node.certs is not None]
    if not wanted:
        return
    from kipmesh.core.errors import InvalidConfigError
    from kipmesh.transport.tls.making import CERTIFICATE_FILE, Authority, replace_file

    certs = folder / "certs"
    try:
        home = certs / "authority"
        if (home / CERTIFICATE_FILE).exists():
            authority = Authority.read(home)
        else:
            authority = Authority.make(f"kipmesh {folder.name}"[:64])
            authority.write(home)
        for node in wanted:
            own = Path(node.certs or "")
            if not is_good(own):
                names = [node.name, "localhost", HOST]
                authority.issue(node.name, names if node.role is Role.CONSUMER else [*names, NODE_NAME]).write(own)
        if not is_good(certs / CLIENT):
            authority.issue(CLIENT, [CLIENT]).write(certs / CLIENT)
        lines = [f"{key}={value}\n" for key, value in client_config(wanted).items()]
        text = "# for clients, and `kipmesh --command-config`\n" + "".join(lines)
        replace_file(folder / CLIENT_PROPERTIES, text.encode())  # clients that start meanwhile read it
    except InvalidConfigError as error:
        raise ClusterError(error.message) from None
    except OSError as error:
        raise ClusterError(f"{error.filename}: {error.strerror}") from None


def is_good(home: Path) -> bool:
    """Whether a folder has a whole certificate that does not soon expire."""
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
    """What clients of a cluster need beside its addresses; nothing without TLS."""
    for node in nodes:
        if node.certs is not None:
            return {"security.protocol": "SSL", "ssl.certificate.dir": str(Path(node.certs).parent / CLIENT)}
    return {}
