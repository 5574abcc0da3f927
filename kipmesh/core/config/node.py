"""Configuration of controllers, brokers and the consumer service: Kafka's keys and defaults, and kipmesh's own."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kipmesh.core.config.base import (
    Config,
    MinusOneOrMore,
    NotNegative,
    NotNegativeInt32,
    Positive,
    PositiveInt32,
    StrList,
    checked,
)
from kipmesh.core.config.client import GroupId, MemberConfig
from kipmesh.core.config.security import ClientSslConfig, ServerSslConfig
from kipmesh.core.config.topic import BROKER_DEFAULTS, CleanupPolicy, TopicConfig
from kipmesh.core.scram import HASHES
from kipmesh.messages.schema import MAX_INT32, MAX_INT64

PORT_MAX = 65535
QUEUED_REQUEST_BYTES_MIN = 128 << 10
"""Must exceed one read of a listener, so that a partly read request never blocks the rest of itself."""


class Endpoint(Config):
    """A listener: NAME://host:port."""

    name: str
    host: str
    port: Annotated[int, Field(ge=0, le=PORT_MAX)]

    @classmethod
    def from_text(cls, text: str) -> Endpoint:
        """Parse `NAME://host:port`, with port 0 to 65535. The brackets of an IPv6 host are removed. Raises ValueError
        for any other text."""
        name, separator, address = text.partition("://")
        host, colon, port = address.rpartition(":")
        if not (separator and colon and name and port.isdigit() and int(port) <= PORT_MAX):
            raise ValueError(f"{text!r} is not NAME://host:port")
        return cls.parse({"name": name, "host": host.strip("[]"), "port": int(port)})


def parse_http_listener(text: str) -> Endpoint:
    """Parse `host:port`, `http://host:port` or `https://host:port` as an endpoint named HTTP or HTTPS. Raises
    ValueError for any other text."""
    scheme, separator, address = text.partition("://")
    if not separator:
        scheme, address = "http", text
    if scheme not in ("http", "https"):
        raise ValueError(f"{text!r} is not host:port, http://host:port or https://host:port")
    return Endpoint.from_text(f"{scheme.upper()}://{address}")


class ServiceConfig(Config):
    """Configuration keys of every service process."""

    http_listener: Annotated[str, checked(parse_http_listener)] = "127.0.0.1:0"
    """host:port of /metrics, /healthz and /readyz, and of the consumer service's API; with TLS if it begins with
    `https://`. Port 0 selects a free port."""
    http_ssl_client_auth: Literal["none", "required"] = "none"
    """Whether an `https://` `http.listener` requires client certificates."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of log events."""
    log_format: Literal["json", "console"] = "json"
    """Format of log lines."""
    shutdown_grace_ms: NotNegative = 5000
    """Time in ms for running requests to complete after SIGTERM."""

    @property
    def http_endpoint(self) -> Endpoint:
        """Parsed `http.listener`, named HTTP or HTTPS."""
        return parse_http_listener(self.http_listener)


class Voter(Config):
    """A member of `controller.quorum.voters`: id@host:port."""

    id: int
    host: str
    port: int

    @property
    def address(self) -> str:
        """Address as `host:port`."""
        return f"{self.host}:{self.port}"


def parse_voters(text: str) -> tuple[Voter, ...]:
    """Parse `1@host:port,2@host:port` in this order. Empty entries are ignored, so the result may be empty.

    Raises ValueError for a malformed entry, an id or port out of range, and a duplicate id or address.
    """
    voters: dict[int, Voter] = {}
    addresses: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        node, at, address = part.partition("@")
        host, colon, port = address.rpartition(":")
        if not (at and colon and node.isdecimal() and host and port.isdecimal()):
            raise ValueError(f"{part!r} is not id@host:port")
        if int(node) > MAX_INT32:
            raise ValueError(f"{part!r}: an id must be at most {MAX_INT32}")
        if not 1 <= int(port) <= PORT_MAX:
            raise ValueError(f"{part!r}: a port must be between 1 and {PORT_MAX}")
        voter = Voter.parse({"id": int(node), "host": host, "port": int(port)})
        if voter.id in voters:
            raise ValueError(f"voter {voter.id} appears more than once")
        if addresses.setdefault(voter.address, voter.id) != voter.id:
            raise ValueError(f"voters {addresses[voter.address]} and {voter.id} have the same address {voter.address}")
        voters[voter.id] = voter
    return tuple(voters.values())


