"""TLS under gRPC: credentials of both sides that follow the files, who a peer is, and what only nodes may call.

gRPC asks the server for certificates at each handshake, on threads of its own. Clients get new channels (`client`).
gRPC in Python knows no certificate that a client may leave out: a listener requires one, or does not ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import grpc
import structlog

from kipmesh.core.errors import InvalidConfigError
from kipmesh.messages.table import Api
from kipmesh.transport.tls.files import Material, TlsFiles

log = structlog.get_logger(__name__)

NAMES_SHOWN_MAX = 5


class ServerTls:
    """TLS of one gRPC server, and the names by which it knows nodes.

    A server of plaintext beside those that have TLS has one as well (`encrypts` is false): nobody is a node there.
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
        """Requests that only nodes may send and that came from others."""
        self._node_names = tuple(node_names)
        self._served: int | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`."""
        first = self.files.current
        self._served = first.generation
        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(first), self._changed, require_client_authentication=self._requires_certificate
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """On a thread of gRPC, at a handshake: what is to be used from now on, None for what is used already."""
        current = self.files.current
        if current.generation == self._served:
            return None
        configuration = _server_configuration(current)
        self._served = current.generation
        return configuration

    def guards(self, api: Api) -> bool:
        """Whether `check` applies to requests of an API."""
        return api.is_for_nodes or api.has_replica_id

    async def check(self, api: Api, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """End the call with PERMISSION_DENIED if only nodes may send the request and the peer is not a node."""
        if api.has_replica_id and request.replica_id < 0:
            return
        names = peer_names(context)
        if is_node(names, self._node_names):
            return
        self.refused += 1
        shown = ", ".join(names[:NAMES_SHOWN_MAX]) or "none"
        log.warning("a request for nodes came from another", method=api.rpc, peer=context.peer(), names=shown)
        text = f"{api.rpc} is for nodes: none of the names of the certificate ({shown}) is in ssl.node.names"
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)


def _server_configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    if material.private_key is None or material.certificate_chain is None or material.authorities is None:
        raise InvalidConfigError("TLS of a listener needs a certificate, its key and authorities")
    return grpc.ssl_server_certificate_configuration(
        [(material.private_key, material.certificate_chain)], root_certificates=material.authorities
    )


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Of a client; the host's name is checked by gRPC."""
    return grpc.ssl_channel_credentials(material.authorities, material.private_key, material.certificate_chain)


def peer_names(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, ...]:
    """The alternative names of the peer's certificate, none without TLS."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return tuple([name.decode(errors="replace") for name in names])


def is_node(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Whether one of a certificate's alternative names is one of `ssl.node.names`.

    DNS names, addresses and URIs are compared as they are, DNS names without regard to case. The subject's common name
    does not count, nor does a pattern in a peer's own certificate: `*.example.org` there is no node of that domain.
    """
    wanted = [pattern.lower() for pattern in patterns]
    return any(_matches(name.lower(), pattern) for name in names for pattern in wanted)


def _matches(name: str, pattern: str) -> bool:
    if not pattern.startswith("*."):
        return name == pattern
    label, dot, rest = name.partition(".")
    return bool(dot and label and label != "*" and rest == pattern[2:] and "/" not in label)


def meaning_of(details: str, *, has_tls: bool) -> str:
    """What it means that gRPC says this of a connection that was not made, empty where that is not known."""
    meaning = ""
    if "Hostname Verification Check failed" in details:
        meaning = "its certificate does not have the name that it was asked by"
    elif "CERTIFICATE_VERIFY_FAILED" in details:
        expired = "expired" in details
        meaning = (
            "its certificate has expired" if expired else "no authority that is trusted here signed its certificate"
        )
    elif has_tls and ("WRONG_VERSION_NUMBER" in details or "Handshake read failed" in details):
        meaning = "does it speak TLS? See security.protocol"
    elif "failed to connect" in details and "Socket closed" in details:
        meaning = "does it trust this side's certificate?" if has_tls else "does it want security.protocol=SSL?"
    return meaning
