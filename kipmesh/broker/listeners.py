"""The listeners of a broker: one server for each, with the same handlers.

Mesh listeners speak gRPC, all others the Kafka protocol. The broker registers their addresses, so that every broker can
return the addresses of the others for the listener that a client uses. Modules of the Kafka protocol are imported only
if a listener needs them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from kipmesh.broker.handlers import make_handlers
from kipmesh.broker.parts import BrokerParts
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.messages import Listener
from kipmesh.messages.table import KAFKA_APIS
from kipmesh.node.tls import ProcessTls
from kipmesh.transport.grpc.server import Server
from kipmesh.transport.metrics import RequestMetrics
from kipmesh.transport.pipeline import Handlers, Observer, Pipeline
from kipmesh.transport.tls import ServerContext

if TYPE_CHECKING:
    from kipmesh.transport.kafka.handshake import Sasl
    from kipmesh.transport.kafka.listener import WireServer

STOP_GRACE_S = 0.2


@dataclass(eq=False)
class Listeners:
    """The gRPC and Kafka listeners of one broker. Must be created inside the event loop."""

    config: BrokerConfig
    registry: CollectorRegistry
    tls: ProcessTls
    parts: BrokerParts

    def __post_init__(self) -> None:
        self.ports: dict[str, int] = {}
        """Bound ports by listener name; empty before `start`."""
        self._servers: list[Server] = []
        self._kafka: WireServer | None = None

    async def start(self) -> None:
        """Bind all listeners and serve requests.

        Raises AddressError if an address cannot be bound, and KafkaError with INVALID_CONFIG if no mesh listener is the
        inter-broker listener or if `sasl.users.file` is unreadable or invalid.
        """
        config, own = self.config, self.config.inter_broker_listener_name
        if own not in [endpoint.name for endpoint in config.mesh_endpoints]:
            raise KafkaError(ErrorCode.INVALID_CONFIG, f"listeners must have the inter.broker.listener.name {own}")
        handlers, metrics, trace = make_handlers(self.parts), RequestMetrics(), self.parts.trace
        observers = None if trace is None else trace.observers()
        self.registry.register(metrics)
        pipeline = Pipeline(handlers, observers=observers, metrics=metrics)
        for endpoint in config.mesh_endpoints:
            name = "" if endpoint.name == own else endpoint.name
            server = Server(pipeline, config.socket_request_max_bytes, name, self.tls.mesh_server(endpoint.name))
            self._servers.append(server)
            self.ports[endpoint.name] = await server.start(endpoint.host, endpoint.port)
        if config.kafka_endpoints:
            await self._start_kafka(handlers, observers, metrics)

    async def _start_kafka(
        self, handlers: Handlers, observers: Mapping[str, Observer] | None, metrics: RequestMetrics
    ) -> None:
        from kipmesh.transport.kafka.handshake import connection_handlers
        from kipmesh.transport.kafka.limits import Limits
        from kipmesh.transport.kafka.listener import WireServer

        config = self.config
        connections = connection_handlers(KAFKA_APIS.values(), self._sasl())
        handlers = {**handlers, **connections}
        pipeline = Pipeline(handlers, observers=observers, metrics=metrics, faults=self.parts.faults)
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
        self._kafka = WireServer(pipeline, limits)
        self.registry.register(self._kafka.metrics)
        for endpoint in config.kafka_endpoints:
            tls = None
            if config.has_tls(endpoint.name) and self.tls.files is not None:
                tls = ServerContext(self.tls.files, client_auth=config.ssl_client_auth).reloading()
            self.ports[endpoint.name] = await self._kafka.listen(
                endpoint.name, endpoint.host, endpoint.port, tls, has_sasl=config.has_sasl(endpoint.name)
            )

    def _sasl(self) -> Sasl | None:
        from kipmesh.broker.membership.users import FileUsers, LogUsers, UsersFileError
        from kipmesh.transport.kafka.handshake import Sasl

        config = self.config
        if not any(config.has_sasl(endpoint.name) for endpoint in config.kafka_endpoints):
            return None
        try:
            file = FileUsers(config.sasl_users_file) if config.sasl_users_file else None
        except UsersFileError as error:
            raise InvalidConfigError(f"sasl.users.file {config.sasl_users_file}: {error}") from None
        publisher = self.parts.publisher
        users = LogUsers(publisher.published_image, publisher.wait_until, file)
        return Sasl(tuple(config.sasl_enabled_mechanisms), users)

    def advertised(self) -> list[Listener]:
        """Return the advertised addresses of the bound listeners, to register them. Port 0 becomes the bound port."""
        return [
            Listener(one.name, one.host, one.port or self.ports[one.name], self.config.protocol_number(one.name))
            for one in self.config.advertised_endpoints
            if one.name in self.ports
        ]

    async def set_serving(self, is_serving: bool) -> None:
        """Set whether the gRPC health service of each mesh listener reports that the broker serves."""
        for server in self._servers:
            await server.set_serving(is_serving)

    async def stop(self) -> None:
        """Stop all listeners and close their connections. gRPC requests have `STOP_GRACE_S` to complete. Idempotent."""
        if self._kafka is not None:
            await self._kafka.stop()
        if self._servers:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*(server.stop(STOP_GRACE_S) for server in self._servers))
