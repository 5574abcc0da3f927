"""TLS for gRPC: reloading credentials of servers and clients, identity of peers, and requests that only nodes may send.

gRPC requests the server's certificates at each handshake, on its own threads. Clients open new channels (`client`).
gRPC in Python does not support optional client certificates: a listener requires one, or does not request one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import grpc
import structlog

from kipmesh.core.errors import InvalidConfigError
from kipmesh.messages.table import Api
from kipmesh.transport.tls.files import Material, TlsFiles

log = structlog.get_logger(__name__)

NAMES_SHOWN_MAX = 5

Guard = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[None]]
"""Aborts a call that the peer is not allowed to make, before its handler runs."""


class ServerTls:
    """TLS of one gRPC server, and the check for requests that only nodes may send.

    Args:
        node_names: patterns of `ssl.node.names`.
        encrypts: False for a plaintext listener next to TLS listeners; its peers do not count as nodes.
        requires_certificate: whether clients must present a certificate.
    """

    def __init__(
        self,
        files: TlsFiles,
        node_names: Sequence[str],
        *,
        encrypts: bool = True,
        requires_certificate: bool = True,
    ) -> None:
        self.files = files
        self.encrypts = encrypts
        self._requires_certificate = requires_certificate
        self.refused = 0
        """Number of requests that were refused because the peer is not a node."""
        self._node_names = tuple(node_names)
        self._served: int | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for `add_secure_port` that follow changes to the files.

        Raises InvalidConfigError if certificate, key or authorities are missing.
        """
        first = self.files.current
        self._served = first.generation
        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(first), self._changed, require_client_authentication=self._requires_certificate
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return a new configuration if the files have changed, else None. Called by gRPC's threads at a handshake."""
        current = self.files.current
        if current.generation == self._served:
            return None
        configuration = _server_configuration(current)
        self._served = current.generation
        return configuration

    def guard(self, api: Api) -> Guard | None:
        """Return the check for requests of an API, or None if all peers may send them."""
        return partial(self._check, api) if api.is_for_nodes or api.has_replica_id else None

    async def _check(self, api: Api, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Abort the call with PERMISSION_DENIED if only nodes may send the request and the peer is not a node."""
        if api.has_replica_id and request.replica_id < 0:
            return
        names = peer_names(context)
        if is_node(names, self._node_names):
            return
        self.refused += 1
        shown = ", ".join(names[:NAMES_SHOWN_MAX]) or "none"
        log.warning("request refused, peer is not a node", method=api.rpc, peer=context.peer(), names=shown)
        text = f"{api.rpc} is for nodes: add a name of the peer's certificate ({shown}) to ssl.node.names"
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)


def _server_configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    if material.private_key is None or material.certificate_chain is None or material.authorities is None:
        raise InvalidConfigError("a TLS listener needs a certificate, its key and trusted authorities")
    return grpc.ssl_server_certificate_configuration(
        [(material.private_key, material.certificate_chain)], root_certificates=material.authorities
    )


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Return a client's credentials, which do not follow changes to the files. gRPC checks the server's host name."""
    return grpc.ssl_channel_credentials(material.authorities, material.private_key, material.certificate_chain)


def peer_names(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, ...]:
    """Return the subject alternative names of the peer's certificate, or () without TLS."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return tuple([name.decode(errors="replace") for name in names])


def is_node(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Return whether an alternative name of a certificate matches a pattern of `ssl.node.names`, ignoring case.

    `*.` in a pattern matches one label. A wildcard in the certificate matches nothing. The common name does not count.
    """
    lower_patterns = [pattern.lower() for pattern in patterns]
    return any(_matches(name.lower(), pattern) for name in names for pattern in lower_patterns)


def _matches(name: str, pattern: str) -> bool:
    if not pattern.startswith("*."):
        return name == pattern
    label, dot, rest = name.partition(".")
    return bool(dot and label and label != "*" and rest == pattern[2:] and "/" not in label)


def hint_for(details: str, *, has_tls: bool) -> str:
    """Return a hint for the user on the gRPC error `details` of a failed connection, or "" if they are unknown."""
    hint = ""
    if "Hostname Verification Check failed" in details:
        hint = "its certificate does not contain the host name of this address"
    elif "CERTIFICATE_VERIFY_FAILED" in details:
        expired = "expired" in details
        hint = "its certificate has expired" if expired else "its certificate is not signed by an authority in ca.crt"
    elif has_tls and ("WRONG_VERSION_NUMBER" in details or "Handshake read failed" in details):
        hint = "does it speak TLS? See security.protocol"
    elif "failed to connect" in details and "Socket closed" in details:
        hint = "does it trust this side's certificate?" if has_tls else "does it want security.protocol=SSL?"
    return hint
