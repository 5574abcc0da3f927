"""Configuration of clients: Kafka's keys and defaults for producers, consumers and administration.

Keys of what is not built yet are refused (`transactional.id`).
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
        raise ValueError(f"{unknown[0] if unknown else value!r} is none of {', '.join(_ASSIGNORS)}")


GroupId = Annotated[str, Field(min_length=1, max_length=8192)]


class MemberConfig(Config):
    """What members of consumer groups share."""

    group_id: GroupId | None = None
    """The group that this consumer shares topics with (`subscribe`) and commits offsets for."""
    partition_assignment_strategy: Annotated[
        StrList, checked(_check_assignors), AfterValidator(lambda names: tuple(dict.fromkeys(names)))
    ] = ("range", "cooperative-sticky")
    """How partitions are shared out, best first: `range`, `roundrobin`, `cooperative-sticky`. The group takes one that
    all members know; they are cooperative if that is all they know."""
    session_timeout_ms: PositiveInt32 = 45_000
    """Time in ms without a heartbeat after which the coordinator removes a member, so that its partitions go to
    others."""
    heartbeat_interval_ms: PositiveInt32 = 3000
    """Time in ms between two heartbeats, less than `session.timeout.ms`."""
    max_poll_interval_ms: PositiveInt32 = 300_000
    """Longest time in ms between two polls of a member, and that a rebalance waits for it."""
    enable_auto_commit: bool = True
    """Whether positions are committed by themselves: within `poll`, before partitions go, and by `close`."""
    auto_commit_interval_ms: NotNegativeInt32 = 5000
    """Time in ms between two such commits."""
    client_rack: str = ""
    """The rack that this client is in: leaders may send it to a replica there (392-17)."""
    fetch_max_wait_ms: NotNegativeInt32 = 500
    """Longest time in ms that a broker waits for `fetch.min.bytes`."""
    max_partition_fetch_bytes: PositiveInt32 = 1_048_576
    """Bytes of one partition in one response; a first batch that is larger still comes whole."""
    enable_incremental_fetch: bool = True
    """Whether fetch sessions are requested: then a fetch names only partitions that changed."""

    @model_validator(mode="after")
    def _check_session(self) -> Self:
        """A member is heard of within its session, as Kafka requires."""
        beat_ms, session_ms = self.heartbeat_interval_ms, self.session_timeout_ms
        if beat_ms >= session_ms:
            raise ValueError(f"heartbeat.interval.ms ({beat_ms}) must be less than session.timeout.ms ({session_ms})")
        return self


class ClientConfig(ClientSslConfig):
    """What all clients share."""

    client_id: Annotated[str, Field(max_length=249)] = ""
    """This client's name for itself, in the servers' logs and metrics."""
    request_timeout_ms: PositiveInt32 = 30_000
    """Longest time in ms for the answer to one request."""
    retry_backoff_ms: NotNegative = 100
    """Time in ms before the first retry; it doubles with each further one."""
    retry_backoff_max_ms: NotNegative = 1000
    """Longest time in ms between two retries."""
    metadata_max_age_ms: Positive = 300_000
    """Age in ms at which metadata is fetched again without need."""
    socket_connection_setup_timeout_ms: Positive = 10_000
    """Longest time in ms that one bootstrap address is tried."""


class ApiConfig(ClientConfig):
    """What clients with blocking calls share."""

    default_api_timeout_ms: PositiveInt32 = 60_000
    """Longest time in ms of one call of the library, its retries included."""


class AdminConfig(ApiConfig):
    """An administration client's configuration."""


def _acks(value: Any) -> Any:
    return {"all": -1, "-1": -1, "0": 0, "1": 1}.get(value, value) if isinstance(value, str) else value


def _same_key(values: Any, alias: str, key: str) -> Any:
    """The values with another name of a key replaced by the key."""
    if not isinstance(values, dict) or alias not in values:
        return values
    if key in values:
        raise ValueError(f"{alias} and {key} are the same; give one of them")
    return {key if each == alias else each: value for each, value in values.items()}


