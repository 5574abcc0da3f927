"""Limits of a broker's listeners of the Kafka protocol."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kipmesh.core.config.base import Config, Positive, PositiveInt32
from kipmesh.messages.limits import MAX_INT32, MAX_INT64

QUEUED_REQUEST_BYTES_MIN = 128 << 10
"""More than a listener reads at once, so that what it has read of one request never keeps out the rest of it."""


class WireConfig(Config):
    """Part of a broker's configuration; docs/wire.md says how the limits work together."""

    queued_max_request_bytes: Annotated[int, Field(ge=QUEUED_REQUEST_BYTES_MIN, le=MAX_INT64)] = 256 << 20
    """Bytes of requests that wait for their answers at a time. Listeners of the Kafka protocol read no more until there
    is room; by gRPC, produce requests beyond it are refused."""
    queued_max_response_bytes: Positive = 256 << 20
    """Bytes of responses that clients by the Kafka protocol do not take. Fetches get the fewer bytes the less of it is
    left, and one batch at least."""
    queued_max_response_bytes_per_connection: Positive = 256 << 10
    """Bytes of responses that a client by the Kafka protocol does not take above which none of its requests begins."""
    socket_request_other_max_bytes: PositiveInt32 = 16 << 20
    """Largest request in bytes by the Kafka protocol, of all APIs but Produce."""
    socket_request_max_items: PositiveInt32 = 100_000
    """Most items of a request by the Kafka protocol: topics, partitions, members and all else that is in lists."""
    socket_listen_backlog_size: PositiveInt32 = 1024
    """Connections by the Kafka protocol that wait to be accepted; the system may have a lower limit."""
    max_in_flight_requests_per_connection: PositiveInt32 = 16
    """Requests of a connection by the Kafka protocol that wait for their answers; no more are read then."""
    max_connections: PositiveInt32 = MAX_INT32
    """Most connections by the Kafka protocol, of all listeners together; one more is closed at once."""
    max_connections_per_ip: PositiveInt32 = MAX_INT32
    """Most connections by the Kafka protocol from one address."""
    connections_max_idle_ms: Annotated[int, Field(ge=100, le=MAX_INT64)] = 600_000
    """Time in ms after which a connection by the Kafka protocol is closed when nothing came by it and nothing is to be
    answered."""
    connections_max_stall_ms: Annotated[int, Field(ge=100, le=MAX_INT64)] = 30_000
    """Time in ms after which a connection by the Kafka protocol is closed when nothing came in the middle of a request,
    or no byte of a response was taken. While others wait for memory it is the time for the whole of either."""
    connections_max_handshake_ms: Annotated[int, Field(ge=100, le=MAX_INT64)] = 10_000
    """Time in ms that a TLS handshake of a connection by the Kafka protocol may take."""
    sasl_server_max_receive_size: PositiveInt32 = 64 << 10
    """Largest request in bytes of a client that has not authenticated yet, at listeners with SASL."""
