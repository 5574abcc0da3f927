"""A broker's listeners for Kafka's own protocol: `kipmesh.wire` with this broker's handlers and configuration.

Every listener but the mesh's is one. Their addresses are registered with the broker, so that each broker can tell a
client where the others are on the listener that the client came by.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.node.broker.reconcile import Until
from kipmesh.node.broker.users import FileUsers, Known, LogUsers, UsersFileError
from kipmesh.tls import ServerContext, TlsFiles
from kipmesh.transport.pipeline import Pipeline
from kipmesh.wire.listener import Limits, WireServer
from kipmesh.wire.sasl import Sasl


class KafkaListeners:
    """One broker's; made inside the event loop. Nothing is loaded where none is configured."""

    def __init__(
        self,
        config: BrokerConfig,
        pipeline: Pipeline,
        registry: CollectorRegistry,
        tls_files: TlsFiles | None,
    ) -> None:
        self._config = config
        limits = Limits(
            config.socket_request_max_bytes,
            config.queued_max_request_bytes,
            config.max_connections,
            config.max_connections_per_ip,
            config.connections_max_idle_ms,
            config.socket_request_other_max_bytes,
            config.socket_request_max_items,
            config.max_in_flight_requests_per_connection,
            config.queued_max_response_bytes,
            config.queued_max_response_bytes_per_connection,
            config.connections_max_stall_ms,
            config.connections_max_handshake_ms,
            config.sasl_server_max_receive_size,
            config.socket_listen_backlog_size,
        )
        self._server = WireServer(pipeline, limits)
        self._tls_files = tls_files
        registry.register(self._server.metrics)

    async def start(self) -> dict[str, int]:
        """Bind all; their ports, by name. Raises AddressError."""
        bound = {}
        for endpoint in self._config.kafka_endpoints:
            context = None
            if self._config.has_tls(endpoint.name) and self._tls_files is not None:
                context = ServerContext(self._tls_files, client_auth=self._config.ssl_client_auth).reloading()
            bound[endpoint.name] = await self._server.listen(
                endpoint.name, endpoint.host, endpoint.port, context, has_sasl=self._config.has_sasl(endpoint.name)
            )
        return bound

    async def stop(self) -> None:
        """End every connection; idempotent."""
        await self._server.stop()


def make_sasl(config: BrokerConfig, known: Known, until: Until) -> Sasl | None:
    """Who may come in; raises InvalidConfigError where the file of users cannot be read."""
    if not any(config.has_sasl(endpoint.name) for endpoint in config.kafka_endpoints):
        return None
    try:
        file = FileUsers(config.sasl_users_file) if config.sasl_users_file else None
    except UsersFileError as error:
        raise InvalidConfigError(f"sasl.users.file {config.sasl_users_file}: {error}") from None
    return Sasl(tuple(config.sasl_enabled_mechanisms), LogUsers(known, until, file))
