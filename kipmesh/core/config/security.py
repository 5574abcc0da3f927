"""TLS configuration of listeners and clients. See docs/security.md.

Keys are Kafka's where they exist, with PEM as the only store format. `ssl.certificate.dir` and `ssl.node.names` are
kipmesh's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self, get_args

from pydantic import BeforeValidator, model_validator

from kipmesh.core.config.base import Config, StrList, checked

Protocol = Literal["PLAINTEXT", "SSL"]
ListenerProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
PROTOCOLS: Mapping[str, ListenerProtocol] = {name: name for name in get_args(ListenerProtocol)}
"""Protocol by name, in the order of Kafka's numbers."""


def parse_protocol_map(value: tuple[str, ...]) -> dict[str, ListenerProtocol]:
    """Return listener name -> protocol from `NAME:PROTOCOL` entries. Raises ValueError for a malformed or duplicate
    entry."""
    protocols: dict[str, ListenerProtocol] = {}
    for text in value:
        name, colon, protocol = text.partition(":")
        if not (colon and name and protocol in PROTOCOLS):
            raise ValueError(f"{text!r} is not NAME:PLAINTEXT or NAME:SSL (or NAME:SASL_PLAINTEXT, NAME:SASL_SSL)")
        if name in protocols:
            raise ValueError(f"listener {name} appears more than once")
        protocols[name] = PROTOCOLS[protocol]
    return protocols


def _checked_client_auth(value: object) -> object:
    if value not in ("none", "requested", "required"):
        raise ValueError(f"must be none, requested or required, got {value!r}")
    return value


ClientAuth = Annotated[Literal["none", "requested", "required"], BeforeValidator(_checked_client_auth)]


class SslConfig(Config):
    """Locations of a process's certificate, key and trusted authorities, as PEM files."""

    ssl_certificate_dir: str = ""
    """Directory with `tls.crt` (certificate chain, own certificate first), `tls.key` and `ca.crt` (authorities), as
    written by cert-manager and Kubernetes TLS secrets."""
    ssl_keystore_location: str = ""
    """PEM file with the private key and certificate chain, instead of `ssl.certificate.dir`."""
    ssl_keystore_type: Literal["PEM"] = "PEM"
    """Format of `ssl.keystore.location`."""
    ssl_truststore_location: str = ""
    """PEM file with the trusted authorities, instead of `ssl.certificate.dir`."""
    ssl_truststore_type: Literal["PEM"] = "PEM"
    """Format of `ssl.truststore.location`."""

    @model_validator(mode="after")
    def _check_one_place(self) -> Self:
        if self.ssl_certificate_dir and (self.ssl_keystore_location or self.ssl_truststore_location):
            raise ValueError(
                "ssl.certificate.dir excludes ssl.keystore.location and ssl.truststore.location, remove it or both"
            )
        return self

    def check_ssl_files(self, feature: str, *, needs_certificate: bool) -> None:
        """Raise a ValueError that names `feature` unless trusted authorities and, with `needs_certificate`, a key and
        certificate are configured. The files are not opened."""
        if self.ssl_certificate_dir:
            return
        if not self.ssl_truststore_location or (needs_certificate and not self.ssl_keystore_location):
            other = (
                "ssl.keystore.location and ssl.truststore.location" if needs_certificate else "ssl.truststore.location"
            )
            raise ValueError(f"{feature} needs ssl.certificate.dir, or {other}")


class ClientSslConfig(SslConfig):
    """TLS configuration of a client."""

    security_protocol: Protocol = "PLAINTEXT"
    """Protocol of the brokers' listener: PLAINTEXT or SSL."""
    ssl_endpoint_identification_algorithm: Literal["https"] = "https"
    """Always `https`: a broker's certificate must contain the host name that the client connects to."""

    @model_validator(mode="after")
    def _check_ssl(self) -> Self:
        if self.security_protocol == "SSL":
            self.check_ssl_files("security.protocol=SSL", needs_certificate=False)
        return self


class ServerSslConfig(SslConfig):
    """TLS configuration of a node's listeners."""

    listener_security_protocol_map: Annotated[StrList, checked(parse_protocol_map)] = ()
    """Protocol of each listener: NAME:PLAINTEXT or NAME:SSL, separated by commas; for listeners of the Kafka protocol
    with authentication NAME:SASL_PLAINTEXT or NAME:SASL_SSL. If it is empty, a listener with the name of a protocol has
    that protocol, and all others are PLAINTEXT."""
    ssl_client_auth: ClientAuth = "none"
    """Client certificates at listeners: `none`, `requested` (not for gRPC) or `required`. The inter-node listener
    always requires them."""
    ssl_node_names: StrList = ()
    """Names of nodes: the certificate of a broker or controller must have one of them as a subject alternative name
    (DNS name, address or URI). A `*` as the first label of a DNS name matches any one label. A peer without such a name
    is a client and cannot replicate, vote or register. Required for TLS at an inter-node listener."""

    def protocol_of(self, listener: str) -> ListenerProtocol:
        """Return the listener's protocol: the one in the protocol map, else the one that the listener is named after,
        else PLAINTEXT."""
        protocols = parse_protocol_map(self.listener_security_protocol_map)
        return protocols.get(listener, PROTOCOLS.get(listener, "PLAINTEXT"))

    def has_tls(self, listener: str) -> bool:
        """Return whether the listener with this name uses TLS."""
        return self.protocol_of(listener) in ("SSL", "SASL_SSL")

    def has_sasl(self, listener: str) -> bool:
        """Return whether clients of this listener must authenticate with SASL."""
        return self.protocol_of(listener).startswith("SASL_")

    def protocol_number(self, listener: str) -> int:
        """Return Kafka's number for the listener's protocol: 0 PLAINTEXT, 1 SSL, 2 SASL_PLAINTEXT, 3 SASL_SSL."""
        return list(PROTOCOLS).index(self.protocol_of(listener))

    def check_protocol_map(self, listeners: tuple[str, ...], http: str) -> None:
        """Raise ValueError for a listener that is missing from a non-empty protocol map, or for a listener with TLS but
        without certificate files.

        `http` is the scheme of `http.listener`: HTTP or HTTPS.
        """
        protocols = parse_protocol_map(self.listener_security_protocol_map)
        for name in listeners:
            if protocols and name not in protocols:
                raise ValueError(f"listener.security.protocol.map lacks listener {name}; add {name}:PROTOCOL")
            if self.has_tls(name):
                self.check_ssl_files(f"listener {name} with SSL", needs_certificate=True)
        if http == "HTTPS":
            self.check_ssl_files("http.listener with https", needs_certificate=True)

    def check_mesh_listener(self, name: str) -> None:
        """Raise ValueError if the gRPC listener `name` uses SASL, or uses TLS without `ssl.node.names`."""
        if self.has_sasl(name):
            raise ValueError(f"listener {name} is gRPC, which does not support SASL")
        if self.has_tls(name) and not self.ssl_node_names:
            raise ValueError(f"listener {name} with SSL needs ssl.node.names, the names in certificates of nodes")
