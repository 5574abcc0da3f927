"""TLS: which listeners have it, and where certificates, keys and authorities are; docs/security.md says how to use it.

Kafka's keys where there is one, PEM as the only form of a store; `ssl.certificate.dir` and `ssl.node.names` are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self, get_args

from pydantic import BeforeValidator, model_validator

from kipmesh.core.config.base import Config, StrList, checked

Protocol = Literal["PLAINTEXT", "SSL"]
ListenerProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
PROTOCOLS: Mapping[str, ListenerProtocol] = {name: name for name in get_args(ListenerProtocol)}
"""By name, in the order of Kafka's numbers."""


def parse_protocol_map(value: tuple[str, ...]) -> dict[str, ListenerProtocol]:
    """From `NAME:PROTOCOL` texts; raises ValueError."""
    protocols: dict[str, ListenerProtocol] = {}
    for text in value:
        name, colon, protocol = text.partition(":")
        if not (colon and name and protocol in PROTOCOLS):
            raise ValueError(f"{text!r} is not NAME:PLAINTEXT or NAME:SSL (or NAME:SASL_PLAINTEXT, NAME:SASL_SSL)")
        if name in protocols:
            raise ValueError(f"listener {name} is named twice")
        protocols[name] = PROTOCOLS[protocol]
    return protocols


def _checked_client_auth(value: object) -> object:
    if value not in ("none", "requested", "required"):
        raise ValueError("none, requested or required")
    return value


ClientAuth = Annotated[Literal["none", "requested", "required"], BeforeValidator(_checked_client_auth)]


class SslConfig(Config):
    """Where a process has its certificate, its key and the authorities that it trusts, as PEM files."""

    ssl_certificate_dir: str = ""
    """Folder with `tls.crt` (own certificate, then those that lead to the authority), `tls.key` and `ca.crt` (the
    authorities), as cert-manager and Kubernetes' TLS secrets lay them out."""
    ssl_keystore_location: str = ""
    """PEM file with the own key and certificates, instead of the folder."""
    ssl_keystore_type: Literal["PEM"] = "PEM"
    """Form of `ssl.keystore.location`."""
    ssl_truststore_location: str = ""
    """PEM file with the authorities, instead of the folder."""
    ssl_truststore_type: Literal["PEM"] = "PEM"
    """Form of `ssl.truststore.location`."""

    @model_validator(mode="after")
    def _check_one_place(self) -> Self:
        if self.ssl_certificate_dir and (self.ssl_keystore_location or self.ssl_truststore_location):
            raise ValueError("ssl.certificate.dir has all; leave ssl.keystore.location and ssl.truststore.location out")
        return self

    def check_ssl_files(self, what: str, *, needs_certificate: bool) -> None:
        """Raise ValueError unless the files that `what` needs are named."""
        if self.ssl_certificate_dir:
            return
        if not self.ssl_truststore_location or (needs_certificate and not self.ssl_keystore_location):
            other = (
                "ssl.keystore.location and ssl.truststore.location" if needs_certificate else "ssl.truststore.location"
            )
            raise ValueError(f"{what} needs ssl.certificate.dir, or {other}")


class ClientSslConfig(SslConfig):
    """How a client reaches brokers."""

    security_protocol: Protocol = "PLAINTEXT"
    """How brokers are reached: PLAINTEXT or SSL, as their listener is."""
    ssl_endpoint_identification_algorithm: Literal["https"] = "https"
    """A broker's certificate must have the name that the broker is reached by; this cannot be turned off."""

    @model_validator(mode="after")
    def _check_ssl(self) -> Self:
        if self.security_protocol == "SSL":
            self.check_ssl_files("security.protocol=SSL", needs_certificate=False)
        return self


class ServerSslConfig(SslConfig):
    """Which listeners of a node have TLS, and whom they trust."""

    listener_security_protocol_map: Annotated[StrList, checked(parse_protocol_map)] = ()
    """NAME:PLAINTEXT or NAME:SSL for each listener, separated by commas; NAME:SASL_PLAINTEXT or NAME:SASL_SSL for those
    of the Kafka protocol whose clients authenticate. When it is empty all are PLAINTEXT, but for those with the name of
    another protocol."""
    ssl_client_auth: ClientAuth = "none"
    """Whether listeners ask for clients' certificates: `none`, `requested` (not for gRPC) or `required`. The listener
    that nodes use among each other always requires them."""
    ssl_node_names: StrList = ()
    """Names, one of which the certificate of a broker or controller must have in its subject alternative name (DNS
    name, address or URI); a `*` as the first label of a DNS name stands for any one label. Who has none of them is a
    client and cannot replicate, vote or register. Required when a listener of the mesh has TLS."""

    def protocol_of(self, listener: str) -> ListenerProtocol:
        """The protocol of a listener by its name."""
        protocols = parse_protocol_map(self.listener_security_protocol_map)
        return protocols.get(listener, PROTOCOLS.get(listener, "PLAINTEXT"))

    def has_tls(self, listener: str) -> bool:
        """Whether the listener of that name encrypts."""
        return self.protocol_of(listener) in ("SSL", "SASL_SSL")

    def has_sasl(self, listener: str) -> bool:
        """Whether who comes by the listener has to say who it is."""
        return self.protocol_of(listener).startswith("SASL_")

    def protocol_number(self, listener: str) -> int:
        """Kafka's number of the listener's protocol."""
        return list(PROTOCOLS).index(self.protocol_of(listener))

    def check_protocol_map(self, listeners: tuple[str, ...], http: str) -> None:
        """Raise ValueError for a listener that the map leaves out, and for one with TLS that lacks files or names."""
        protocols = parse_protocol_map(self.listener_security_protocol_map)
        for name in listeners:
            if protocols and name not in protocols:
                raise ValueError(f"listener.security.protocol.map does not say what listener {name} is")
            if self.has_tls(name):
                self.check_ssl_files(f"listener {name} with SSL", needs_certificate=True)
        if http == "HTTPS":
            self.check_ssl_files("http.listener with https", needs_certificate=True)

    def check_mesh_listener(self, name: str) -> None:
        """Raise ValueError when a listener of the mesh has TLS and nothing says who is a node."""
        if self.has_sasl(name):
            raise ValueError(f"listener {name} speaks gRPC, which has no SASL")
        if self.has_tls(name) and not self.ssl_node_names:
            raise ValueError(f"listener {name} with SSL needs ssl.node.names: the names of brokers and controllers")
