"""TLS of one process: certificate files shared by its listeners and clients, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kipmesh.core.config import NodeConfig
from kipmesh.core.config.node import ConsumerServiceConfig

if TYPE_CHECKING:
    from kipmesh.transport.grpc.tls import ServerTls
    from kipmesh.transport.tls import ServerContext, TlsFiles


class ProcessTls:
    """The certificate files of one process, and the TLS contexts made from them. Without TLS, its methods return None.

    Raises InvalidConfigError if the certificates cannot be used.
    """

    def __init__(self, config: NodeConfig | ConsumerServiceConfig, registry: CollectorRegistry) -> None:
        self.files: TlsFiles | None = None
        self._servers: list[ServerTls] = []
        self._config = config
        if not _wants_tls(config):
            return
        from kipmesh.transport.tls import TlsFiles, TlsPaths  # late: imports cryptography

        self.files = TlsFiles(TlsPaths.of(config))
        registry.register(_TlsCollector(self.files, lambda: sum(server.refused for server in self._servers)))

    def mesh_server(self, listener: str) -> ServerTls | None:
        """Return the TLS settings of a gRPC listener, or None for plaintext.

        If the mesh listener has TLS, a plaintext listener also gets TLS settings, which make it refuse requests that
        only nodes may send.
        """
        config = self._config
        if self.files is None or not isinstance(config, NodeConfig):
            return None
        encrypts = config.has_tls(listener)
        if not encrypts and not config.mesh_has_tls:
            return None
        from kipmesh.transport.grpc.tls import ServerTls

        required = listener == config.mesh_listener or config.ssl_client_auth == "required"
        server = ServerTls(self.files, config.ssl_node_names, encrypts=encrypts, requires_certificate=required)
        self._servers.append(server)
        return server

    def mesh_client(self) -> TlsFiles | None:
        """Return the certificate files for connections to brokers and controllers, or None for plaintext."""
        config = self._config
        wants = config.mesh_has_tls if isinstance(config, NodeConfig) else config.security_protocol == "SSL"
        return self.files if wants else None

    def http(self, *, alpn: tuple[str, ...] = ()) -> ServerContext | None:
        """Return the TLS context of `http.listener`, or None for plaintext. `alpn`: protocol names to offer."""
        if self.files is None or self._config.http_endpoint.name != "HTTPS":
            return None
        from kipmesh.transport.tls import ServerContext

        return ServerContext(self.files, client_auth=self._config.http_ssl_client_auth, alpn=alpn)

    def close(self) -> None:
        """Stop watching the certificate files. Idempotent."""
        if self.files is not None:
            self.files.close()


def _wants_tls(config: NodeConfig | ConsumerServiceConfig) -> bool:
    if config.http_endpoint.name == "HTTPS":
        return True
    if isinstance(config, NodeConfig):
        return config.mesh_has_tls or any(config.has_tls(each.name) for each in config.endpoints)
    return config.security_protocol == "SSL"


class _TlsCollector(Collector):
    def __init__(self, files: TlsFiles, refused: Callable[[], int]) -> None:
        self._files = files
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        files, current = self._files, self._files.current
        expiry = GaugeMetricFamily(
            "kipmesh_tls_certificate_expiry_timestamp_seconds",
            "Expiry of the process's certificate, and the earliest expiry of its authorities.",
            labels=["certificate"],
        )
        for label, at_s in (("own", current.not_after_s), ("authority", current.authorities_not_after_s)):
            if at_s is not None:
                expiry.add_metric([label], at_s)
        yield expiry
        text = "1 while changed certificate files are invalid and the previous ones stay in use."
        yield GaugeMetricFamily("kipmesh_tls_files_bad", text, value=float(files.is_bad))
        reloads = CounterMetricFamily(
            "kipmesh_tls_reloads", "Changes of the certificate files, by result.", labels=["result"]
        )
        reloads.add_metric(["used"], files.reloads)
        reloads.add_metric(["refused"], files.failures)
        yield reloads
        text = "Requests refused because only nodes may send them."
        yield CounterMetricFamily("kipmesh_tls_requests_refused", text, value=self._refused())