def _check_voters(value: str) -> None:
    if not parse_voters(value):
        raise ValueError("must name at least one voter as id@host:port")


def _check_listeners(value: tuple[str, ...]) -> None:
    for text in value:
        Endpoint.from_text(text)


def _check_pairs(value: tuple[str, ...]) -> None:
    for text in value:
        if text.find("=") < 1:
            raise ValueError(f"{text!r} is not key=value")


def _check_mechanisms(value: tuple[str, ...]) -> None:
    if not value or set(value) - {"PLAIN", *HASHES}:
        raise ValueError(f"must list some of PLAIN, {', '.join(HASHES)}, got {', '.join(value) or 'none'}")


ListenerList = Annotated[StrList, checked(_check_listeners)]


class NodeConfig(ServerSslConfig, ServiceConfig):
    """Configuration keys of controllers and brokers."""

    node_id: NotNegativeInt32
    """Id of this node, unique in the cluster."""
    cluster_id: Annotated[str, Field(min_length=1, max_length=64)]
    """Id of the cluster. A data directory of another cluster is refused."""
    controller_quorum_voters: Annotated[str, checked(_check_voters)]
    """Voters of the metadata quorum: id@host:port, separated by commas."""
    listeners: ListenerList = ("MESH://127.0.0.1:0",)
    """Listeners of this node: NAME://host:port, separated by commas. Names that begin with MESH are gRPC; on all others
    a broker serves the Kafka protocol. Port 0 selects a free port."""
    advertised_listeners: ListenerList = ()
    """Addresses at which clients and other nodes reach the listeners, by name; by default those of `listeners`. A
    client receives the addresses of the listener name that it connected to."""
    socket_request_max_bytes: PositiveInt32 = 100 << 20
    """Maximum bytes of a request."""
    broker_session_timeout_ms: PositiveInt32 = 3000
    """Time in ms without a heartbeat after which the controller fences a broker."""
    broker_connection_loss_timeout_ms: NotNegative = 200
    """Time in ms after which the controller fences a broker whose connection broke and that did not reconnect; 0 to
    rely on `broker.session.timeout.ms` only."""
    broker_heartbeat_interval_ms: PositiveInt32 = 500
    """Time in ms between heartbeats of a broker."""
    controller_quorum_fetch_timeout_ms: PositiveInt32 = 1000
    """Time in ms without a fetch response from the metadata leader after which a voter becomes a candidate. A leader
    without fetches from a majority resigns after 1.5 times this."""
    controller_quorum_election_timeout_ms: PositiveInt32 = 500
    """Minimum time in ms that a voter without a leader waits before it becomes a candidate, and that a candidate waits
    for votes."""
    controller_quorum_election_backoff_max_ms: PositiveInt32 = 1000
    """Maximum back-off in ms of a candidate after a lost election."""
    controller_quorum_request_timeout_ms: PositiveInt32 = 2000
    """Timeout in ms of a request to another member of the metadata quorum."""
    controller_quorum_retry_backoff_ms: PositiveInt32 = 20
    """Time in ms before a failed request to another member of the metadata quorum is retried."""
    replica_fetch_response_max_bytes: PositiveInt32 = 10 << 20
    """Maximum bytes of a response to a follower, and of a part of a metadata snapshot."""
    metadata_log_segment_bytes: Annotated[int, Field(ge=14, le=MAX_INT32)] = 1 << 30
    """Maximum bytes of a segment of the metadata log."""
    metadata_snapshot_min_changed_records_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the latest metadata snapshot's records that must have been changed or deleted before the next
    snapshot."""
    metadata_log_max_record_bytes_between_snapshots: Positive = 20 << 20
    """Minimum bytes of metadata records after the latest snapshot before the next one, in addition to the share of
    changed records."""
    metadata_log_max_snapshot_interval_ms: NotNegative = 3_600_000
    """Maximum time in ms between snapshots while there are new records; 0 for no limit."""
    metadata_start_offset_lag_time_max_ms: Positive = 604_800_000
    """Time in ms that the metadata leader keeps records for lagging replicas."""
    metadata_max_retention_bytes: Positive = 100 << 20
    """Maximum bytes of the metadata log and its snapshots; the oldest are deleted first."""

    @model_validator(mode="after")
    def _check_ssl(self) -> Self:
        self.check_protocol_map(tuple(each.name for each in self.endpoints), self.http_endpoint.name)
        self.check_mesh_listener(self.mesh_listener)
        return self

    @property
    def mesh_listener(self) -> str:
        """Name of the gRPC listener for traffic between nodes: the first listener. Empty without listeners."""
        return self.endpoints[0].name if self.endpoints else ""

    @property
    def mesh_has_tls(self) -> bool:
        """Whether traffic between nodes uses TLS."""
        return self.has_tls(self.mesh_listener)

    @property
    def voters(self) -> tuple[Voter, ...]:
        """Parsed `controller.quorum.voters`."""
        return parse_voters(self.controller_quorum_voters)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Parsed `listeners`."""
        return tuple(Endpoint.from_text(text) for text in self.listeners)


