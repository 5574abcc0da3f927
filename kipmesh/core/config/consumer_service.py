"""Configuration of the consumer service: Kafka's consumer keys where there is one, and the limits of its HTTP side."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from kipmesh.core.config.base import NotNegative, NotNegativeInt32, Positive, PositiveInt32, StrList
from kipmesh.core.config.client import check_assignors, check_session
from kipmesh.core.config.node import Endpoint, parse_http_listener
from kipmesh.core.config.security import ClientSslConfig


class ConsumerServiceConfig(ClientSslConfig):
    """The consumer service."""

    bootstrap_servers: Annotated[str, Field(min_length=1)]
    """Brokers to begin with: host:port, separated by commas."""
    http_listener: str = "127.0.0.1:0"
    """host:port of the API and of /metrics, /healthz and /readyz; with TLS when it begins with `https://`. Port 0 takes
    a free one."""
    http_ssl_client_auth: Literal["none", "required"] = "none"
    """Whether `http.listener` requires clients' certificates, when it begins with `https://`."""
    client_id: str = "kipmesh-consumer"
    """The name that brokers see."""
    client_rack: str = ""
    """Where this service is."""
    group_id: Annotated[str, Field(min_length=1, max_length=8192)] | None = None
    """The group that the service's streams of `from=committed` are members of; none for a service without them."""
    partition_assignment_strategy: StrList = ("range", "cooperative-sticky")
    """How partitions are shared out, best first: `range`, `roundrobin`, `cooperative-sticky`. The group takes one that
    all members know; they are cooperative if that is all they know."""
    session_timeout_ms: PositiveInt32 = 45_000
    """Time in ms without a heartbeat after which the partitions of a service that died go to others."""
    heartbeat_interval_ms: PositiveInt32 = 3000
    """Time in ms between two heartbeats, less than `session.timeout.ms`."""
    max_poll_interval_ms: PositiveInt32 = 300_000
    """Longest time in ms that a reader may take nothing before its partitions go to others."""
    enable_auto_commit: bool = True
    """Whether what was delivered is committed for the group."""
    auto_commit_interval_ms: NotNegativeInt32 = 5000
    """Time in ms between two such commits."""
    auto_offset_reset: Literal["earliest", "latest", "none"] = "latest"
    """Where the group begins in a partition without a committed offset; `none` ends the stream with an error."""
    fetch_max_wait_ms: NotNegativeInt32 = 500
    """Longest time in ms that a fetch waits at a broker."""
    fetch_max_bytes: PositiveInt32 = 128 << 10
    """Bytes that one fetch of a stream asks for; a stalled reader holds several times as much (see http-api.md)."""
    max_partition_fetch_bytes: PositiveInt32 = 1 << 20
    """Bytes of one partition in a fetch."""
    enable_incremental_fetch: bool = True
    """Whether streams ask brokers for fetch sessions."""
    request_timeout_ms: PositiveInt32 = 30_000
    """Time in ms after which a request to a broker has failed."""
    max_poll_records: Annotated[int, Field(ge=1, le=10_000)] = 500
    """Records that one step of a stream takes at most."""
    streams_max: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Streams at a time; one more is answered with 503."""
    stream_write_timeout_ms: Positive = 300_000
    """Time in ms after which a reader that takes nothing is dropped."""
    stream_heartbeat_interval_ms: Positive = 15_000
    """Time in ms between the comments that keep an idle SSE stream open."""
    lag_partitions_max: Positive = 10_000
    """Partitions whose delivered position is remembered; the one used longest ago is forgotten first."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of what is logged."""
    log_format: Literal["json", "console"] = "json"
    """Form of the log's lines."""
    shutdown_grace_ms: NotNegative = 5000
    """Time in ms that running requests are given on SIGTERM."""

    @field_validator("http_listener")
    @classmethod
    def _check_http(cls, value: str) -> str:
        parse_http_listener(value)
        return value

    @model_validator(mode="after")
    def _check_https(self) -> Self:
        if self.http_endpoint.name == "HTTPS":
            self.check_ssl_files("http.listener with https", needs_certificate=True)
        return self

    @field_validator("partition_assignment_strategy")
    @classmethod
    def _check_assignors(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_assignors(value)

    @model_validator(mode="after")
    def _check_session(self) -> Self:
        check_session(self)
        return self

    @field_validator("bootstrap_servers")
    @classmethod
    def _check_bootstrap(cls, value: str) -> str:
        for address in value.split(","):
            Endpoint.from_text(f"MESH://{address.strip()}")
        return value

    @property
    def http_endpoint(self) -> Endpoint:
        """The parsed `http.listener`; its name is HTTP or HTTPS."""
        return parse_http_listener(self.http_listener)
