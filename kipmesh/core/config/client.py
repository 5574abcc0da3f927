"""Configuration of producers, consumers and admin clients, with Kafka's keys and defaults.

Keys of features that are not supported yet are refused (`transactional.id`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kipmesh.core.config.base import Config, NotNegative, NotNegativeInt32, Positive, PositiveInt32, StrList, checked
from kipmesh.core.config.security import ClientSslConfig
from kipmesh.core.producer.sequences import UNRESOLVED_MAX
from kipmesh.messages.schema import MAX_INT32, MAX_INT64

_ASSIGNORS = ("range", "roundrobin", "cooperative-sticky")


def _check_assignors(value: tuple[str, ...]) -> None:
    unknown = [name for name in value if name not in _ASSIGNORS]
    if unknown or not value:
        raise ValueError(f"must list some of {', '.join(_ASSIGNORS)}, got {unknown[0] if unknown else 'none'!r}")


GroupId = Annotated[str, Field(min_length=1, max_length=8192)]


class MemberConfig(Config):
    """Configuration keys of consumer group members."""

    group_id: GroupId | None = None
    """Consumer group for `subscribe` and committed offsets."""
    partition_assignment_strategy: Annotated[
        StrList, checked(_check_assignors), AfterValidator(lambda names: tuple(dict.fromkeys(names)))
    ] = ("range", "cooperative-sticky")
    """Assignors in order of preference: `range`, `roundrobin`, `cooperative-sticky`. The group uses one that all
    members support. Rebalances are cooperative only if `cooperative-sticky` is the only one."""
    session_timeout_ms: PositiveInt32 = 45_000
    """Time in ms without a heartbeat after which the coordinator removes a member and reassigns its partitions."""
    heartbeat_interval_ms: PositiveInt32 = 3000
    """Time in ms between heartbeats; must be less than `session.timeout.ms`."""
    max_poll_interval_ms: PositiveInt32 = 300_000
    """Maximum time in ms between polls of a member, and its rebalance timeout."""
    enable_auto_commit: bool = True
    """Whether positions are committed automatically: in `poll`, before partitions are revoked, and in `close`."""
    auto_commit_interval_ms: NotNegativeInt32 = 5000
    """Time in ms between automatic commits."""
    client_rack: str = ""
    """Rack of this client. Leaders may redirect its fetches to a replica in the same rack (392-17)."""
    fetch_max_wait_ms: NotNegativeInt32 = 500
    """Maximum time in ms that a broker waits for `fetch.min.bytes`."""
    max_partition_fetch_bytes: PositiveInt32 = 1_048_576
    """Maximum bytes of one partition in a response; a larger first batch is still returned whole."""
    enable_incremental_fetch: bool = True
    """Whether to use fetch sessions, in which a fetch names only changed partitions."""

    @model_validator(mode="after")
    def _check_session(self) -> Self:
        """Raise ValueError unless the heartbeat interval is shorter than the session timeout, as in Kafka."""
        beat_ms, session_ms = self.heartbeat_interval_ms, self.session_timeout_ms
        if beat_ms >= session_ms:
            raise ValueError(f"heartbeat.interval.ms ({beat_ms}) must be less than session.timeout.ms ({session_ms})")
        return self


class ClientConfig(ClientSslConfig):
    """Configuration keys of all clients."""

    client_id: Annotated[str, Field(max_length=249)] = ""
    """Name of this client in the logs and metrics of brokers."""
    request_timeout_ms: PositiveInt32 = 30_000
    """Maximum time in ms to wait for a response."""
    retry_backoff_ms: NotNegative = 100
    """Time in ms before the first retry, doubled for each further retry."""
    retry_backoff_max_ms: NotNegative = 1000
    """Maximum time in ms between retries."""
    metadata_max_age_ms: Positive = 300_000
    """Age in ms at which metadata is refreshed even without errors."""
    socket_connection_setup_timeout_ms: Positive = 10_000
    """Maximum time in ms to connect to one bootstrap address."""


class ApiConfig(ClientConfig):
    """Configuration keys of clients whose API calls have a default timeout."""

    default_api_timeout_ms: PositiveInt32 = 60_000
    """Maximum time in ms of one API call, including retries."""


class AdminConfig(ApiConfig):
    """Configuration of an admin client."""


def _acks(value: Any) -> Any:
    return {"all": -1, "-1": -1, "0": 0, "1": 1}.get(value, value) if isinstance(value, str) else value


def _same_key(values: Any, alias: str, key: str) -> Any:
    """Return `values` with the key `alias` renamed to `key`. Raises ValueError if both are set."""
    if not isinstance(values, dict) or alias not in values:
        return values
    if key in values:
        raise ValueError(f"{alias} is an alias of {key}; set only one of them")
    return {key if each == alias else each: value for each, value in values.items()}


class ProducerConfig(ClientConfig):
    """Configuration of a producer. `batch.size` counts uncompressed bytes."""

    acks: Annotated[Literal[-1, 0, 1], BeforeValidator(_acks)] = -1
    """Replicas that must have a record before it counts as sent: all (-1) in-sync replicas, the leader (1), none
    (0)."""
    batch_size: NotNegativeInt32 = 16_384
    """Maximum bytes of records in one batch of a partition; a larger record is sent alone."""
    linger_ms: NotNegative = 5
    """Time in ms that a batch waits for further records."""
    compression_type: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    """Compression codec of batches."""
    compression_gzip_level: Annotated[int, Field(ge=-1, le=9)] = -1
    """Compression level of gzip; -1 is zlib's default."""
    compression_lz4_level: Annotated[int, Field(ge=1, le=17)] = 9
    """Compression level of lz4; 9 is the fast compressor, as in Apache Kafka."""
    compression_zstd_level: Annotated[int, Field(ge=-131072, le=22)] = 3
    """Compression level of zstd."""
    max_request_size: PositiveInt32 = 1_048_576
    """Maximum bytes of a request, and so of a record."""
    buffer_memory: Positive = 33_554_432
    """Maximum bytes of buffered and in-flight records; `send` waits beyond them."""
    max_block_ms: NotNegative = 60_000
    """Maximum time in ms that `send` waits for metadata or buffer memory."""
    retries: Annotated[int, Field(ge=0, le=MAX_INT32)] = MAX_INT32
    """Maximum retries of a batch; prefer `delivery.timeout.ms` as the limit."""
    delivery_timeout_ms: PositiveInt32 = 120_000
    """Maximum time in ms from `send` to success or failure."""
    max_in_flight_requests_per_connection: PositiveInt32 = 5
    """Maximum requests in flight per broker; at most 5 with idempotence. Without idempotence at most one of them has a
    batch of the same partition, so record order is kept in both cases."""
    metadata_evict_ms: Annotated[int, Field(ge=5000, le=MAX_INT64)] = 300_000
    """Time in ms after which metadata of an unused topic is dropped (alias `metadata.max.idle.ms`; 526-01)."""
    metadata_refresh: Literal["paced", "literal", "all"] = "paced"
    """How metadata is refreshed: `paced` (few topics per request, spread over time; 526-11), `literal` (few topics per
    request) or `all` (all topics in each request)."""
    partitioner_ignore_keys: bool = False
    """Whether records with keys are distributed like records without keys."""
    enable_idempotence: bool = True
    """Whether retries write each record exactly once. Requires `acks=all`, `retries` above 0 and at most 5 requests in
    flight. Other values of these keys disable idempotence, or are refused if it is enabled explicitly."""

    @model_validator(mode="before")
    @classmethod
    def _disable_idempotence(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "enable.idempotence" in values:
            return values
        in_flight = str(values.get("max.in.flight.requests.per.connection", ""))
        is_incompatible = (
            _acks(values.get("acks", -1)) != -1
            or str(values.get("retries", "")) == "0"
            or (in_flight.isdigit() and int(in_flight) > UNRESOLVED_MAX)
        )
        return {**values, "enable.idempotence": False} if is_incompatible else values

    @model_validator(mode="after")
    def _check_idempotence(self) -> Self:
        if not self.enable_idempotence:
            return self
        if self.acks != -1:
            raise ValueError(f"enable.idempotence needs acks=all, got {self.acks}")
        if self.retries == 0:
            raise ValueError("enable.idempotence needs retries above 0, got 0")
        in_flight = self.max_in_flight_requests_per_connection
        if in_flight > UNRESOLVED_MAX:
            key = "max.in.flight.requests.per.connection"
            raise ValueError(f"enable.idempotence needs {key} of at most {UNRESOLVED_MAX}, got {in_flight}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _max_idle(cls, values: Any) -> Any:
        return _same_key(values, "metadata.max.idle.ms", "metadata.evict.ms")


class ConsumerConfig(ApiConfig, MemberConfig):
    """Configuration of a consumer; `rack.id` is an alias of `client.rack`."""

    group_instance_id: GroupId | None = None
    """Unique name of a static member. A member that rejoins with it within its session keeps its partitions without a
    rebalance."""
    replica_selection_mode: Literal["fetch", "metadata", "consumer"] = "fetch"
    """Component that chooses the replica to read from: the leader in fetch responses (`fetch`), a broker in Metadata
    responses (`metadata`), or the consumer's own selector (`consumer`)."""
    replica_selection_policy: Literal["leader", "preferred"] = "leader"
    """Replica that the modes `metadata` and `consumer` read from: the leader, or the chosen replica (`preferred`)."""
    replica_selector_class: str = ""
    """Selector of mode `consumer`: a name, an entry point or a dotted path; empty for the leader."""
    replica_selector_config: StrList = ()
    """Configuration of the selector: `key=value`, separated by commas."""
    fetch_min_bytes: NotNegativeInt32 = 1
    """Minimum bytes that a broker collects before it responds to a fetch."""
    fetch_max_bytes: PositiveInt32 = 52_428_800
    """Maximum bytes of a broker's fetch response, and of buffered records before fetching pauses."""
    max_poll_records: PositiveInt32 = 500
    """Maximum records returned by one poll."""
    auto_offset_reset: Literal["earliest", "latest", "none", "error"] = "latest"
    """Position to continue from without a valid one; `none` and `error` raise an error."""
    check_crcs: bool = True
    """Whether to verify the CRC of each batch."""
    isolation_level: Literal["read_uncommitted"] = "read_uncommitted"
    """Isolation level; transactions are not supported yet."""

    @model_validator(mode="before")
    @classmethod
    def _rack_id(cls, values: Any) -> Any:
        return _same_key(values, "rack.id", "client.rack")