class ControllerConfig(NodeConfig):
    """Configuration of a metadata controller."""

    metadata_log_dir: str
    """Directory of the metadata log."""
    num_partitions: PositiveInt32 = 1
    """Default number of partitions of a new topic."""
    default_replication_factor: PositiveInt32 = 3
    """Default replication factor of a new topic, limited to the number of brokers."""
    min_insync_replicas: PositiveInt32 = 2
    """Default of the topics' `min.insync.replicas`, limited to the number of replicas."""
    unclean_leader_election_enable: bool = False
    """Default of the topics' `unclean.leader.election.enable`."""
    auto_leader_rebalance_enable: bool = True
    """Whether leadership returns automatically to the preferred leader, the leader service, once it is in sync."""
    leader_imbalance_check_interval_seconds: Positive = 30
    """Time in s between checks for partitions whose preferred leader does not lead."""
    max_partitions_per_request: PositiveInt32 = 10_000
    """Maximum partitions changed by one CreateTopics, CreatePartitions or AlterPartitionReassignments request. The
    controller makes no other decision meanwhile."""

    @model_validator(mode="after")
    def _check_own_address(self) -> Self:
        """Raise ValueError if this voter's port in controller.quorum.voters differs from that of its first listener and
        the address is not advertised. Listener port 0 is accepted."""
        own = next((voter for voter in self.voters if voter.id == self.node_id), None)
        listener = next(iter(self.endpoints), None)
        advertised = {f"{one.host}:{one.port}" for one in map(Endpoint.from_text, self.advertised_listeners)}
        if own is None or listener is None or listener.port in (0, own.port) or own.address in advertised:
            return self
        raise ValueError(
            f"configuration key 'listeners': {self.listeners[0]!r}, but controller.quorum.voters has "
            f"{own.id}@{own.address}; if that address is forwarded to this node, "
            f"set advertised.listeners={listener.name}://{own.address}"
        )


class WireConfig(Config):
    """Limits of a broker's Kafka listeners; docs/wire.md explains how they work together."""

    queued_max_request_bytes: Annotated[int, Field(ge=QUEUED_REQUEST_BYTES_MIN, le=MAX_INT64)] = 256 << 20
    """Maximum bytes of requests in progress. Kafka listeners stop reading at the limit; Produce requests by gRPC beyond
    it are refused."""
    queued_max_response_bytes: Positive = 256 << 20
    """Maximum bytes of responses that Kafka clients have not read yet. Fetch responses shrink as the rest decreases, to
    at least one batch."""
    queued_max_response_bytes_per_connection: Positive = 256 << 10
    """Maximum bytes of responses that one Kafka client has not read yet. Above it none of the client's requests is
    started."""
    socket_request_other_max_bytes: PositiveInt32 = 16 << 20
    """Maximum bytes of a Kafka request other than Produce."""
    socket_request_max_items: PositiveInt32 = 100_000
    """Maximum items in the lists of a Kafka request: topics, partitions, members and others."""
    socket_listen_backlog_size: PositiveInt32 = 1024
    """Maximum Kafka connections waiting to be accepted; the operating system may have a lower limit."""
    max_in_flight_requests_per_connection: PositiveInt32 = 16
    """Maximum requests in progress per Kafka connection. At the limit the connection is not read."""
    max_connections: PositiveInt32 = MAX_INT32
    """Maximum Kafka connections of all listeners together. Further connections are closed immediately."""
    max_connections_per_ip: PositiveInt32 = MAX_INT32
    """Maximum Kafka connections from one address."""
    connections_max_idle_ms: Annotated[int, Field(ge=100, le=MAX_INT64)] = 600_000
    """Time in ms after which an idle Kafka connection is closed: no bytes received and no response pending."""
    connections_max_stall_ms: Annotated[int, Field(ge=100, le=MAX_INT64)] = 30_000
    """Time in ms after which a Kafka connection is closed if a partly received request or an unread response makes no
    progress. While other connections wait for memory, it limits the whole transfer of either."""
    connections_max_handshake_ms: Annotated[int, Field(ge=100, le=MAX_INT64)] = 10_000
    """Maximum time in ms of a TLS handshake of a Kafka connection."""
    sasl_server_max_receive_size: PositiveInt32 = 64 << 10
    """Maximum bytes of a request before authentication at listeners with SASL."""