class ProducerConfig(ClientConfig):
    """A producer's configuration. `batch.size` counts uncompressed bytes."""

    acks: Annotated[Literal[-1, 0, 1], BeforeValidator(_acks)] = -1
    """Who has a record before it counts as sent: all (-1) in-sync replicas, the leader (1), nobody (0)."""
    batch_size: NotNegativeInt32 = 16_384
    """Bytes of records that a partition collects into one batch; a larger record is a batch of its own."""
    linger_ms: NotNegative = 5
    """Time in ms that a batch waits for more records."""
    compression_type: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    """How batches are compressed."""
    compression_gzip_level: Annotated[int, Field(ge=-1, le=9)] = -1
    """Level of gzip; -1 is zlib's own default."""
    compression_lz4_level: Annotated[int, Field(ge=1, le=17)] = 9
    """Level of lz4; 9 is the fast compressor, as in Apache Kafka."""
    compression_zstd_level: Annotated[int, Field(ge=-131072, le=22)] = 3
    """Level of zstd."""
    max_request_size: PositiveInt32 = 1_048_576
    """Largest request in bytes, so also the largest record."""
    buffer_memory: Positive = 33_554_432
    """Bytes of records that wait or are under way; beyond them `send` waits."""
    max_block_ms: NotNegative = 60_000
    """Longest time in ms that `send` waits for metadata or room."""
    retries: Annotated[int, Field(ge=0, le=MAX_INT32)] = MAX_INT32
    """How often a batch is sent again; `delivery.timeout.ms` is the better bound."""
    delivery_timeout_ms: PositiveInt32 = 120_000
    """Longest time in ms from `send` to success or failure."""
    max_in_flight_requests_per_connection: PositiveInt32 = 5
    """Requests that wait for one broker's answer, at most 5 with idempotence; without it there is never more than one
    batch of a partition among them, so that the order is kept in both cases."""
    metadata_evict_ms: Annotated[int, Field(ge=5000, le=MAX_INT64)] = 300_000
    """Time in ms after which a topic is forgotten that no record went to (also `metadata.max.idle.ms`; 526-01)."""
    metadata_refresh: Literal["paced", "literal", "all"] = "paced"
    """How metadata is kept fresh: by few topics a request, spread in time or not (526-11), or all topics each time."""
    partitioner_ignore_keys: bool = False
    """Whether records with keys are spread like those without."""
    enable_idempotence: bool = True
    """Whether each record is written exactly once, however often it is sent. Needs `acks=all`, `retries` above 0 and at
    most 5 requests in flight: another value of these turns it off, and is refused where it is asked for in words."""

    @model_validator(mode="before")
    @classmethod
    def _idempotence_gives_way(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "enable.idempotence" in values:
            return values
        in_flight = str(values.get("max.in.flight.requests.per.connection", ""))
        gives_way = (
            _acks(values.get("acks", -1)) != -1
            or str(values.get("retries", "")) == "0"
            or (in_flight.isdigit() and int(in_flight) > UNRESOLVED_MAX)
        )
        return {**values, "enable.idempotence": False} if gives_way else values

    @model_validator(mode="after")
    def _idempotence_is_possible(self) -> Self:
        if self.enable_idempotence:
            if self.acks != -1:
                raise ValueError("enable.idempotence needs acks=all")
            if self.retries == 0:
                raise ValueError("enable.idempotence needs retries above 0")
            if self.max_in_flight_requests_per_connection > UNRESOLVED_MAX:
                raise ValueError(
                    f"enable.idempotence needs max.in.flight.requests.per.connection of at most {UNRESOLVED_MAX}"
                )
        return self

    @model_validator(mode="before")
    @classmethod
    def _max_idle(cls, values: Any) -> Any:
        return _same_key(values, "metadata.max.idle.ms", "metadata.evict.ms")


class ConsumerConfig(ApiConfig, MemberConfig):
    """A consumer's configuration; `rack.id` is another name of `client.rack`."""

    group_instance_id: GroupId | None = None
    """A name that no other member has: who comes back by it within its session finds its partitions without a
    rebalance."""
    replica_selection_mode: Literal["fetch", "metadata", "consumer"] = "fetch"
    """Who chooses the replica to read from: the leader, who answers Metadata, or the consumer by its own selector."""
    replica_selection_policy: Literal["leader", "preferred"] = "leader"
    """Whether the modes `metadata` and `consumer` read from the replica that was chosen."""
    replica_selector_class: str = ""
    """The selector of mode `consumer`: a name, an entry point or a dotted path; empty for the leader."""
    replica_selector_config: StrList = ()
    """Keys of the selector's own: `key=value`, separated by commas."""
    fetch_min_bytes: NotNegativeInt32 = 1
    """Bytes that a broker waits for before it answers a fetch."""
    fetch_max_bytes: PositiveInt32 = 52_428_800
    """Largest answer of one broker in bytes, and what is held undelivered before fetching pauses."""
    max_poll_records: PositiveInt32 = 500
    """Records of one poll."""
    auto_offset_reset: Literal["earliest", "latest", "none", "error"] = "latest"
    """Where to go on without a valid position; `none` and `error` raise."""
    check_crcs: bool = True
    """Whether each batch's CRC is checked."""
    isolation_level: Literal["read_uncommitted"] = "read_uncommitted"
    """There are no transactions yet."""

    @model_validator(mode="before")
    @classmethod
    def _rack_id(cls, values: Any) -> Any:
        return _same_key(values, "rack.id", "client.rack")