class BrokerConfig(NodeConfig, WireConfig):
    """Configuration of a leader or follower service."""

    log_dirs: StrList
    """Log directories, separated by commas; none may be inside another. A new log is placed in the one with the fewest
    logs. A directory whose disk fails is taken offline if others remain."""
    metadata_log_dir: str = ""
    """Directory of the metadata log; by default the first of log.dirs. The broker stops if this directory fails."""
    broker_rack: str | None = None
    """Rack of this broker."""
    replica_selector_class: str = ""
    """Selector of the replica that consumers read from: `LeaderSelector` (default), `RackAwareReplicaSelector`, an
    entry point of the group `kipmesh.replica_selectors`, or a dotted path. Kafka's class names of the first two are
    accepted."""
    replica_selection_mode: Literal["fetch", "metadata"] = "fetch"
    """Responses that carry the selected replica: `fetch` (the leader's fetch responses) or `metadata` (any broker's
    Metadata responses)."""
    replica_selector_config: Annotated[StrList, checked(_check_pairs)] = ()
    """Additional configuration of the selector: key=value, separated by commas."""
    inter_broker_listener_name: str = "MESH"
    """Listener for traffic between brokers. It is gRPC, as are listeners whose names begin with MESH."""
    log_retention_check_interval_ms: Positive = 300_000
    """Time in ms between checks for segments to delete."""
    log_cleaner_backoff_ms: Positive = 15_000
    """Time in ms between checks for logs to compact while no log needs it."""
    log_cleaner_dedupe_buffer_size: Annotated[int, Field(ge=1 << 16, le=MAX_INT64)] = 128 << 20
    """Bytes of memory for the keys of one compaction. A log with more keys needs several compactions."""
    log_cleaner_delete_retention_ms: NotNegative = 86_400_000
    """Default of the topics' `delete.retention.ms`."""
    log_cleaner_enable: bool = True
    """Whether logs with `cleanup.policy=compact` are compacted."""
    log_cleaner_io_max_bytes_per_second: Annotated[float, Field(gt=0)] = float(MAX_INT64)
    """Maximum bytes per second that compaction reads and writes together."""
    log_cleaner_max_compaction_lag_ms: Positive = MAX_INT64
    """Default of the topics' `max.compaction.lag.ms`."""
    log_cleaner_min_cleanable_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Default of the topics' `min.cleanable.dirty.ratio`."""
    log_cleaner_min_compaction_lag_ms: NotNegative = 0
    """Default of the topics' `min.compaction.lag.ms`."""
    log_cleanup_policy: CleanupPolicy = "delete"
    """Default of the topics' `cleanup.policy`."""
    log_flush_interval_messages: Positive = MAX_INT64
    """Default of the topics' `flush.messages`."""
    log_flush_interval_ms: NotNegative = MAX_INT64
    """Default of the topics' `flush.ms`."""
    log_flush_scheduler_interval_ms: Positive = 3000
    """Time in ms between checks for logs to fsync."""
    log_flush_offset_checkpoint_interval_ms: PositiveInt32 = 60_000
    """Time in ms between writes of the recovery points."""
    log_index_interval_bytes: NotNegativeInt32 = 4096
    """Default of the topics' `index.interval.bytes`."""
    log_index_size_max_bytes: Annotated[int, Field(ge=4, le=MAX_INT32)] = 10 << 20
    """Default of the topics' `segment.index.bytes`."""
    log_message_timestamp_type: Literal["CreateTime", "LogAppendTime"] = "CreateTime"
    """Default of the topics' `message.timestamp.type`."""
    log_retention_bytes: MinusOneOrMore = -1
    """Default of the topics' `retention.bytes`."""
    log_retention_ms: MinusOneOrMore = 604_800_000
    """Default of the topics' `retention.ms`."""
    log_roll_ms: Positive = 604_800_000
    """Default of the topics' `segment.ms`."""
    log_segment_bytes: Annotated[int, Field(ge=14, le=MAX_INT32)] = 1 << 30
    """Default of the topics' `segment.bytes`."""
    log_segment_delete_delay_ms: NotNegative = 60_000
    """Default of the topics' `file.delete.delay.ms`."""
    log_open_files_max: Annotated[int, Field(ge=64, le=MAX_INT64)] = 4000
    """Maximum open log files."""
    message_max_bytes: Annotated[int, Field(ge=0, le=MAX_INT32)] = 1048588
    """Default of the topics' `max.message.bytes`."""
    min_insync_replicas: PositiveInt32 = 2
    """Default of the topics' `min.insync.replicas`, limited to the number of replicas."""
    unclean_leader_election_enable: bool = False
    """Default of the topics' `unclean.leader.election.enable`."""
    replica_fetch_wait_max_ms: NotNegativeInt32 = 500
    """Maximum time in ms that a follower's fetch waits at the leader."""
    replica_fetch_min_bytes: NotNegativeInt32 = 1
    """Minimum bytes that a follower's fetch waits for."""
    replica_fetch_max_bytes: PositiveInt32 = 1 << 20
    """Maximum bytes of a partition in a follower's fetch."""
    follower_replication_throttled_rate: Annotated[int, Field(ge=1, le=2**63 - 1)] = 2**63 - 1
    """Maximum fetch rate in bytes per second of replicas that a reassignment adds to this broker. Can be changed at
    runtime, for one broker or all."""
    replica_fetch_backoff_ms: NotNegativeInt32 = 200
    """Time in ms that a follower waits after a failed fetch."""
    replica_socket_timeout_ms: PositiveInt32 = 30_000
    """Time in ms without a response after which a follower closes the connection."""
    replica_lag_time_max_ms: Positive = 30_000
    """Time in ms behind the leader's log end after which the leader removes a replica from the ISR."""
    replica_high_watermark_checkpoint_interval_ms: Positive = 5000
    """Time in ms between writes of the high watermarks."""
    replica_fetch_high_watermark_wakeup: bool = True
    """Whether a leader completes a follower's waiting fetch as soon as the high watermark advances (392-02)."""
    fetch_max_bytes: PositiveInt32 = 55 << 20
    """Maximum bytes of a fetch response to a consumer."""
    enable_incremental_fetch: bool = True
    """Whether this broker uses fetch sessions when it fetches from leaders."""
    fetch_session_cache_policy: Literal["adopted", "reserved"] = "adopted"
    """Policy for admission and eviction of fetch sessions: Kafka's (`adopted`) or the draft's (`reserved`)."""
    max_incremental_fetch_session_cache_slots: NotNegativeInt32 = 10_000
    """Maximum fetch sessions at this broker; 0 disables them. Policy `adopted`."""
    min_incremental_fetch_session_eviction_ms: NotNegative = 120_000
    """Time in ms after which an unused session may be evicted, and an older session for one with more partitions.
    Policy `adopted`."""
    min_incremental_fetch_session_size: NotNegative = 1
    """Minimum partitions of a session. Policy `reserved`."""
    incremental_fetch_session_cache_slots_per_broker: NotNegative = 10
    """Maximum sessions per follower. Policy `reserved`."""
    incremental_fetch_session_consumer_cache_slots: NotNegative = 10_000
    """Maximum sessions of all clients together. Policy `reserved`."""
    min_incremental_fetch_session_eviction_time_ms: NotNegative = 120_000
    """Time in ms after which an unused session may be evicted. Policy `reserved`."""
    max_incremental_fetch_sessions_per_client_id: NotNegative = 0
    """Maximum sessions at this broker per client id, not counting followers; 0 for no limit."""
    producer_id_expiration_ms: PositiveInt32 = 86_400_000
    """Time in ms after which a partition forgets an idempotent producer that writes nothing to it."""
    producer_id_expiration_check_interval_ms: PositiveInt32 = 600_000
    """Time in ms between checks for producers to forget."""
    auto_create_topics_enable: bool = True
    """Whether a Kafka client's metadata request may create a missing topic. gRPC clients never create topics this
    way."""
    sasl_enabled_mechanisms: Annotated[StrList, checked(_check_mechanisms)] = ("SCRAM-SHA-256", "SCRAM-SHA-512")
    """Mechanisms at listeners with SASL: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512."""
    sasl_users_file: str = ""
    """File with a line `name=password` per SASL user, reloaded when it changes. Required for PLAIN; for SCRAM it
    applies to users without a credential in the metadata log (`kipmesh user`)."""
    fault_injection_enable: bool = False
    """Whether tests may inject faults at this broker's Kafka listeners (`kipmesh faults`)."""
    group_initial_rebalance_delay_ms: NotNegativeInt32 = 3000
    """Time in ms that the first rebalance of an empty group waits for more members, restarted when one joins."""
    group_min_session_timeout_ms: PositiveInt32 = 6000
    """Minimum session timeout in ms of a member."""
    group_max_session_timeout_ms: PositiveInt32 = 1_800_000
    """Maximum session timeout in ms of a member."""
    group_max_size: PositiveInt32 = MAX_INT32
    """Maximum members of a consumer group."""
    offset_metadata_max_bytes: NotNegativeInt32 = 4096
    """Maximum bytes of the metadata text of a committed offset."""
    offsets_commit_timeout_ms: PositiveInt32 = 5000
    """Time in ms after which a write to a group fails if it is not replicated."""
    offsets_retention_minutes: PositiveInt32 = 7 * 24 * 60
    """Time in minutes that offsets are kept after their group became empty or unsubscribed from the topic."""
    offsets_retention_check_interval_ms: Positive = 600_000
    """Time in ms between checks for expired offsets."""
    offsets_topic_num_partitions: PositiveInt32 = 8
    """Partitions of `__consumer_offsets` at creation; never changed later."""
    offsets_topic_replication_factor: Annotated[int, Field(ge=1, le=32767)] = 3
    """Replication factor of `__consumer_offsets` at creation, limited to the number of brokers."""
    offsets_topic_segment_bytes: Annotated[int, Field(ge=14, le=MAX_INT32)] = 100 << 20
    """Maximum bytes of a segment of `__consumer_offsets`, set at creation."""
    mesh_trace_sample: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of Fetch, Produce and Metadata requests that this broker writes to `__mesh_trace`, from 0 (off, including
    the trace of snapshots) to 1."""
    mesh_trace_rate_max: Positive = 1000
    """Maximum trace entries per second; further entries are dropped and counted."""
    mesh_trace_queue_max: Positive = 10_000
    """Maximum trace entries waiting to be written; further entries are dropped and counted."""
    mesh_trace_flush_interval_ms: Annotated[int, Field(ge=10, le=MAX_INT64)] = 1000
    """Time in ms between writes of the trace."""
    mesh_trace_topic_num_partitions: PositiveInt32 = 3
    """Partitions of `__mesh_trace` at creation."""
    mesh_trace_topic_replication_factor: Annotated[int, Field(ge=1, le=32767)] = 3
    """Replication factor of `__mesh_trace` at creation, limited to the number of brokers."""
    mesh_trace_topic_retention_ms: MinusOneOrMore = 86_400_000
    """`retention.ms` of `__mesh_trace` at creation."""
    mesh_trace_topic_retention_bytes: MinusOneOrMore = 256 << 20
    """`retention.bytes` of `__mesh_trace` at creation, per partition."""

    @property
    def mesh_listener(self) -> str:
        """Name of the gRPC listener for traffic between brokers: `inter.broker.listener.name`."""
        return self.inter_broker_listener_name

    @model_validator(mode="after")
    def _check_advertised(self) -> Self:
        """Raise ValueError for duplicate or unknown listener names and for advertised wildcard addresses, as in Apache
        Kafka."""
        advertised = tuple(map(Endpoint.from_text, self.advertised_listeners))
        for key, endpoints in (("listeners", self.endpoints), ("advertised.listeners", advertised)):
            names = [endpoint.name for endpoint in endpoints]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"configuration key {key!r} has more than one listener {twice}")
        for endpoint in advertised:
            if endpoint.name not in {one.name for one in self.endpoints}:
                raise ValueError(f"configuration key 'advertised.listeners': listeners has no {endpoint.name}")
        for endpoint in self.advertised_endpoints:
            if endpoint.host in ("", "0.0.0.0", "::"):  # noqa: S104
                raise ValueError(
                    f"clients cannot reach {endpoint.name}://{endpoint.host}:{endpoint.port}; "
                    f"set advertised.listeners={endpoint.name}://HOST:PORT"
                )
        return self

    @model_validator(mode="after")
    def _check_sasl(self) -> Self:
        for endpoint in self.mesh_endpoints:
            if self.has_sasl(endpoint.name):
                raise ValueError(f"listener {endpoint.name} is gRPC, which does not support SASL")
        has_sasl = any(self.has_sasl(endpoint.name) for endpoint in self.kafka_endpoints)
        if has_sasl and "PLAIN" in self.sasl_enabled_mechanisms and not self.sasl_users_file:
            raise ValueError("PLAIN in sasl.enabled.mechanisms needs sasl.users.file")
        return self

    @model_validator(mode="after")
    def _check_client_auth(self) -> Self:
        others = [one.name for one in self.mesh_endpoints if one.name != self.mesh_listener]
        with_tls = [name for name in others if self.has_tls(name)]
        if with_tls and self.ssl_client_auth == "requested":
            raise ValueError(
                f"listener {with_tls[0]} is gRPC, which does not support ssl.client.auth=requested; "
                "set it to none or required"
            )
        return self

    @property
    def mesh_endpoints(self) -> tuple[Endpoint, ...]:
        """The gRPC listeners: `inter.broker.listener.name` and those whose names begin with MESH."""
        own = self.inter_broker_listener_name
        return tuple(one for one in self.endpoints if one.name == own or one.name.startswith("MESH"))

    @property
    def kafka_endpoints(self) -> tuple[Endpoint, ...]:
        """Listeners for the Kafka protocol: all except the gRPC listeners."""
        mesh = self.mesh_endpoints
        return tuple(one for one in self.endpoints if one not in mesh)

    @property
    def advertised_endpoints(self) -> tuple[Endpoint, ...]:
        """Endpoint that clients use for each listener, in the order of `listeners`: the advertised one, else the
        listener itself. Port 0 means the port that the listener binds."""
        advertised = {one.name: one for one in map(Endpoint.from_text, self.advertised_listeners)}
        return tuple(advertised.get(one.name, one) for one in self.endpoints)

    @property
    def replica_selector_configs(self) -> dict[str, str]:
        """Parsed `replica.selector.config`: key -> value."""
        pairs = [text.partition("=") for text in self.replica_selector_config]
        return {key.strip(): value.strip() for key, _, value in pairs}

    def topic_defaults(self) -> TopicConfig:
        """Return this broker's defaults for topics: the configuration of a topic that sets no keys."""
        values = self.as_dict()
        return TopicConfig.parse({topic: values[broker] for topic, broker in BROKER_DEFAULTS.items()})


def _check_bootstrap(value: str) -> None:
    for address in value.split(","):
        Endpoint.from_text(f"MESH://{address.strip()}")


class ConsumerServiceConfig(ClientSslConfig, ServiceConfig, MemberConfig):
    """Configuration of the consumer service."""

    bootstrap_servers: Annotated[str, Field(min_length=1), checked(_check_bootstrap)]
    """Bootstrap brokers: host:port, separated by commas."""
    client_id: str = "kipmesh-consumer"
    """Client id of the service at brokers."""
    group_id: GroupId | None = None
    """Consumer group of streams with `from=committed`; none disables such streams."""
    auto_offset_reset: Literal["earliest", "latest", "none"] = "latest"
    """Start position of the group in a partition without a committed offset; `none` ends the stream with an error."""
    fetch_max_bytes: PositiveInt32 = 128 << 10
    """Maximum bytes of one fetch of a stream. A stalled reader buffers several times as much (see http-api.md)."""
    request_timeout_ms: PositiveInt32 = 30_000
    """Timeout in ms of a request to a broker."""
    max_poll_records: Annotated[int, Field(ge=1, le=10_000)] = 500
    """Maximum records in one step of a stream."""
    streams_max: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Maximum concurrent streams; further ones get status 503."""
    stream_write_timeout_ms: Positive = 300_000
    """Time in ms after which a reader that reads nothing is disconnected."""
    stream_heartbeat_interval_ms: Positive = 15_000
    """Time in ms between comments that keep an idle SSE stream open."""
    lag_partitions_max: Positive = 10_000
    """Maximum partitions whose delivered position is remembered; the least recently used is dropped first."""

    @model_validator(mode="after")
    def _check_https(self) -> Self:
        if self.http_endpoint.name == "HTTPS":
            self.check_ssl_files("http.listener with https", needs_certificate=True)
        return self
